"""A worker process as the engine sees it, and the loop that runs inside it.

They talk in frames over the worker's standard input and output: eight bytes of length, then a packed message. The
worker saves the state of a site after every call, so that killing it loses only the call in flight.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from polyclinic.federation.call import Call, Failure, Reply, pack, unpack
from polyclinic.federation.host import SiteHost
from polyclinic.federation.state import SitePosition

#: seconds a worker has to start: far more than it takes, so that one which never will is not waited for
STARTS_WITHIN = 300.0


def reason_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("polyclinic") and text else f"{type(error).__name__}: {text}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(module: str, *arguments: str) -> list[str]:
    """What starts a module of this installation in a process of its own."""
    return [sys.executable, "-m", module, *arguments]


class WorkerGone(Exception):  # noqa: N818
    """The worker hung past its deadline or died."""


class WorkerProcess:
    """Starts `command` and speaks to it. Not for use by two threads at once."""

    def __init__(self, command: list[str], *, threads: int, inherit: tuple[int, ...] = ()) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # a session of its own, so that Ctrl-C reaches the coordinator alone, which then ends its workers
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            pass_fds=inherit,
        )
        assert self._process.stdin
        # a worker that does not read must not hold up who writes to it beyond the deadline
        os.set_blocking(self._process.stdin.fileno(), False)

    def call(self, call: Call, deadline: float | None) -> tuple[Reply | Failure, SitePosition | None]:
        """The answer to a call and where the site stands after it; WorkerGone if there is none in time."""
        header, reply = self.exchange_call(call.to_bytes(), deadline)
        position = SitePosition(*header["position"]) if header["position"] else None
        if header["failed"] is not None:
            return Failure(call.site, call.operation, header["failed"]), position
        return Reply.from_bytes(reply), position

    def exchange_call(
        self, call: bytes, deadline: float | None, durable: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """The same for who only passes the bytes on: `failed` (None or why), `position`, and the reply's bytes.

        `durable`: positions of sites in a checkpoint that is durable, older states than which may be forgotten.
        """
        header, blobs = self._exchange({"do": "call", "durable": durable or {}}, [call], deadline)
        return header, blobs[0] if blobs else b""

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Tell a worker where its sites stand; also waits until it has started."""
        header, _ = self._exchange({"do": "restore", "positions": dict(positions)}, [], STARTS_WITHIN)
        if header.get("failed"):
            raise WorkerGone(header["failed"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _exchange(
        self, header: dict[str, Any], blobs: list[bytes], deadline: float | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        assert self._process.stdin
        assert self._process.stdout
        until = None if deadline is None else time.monotonic() + deadline
        try:
            write_frame(self._process.stdin, pack(header, blobs), until)
            answer = read_frame(self._process.stdout, until)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise WorkerGone(f"the site's process died ({self._exit()})")
        return unpack(answer)

    def _exit(self) -> str:
        try:
            return f"exit code {self._process.wait(timeout=5)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipe"


def write_frame(pipe: IO[bytes], message: bytes, until: float | None = None) -> None:
    """Write one frame; WorkerGone once the clock passes `until`."""
    for data in (len(message).to_bytes(8, "little"), message):
        rest = memoryview(data)
        while rest:
            _wait([], [pipe], until)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(pipe.fileno(), rest) :]


def read_frame(pipe: IO[bytes], until: float | None = None) -> bytes | None:
    """The next frame, None at the end of the stream; WorkerGone once the clock passes `until`."""
    head = _read(pipe, 8, until)
    return None if head is None else _read(pipe, int.from_bytes(head, "little"), until)


def _read(pipe: IO[bytes], count: int, until: float | None) -> bytes | None:
    chunks, missing = [], count
    while missing:
        _wait([pipe], [], until)
        chunk = os.read(pipe.fileno(), min(missing, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _wait(readable: list[IO[bytes]], writable: list[IO[bytes]], until: float | None) -> None:
    """Wait until the pipe is ready, or WorkerGone."""
    left = None if until is None else max(0.0, until - time.monotonic())
    if not any(select.select(readable, writable, [], left)):
        raise WorkerGone("no answer within the deadline (engine.deadline)")


# --- inside the worker --------------------------------------------------------------------------------


def serve(host: SiteHost | Callable[[], SiteHost], tell: Callable[[BaseException], str] = reason_of) -> None:
    """Answer calls on standard input until it ends. Nothing else may write to standard output.

    Where the host cannot be made, that is the answer to whatever comes first. `tell` says what went wrong in words that
    may leave this process.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        host = host() if callable(host) else host
    except Exception as error:
        read_frame(sys.stdin.buffer)
        write_frame(answers, pack({"failed": tell(error), "position": None}, []))
        return
    while (message := read_frame(sys.stdin.buffer)) is not None:
        header, blobs = unpack(message)
        write_frame(answers, _answer(host, header, blobs, tell))


def _answer(host: SiteHost, header: dict[str, Any], blobs: list[bytes], tell: Callable[[BaseException], str]) -> bytes:
    if header["do"] == "restore":
        host.restore({name: SitePosition(*position) for name, position in header["positions"].items()})
        return pack({}, [])
    try:
        if header["durable"]:
            host.drop_old_versions({name: SitePosition(*position) for name, position in header["durable"].items()})
        call = Call.from_bytes(blobs[0])
        reply = host.handle(call)
        position = host.save(call.site)
    except Exception as error:
        return pack({"failed": tell(error), "position": None}, [])
    return pack({"failed": None, "position": position}, [reply.to_bytes()])


def end_with_parent() -> None:
    """A process that was killed cannot end those it started: they watch for that themselves."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
