"""Worker processes: the engine's handle of one, and the loop that runs inside it.

They talk in frames over the worker's standard input and output: eight bytes of length, then a packed message. The
worker saves the state of a site after every call, so that killing it loses only the call in flight. A worker whose
standard input ends has lost the process that started it, and ends, too.

Pipes and threads only, which every system has: no `select`, no signals, no inherited descriptors.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from polyclinic.errors import BadInput, Damaged, StorageFailed, WorkFailed
from polyclinic.federation.call import Call, Failure, Reply, pack, unpack
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.federation.site import SitePosition
from polyclinic.files import STORAGE_ERRORS, atomic_write
from polyclinic.json_types import JsonObject, parse_json
from polyclinic.progress import listening
from polyclinic.progress import tell as tell_progress

#: seconds a worker has to start: far more than it takes, so that one which never will is not waited for
STARTS_WITHIN = 300.0
#: seconds that a worker which has closed its pipe has to end, so that its exit code can be told
EXITS_WITHIN = 30.0
#: bytes; what tells progress is smaller
SMALL_FRAME = 4096


def reason_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("polyclinic") and text else f"{type(error).__name__}: {text}"


def is_storage_failure(error: BaseException) -> bool:
    """Whether files of the run are at fault: at a simulated site that is no failure of the site, and ends the run."""
    if isinstance(error, OSError):
        return error.errno in STORAGE_ERRORS
    return isinstance(error, StorageFailed | LedgerBroken | Damaged)


def storage_failure(site: str, reason: str) -> StorageFailed:
    """What ends a run whose files are at fault."""
    return StorageFailed(
        f"what site '{site}' keeps cannot be used: {reason}; bring the file back from a copy, or run the study again "
        "into another folder"
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(module: str, *arguments: str) -> list[str]:
    """What starts a module of this installation in a process of its own."""
    return [sys.executable, "-m", module, *arguments]


class WorkerGone(Exception):  # noqa: N818
    """The worker hung past its deadline or died."""


class WorkerProcess:
    """Starts `command` and speaks to it. Not for use by two threads at once; but any thread may kill it."""

    def __init__(self, command: list[str], *, threads: int, spec: str = "") -> None:
        """`spec` is what the worker reads with `read_spec`: not an argument, which all users of a machine can see."""
        self._spec = spec  # what the worker is told before its first message
        self._exchange_begins = threading.Lock()
        self._killed = False
        #: the thread of the exchange that is under way, or was the last, and where its answer will be
        self._exchanging: threading.Thread | None = None
        self._answers: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self._process = self._start(command, threads)

    def _start(self, command: list[str], threads: int) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # a session (on Windows: a process group) of its own, so that Ctrl-C reaches the coordinator alone, which then
        # ends its workers
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )

    def call(self, call: Call, deadline: float | None) -> tuple[Reply | Failure, SitePosition | None]:
        """The answer to a call and where the site stands after it; WorkerGone if there is none in time."""
        header, reply = self.exchange_call(call.to_bytes(), deadline)
        position = SitePosition(*header["position"]) if header["position"] else None
        if header.get("storage"):
            raise storage_failure(call.site, header["failed"])
        if header["failed"] is not None:
            return Failure(call.site, call.operation, header["failed"]), position
        return Reply.from_bytes(reply, call), position

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
        """End the process; a thread that waits for its answer hears at once that there will be none."""
        with self._exchange_begins:
            self._killed = True
        self._process.kill()
        self._exit()
        self._answers.put(None)  # its pipe need not end with it: a child of the worker's may hold that open
        if self._exchanging:
            self._exchanging.join(EXITS_WITHIN)  # it reads the end of the pipe, which must be open until then
            if self._exchanging.is_alive():
                return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _exchange(
        self, header: dict[str, Any], blobs: list[bytes], deadline: float | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a message and wait for the answer, in a thread of its own: a worker that does not read, or does not
        answer, must not hold up its caller beyond the deadline. The thread ends with the worker."""
        answers: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        message = pack(header, blobs)
        with self._exchange_begins:
            if self._killed:
                raise WorkerGone("the site's process was ended")
            self._answers = answers
            self._exchanging = threading.Thread(target=lambda: answers.put(self._converse(message)), daemon=True)
            self._exchanging.start()
        try:
            answer = answers.get(timeout=deadline)
        except queue.Empty:
            raise WorkerGone("no answer within the deadline (engine.deadline)") from None
        if answer is None:
            raise WorkerGone(f"the site's process died ({self._exit()})")
        if isinstance(answer, Exception):
            raise answer
        return unpack(answer)

    def _converse(self, message: bytes) -> bytes | Exception | None:
        """The worker's answer to a message, or what is wrong with it; None if it died, or was killed."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            if self._spec:
                write_frame(self._process.stdin, self._spec.encode())
                self._spec = ""
            write_frame(self._process.stdin, message)
            while (answer := read_frame(self._process.stdout)) is not None and len(answer) < SMALL_FRAME:
                if (header := unpack(answer)[0]).get("progress") is None:
                    break
                tell_progress(*header["progress"])  # no answer, but how far the worker is
            return answer
        except OSError:  # a broken pipe
            return None
        except Exception as error:  # it talks nonsense; whoever waits for the answer must hear of that
            return error

    def _exit(self) -> str:
        try:
            return f"exit code {self._process.wait(timeout=EXITS_WITHIN)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipe"


def write_frame(pipe: IO[bytes], message: bytes) -> None:
    """Write one frame."""
    for data in (len(message).to_bytes(8, "little"), message):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(pipe.fileno(), rest) :]


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame, None at the end of the stream."""
    head = _read(pipe, 8)
    return None if head is None else _read(pipe, int.from_bytes(head, "little"))


