"""A parcel: tensors and plain metadata of a declared kind, encoded without pickle.

The encoding is one safetensors file whose header carries the kind and the metadata as JSON. Its bytes are exactly what
a wire would carry. Images may be compressed in it, losslessly; who makes or opens a parcel sees only tensors.

A header and then the tensors, sorted by type and name, as safetensors writes them. Who knows the header knows the
size, and can digest the tensors where they lie (`Layout`): a file of 45 MB need not be put together for that.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.digest_threads import BACKGROUND, PAYS_FROM, pieces_of_gpu
from polyclinic.federation.ledger.kinds import KINDS, MESSAGE_LIMIT, ParcelRejected
from polyclinic.federation.ledger.kinds import SEALED as SEALED
from polyclinic.federation.ledger.wire import ROUNDING, Encoding
from polyclinic.files import decode_tensors
from polyclinic.json_types import JsonMapping, JsonObject

#: types of tensors in the order in which safetensors writes them, and the names it gives them
TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

#: name, type and shape of each tensor
Shapes = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Layout(NamedTuple):
    """How tensors lie in a file: the same for all parcels of one network."""

    shapes: Shapes
    #: bytes of all tensors
    size: int
    #: names of the tensors of floating-point numbers that hold any
    floats: tuple[str, ...]
    #: names in the order in which the tensors are written
    order: tuple[str, ...]
    #: what the header says of them, as JSON
    entries: str

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """What comes before the tensors; TypeError for a type that has no encoding."""
        if unknown := [f"'{name}' ({dtype})" for name, dtype, _ in self.shapes if dtype not in TYPES]:
            raise TypeError(f"tensors of this type have no encoding: {', '.join(unknown[:3])}")
        entries = "," + self.entries[1:] if self.shapes else "}"
        text = (_json({"__metadata__": dict(metadata)})[:-1] + entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@functools.lru_cache(maxsize=32)
def layout_of(shapes: Shapes) -> Layout:
    """Found once for all parcels of one network."""
    entries: dict[str, Any] = {}
    places, floats, size = list(TYPES), [], 0
    for name, dtype, shape in sorted(shapes, key=lambda one: (places.index(one[1]) if one[1] in TYPES else 0, one[0])):
        start, size = size, size + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES.get(dtype), "shape": list(shape), "data_offsets": [start, size]}
        if dtype.is_floating_point and 0 not in shape:
            floats.append(name)
    return Layout(shapes, size, tuple(floats), tuple(entries), _json(entries))


#: bytes of JSON, which takes twenty times as much memory once it is read
HEADER_LIMIT = 4 * 2**20
_METADATA_KEY = "parcel"
_canonical_json = json.JSONEncoder(sort_keys=True, allow_nan=False).encode
#: what reading broken tensors raises; KeyError for a dtype that torch does not have
_UNREADABLE = (SafetensorError, KeyError, wire_codec.NotPictures, wire_codec.NotOnWire)


@dataclass(frozen=True)
class Parcel:
    """`tensors` by name, `metadata` of plain JSON values. Treat both as frozen once the parcel is made.

    `privacy` is what the site says it has spent on what the parcel holds, and None where nothing covers it. Tensors lie
    in the order of their names, so that a receiver finds them in the same order whether the parcel was encoded on its
    way or not. Those named in `compressed` (images, uint8 [N, C, H, W]) travel without their redundancy.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    metadata: JsonMapping = field(default_factory=dict)
    privacy: JsonMapping | None = None
    compressed: tuple[str, ...] = ()
    _packed: Sequence[str] = field(default=(), init=False, repr=False, compare=False)  #: images that travel compressed

    def __post_init__(self) -> None:
        if self.kind not in KINDS.builtin and self.kind != SEALED and self.kind not in KINDS:
            raise ParcelRejected(f"'{self.kind}' is not a kind of parcel; the kinds are {', '.join(KINDS)}")
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))
        if self.compressed:
            fitting = [name for name in self.compressed if wire_codec.can_pack_images(self.tensors[name])]
            object.__setattr__(self, "_packed", fitting)

    @property
    def content(self) -> str:
        """The kind of what it holds; a sealed parcel says so on its outside."""
        return str(self.metadata.get("kind")) if self.kind == SEALED else self.kind

    @property
    def wire(self) -> Encoding:
        """How its numbers travel; see `shortened`."""
        return vars(self)["_on_wire"][0] if "_on_wire" in vars(self) else "exact"

    @cached_property
    def layout(self) -> Layout:
        """Names, types and shapes of the tensors, and how they lie in `encoded`."""
        return layout_of(tuple([(name, one.dtype, one.shape) for name, one in self.tensors.items()]))

    @property
    def norms(self) -> dict[str, float]:
        """The Euclidean norm of each tensor of floating-point numbers, worked out again where a tensor has changed."""
        floats = [self.tensors[name].detach() for name in self.layout.floats]
        # a tensor that was made in inference mode does not know how often it was changed
        versions = [0 if one.is_inference() else one._version for one in floats]
        known, norms = vars(self).get("_norms", (None, {}))
        if known != versions:
            # the norm of many half-precision numbers is more than half precision holds
            wide = [one.float() if one.itemsize < 4 else one for one in floats]
            # in one pass: a GPU is waited for once; of floats and doubles it makes doubles
            found = torch.stack(torch._foreach_norm(wide)).tolist() if wide else []
            norms = dict(zip(self.layout.floats, found, strict=True))
            vars(self)["_norms"] = (versions, norms)
        return norms

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of the parcel; the same tensors and metadata always give the same bytes."""
        packed = {name: wire_codec.pack_images(self.tensors[name]) for name in self._packed}
        if sum(self.tensors[name].nbytes for name in packed) > wire_codec.ROOM:
            within = {
                name: self.tensors[name].nbytes <= wire_codec.EXPANDS * one.nbytes for name, one in packed.items()
            }
            packed = {name: one for name, one in packed.items() if within[name]}
            object.__setattr__(self, "_packed", list(packed))
        travelling = {**self.tensors, **packed, **vars(self).get("_on_wire", (None, {}))[1]}
        return b"".join(self._buffers(travelling))

    @cached_property
    def size(self) -> int:
        """The length of `encoded`, which is not made for it where that can be avoided."""
        if self._packed or "_on_wire" in vars(self) or "encoded" in vars(self):
            return len(self.encoded)
        return len(self._header) + self.layout.size

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`, which is not made for it where that can be avoided.

        Of a shortened parcel it is that of the numbers which its receiver finds, and of how they travelled: another
        build of zlib makes other bytes of the same numbers, and a run may be resumed on another machine.
        """
        return self.digest_soon.result() if "digest_soon" in vars(self) else self._digest_now()

    @cached_property
    def digest_soon(self) -> Future[str]:
        """The digest; that of a large parcel is computed beside other work. Nobody may change the tensors meanwhile:
        WorkFailed if one was changed in place, which would make it another parcel."""
        tensors = list(self.tensors.values())
        if "digest" in vars(self) or self.layout.size < PAYS_FROM:
            future: Future[str] = Future()
            future.set_result(self.digest)
            return future
        versions = [tensor._version for tensor in tensors]

        def digest_unchanged() -> str:
            found = self._digest_now()
            for (name, tensor), version in zip(self.tensors.items(), versions, strict=True):
                if tensor._version != version:
                    raise WorkFailed(
                        f"tensor '{name}' of a parcel of kind '{self.kind}' was changed after the site released it; "
                        "the method must copy a tensor before it changes it in place"
                    )
            return found

        return BACKGROUND.submit(digest_unchanged, tensors)

    @cached_property
    def digest_of_bytes(self) -> str:
        """SHA-256 of `encoded` in any case."""
        return hashlib.sha256(self.encoded).hexdigest() if "_on_wire" in vars(self) else self.digest

    def _digest_now(self) -> str:
        if "_on_wire" not in vars(self) and (self._packed or "encoded" in vars(self)):
            return hashlib.sha256(self.encoded).hexdigest()
        hasher = hashlib.sha256()
        for buffer in self._buffers(self.tensors):
            hasher.update(buffer)
        return hasher.hexdigest()

    def _buffers(self, tensors: Mapping[str, Tensor]) -> Iterator[Any]:
        """The bytes of a file with these tensors, which lie where the tensors do."""
        layout = self.layout
        if tensors is not self.tensors:
            layout = layout_of(tuple([(name, one.dtype, one.shape) for name, one in tensors.items()]))
        yield self._header if tensors is self.tensors else layout.header({_METADATA_KEY: self._description})
        ordered = [tensors[name] for name in layout.order]
        for piece in pieces_of_gpu(ordered) if any(map(attrgetter("is_cuda"), ordered)) else ordered:
            plain = piece.detach().contiguous()
            if plain.dtype not in (torch.float32, torch.int64):  # NumPy does not know every type
                plain = plain.flatten().view(torch.uint8)
            yield plain.numpy().data

    @cached_property
    def _header(self) -> bytes:
        """What comes before the tensors where these travel as they lie."""
        return self.layout.header({_METADATA_KEY: self._description})

    @cached_property
    def _description(self) -> str:
        """Kind and metadata as JSON."""
        header: JsonObject = {"kind": self.kind, "metadata": dict(self.metadata)}
        if self.privacy is not None:
            header["privacy"] = dict(self.privacy)
        if self._packed:
            header["compressed"] = {name: list(self.tensors[name].shape) for name in self._packed}
        if "_on_wire" in vars(self):
            header["wire"] = {"encoding": self.wire, "tensors": vars(self)["_on_wire"][2]}
        return _canonical_json(header)


