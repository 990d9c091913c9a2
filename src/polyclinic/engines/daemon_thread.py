"""A daemon thread that does work in order: an executor that nobody ever has to wait for.

`ThreadPoolExecutor` joins its threads without a bound, when it is left and again when Python ends. A thread that waits
for a site which never answers would hold up Ctrl-C for as long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThread:
    """One thread; what it is given first is done first."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done; the future has what it gives or raises."""
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def end(self) -> None:
        """Begin nothing more. The thread ends after what it is doing now; nobody waits for that here."""
        self._ended = True
        self._work.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, for so many seconds at most."""
        self._thread.join(timeout)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None and not self._ended:
            self._do(*given)
            del given  # and with it the result, which may be a model: whoever took it has it now

    @staticmethod
    def _do(future: Future[T], work: Callable[[], T]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever takes the result gets it
            future.set_exception(error)


def join_all(threads: Iterable[DaemonThread], within: float) -> None:
    """Wait until threads that were told to end have done so, for so many seconds at most in all."""
    until = time.monotonic() + within
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