def _read(pipe: IO[bytes], count: int) -> bytes | None:
    chunks, missing = [], count
    while missing:
        chunk = os.read(pipe.fileno(), min(missing, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


# --- inside the worker --------------------------------------------------------------------------------


def read_spec() -> str:
    """In a worker: the `spec` that its `WorkerProcess` was given. Call it once, before `serve`."""
    return (read_frame(sys.stdin.buffer) or b"").decode()


def serve(host: SiteHost | Callable[[], SiteHost], tell: Callable[[BaseException], str] = reason_of) -> None:
    """Answer calls on standard input until it ends, and this process with it. Nobody else may use the two pipes.

    Where the host cannot be made, that is the answer to whatever comes first. `tell` says what went wrong in words that
    may leave this process.
    """
    calls, answers = _take_pipes()
    messages = _messages(calls)
    try:
        host = host() if callable(host) else host
    except Exception as error:
        messages.get()
        write_frame(answers, pack({"failed": tell(error), "position": None}, []))
        return
    with listening(lambda *told: _send_progress(answers, told)):
        while True:
            header, blobs = unpack(messages.get())
            write_frame(answers, _answer(host, header, blobs, tell))


def _send_progress(answers: IO[bytes], told: tuple[str, int, int]) -> None:
    """From the thread that answers only: two must not write at once."""
    if threading.current_thread() is threading.main_thread():
        write_frame(answers, pack({"progress": told}, []))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes of standard input and output, which from now on are nothing and standard error to everybody else."""
    calls, answers = os.fdopen(os.dup(sys.stdin.fileno()), "rb"), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return calls, answers


def _messages(calls: IO[bytes]) -> queue.SimpleQueue[bytes]:
    """The messages as they come, read by a thread of its own, which ends this process when there will be no more."""
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while (message := read_frame(calls)) is not None:
            messages.put(message)
        os._exit(1)  # even in the middle of a call: whoever wanted its answer is gone

    threading.Thread(target=read, daemon=True).start()
    return messages


def _answer(host: SiteHost, header: dict[str, Any], blobs: list[bytes], tell: Callable[[BaseException], str]) -> bytes:
    try:
        if header["do"] == "restore":
            host.restore({name: SitePosition(*position) for name, position in header["positions"].items()})
            return pack({}, [])
        if header["durable"]:
            host.drop_old_versions({name: SitePosition(*position) for name, position in header["durable"].items()})
        call = Call.from_bytes(blobs[0])
        reply = host.handle(call)
        position = host.save(call.site)
    except Exception as error:
        return pack({"failed": tell(error), "position": None, "storage": is_storage_failure(error)}, [])
    return pack({"failed": None, "position": position}, [reply.to_bytes()])


@dataclass(frozen=True)
class Outcome:
    """`error` is None when all went well, else the name of the exception; `reason` one sentence."""

    error: str | None = None
    reason: str | None = None
    values: JsonObject | None = None

    @classmethod
    def of(cls, work: Callable[[], JsonObject]) -> "Outcome":
        """What became of a piece of work."""
        try:
            return cls(values=work())
        except Exception as error:
            return cls(type(error).__name__, reason_of(error))

    def result(self) -> JsonObject:
        """What was found; BadInput or WorkFailed if nothing was."""
        if self.values is not None:
            return self.values
        raise BadInput(self.reason or "") if self.error == "BadInput" else WorkFailed(self.reason or "")

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        return cls(**parse_json(path.read_text(encoding="utf-8")))
