"""A pool of workers with bounded prefetch: PREFETCH calls in flight per worker, a site always in the same worker."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from polyclinic.engines.worker_process import reason_of
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.state import SitePosition

#: calls a worker may be ahead of whoever takes the answers: enough to keep it busy, few to hold in memory
PREFETCH = 2


class Worker(Protocol):
    """What runs calls at some of the sites, somewhere else; its sites' states are on disk after every call."""

    def call(self, call: Call, deadline: float | None) -> tuple[Reply | Failure, SitePosition | None]:
        """The answer and where the site stands after it; raises if there is none in time, or ever."""

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Put its sites to where they stand; also waits until it has started."""

    def kill(self) -> None:
        """End it now, whatever it does."""


class WorkerPool:
    """Runs calls in `lanes` workers, which are started when they are first needed, and anew after they die."""

    def __init__(
        self, sites: tuple[str, ...], start_worker: Callable[[], Worker], *, lanes: int, deadline: float | None
    ) -> None:
        self.sites = sites
        self.start_worker = start_worker
        self.deadline = deadline
        self._pool: list[Worker | None] = [None] * lanes
        self._positions: dict[str, SitePosition] = {}

    def close(self) -> None:
        for lane in range(len(self._pool)):
            self._end(lane)

    def _call_workers(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        """A site always works in the same lane; the lanes work at the same time, a little ahead."""
        waiting: dict[int, deque[Call]] = {}
        for call in calls:
            waiting.setdefault(self._lane(call.site), deque()).append(call)
        begun: dict[int, deque[Future[Reply | Failure]]] = {lane: deque() for lane in waiting}
        with contextlib.ExitStack() as stack:
            threads = {lane: stack.enter_context(ThreadPoolExecutor(1)) for lane in waiting}

            def begin(lane: int) -> None:
                if waiting[lane]:
                    begun[lane].append(threads[lane].submit(self._call_worker, lane, waiting[lane].popleft()))

            try:
                for lane in list(waiting) * PREFETCH:
                    begin(lane)
                for call in calls:
                    lane = self._lane(call.site)
                    yield begun[lane].popleft().result()
                    begin(lane)
            except KeyboardInterrupt:  # nobody wants to wait for turns that a resumed run will do again
                for thread in threads.values():
                    thread.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def _lane(self, site: str) -> int:
        return self.sites.index(site) % len(self._pool)

    def _call_worker(self, lane: int, call: Call) -> Reply | Failure:
        try:
            worker = self._pool[lane] or self._start(lane)
            answer, position = worker.call(call, self.deadline)
        except Exception as error:  # it hangs, died, or answers with nonsense: its sites start from disk again
            self._end(lane)
            return Failure(call.site, call.operation, reason_of(error))
        if position is not None:
            self._positions[call.site] = position
        return answer

    def _start(self, lane: int) -> Worker:
        worker = self._pool[lane] = self.start_worker()
        mine = self.sites[lane :: len(self._pool)]
        worker.restore({site: self._positions[site] for site in mine if site in self._positions})
        return worker

    def _end(self, lane: int) -> None:
        worker, self._pool[lane] = self._pool[lane], None
        if worker is not None:
            worker.kill()
