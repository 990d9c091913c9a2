"""The NVFlare engine, a site's side: takes calls, has a child process work on them, hands out the answers.

The work runs in a child process, so that one which is killed for want of memory is a failed answer, and this process
stays to give it.
"""

import threading
from collections.abc import Callable
from typing import Any

from polyclinic.engines.nvflare.engine import LARGEST, PATIENCE, PIECE, STOPPED_AT_SITE, Kept
from polyclinic.engines.worker_process import EXITS_WITHIN, WorkerGone, WorkerProcess, reason_of
from polyclinic.federation.call import pack, unpack
from polyclinic.federation.site import SitePosition

#: what a worker says about a call: its header and the reply's bytes
Answer = tuple[dict[str, Any], bytes]


class Relay:
    """`handle` may be called by several threads; the coordinator has one call at a time at a site."""

    def __init__(
        self,
        site: str,
        start_worker: Callable[[], WorkerProcess],
        tell: Callable[[BaseException], str] = reason_of,
    ) -> None:
        """`tell` says what went wrong in words that may leave this process."""
        self.site = site
        self.tell = tell
        self.start_worker = start_worker
        self._worker: WorkerProcess | None = None
        self._position = SitePosition()
        self._task: _Task | None = None
        self._pieces: dict[str, dict[int, bytes]] = {}
        self._kept = Kept()
        self._leaves = ""
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # of the worker, by the thread of a task or by who gives that task up

    def handle(self, what: str, payload: bytes) -> bytes:
        """The answer to one message; `what` is one of those that `wire` lists."""
        if self._leaves:
            return refusal(self._leaves)
        header, blobs = unpack(payload)
        if what == "ping":
            return pack({"site": self.site}, [])
        if what == "piece":
            self._keep_piece(header["call"], header["index"], blobs[0])
            return pack({}, [])
        if what == "run" and not self._begin(header, blobs):
            return pack({"state": "missing"}, [])
        return self._take(header) if what == "take" else self._wait(header)

    def _keep_piece(self, call: str, index: int, piece: bytes) -> None:
        """Keep a part of a call until it is whole; ValueError for more than any call has."""
        held = sum(len(one) for of_call in self._pieces.values() for one in of_call.values())
        if len(piece) > PIECE or held + len(piece) > LARGEST:
            self._pieces.clear()
            raise ValueError(f"a piece of {len(piece)} bytes after {held}: a call has at most {LARGEST} bytes")
        self._pieces.setdefault(call, {})[index] = piece

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._give_up()

    def leave(self, why: str = STOPPED_AT_SITE) -> None:
        """The site is being stopped, or its part of the job: say so to whoever waits, and end the child process."""
        self._leaves = why
        if self._task is not None:
            self._task.done.set()
        self._end_worker()

    def _begin(self, header: dict[str, Any], blobs: list[bytes]) -> bool:
        """Start on a call, once; another that is still being worked on was given up by the coordinator. False if the
        call came without a parcel that this site does not have any more."""
        if self._task and self._task.name == header["call"]:
            return True
        came = self._pieces.pop(header["call"], {})
        travelled = b"".join(came[index] for index in range(header["pieces"])) if header["pieces"] else blobs[0]
        self._pieces.clear()
        call = self._kept.whole(travelled, header.get("held") or {})
        if call is None:
            return False
        with self._lock:
            position = SitePosition(*header["position"])
            if self._task and not self._task.done.is_set():
                self._give_up()
            elif position != self._position:  # the coordinator never got the last answer: it counts for nothing
                self._end_worker()
            self._task = _Task(header["call"])
            arguments = (self._task, call, position, header["durable"], header["deadline"])
            threading.Thread(target=self._work, args=arguments, daemon=True).start()
        return True

    def _work(
        self, task: "_Task", call: bytes, position: SitePosition, durable: list[int] | None, deadline: float | None
    ) -> None:
        try:
            worker = self._worker_for(task, position)
            task.answer = worker.exchange_call(call, deadline, None if durable is None else {self.site: durable})
            with self._changing:
                if task.answer[0]["position"] and not task.given_up:
                    self._position = SitePosition(*task.answer[0]["position"])
        except Exception as error:
            self._end_worker(task)
            task.answer = ({"failed": self.tell(error), "position": None}, b"")
        finally:
            task.done.set()

    def _worker_for(self, task: "_Task", position: SitePosition) -> WorkerProcess:
        """The worker, started if there is none; WorkerGone if the task was given up before that."""
        with self._changing:
            if task.given_up:
                raise WorkerGone("the call was given up")
            if self._worker is not None:
                return self._worker
            self._worker = worker = self.start_worker()
            self._position = position
        worker.restore({self.site: position})
        return worker

    def _give_up(self) -> None:
        """End the work on the present task: no worker is started for it any more, and the one there is ends."""
        task = self._task
        if task is not None:
            with self._changing:
                task.given_up = True
        self._end_worker()
        if task is not None:
            task.done.wait(EXITS_WITHIN)  # its thread ends with the worker; one that does not can do no harm

    def _end_worker(self, failed: "_Task | None" = None) -> None:
        """End the worker; where a task failed that was given up, its worker has been, and another may be at work."""
        with self._changing:
            if failed is not None and failed.given_up:
                return
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _wait(self, header: dict[str, Any]) -> bytes:
        task = self._of(header)
        if not task.done.wait(PATIENCE):
            return pack({"state": "working"}, [])
        if self._leaves:
            return refusal(self._leaves)
        said, reply = task.answer
        whole = len(reply) <= PIECE
        return pack({"state": "done", **said, "size": len(reply), "whole": whole}, [reply] if whole else [])

    def _take(self, header: dict[str, Any]) -> bytes:
        reply = self._of(header).answer[1]
        return pack({}, [reply[header["offset"] : header["offset"] + PIECE]])

    def _of(self, header: dict[str, Any]) -> "_Task":
        if self._task is None or self._task.name != header["call"]:
            raise LookupError(f"site '{self.site}' knows nothing of call {header['call']}")
        return self._task


def refusal(reason: str) -> bytes:
    """The answer of a site that cannot take part, to whatever it is asked."""
    return pack({"state": "done", "failed": reason, "position": None, "size": 0, "whole": True}, [b""])


class _Task:
    """A call that is being worked on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = threading.Event()
        #: the coordinator wants no answer any more: what its thread still does counts for nothing
        self.given_up = False
        self.answer: Answer = ({}, b"")
