"""The live page in a real browser: charts drawn, progress followed, keyboard, narrow and wide, dark, hostile names."""

import json

import pytest
from browser_pages import NARROW, WIDE, contrast, fits_the_screen, serving
from served import LINES, write_run

from polyclinic.files import lock
from polyclinic.report.serve.app import folder_app
from polyclinic.report.serve.jobs import Jobs

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "project"
    write_run(place / "runs" / "first")
    write_run(place / "runs" / "second", method="cwt", finished=False)
    (place / "study.toml").write_text('[method]\nname = "fedavg"\nrounds = 1\n')
    return place


@pytest.fixture
def address(folder):
    jobs = Jobs(folder)
    with serving(lambda access: folder_app(folder, access, jobs)) as found:
        yield found
    jobs.close()


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "light"), (WIDE, "dark"), (NARROW, "dark")])
def test_all_pages_are_drawn_wide_narrow_and_dark(open_page, address, viewport, scheme):
    page = open_page(address, viewport=viewport, color_scheme=scheme)
    page.wait_for_selector("text=2 of 2 runs")
    assert "token" not in page.url
    assert fits_the_screen(page)
    assert contrast(page) > 7
    assert contrast(page, ".quiet") > 4.5
    page.click("text=runs/first")
    page.wait_for_selector("figure.chart svg path")
    assert page.locator("figure.chart").count() == 2
    assert page.locator("figure.chart svg circle").count() == 3 + 3 + 3
    assert page.locator("figure.chart svg .name").first.text_content() == "Validation accuracy by round"
    assert fits_the_screen(page)
    page.click("text=All runs")
    page.check("[aria-label='choose runs/first']")
    page.check("[aria-label='choose runs/second']")
    page.click("text=Compare 2 chosen runs")
    page.wait_for_selector("text=2 runs side by side")
    page.wait_for_selector("figure.chart svg path")
    assert page.locator("figure.chart").count() == 2
    assert fits_the_screen(page)


def test_the_page_follows_a_run(open_page, address, folder):
    run = folder / "runs" / "second"
    live = {"round": 4, "sites": ["site-1", "site-2"], "operation": "train", "at_work": ["site-2"], "warnings": []}
    (run / "progress.json").write_text(json.dumps(live))
    with lock(run / ".lock"):
        page = open_page(address)
        page.wait_for_selector("text=At work now")
        page.click("section.card a")
        page.wait_for_selector("text=round 4: site-2 (train)")
        page.wait_for_selector("text=3 of 5 rounds")
        (run / "history.jsonl").open("a").write(json.dumps({**LINES[2], "round": 4}) + "\n")
        page.wait_for_selector("text=4 of 5 rounds")
        assert page.locator("figure.chart").first.locator("circle").count() == 8
        assert page.locator("text=This run was started elsewhere").count() == 1
    page.wait_for_selector("text=Go on with this run")


def test_values_as_a_table_and_files_to_take_away(open_page, address):
    page = open_page(address)
    page.click("text=runs/first")
    figure = page.locator("figure.chart").first
    figure.locator("summary").click()
    assert figure.locator("tbody tr").count() == 3
    with page.expect_download() as taken:
        page.click("text=result.json")
    assert json.loads(taken.value.path().read_text())["method"] == "fedavg"


def test_the_keyboard_is_enough(open_page, address):
    page = open_page(address)
    page.wait_for_selector("text=2 of 2 runs")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent || document.activeElement.id"))
        if reached[-1] == "runs/first":
            break
    assert reached[0] == "Skip to the content"
    assert reached[-1] == "runs/first"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    page.wait_for_selector("figure.chart svg path")


def test_what_is_typed_survives_news(open_page, address, folder):
    page = open_page(address)
    page.fill("#name", "my run")
    page.fill("#filter", "seco")
    page.wait_for_selector("text=1 of 2 runs")
    write_run(folder / "runs" / "third-second")
    page.wait_for_selector("text=2 of 3 runs")
    assert page.input_value("#name") == "my run"
    assert page.evaluate("document.activeElement.id") == "filter"


def test_hostile_names_are_texts(open_page, address, folder):
    name = "<img src=x onerror=document.title='hacked'>"
    write_run(folder / name, method="<script>document.title='hacked'<\\u002fscript>")
    (folder / name / "<b onclick=1>.csv").write_text("x\n")
    page = open_page(address)
    page.click(f"text={name}")
    page.wait_for_selector("figure.chart svg path")
    assert "hacked" not in page.title().replace(name, "")
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("#title").text_content() == name


def test_without_the_token_the_page_asks_for_it(chromium, address):
    page = chromium.new_context().new_page()
    page.goto(address.partition("#")[0])
    page.fill("#token", address)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 of 2 runs")
    page.context.close()


def test_a_report_can_reach_nothing(open_page, address, folder, chromium):
    """No script of a report runs, so it neither reads the token nor asks the server."""
    script = """<p id=said>no script</p><script>
      document.getElementById("said").textContent = "ran"; fetch("/api/overview")</script>"""
    (folder / "runs" / "first" / "report.html").write_text(script)
    page = chromium.new_context().new_page()
    page.goto(address)
    page.click("text=runs/first")
    with page.context.expect_page() as opened:
        page.click("text=Open the report")
    opened.value.wait_for_load_state("load")  # scripts of the page would have run by now
    assert opened.value.text_content("#said") == "no script"
    page.context.close()


def test_a_run_is_started_and_stopped_by_hand(open_page, address, folder):
    study = '[data]\nsource = "fundus-phantom"\nsize = 28\nsamples = 60\n[sites]\npartition = "iid"\ncount = 2\n'
    more = '[model]\nbackbone = "lenet5"\n[engine]\nworkers = 1\n[method]\nname = "fedavg"\nrounds = 100000\n'
    (folder / "study.toml").write_text(study + more)
    page = open_page(address)
    page.click("button:has-text('Start')")
    page.wait_for_selector("text=of 100000 rounds")
    page.wait_for_selector("figure.chart svg path", state="attached")  # a flat line has no height to be seen by
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("text=Stop this run")
    page.wait_for_selector("text=Go on with this run")
    assert (folder / "runs" / "study" / "history.jsonl").exists()
