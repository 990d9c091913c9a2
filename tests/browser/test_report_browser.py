"""Reports in a real browser: charts are drawn, nothing is complained about, wide, narrow, dark, and by keyboard."""

import base64

import pytest
from browser_pages import NARROW, WIDE, contrast, fits_the_screen

from polyclinic.report.write import build_report, write_report

pytestmark = pytest.mark.slow

#: of every chart: how wide and high it is drawn, and how many marks and texts it has
CHARTS = """
Array.from(document.querySelectorAll('figure.chart svg')).map(svg => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, svg.querySelectorAll('path, use, image').length, svg.querySelectorAll('text').length];
})
"""


@pytest.fixture(scope="module")
def pages(tiny, undisturbed, tmp_path_factory) -> dict[str, str]:
    """Addresses of reports: a classification, a regression and a segmentation."""
    brain = {"data.source": "brain-phantom", "model.backbone": "unet"}
    masks = {"task": {"name": "segmentation", "surface_distances": True}}
    studies = {
        "classification": tiny("fedavg", {"data.samples": 160}, rounds=3),
        "regression": tiny("fedavg", {"data.source": "hand-phantom", "task": {"name": "regression"}}, rounds=2),
        "segmentation": tiny("fedavg", {**brain, **masks}, rounds=2),
    }
    out = tmp_path_factory.mktemp("pages")
    folders = {name: undisturbed(study).folder for name, study in studies.items()}
    return {
        name: write_report(build_report(one), one, out / f"{name}.html")[0].as_uri() for name, one in folders.items()
    }


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["classification", "regression", "segmentation"])
def test_every_chart_is_drawn_within_the_page(name, viewport, open_page, pages):
    page = open_page(pages[name], viewport=viewport)
    drawn = page.evaluate(CHARTS)
    assert len(drawn) >= 4
    for width, height, marks, texts in drawn:
        assert 150 < width <= viewport["width"]
        assert height > 40
        assert marks >= 2
        assert texts > 1
    assert fits_the_screen(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_can_be_read_on_dark_and_light_paper(scheme, open_page, pages):
    page = open_page(pages["classification"], color_scheme=scheme)
    assert contrast(page) > 7
    for selector in (".note", "a", "summary", "th"):
        assert contrast(page, selector) > 4.5
    ink, paper = page.evaluate(
        "[getComputedStyle(document.querySelector('figure.chart svg text')).fill, "
        "getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in (ink, paper)]
    assert (light[0] > 450, light[1] < 150) == (scheme == "dark", scheme == "dark")


def test_the_keyboard_reaches_terms_and_opens_tables(open_page, pages):
    page = open_page(pages["classification"])
    active, seen = "document.activeElement", set()
    for _ in range(80):
        page.keyboard.press("Tab")
        tag = page.evaluate(f"{active}.tagName")
        seen.add(tag)
        if tag == "SPAN":
            assert page.evaluate(f"getComputedStyle({active}.querySelector('.tip')).display") == "block"
        if tag == "SUMMARY":
            page.keyboard.press("Enter")
            assert page.evaluate(f"{active}.parentElement.open")
            assert page.evaluate(f"{active}.parentElement.querySelector('table').offsetHeight") > 20
            break
    assert {"A", "SPAN", "SUMMARY"} <= seen


def test_the_csv_behind_a_chart_is_downloaded(open_page, pages):
    page = open_page(pages["classification"])
    page.click("#chart-confusion summary")
    with page.expect_download() as waiting:
        page.click("#chart-confusion a.csv")
    assert waiting.value.suggested_filename == "confusion.csv"


def test_a_dark_page_prints_on_white_paper(open_page, pages):
    page = open_page(pages["regression"], color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert base64.b64encode(page.pdf())[:4] == b"JVBE"  # %PDF
