"""The NVFlare engine, the coordinator's side: sends calls to sites as messages, again where one was lost.

Every message is bytes there and bytes back, `pack`ed. Pieces keep memory bounded at both ends, whatever a method sends.

    piece  {call, index} + bytes        a piece of a call that is too large for one message
    run    {call, pieces, held, position, durable, deadline} + call   work on it; the answer, or `working` after a
                                        while, or `missing` where the site no longer has what `held` names
    wait   {call}                       the answer, or `working` after a while
    take   {call, offset}               a piece of an answer that is too large for one message
    ping   {}                           a sign of life; a deployed site adds whether its people let the study run
"""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from polyclinic.engines.pool import DaemonThread
from polyclinic.engines.worker_process import reason_of
from polyclinic.errors import RunPaused
from polyclinic.federation.call import Call, Failure, Reply, frame_of, pack, unpack
from polyclinic.federation.ledger.parcel import SEALED
from polyclinic.federation.site import SitePosition
from polyclinic.json_types import JsonObject

#: bytes of a piece, and of the largest call or answer that travels in one message
PIECE = 8 * 2**20
#: bytes of the largest call or answer that is taken: a parcel has at most 4 GiB (`Expected.max_bytes`)
LARGEST = 4 * 2**30 + 2**24
#: what a site answers, whatever it is asked, while it is being stopped
STOPPED_AT_SITE = "the site was stopped"
#: what it answers when its part of a job ends before the answer is there
JOB_ENDED = "NVFlare ended the job, as it does at all sites where the job's process of one was killed"
#: seconds that a site lets the coordinator wait for an answer before it says that it is still working
PATIENCE = 10.0


#: bytes of the smallest parcel that a site keeps, so that it need not travel again
KEPT_FROM = 4096


