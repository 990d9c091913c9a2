"""Progress of long work inside a run: whoever works tells it (`tell`), whoever shows it listens (`listening`).

Told are counts only, and to this machine's own display only. Nothing is computed otherwise where somebody listens.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

#: called with (what is being done, how many are done, how many there are)
Listener = Callable[[str, int, int], None]

#: seconds between two reports to the listener; the last one of a piece of work always comes
EVERY = 0.25

#: seconds that a first piece may take and still stand for the others
UNKNOWN_AFTER = 30

_listener: Listener | None = None
_last = 0.0


def tell(what: str, done: int, total: int) -> None:
    """Report that `done` of `total` pieces of a long work are done; quick where nobody listens."""
    global _last
    if _listener is None or (done < total and time.monotonic() - _last < EVERY):
        return
    _last = time.monotonic()
    _listener(what, done, total)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told of all long work in this process, and of its workers."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def time_left(seconds: float, done: int, total: int) -> str:
    """How long the rest will take, as a person says it, after `seconds` of work: `about 2 min left`."""
    if done <= 1 < total and seconds > UNKNOWN_AFTER:  # the first piece often prepares for all others
        return "time left not known yet"
    left = seconds * (total - done) / max(1, done)
    return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"
