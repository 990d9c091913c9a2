"""The page of a hospital's own people in a real browser."""

import pytest
from browser_pages import NARROW, WIDE, contrast, fits_the_screen, serving
from kit_of_north import came, left, make_kit

from polyclinic.deployment.approval import Approvals
from polyclinic.report.serve.site_app import site_app

pytestmark = pytest.mark.slow


@pytest.fixture
def kit(tmp_path):
    folder = make_kit(tmp_path)
    came(folder)
    came(folder, "second", method={"name": "cwt", "rounds": 9})
    left(folder)
    return folder


@pytest.fixture
def address(kit):
    with serving(lambda access: site_app(kit, access)) as found:
        yield found


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_a_person_reads_approves_and_stops(open_page, address, kit, viewport, scheme):
    page = open_page(address, viewport=viewport, color_scheme=scheme)
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


def test_a_decision_that_is_not_confirmed_is_none(open_page, address, kit):
    page = open_page(address)
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.locator("[data-run=first] button", has_text="Refuse").click()
    assert Approvals(kit, "north").decisions("first") == []


def test_the_ledger_is_searched_by_keyboard(open_page, address):
    page = open_page(address)
    page.focus("#search-text")
    page.keyboard.type("evaluate")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 of 4 lines, 60 B")
    assert page.locator("#lines tbody tr").count() == 2
    page.locator("progress").first.wait_for()


def test_everything_is_stopped(open_page, address, kit):
    for run in ("first", "second"):
        Approvals(kit, "north").decide(run, "approve")
    page = open_page(address)
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("text=Stop all studies (2)")
    page.wait_for_selector("text=All studies are stopped.")
    assert [Approvals(kit, "north").state(run) for run in ("first", "second")] == ["revoked", "revoked"]