class Kept:
    """What a site keeps of the last call: its large parcels, by digest, for the calls that come with them again."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def whole(self, call: bytes, held: Mapping[str, str]) -> bytes | None:
        """The bytes of a call, with the parcels that did not travel; None if one of them is not here.

        `held`: digests by the parcel's place in the call. What is whole is kept for the next call.
        """
        start, lengths = frame_of(call)
        if start + sum(lengths) > LARGEST:
            raise ValueError(f"a call has at most {LARGEST} bytes, with what did not travel")
        places = {int(place): digest for place, digest in held.items()}
        parts, at = [call[:start]], start
        for place, length in enumerate(lengths):
            blob = self._blobs.get(places[place]) if place in places else call[at : at + length]
            if blob is None or len(blob) != length:
                return None
            at += 0 if place in places else length
            parts.append(blob)
        if at != len(call):
            raise ValueError("a call is not as long as its header says")
        if large := [blob for blob in parts[1:] if len(blob) >= KEPT_FROM]:
            self._blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in large}
        return b"".join(parts)


def pieces(buffers: Iterable[bytes], size: int = PIECE) -> Iterator[bytes]:
    """The bytes of all buffers one after the other, cut into pieces; only one piece is made at a time."""
    begun = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            taken = view[: size - len(begun)]
            begun += taken
            view = view[len(taken) :]
            if len(begun) == size:
                yield bytes(begun)
                begun.clear()
    if begun:
        yield bytes(begun)


#: sends `(what, payload)` to a site and gives what came back within `timeout` seconds; TimeoutError if nothing did
Send = Callable[[str, bytes, float], bytes]
#: large messages under way at once: each is in memory a few times over
AT_ONCE = 4
#: seconds for a site that was lost to show that it is back
SHORT = 5.0
#: seconds after which a site that says "working" and nothing else is given up, where engine.deadline says nothing
LONGEST_WORK = 24 * 3600.0
#: seconds between attempts to reach a site
PAUSE = 1.0


class SiteLost(Exception):  # noqa: N818
    """A site that gives no sign of life."""


class JobEnded(RunPaused):
    """NVFlare has ended the job at a site: the run goes on in another one."""


@dataclass(frozen=True)
class Patience:
    """How long sites are waited for, in seconds. `deadline`: for one operation; `silence`: for a sign of life."""

    deadline: float | None = None
    silence: float = 60.0


class NVFlare:
    """Sends calls to sites. A site that is lost is asked for a sign of life before it gets another call."""

    def __init__(
        self, sites: Mapping[str, Send | None], *, patience: Patience, simulation: bool, durable: Callable[[], None]
    ) -> None:
        """`sites`: how to reach each, None for one that is absent. `durable` is called when a checkpoint is."""
        self.simulation = simulation
        self.lost: set[str] = {site for site, send in sites.items() if send is None}
        self._sites = sites
        self._patience = patience
        self._when_durable = durable
        self._positions: dict[str, SitePosition] = {}
        self._durable: dict[str, SitePosition] = {}
        self._large = threading.Semaphore(AT_ONCE)
        self._held: dict[str, frozenset[str]] = {}  # digests of the large parcels of each site's last call

    def call(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        """All sites work at once; their answers are fetched one after the other, as they are taken."""
        threads, abandoned = [DaemonThread() for _ in calls], threading.Event()
        try:
            begun = [
                thread.submit(partial(self._run, call, abandoned)) for thread, call in zip(threads, calls, strict=True)
            ]
            for call, future in zip(calls, begun, strict=True):
                yield self._finish(call, *future.result())
        finally:  # also where nobody takes the answers any more: a thread is not waited for, it stops asking its site
            abandoned.set()
            for thread in threads:
                thread.end()

    def checkpoint(self) -> dict[str, SitePosition]:
        return dict(self._positions)

    saved_positions = checkpoint

    def prune(self, positions: dict[str, SitePosition]) -> None:
        self._durable = dict(positions)  # the sites hear of it with their next call
        self._when_durable()

    def restore(self, positions: dict[str, SitePosition]) -> None:
        self._positions = dict(positions)  # a site that stands elsewhere goes there with its next call
        self._durable = {}

    def close(self) -> None:
        """Nothing: what reaches the sites belongs to who made the engine."""

    def leaves(self, site: str) -> None:
        """The site says that it is being stopped: it is lost, and is not waited for."""
        self.lost.add(site)

    # --- one call -----------------------------------------------------------------------------------

    def _run(self, call: Call, abandoned: threading.Event) -> tuple[str, JsonObject, list[bytes]]:
        """Have a site work on a call until it is done: the call's name and what the site said of it."""
        name = uuid.uuid4().hex
        try:
            return (name, *self._until_done(name, call, abandoned))
        except Exception as error:
            return name, {"failed": reason_of(error), "position": None}, []

    def _until_done(self, name: str, call: Call, abandoned: threading.Event) -> tuple[JsonObject, list[bytes]]:
        self._look_for(call.site)
        deadline = LONGEST_WORK if self._patience.deadline is None else self._patience.deadline
        until = time.monotonic() + deadline + PATIENCE
        said, blobs = self._send_call(name, call)
        while said["state"] == "working" and not abandoned.is_set():
            if time.monotonic() > until:
                raise SiteLost("no answer within the deadline (engine.deadline)")
            said, blobs = self._message(call.site, "wait", {"call": name})
        return said, blobs

    def _look_for(self, site: str) -> None:
        """SiteLost if the site was lost and still is."""
        if self._sites[site] is None:
            raise SiteLost("is not connected")
        if site in self.lost:
            said, _ = self._message(site, "ping", {}, within=min(SHORT, self._patience.silence))
            if said.get("failed") == STOPPED_AT_SITE:
                raise SiteLost(STOPPED_AT_SITE)
            self.lost.discard(site)

    def _send_call(self, name: str, call: Call) -> tuple[JsonObject, list[bytes]]:
        """Send a call without the parcels that the site has of its last one, such as the weights that it trained and
        now scores; whole where it has them no more, as after a restart."""
        digests = {  # what is sealed is other bytes each time
            place: parcel.digest_of_bytes
            for place, parcel in enumerate(call.parcels.values())
            if parcel.kind != SEALED and parcel.size >= KEPT_FROM
        }
        held = {place: digest for place, digest in digests.items() if digest in self._held.get(call.site, ())}
        said, blobs = self._send(name, call, held)
        if said["state"] == "missing" and held:
            said, blobs = self._send(name, call, {})
        self._durable.pop(call.site, None)
        if digests:
            self._held[call.site] = frozenset(digests.values())
        return said, blobs

    def _send(self, name: str, call: Call, held: Mapping[int, str]) -> tuple[JsonObject, list[bytes]]:
        position = self._positions.get(call.site, SitePosition())
        header = {
            "call": name,
            "pieces": 0,
            "held": held,
            "position": position,
            "durable": self._durable.get(call.site),
            "deadline": self._patience.deadline,
        }
        first, text, *parcels = call.chunks()
        chunks = [first, text, *(parcel for place, parcel in enumerate(parcels) if place not in held)]
        if sum(map(len, chunks)) <= PIECE:
            return self._message(call.site, "run", header, [b"".join(chunks)])
        for index, piece in enumerate(pieces(chunks)):
            with self._large:
                self._message(call.site, "piece", {"call": name, "index": index}, [piece])
            header["pieces"] = index + 1
        return self._message(call.site, "run", header)

    def _finish(self, call: Call, name: str, said: JsonObject, blobs: list[bytes]) -> Reply | Failure:
        """The answer, its bytes fetched if they did not come at once."""
        if said["failed"] == JOB_ENDED:
            raise JobEnded(JOB_ENDED)
        try:
            if said["failed"] is None:
                size = announced(said)
                reply = Reply.from_bytes(blobs[0] if said["whole"] else self._fetch(call.site, name, size), call)
                self._positions[call.site] = SitePosition(*said["position"])
                return reply
            reason = said["failed"]
        except Exception as error:
            reason = reason_of(error)
        return Failure(call.site, call.operation, reason)

    def _fetch(self, site: str, name: str, size: int) -> bytes:
        came: list[bytes] = []
        missing = size
        while missing:
            _, [piece] = self._message(site, "take", {"call": name, "offset": size - missing})
            if not piece:
                raise SiteLost(f"sent {size - missing} of {size} bytes")
            if len(piece) > min(PIECE, missing):
                raise SiteLost(f"sent a piece of {len(piece)} bytes where at most {min(PIECE, missing)} were left")
            came.append(piece)
            missing -= len(piece)
        return b"".join(came)

    def _message(
        self,
        site: str,
        what: str,
        header: JsonObject,
        blobs: list[bytes] | None = None,
        within: float | None = None,
    ) -> tuple[JsonObject, list[bytes]]:
        """One message and its answer; SiteLost once there has been none for too long, and the site counts as lost.

        A message that was lost is sent again: a site does nothing twice.
        """
        send, payload = self._sites[site], pack(header, blobs or [])
        assert send is not None
        until = time.monotonic() + (within or self._patience.silence)
        while True:
            try:
                return unpack(send(what, payload, within or PATIENCE + self._patience.silence))
            except TimeoutError as error:
                if time.monotonic() + PAUSE > until:
                    self.lost.add(site)
                    silence = f"engine.silence = {self._patience.silence:g}"
                    raise SiteLost(f"gives no sign of life ({error}; {silence})") from None
                time.sleep(PAUSE)


def announced(said: JsonObject) -> int:
    """How many bytes a site says that its answer has; SiteLost for no number, or more than is ever taken."""
    size = said.get("size")
    if type(size) is not int or not 0 < size <= LARGEST:
        raise SiteLost(f"announced an answer of {size!r} bytes; the limit is {LARGEST}")
    return size
