"""The default engine: sites live in this process, or in a few worker processes where that is faster.

Results are the same bit for bit either way: a site computes with a fixed number of threads, draws from generators
with addresses, and never sees another site's numbers.
"""

import itertools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Literal

from polyclinic.engines.pool import Worker, WorkerPool
from polyclinic.engines.worker_process import cores, is_storage_failure, reason_of, storage_failure
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.host import SiteHost
from polyclinic.federation.site import SitePosition

#: with `workers = "auto"`: seconds of parallel work after which worker processes are worth their start
PAYS_AFTER = 8.0


class InProcess(WorkerPool):
    """Runs calls one after the other here, or at the same time in worker processes."""

    simulation = True

    def __init__(
        self,
        host: SiteHost,
        sites: tuple[str, ...],
        start_worker: Callable[[], Worker],
        *,
        workers: int | Literal["auto"] = "auto",
        threads: int = 1,
        deadline: float | None = None,
        may_grow: bool = True,
        stacked: bool = False,
    ) -> None:
        """`stacked`: operations that can work at several sites at once do so, while sites live in this process."""
        self.host, self.stacked = host, stacked
        self.stacked_operations: set[str] = set()  # those that were done at several sites at once
        host.by_reference = True
        self.most = min(len(sites), max(1, cores() // threads)) if workers == "auto" else min(workers, len(sites))
        self.grows = workers == "auto" and may_grow and self.most > 1
        self._busy_seconds = 0.0
        at_once = deadline is not None or (workers != "auto" and self.most > 1)
        super().__init__(sites, start_worker, lanes=self.most if at_once else 0, deadline=deadline)

    def call(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        # to worker processes once enough parallel work has been seen, and no site is in mid-turn
        has_paid = self.grows and not self._pool and len(calls) > 1 and self._busy_seconds > PAYS_AFTER
        if has_paid and not any(site.memory for site in self.host.resident()):
            self._positions = self.host.checkpoint()
            self._pool = [None] * self.most
        if self._pool:
            return self._call_workers(calls)
        if not self.stacked or len(calls) < 2:
            return self._call_in_turn(calls)
        most, operation = self.host.GROUPED, calls[0].operation
        groups = [calls[start : start + most] for start in range(0, len(calls), most)]
        if len(groups) > 1 and not self.host.can_divide(operation):
            return self._call_in_turn(calls)
        return itertools.chain.from_iterable(map(self._call_group, groups))

    def checkpoint(self) -> dict[str, SitePosition]:
        return super().checkpoint() if self._pool else self.host.checkpoint()

    def saved_positions(self) -> dict[str, SitePosition]:
        return super().saved_positions() if self._pool else self.host.sites.saved_positions()

    def close(self) -> None:
        self.host.settle()
        super().close()

    def prune(self, positions: dict[str, SitePosition]) -> None:
        self.host.drop_old_versions(positions)

    def restore(self, positions: dict[str, SitePosition]) -> None:
        self._positions = dict(positions)
        self.host.restore(positions)
        self.close()

    def _call_in_turn(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        for call in calls:
            started = perf_counter()
            try:
                answer: Reply | Failure = self.host.handle(call)
            except Exception as error:
                answer = _failure(call, error)
            if len(calls) > 1:
                self._busy_seconds += perf_counter() - started
            yield answer

    def _call_group(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        """At once, where they can be."""
        operation = calls[0].operation
        if len(calls) == 1 or not self.host.is_grouped(operation, len(calls)):
            yield from self._call_in_turn(calls)
            return
        self.stacked_operations.add(operation)
        answers = self.host.handle_group(calls)
        # where the work of several sites failed at once they have one error; where gates refuse, each has its own
        errors = [id(answer) for answer in answers if isinstance(answer, Exception)]
        if self.host.can_divide(operation) and len(set(errors)) < len(errors):
            yield from self._call_in_turn(calls)  # the images of one site must not cost the answers of all
            return
        for call, answer in zip(calls, answers, strict=True):
            yield _failure(call, answer) if isinstance(answer, Exception) else answer


def _failure(call: Call, error: Exception) -> Failure:
    """The failure of a site; StorageFailed where the files of the run are at fault, which all sites share."""
    if is_storage_failure(error):
        raise storage_failure(call.site, reason_of(error)) from error
    return Failure(call.site, call.operation, reason_of(error))