def shortened(parcel: Parcel, encoding: Encoding, base: Mapping[str, Tensor] | None = None) -> Parcel:
    """The parcel as it travels with `engine.wire`: it holds the numbers that its receiver will find.

    `base`: tensors that sender and receiver both have, for differences.
    """
    if encoding == "exact" or parcel.kind not in wire_codec.SHORTENED or "_on_wire" in vars(parcel):
        return parcel
    blobs, told = wire_codec.pack(parcel.tensors, encoding, base or {})
    if not blobs:
        return parcel
    tensors = parcel.tensors
    if encoding in ROUNDING:
        described = {"encoding": encoding, "tensors": told}
        received = wire_codec.unpack(blobs, described, parcel.layout.size + HEADER_LIMIT, None)
        moved = {name: tensor.to(parcel.tensors[name].device) for name, tensor in received.items()}
        tensors = {**tensors, **moved}
    found = replace(parcel, tensors=tensors)
    vars(found)["_on_wire"] = (encoding, blobs, told)
    return found


def decode_all(blobs: Iterable[bytes], base: Mapping[str, Tensor] | None = None) -> list[Parcel]:
    """The parcels of one message. What a message may hold once it is read is bounded for all of them together."""
    found: list[Parcel] = []
    left = MESSAGE_LIMIT
    for blob in blobs:
        found.append(decode(blob, base=base, most=left))
        left -= found[-1].layout.size
    return found


