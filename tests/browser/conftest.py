"""Real headless Chromium. These tests are slow, and skipped where Playwright or Chromium is not installed.

`pip install playwright`, and the Chromium of the system (or the one named in CHROMIUM).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_pages import WIDE

#: milliseconds for something to appear: only a page that is broken takes so long
PATIENCE = 60_000


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser for all tests of the session."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, viewport=..., color_scheme="dark")`; at the end no page may have complained."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_it(address: str, **settings: Any) -> Any:
        context = chromium.new_context(**{"viewport": WIDE, **settings})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []
