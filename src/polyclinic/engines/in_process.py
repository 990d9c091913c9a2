"""The default engine: sites live in this process, or in a few worker processes where that is faster.

Results are the same bit for bit either way: a site computes with a fixed number of threads, draws from generators
with addresses, and never sees another site's numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from polyclinic.engines.worker_process import WorkerProcess, reason_of
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.site import SiteHost, SitePosition

#: with `workers = "auto"`: seconds of parallel work after which worker processes are worth their start
PAYS_AFTER = 8.0


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

    def call(self, calls: list[Call]) -> list[Reply | Failure]:
        self._consider_growing(calls)
        if self._pool:
            return self._call_workers(calls)
        started = time.perf_counter()
        answers = [self._call_here(call) for call in calls]
        if len(calls) > 1:
            self._busy_seconds += time.perf_counter() - started
        return answers

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

    def _call_workers(self, calls: list[Call]) -> list[Reply | Failure]:
        """A site always works in the same process; the processes work at the same time."""
        lanes: dict[int, list[int]] = {}
        for position, call in enumerate(calls):
            lanes.setdefault(self.sites.index(call.site) % len(self._pool), []).append(position)
        answers: list[Reply | Failure | None] = [None] * len(calls)

        def work(lane: int) -> None:
            for position in lanes[lane]:
                answers[position] = self._call_worker(lane, calls[position])

        with ThreadPoolExecutor(len(lanes)) as threads:
            list(threads.map(work, lanes))
        return [answer for answer in answers if answer is not None]

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