def decode(data: bytes, base: Mapping[str, Tensor] | None = None, most: int = MESSAGE_LIMIT) -> Parcel:
    """The parcel that `data` encodes, or ParcelRejected.

    `base`: the tensors that differences are to be added to, as in `shortened`. `most`: bytes of its tensors.
    """
    header = _header(data)
    try:
        declared = json.loads(header["__metadata__"][_METADATA_KEY], parse_constant=_refuse_constant)
        kind, metadata, privacy = declared["kind"], declared["metadata"], declared.get("privacy")
        compressed, on_wire = declared.get("compressed", {}), declared.get("wire")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ParcelRejected("the bytes are safetensors, but not a parcel: kind or metadata are missing") from error
    if not isinstance(kind, str) or not isinstance(metadata, dict) or not isinstance(privacy, dict | None):
        raise ParcelRejected("a parcel's kind must be text, its metadata and its privacy tables")
    if on_wire is not None and kind not in wire_codec.SHORTENED:
        raise ParcelRejected(f"{kind} never travels shortened")
    try:
        room = max(wire_codec.EXPANDS * len(data), wire_codec.ROOM)
        if isinstance(on_wire, dict) and on_wire.get("encoding") == "delta":
            room += sum(tensor.nbytes for tensor in (base or {}).values())
        most = min(most, room)
        tensors = wire_codec.unpack_all_images(decode_tensors(data), compressed, most)
        if on_wire is not None:
            tensors |= wire_codec.unpack(tensors, on_wire, most - sum(one.nbytes for one in tensors.values()), base)
        parcel = Parcel(kind, tensors, metadata, privacy, tuple(compressed))
    except _UNREADABLE as error:
        raise ParcelRejected(f"the tensors of the parcel cannot be read: {error}") from error
    if on_wire is not None:
        vars(parcel)["_on_wire"] = (on_wire["encoding"], {}, on_wire["tensors"])
    vars(parcel)["encoded"] = data  # what came is what counts, and need not be encoded again to be counted
    return parcel


def _header(data: bytes) -> JsonObject:
    """The JSON header of safetensors bytes, read before any tensor is."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(HEADER_LIMIT, len(data) - 8):
        raise ParcelRejected("the bytes are not a parcel: too short, or the header is too long")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise ParcelRejected("the bytes are not a parcel: the header is not JSON") from error
    if not isinstance(header, dict):
        raise ParcelRejected("the bytes are not a parcel: the header is not a table")
    return header


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
