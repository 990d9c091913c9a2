"""A pool of workers with bounded prefetch: PREFETCH calls in flight per worker, a site always in the same worker."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from polyclinic.engines.worker_process import WorkerGone, reason_of
from polyclinic.errors import StorageFailed
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.site import SitePosition

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
            future, work = given
            try:
                future.set_result(work())
            except BaseException as error:  # whoever takes the result gets it
                future.set_exception(error)
            del given, future, work  # and with them the result, which may be a model: whoever took it has it now


#: calls a worker may be ahead of whoever takes the answers: enough to keep it busy, few to hold in memory
PREFETCH = 2
#: seconds that threads whose workers were ended have to end; no longer, as somebody pressed Ctrl-C
THREADS_END_WITHIN = 5.0


class Worker(Protocol):
    """What runs calls at some of the sites, somewhere else; its sites' states are on disk after every call."""

    def call(self, call: Call, deadline: float | None) -> tuple[Reply | Failure, SitePosition | None]:
        """The answer and where the site stands after it; raises if there is none in time, or ever."""

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Put its sites to where they stand; also waits until it has started."""

    def kill(self) -> None:
        """End it now, whatever it does; another thread that waits for its answer gets an exception."""


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
        self._changing = threading.Lock()  # of the pool and the positions, by threads of calls that may be abandoned

    def saved_positions(self) -> dict[str, SitePosition]:
        return dict(self._positions)

    checkpoint = saved_positions  # the states of all sites are on disk after every call

    def close_workers(self) -> None:
        """End all workers."""
        for lane in range(len(self._pool)):
            self._end(lane)

    close = close_workers

    def _call_workers(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        """A site always works in the same lane; the lanes work at the same time, a little ahead."""
        waiting: dict[int, deque[Call]] = {}
        for call in calls:
            waiting.setdefault(self._lane(call.site), deque()).append(call)
        begun: dict[int, deque[Future[Reply | Failure]]] = {lane: deque() for lane in waiting}
        threads = {lane: DaemonThread() for lane in waiting}
        abandoned = threading.Event()

        def begin(lane: int) -> None:
            if waiting[lane]:
                begun[lane].append(
                    threads[lane].submit(partial(self._call_worker, lane, waiting[lane].popleft(), abandoned))
                )

        def take(lane: int) -> Reply | Failure:
            answer = begun[lane][0].result()
            begun[lane].popleft()
            return answer

        try:
            for lane in list(waiting) * PREFETCH:
                begin(lane)
            for call in calls:
                lane = self._lane(call.site)
                yield take(lane)
                begin(lane)
        finally:
            for thread in threads.values():
                thread.end()
            # Ctrl-C here, or Ctrl-C or an error where the answers are taken: nobody wants to wait for sites at work,
            # which stand where their last finished call left them
            if any(begun.values()) or any(waiting.values()):
                with self._changing:
                    abandoned.set()
                self.close_workers()
            until = time.monotonic() + THREADS_END_WITHIN
            for thread in threads.values():
                thread.join(max(0.0, until - time.monotonic()))

    def _lane(self, site: str) -> int:
        return self.sites.index(site) % len(self._pool)

    def _call_worker(self, lane: int, call: Call, abandoned: threading.Event) -> Reply | Failure:
        try:
            worker = self._worker(lane, abandoned)
            answer, position = worker.call(call, self.deadline)
        except StorageFailed:
            raise
        except Exception as error:  # it hangs, died, or answers with nonsense: its sites start from disk again
            self._end(lane, abandoned)
            return Failure(call.site, call.operation, reason_of(error))
        with self._changing:
            if position is not None and not abandoned.is_set():
                self._positions[call.site] = position
        return answer

    def _worker(self, lane: int, abandoned: threading.Event) -> Worker:
        """The worker of a lane, started if there is none; none is started for calls that are abandoned."""
        with self._changing:
            if abandoned.is_set():
                raise WorkerGone("nobody waits for the answer any more")
            worker = self._pool[lane]
            if worker is not None:
                return worker
            worker = self._pool[lane] = self.start_worker()
        mine = self.sites[lane :: len(self._pool)]
        worker.restore({site: self._positions[site] for site in mine if site in self._positions})
        return worker

    def _end(self, lane: int, abandoned: threading.Event | None = None) -> None:
        """End a lane's worker; where the call was abandoned, its worker has been, and another may work there."""
        with self._changing:
            if abandoned is not None and abandoned.is_set():
                return
            worker, self._pool[lane] = self._pool[lane], None
        if worker is not None:
            worker.kill()
