"""Messages between coordinator and site: a call, and a reply, a refusal or a failure.

`to_bytes` / `from_bytes` give the form that crosses a process border or a network: a JSON header and the
encoded parcels, one after the other. No pickle.

A refusal that nobody's images are in may be told. One that depends on images is itself an answer about them ("this
holds NaN" may mean "this patient is among yours"), so a deployed site tells one sentence, and stops until a person has
looked (`layers/suspension.py`). `ParcelRejected` is of the first sort: something came that does not fit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger.keys import Anchor, Head, anchor_from_json, head_from_json
from polyclinic.federation.ledger.kinds import KINDS, MESSAGE_LIMIT, ParcelRejected
from polyclinic.federation.ledger.parcel import HEADER_LIMIT, Parcel, decode_all, shortened
from polyclinic.federation.ledger.wire import ROUNDING, Encoding

T = TypeVar("T")

#: what the header of a call holds, besides the anchor
_CALL = {"site": str, "operation": str, "round": int, "arguments": dict, "to": str, "parcels": list}


@dataclass(frozen=True)
class Call:
    """One operation asked of one site. `to` is who will get what the site releases."""

    site: str
    operation: str
    round: int
    parcels: Mapping[str, Parcel] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    to: str = COORDINATOR
    #: the head of the site's ledger as the coordinator has it, counter-signed
    anchor: Anchor | None = None

    def to_bytes(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> list[bytes]:
        """The bytes of the call before they are joined: those of a parcel are the same for all who receive it."""
        header = {
            "site": self.site,
            "operation": self.operation,
            "round": self.round,
            "arguments": dict(self.arguments),
            "to": self.to,
            "anchor": self.anchor,
            "parcels": list(self.parcels),
        }
        return pack_chunks(header, [p.encoded for p in self.parcels.values()])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Call":
        header, blobs = unpack(data)
        anchor, names = header.get("anchor"), header.get("parcels", [])
        if set(header) - {"anchor"} != set(_CALL) or not all(
            isinstance(header[name], of) for name, of in _CALL.items()
        ):
            raise ParcelRejected("the message is no call: a name or a value in its header is not what a call has")
        if not all(isinstance(name, str) for name in names) or not len(set(names)) == len(names) == len(blobs):
            raise ParcelRejected("the message is no call: its parcels are not those that its header names")
        told = {name: header[name] for name in _CALL if name != "parcels"}
        anchor = None if anchor is None else _from_json(anchor_from_json, anchor)
        return cls(**told, anchor=anchor, parcels=dict(zip(names, decode_all(blobs), strict=True)))


class MissingParcel(WorkFailed, AttributeError):  # noqa: N818
    """A site sent no parcel of a kind that a method needs of it."""


@dataclass(frozen=True)
class Reply:
    """What a site released for one call. `reply.weights` are the tensors of its parcel of kind weights."""

    site: str
    parcels: tuple[Parcel, ...]
    #: how far the site's ledger has come, with these parcels
    head: Head | None = None
    #: instead of that, where a simulated site's lines are still being written: gives the head when they are
    head_soon: Callable[[], Head | None] | None = None

    def __bool__(self) -> Literal[True]:
        return True

    def __getattr__(self, name: str) -> Mapping[str, Tensor]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.parcel(name.replace("_", "-")).tensors

    def parcel(self, kind: str) -> Parcel:
        for parcel in self.parcels:
            if parcel.kind == kind:
                return parcel
        raise MissingParcel(f"site '{self.site}' released no parcel of kind '{kind}'")

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of all parcels together."""
        found: dict[str, Any] = {}
        for parcel in self.parcels:
            found |= parcel.metadata
        return found

    def to_bytes(self) -> bytes:
        return pack({"site": self.site, "head": self.head}, [p.encoded for p in self.parcels])

    @classmethod
    def from_bytes(cls, data: bytes, call: Call | None = None) -> "Reply":
        """The reply that the bytes hold; `call` is what it answers, and has what differences are to be added to."""
        header, blobs = unpack(data)
        base = base_of(call.parcels) if call else None
        if not isinstance(header.get("site"), str):
            raise ParcelRejected("the message is no reply: its header names no site")
        head = header.get("head")
        head = None if head is None else _from_json(head_from_json, head)
        return cls(header["site"], tuple(decode_all(blobs, base)), head)


@dataclass(frozen=True)
class Failure:
    """A site that raised, hung past its deadline, died, or whose parcel was refused. False in a condition."""

    site: str
    operation: str
    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    @classmethod
    def before(cls, site: str, operation: str) -> "Failure":
        """Of a site that failed in this round already, and was not asked."""
        return cls(site, operation, "failed earlier in this round")


def base_of(parcels: Mapping[str, Parcel]) -> Mapping[str, Tensor]:
    """What both ends of a call have, and a reply may be a difference to: the weights that came with it."""
    weights = [parcel for parcel in parcels.values() if parcel.kind == "weights"]
    return weights[0].tensors if len(weights) == 1 else {}


def pack(header: Mapping[str, Any], blobs: list[bytes]) -> bytes:
    """One byte string: length of the header, header with the blobs' lengths, blobs."""
    return b"".join(pack_chunks(header, blobs))


def pack_chunks(header: Mapping[str, Any], blobs: list[bytes]) -> list[bytes]:
    """What `pack` joins."""
    text = json.dumps({"header": dict(header), "lengths": [len(b) for b in blobs]}).encode()
    return [len(text).to_bytes(8, "little"), text, *blobs]


