"""Reports, dossiers and a site's page in a browser."""

import base64

import pytest
from browser_pages import NARROW, WIDE, contrast, fits_the_screen, serving
from kit_of_north import came, left, make_kit

from polyclinic.deployment.approval import Approvals
from polyclinic.report.dossier import write_dossier
from polyclinic.report.serve.site_app import site_app
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


@pytest.fixture(scope="module")
def address(tiny, undisturbed, tmp_path_factory):
    done = write_dossier(undisturbed(tiny("fedavg")).folder, tmp_path_factory.mktemp("dossier") / "d; ü")
    return (done.folder / "index.html").as_uri()


@pytest.mark.parametrize("width", [1200, 380])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_is_readable(open_page, address, width, scheme):
    page = open_page(address, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.locator("section").count() == 11  # the purpose, and ten
    assert fits_the_screen(page)
    assert contrast(page) > 7
    assert min(contrast(page, selector) for selector in ("a.figure", ".note", "th")) > 4.5
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")


def test_a_figure_is_reached_by_keyboard_and_leads_to_its_file(open_page, address):
    page = open_page(address)
    figure = page.locator("a.figure").first
    figure.focus()
    assert "SHA-256" in figure.get_attribute("title")
    page.keyboard.press("Enter")
    page.wait_for_url("**/evidence/result.json")


@pytest.fixture
def kit(tmp_path):
    folder = make_kit(tmp_path)
    came(folder)
    came(folder, "second", method={"name": "cwt", "rounds": 9})
    left(folder)
    return folder


@pytest.fixture
def site_address(kit):
    with serving(lambda access: site_app(kit, access)) as found:
        yield found


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_a_person_reads_approves_and_stops(open_page, site_address, kit, viewport, scheme):
    page = open_page(site_address, viewport=viewport, color_scheme=scheme)
    page.wait_for_selector("text=Studies that wait for you (2)")
    assert fits_the_screen(page)
    assert contrast(page) > 7
    card = page.locator("[data-run=first]")
    card.locator("li", has_text="(step 'train'): weights of a model, to the coordinator.").wait_for()
    card.locator("ol li", has_text="What attacks have got out of such parcels:").wait_for()
    card.locator("input").nth(1).fill("our board agreed")
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    card.locator("button", has_text="Approve").click()
    page.wait_for_selector("text=Write your name first")
    assert asked == []
    card.locator("input").first.fill("Ada Weiß")
    card.locator("button", has_text="Approve").click()
    page.wait_for_selector("text=Studies that wait for you (1)")
    assert asked[0].startswith("Approve first?")
    assert Approvals(kit, "north").decisions("first")[-1].why == "our board agreed"
    assert Approvals(kit, "north").decisions("first")[-1].by.startswith("Ada Weiß (")
    page.locator("[data-run=first] button", has_text="Stop this study").click()
    page.locator("[data-run=first] h3", has_text="stopped").wait_for()
    assert Approvals(kit, "north").state("first") == "revoked"
    assert fits_the_screen(page)


def test_a_decision_that_is_not_confirmed_is_none(open_page, site_address, kit):
    page = open_page(site_address)
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.locator("[data-run=first] button", has_text="Refuse").click()
    assert Approvals(kit, "north").decisions("first") == []


def test_the_ledger_is_searched_by_keyboard(open_page, site_address):
    page = open_page(site_address)
    page.focus("#search-text")
    page.keyboard.type("evaluate")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 of 4 lines, 60 B")
    assert page.locator("#lines tbody tr").count() == 2
    page.locator("progress").first.wait_for()


def test_everything_is_stopped(open_page, site_address, kit):
    for run in ("first", "second"):
        Approvals(kit, "north").decide(run, "approve")
    page = open_page(site_address)
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("text=Stop all studies (2)")
    page.wait_for_selector("text=All studies are stopped.")
    assert [Approvals(kit, "north").state(run) for run in ("first", "second")] == ["revoked", "revoked"]
