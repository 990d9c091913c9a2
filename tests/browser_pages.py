"""What tests in a real browser ask of a page: does it fit, can it be read; and a real server for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 380, "height": 800}


def fits_the_screen(page: Any) -> bool:
    """Whether the page as a whole needs no scrolling sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def contrast(page: Any, selector: str = "body") -> float:
    """The contrast of an element's ink on the page's paper, as WCAG counts it; texts need 4.5."""
    return page.evaluate(
        """selector => {
          const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => {
            const s = v / 255; return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const ink = light(getComputedStyle(document.querySelector(selector)).color);
          const paper = light(getComputedStyle(document.body).backgroundColor);
          return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }""",
        selector,
    )


@contextmanager
def serving(make_app: Callable[[Any], Any]) -> Iterator[str]:
    """A real server on a free port; yields its address."""
    from polyclinic.report.serve import server

    listening = server.listen("127.0.0.1", 0)
    app = make_app(listening.access)
    running = server.make(app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening.socket]}, daemon=True)
    thread.start()
    try:
        yield listening.address
    finally:
        running.should_exit = True
        thread.join(30)
        listening.socket.close()
