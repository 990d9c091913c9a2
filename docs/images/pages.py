"""Takes the pictures of pages that the manual shows: python docs/images/pages.py

It trains the first tutorial's comparison (minutes), writes its reports and a dossier, serves the runs and the kit of a
hospital, and takes nine pictures in a real Chromium. `--work DIR` keeps what was trained; `--looks DIR` also takes
every page whole, wide and narrow, light and dark, for a person to look at. It needs Playwright and Chromium, as
tests/browser does.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from browser_pages import NARROW, WIDE, fits_the_screen, serving  # noqa: E402
from kit_of_north import came, left, make_kit  # noqa: E402

from polyclinic.cli import run_app  # noqa: E402
from polyclinic.report.serve.app import folder_app  # noqa: E402
from polyclinic.report.serve.jobs import Jobs  # noqa: E402
from polyclinic.report.serve.site_app import site_app  # noqa: E402

STUDY = """
seed = 0
data = { source = "chest-phantom", size = 32, samples = 800 }
sites = { names = ["north", "east", "south", "west"], partition = "label-skew", target_ks = 0.3 }
optimizer = { name = "adam", lr = 0.003, batch_size = 8 }
method = { name = "fedavg", rounds = 6, local_epochs = 2 }
audit = { keep_parcels = 0 }
"""
ACROSS = 960  #: pixels of a picture in the manual
#: picture -> page, what to click or scroll to there
PICTURES = {
    "report": ("report", ""),
    "report_curves": ("report", "#classes"),
    "comparison": ("comparison", ""),
    "comparison_methods": ("comparison", "#methods"),
    "dossier": ("dossier", ""),
    "serve_runs": ("runs", ""),
    "serve_run": ("runs", "text=compared/fedavg-seed0"),
    "officer": ("officer", ""),
    "officer_ledger": ("officer", "#search-text"),
}


def train(work: Path) -> None:
    """The runs that pages show, if they are not there yet."""
    (work / "study.toml").write_text(STUDY, encoding="utf-8")
    compared = work / "compared"
    methods = ["--methods", "standalone,fedavg,cwt,centralized", "--seeds", "2"]
    commands = [
        ["compare", str(work / "study.toml"), *methods, "--out", str(compared)],
        ["audit", str(compared / "fedavg-seed0")],
        ["report", str(compared / "fedavg-seed0")],
        ["report", str(compared)],
        ["report", str(compared / "fedavg-seed0"), "--dossier", "--out", str(work / "dossier")],
    ]
    for command in commands if not (work / "dossier").exists() else []:
        assert run_app(command) == 0, command
    if not (work / "kit").exists():
        kit = make_kit(work)
        came(kit, "lungs", method={"name": "fedavg", "rounds": 20})
        came(kit, "bones", method={"name": "fedreplay", "rounds": 9})
        left(kit, "lungs")


@contextmanager
def pages(work: Path) -> Iterator[dict[str, str]]:
    """The address of each page."""
    jobs = Jobs(work)
    with ExitStack() as servers:
        yield {
            "report": (work / "compared" / "fedavg-seed0" / "report.html").as_uri(),
            "comparison": (work / "compared" / "report.html").as_uri(),
            "dossier": (work / "dossier" / "index.html").as_uri(),
            "runs": servers.enter_context(serving(lambda access: folder_app(work, access, jobs))),
            "officer": servers.enter_context(serving(lambda access: site_app(work / "kit", access))),
        }
    jobs.close()


def opened(browser: Any, address: str, place: str, **look: Any) -> Any:
    page = browser.new_context(reduced_motion="reduce", **look).new_page()
    page.goto(address)
    page.wait_for_timeout(1500)
    if place.startswith("text="):
        page.click(place)
        page.wait_for_selector("figure.chart svg path", state="attached")  # a flat line has no height to be seen by
    elif place:
        page.locator(place).first.evaluate("one => one.scrollIntoView()")
        page.wait_for_timeout(500)
    return page


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--work", type=Path, help="where runs are trained and kept")
    asked.add_argument("--looks", type=Path, help="where whole pages are put")
    flags = asked.parse_args()
    from playwright.sync_api import sync_playwright

    work = flags.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    train(work.resolve())
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with pages(work.resolve()) as addresses, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (page, place) in PICTURES.items():
            taken = Image.open(io.BytesIO(opened(browser, addresses[page], place, viewport=WIDE).screenshot()))
            small = taken.convert("RGB").resize(
                (ACROSS, taken.height * ACROSS // taken.width), Image.Resampling.LANCZOS
            )
            small.quantize(256, dither=Image.Dither.NONE).save(HERE / f"page_{name}.png", optimize=True)
        for name, address in addresses.items() if flags.looks else []:
            for wide, viewport in (("1280", WIDE), ("390", {**NARROW, "width": 390})):
                for scheme in ("light", "dark"):
                    page = opened(browser, address, "", viewport=viewport, color_scheme=scheme)
                    flags.looks.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=flags.looks / f"{name}_{wide}_{scheme}.png", full_page=True)
                    print(name, wide, scheme, "fits" if fits_the_screen(page) else "IS TOO WIDE")
        browser.close()


if __name__ == "__main__":
    main()