def frame_of(data: bytes) -> tuple[int, list[int]]:
    """Where the blobs of a packed message begin, and their lengths; ParcelRejected if the bytes are no message."""
    size, _, lengths = _opened(data)
    return 8 + size, lengths


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The header and blobs that `pack` was given; ParcelRejected if the bytes are not that."""
    size, header, lengths = _opened(data)
    view, blobs, start = memoryview(data), [], 8 + size
    for length in lengths:
        blobs.append(bytes(view[start : start + length]))
        start += length
    if start != len(data):
        raise ParcelRejected("the message's length is not what its header says")
    return header, blobs


def _opened(data: bytes) -> tuple[int, dict[str, Any], list[int]]:
    """The length of a message's header, what it says, and the lengths of the blobs behind it."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ParcelRejected("the message is cut short")
    if size > HEADER_LIMIT:
        raise ParcelRejected(f"the message's header has {size} bytes, above the limit of {HEADER_LIMIT}")
    try:
        text = json.loads(data[8 : 8 + size])
        header, lengths = text["header"], text["lengths"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParcelRejected("the message has no readable header") from error
    if (
        not isinstance(header, dict)
        or not isinstance(lengths, list)
        or not all(type(n) is int and n >= 0 for n in lengths)
    ):
        raise ParcelRejected("the message has no readable header")
    return size, header, lengths


def _from_json(read: Callable[[Any], T], value: Any) -> T:
    try:
        return read(value)
    except ValueError as error:
        raise ParcelRejected(f"the message has no readable header: {error}") from error


def sort_payload(payload: Mapping[str, Any], wire: Encoding = "exact") -> tuple[dict[str, Parcel], dict[str, Any]]:
    """Keywords named like a kind become parcels; the others stay plain arguments.

    `wire`: how numbers travel to a site, where that rounds them; a difference is of what a site sends back.
    """
    parcels, arguments = {}, {}
    for name, value in payload.items():
        kind = name.replace("_", "-")
        if isinstance(value, Parcel):
            parcels[name] = value
        elif kind in KINDS.builtin or ((value is None or isinstance(value, Mapping)) and kind in KINDS):
            if value is not None:
                parcels[name] = Parcel(kind, value)
        else:
            arguments[name] = value
    if wire in ROUNDING:
        parcels = {name: shortened(parcel, wire) for name, parcel in parcels.items()}
    return parcels, arguments


class DataDependentRefusal(Exception):  # noqa: N818
    """A refusal that depends on the site's images. Raise it in any check that has looked at them: the host of a
    deployed site then suspends the study. Its text is for the site's own people."""


class Suspended(Exception):  # noqa: N818
    """The site answers nothing until a person there releases a study."""


class GateRefused(Exception):  # noqa: N818
    """A parcel that may not leave. Says which site, operation and kind, and why."""


class GateRefusedData(GateRefused, DataDependentRefusal):
    """A parcel that may not leave because of the numbers in it, which depend on the site's images."""


class LooksOn(ParcelRejected):
    """A site that looks at what came and does no work with it. What it has seen stays in its state."""


#: how a refusal of what another site sealed ends: nobody else can have made it
AS_SENT = " (as another site sealed it)"


def may_depend_on_images(error: Exception, *, working: bool) -> bool:
    """Whether the coordinator could learn something about a site's images from the mere fact of this failure.

    Before the work (`working` is false) nothing has looked at them, unless a check says so. In the work, everything
    may have, but for what the site's policy refuses, what does not fit the study, and a machine that is full.
    """
    if isinstance(error, DataDependentRefusal):
        return True
    unrelated = (GateRefused, ParcelRejected, Suspended, OSError, MemoryError, torch.OutOfMemoryError)
    return working and not isinstance(error, unrelated)


@dataclass(frozen=True)
class Expected:
    """What a receiver accepts: a kind, and where it knows them, every tensor's dtype and shape.

    With `tensors` given, a parcel must hold exactly those names (a part of them with `partial`). Without it
    any names and shapes pass, up to `max_bytes` in all.
    """

    kind: str
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
    partial: bool = False
    max_bytes: int = MESSAGE_LIMIT

    @classmethod
    def like(cls, kind: str, tensors: Mapping[str, Tensor], *, partial: bool = False) -> "Expected":
        """The same names, dtypes and shapes as `tensors`."""
        return cls(kind, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, partial)

    def check(self, parcel: Parcel) -> None:
        """Raise ParcelRejected unless the parcel is what is expected."""
        if parcel.kind != self.kind:
            raise ParcelRejected(f"a parcel of kind '{parcel.kind}' came where '{self.kind}' was expected")
        if parcel.layout.size > self.max_bytes:
            raise ParcelRejected(f"a parcel of {parcel.layout.size} bytes is above the limit of {self.max_bytes}")
        if self.tensors is None:
            return
        found, expected = parcel.tensors.keys(), self.tensors.keys()
        if not (found <= expected if self.partial else found == expected):
            unknown, missing = sorted(found - expected), [] if self.partial else sorted(expected - found)
            raise ParcelRejected(f"{self.kind}: unexpected tensors {unknown[:3]}, missing tensors {missing[:3]}")
        for name, dtype, shape in parcel.layout.shapes:
            if (dtype, shape) != self.tensors[name]:
                came, wanted = f"{dtype} {tuple(shape)}", "{} {}".format(*self.tensors[name])
                raise ParcelRejected(f"{self.kind}: tensor '{name}' is {came}, expected {wanted}")


@dataclass(frozen=True)
class OneOf(Expected):
    """A parcel that is any of several: weights of one of the networks that a study's sites have."""

    choices: tuple[Expected, ...] = ()

    def check(self, parcel: Parcel) -> None:
        refusals = []
        for choice in self.choices:
            try:
                return choice.check(parcel)
            except ParcelRejected as refusal:
                refusals.append(refusal)
        raise refusals[0]
