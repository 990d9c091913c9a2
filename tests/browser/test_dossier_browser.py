"""A dossier in a real browser: nothing is complained about, wide, narrow and dark; figures lead to files."""

import pytest
from browser_pages import contrast, fits_the_screen

from polyclinic.report.dossier import write_dossier

pytestmark = pytest.mark.slow


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
