"""The default engine: sites live in this process, or in a few worker processes where that is faster.

Results are the same bit for bit either way: a site computes with a fixed number of threads, draws from generators
with addresses, and never sees another site's numbers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from polyclinic.engines.worker_process import WorkerProcess, reason_of
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.site import SiteHost, SitePosition

#: with `workers = "auto"`: seconds of parallel work after which worker processes are worth their start
PAYS_AFTER = 8.0
#: calls a worker process may be ahead of whoever takes the answers: enough to keep it busy, few to hold in memory
AHEAD = 2


class InProcess:
    """Runs calls one after the other here, or at the same time in worker processes."""

    simulation = True

    def __init__(
        self,
        host: SiteHost,
        sites: tuple[str, ...],
        start_worker: Callable[[], WorkerProcess],
        *,
        workers: int | Literal["auto"] = "auto",
        threads: int = 1,
        deadline: float | None = None,
        may_grow: bool = True,
    ) -> None:
        self.host = host
        self.sites = sites
        self.start_worker = start_worker
        self.deadline = deadline
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.most = min(len(sites), max(1, cores // threads)) if workers == "auto" else min(workers, len(sites))
        self.grows = workers == "auto" and may_grow and self.most > 1
        self._pool: list[WorkerProcess | None] = []
        self._positions: dict[str, SitePosition] = {}
        self._busy_seconds = 0.0
        if deadline is not None or (workers != "auto" and self.most > 1):
            self._pool = [None] * self.most

    def call(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        self._consider_growing(calls)
        return self._call_workers(calls) if self._pool else self._call_in_turn(calls)

    def checkpoint(self) -> dict[str, SitePosition]:
        return dict(self._positions) if self._pool else self.host.checkpoint()

    def prune(self, positions: dict[str, SitePosition]) -> None:
        self.host.drop_old_versions(positions)

    def restore(self, positions: dict[str, SitePosition]) -> None:
        self._positions = dict(positions)
        self.host.restore(positions)
        self.close()

    def close(self) -> None:
        for lane in range(len(self._pool)):
            self._end(lane)

    # --- in this process --------------------------------------------------------------------------

    def _call_in_turn(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        for call in calls:
            started = time.perf_counter()
            answer = self._call_here(call)
            if len(calls) > 1:
                self._busy_seconds += time.perf_counter() - started
            yield answer

    def _call_here(self, call: Call) -> Reply | Failure:
        try:
            return self.host.handle(call)
        except Exception as error:
            return Failure(call.site, call.operation, reason_of(error))

    def _consider_growing(self, calls: list[Call]) -> None:
        """Move to worker processes once enough parallel work has been seen, and no site is in mid-turn."""
        if self.grows and not self._pool and len(calls) > 1 and self._busy_seconds > PAYS_AFTER:
            if any(site.memory for site in self.host.resident()):
                return
            self._positions = self.host.checkpoint()
            self._pool = [None] * self.most

    # --- in worker processes ----------------------------------------------------------------------

    def _call_workers(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        """A site always works in the same process; the processes work at the same time, a little ahead."""
        waiting: dict[int, deque[Call]] = {}
        for call in calls:
            waiting.setdefault(self._lane(call.site), deque()).append(call)
        begun: dict[int, deque[Future[Reply | Failure]]] = {lane: deque() for lane in waiting}
        with contextlib.ExitStack() as stack:
            threads = {lane: stack.enter_context(ThreadPoolExecutor(1)) for lane in waiting}

            def begin(lane: int) -> None:
                if waiting[lane]:
                    begun[lane].append(threads[lane].submit(self._call_worker, lane, waiting[lane].popleft()))

            for lane in list(waiting) * AHEAD:
                begin(lane)
            for call in calls:
                lane = self._lane(call.site)
                yield begun[lane].popleft().result()
                begin(lane)

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

    def _start(self, lane: int) -> WorkerProcess:
        worker = self._pool[lane] = self.start_worker()
        mine = self.sites[lane :: len(self._pool)]
        worker.restore({site: self._positions[site] for site in mine if site in self._positions})
        return worker

    def _end(self, lane: int) -> None:
        worker, self._pool[lane] = self._pool[lane], None
        if worker is not None:
            worker.kill()
