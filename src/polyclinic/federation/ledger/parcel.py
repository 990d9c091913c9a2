"""A parcel: tensors and plain metadata of a declared kind, encoded without pickle.

The encoding is one safetensors file whose header carries the kind and the metadata as JSON. Its bytes are
exactly what a wire would carry, so its length is what communication is measured by. Images may be compressed in it,
losslessly; who makes or opens a parcel sees only tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger import image_codec
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.background import BACKGROUND, PAYS_FROM
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.layout import Layout, digest_of_file, layout_of
from polyclinic.federation.ledger.wire import ROUNDING, Encoding
from polyclinic.files import contiguous_cpu_copies, decode_tensors
from polyclinic.json_types import JsonMapping, JsonObject

#: not a kind of its own: the form in which a parcel of any kind goes from site to site (`key_exchange.py`)
SEALED = "sealed"

HEADER_LIMIT = 16 * 2**20
_METADATA_KEY = "parcel"
_canonical_json = json.JSONEncoder(sort_keys=True, allow_nan=False).encode
#: what reading broken tensors raises; KeyError for a dtype that torch does not have
_UNREADABLE = (SafetensorError, KeyError, image_codec.NotPictures, wire_codec.NotOnWire)


class ParcelRejected(Exception):  # noqa: N818
    """Bytes or tensors that are not what the receiver expects. Says what was wrong with which tensor."""


#: bytes of the tensors of all parcels of one message, once they are read
MESSAGE_LIMIT = 4 * 2**30


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
    def like(cls, kind: str, tensors: Mapping[str, Tensor], *, partial: bool = False) -> Expected:
        """The same names, dtypes and shapes as `tensors`."""
        return cls(kind, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, partial)

    def check(self, parcel: Parcel) -> None:
        """Raise ParcelRejected unless the parcel is what is expected."""
        if parcel.kind != self.kind:
            raise ParcelRejected(f"a parcel of kind '{parcel.kind}' came where '{self.kind}' was expected")
        if parcel.tensor_bytes > self.max_bytes:
            raise ParcelRejected(f"a parcel of {parcel.tensor_bytes} bytes is above the limit of {self.max_bytes}")
        if self.tensors is not None:
            self._check_tensors(self.tensors, parcel)

    def _check_tensors(self, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], parcel: Parcel) -> None:
        tensors = parcel.tensors
        if not (tensors.keys() <= expected.keys() if self.partial else tensors.keys() == expected.keys()):
            unknown = sorted(set(tensors) - set(expected))
            missing = [] if self.partial else sorted(set(expected) - set(tensors))
            raise ParcelRejected(f"{self.kind}: unexpected tensors {unknown[:3]}, missing tensors {missing[:3]}")
        for name, dtype, shape in parcel.layout.shapes:
            if (dtype, shape) != expected[name]:
                found, wanted = f"{dtype} {tuple(shape)}", "{} {}".format(*expected[name])
                raise ParcelRejected(f"{self.kind}: tensor '{name}' is {found}, expected {wanted}")


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


@dataclass(frozen=True)
class Parcel:
    """`tensors` by name, `metadata` of plain JSON values. Treat both as frozen once the parcel is made.

    `privacy` is what the site says it has spent on what the parcel holds, and None where nothing covers it.
    Tensors lie in the order of their names, so that a receiver finds them in the same order whether the parcel
    was encoded on its way or not. Those named in `compressed` (images, uint8 [N, C, H, W]) travel without their
    redundancy.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    metadata: JsonMapping = field(default_factory=dict)
    privacy: JsonMapping | None = None
    compressed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS and self.kind != SEALED:
            raise ParcelRejected(f"'{self.kind}' is not a kind of parcel; the kinds are {', '.join(KINDS)}")
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))

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
        return layout_of(self.tensors)

    @property
    def tensor_bytes(self) -> int:
        return self.layout.size

    @property
    def norms(self) -> dict[str, float]:
        """The Euclidean norm of each tensor of floating-point numbers, worked out again where a tensor has changed."""
        versions = _versions(self.tensors.values())
        known, norms = vars(self).get("_norms", (None, {}))
        if known != versions:
            norms = self._worked_out_norms()
            vars(self)["_norms"] = (versions, norms)
        return norms

    def _worked_out_norms(self) -> dict[str, float]:
        """In one pass: a GPU is waited for once."""
        floats = self.layout.floats
        if not floats:
            return {}
        with torch.no_grad():
            # the norm of many half-precision numbers is more than half precision holds
            wide = [t.float() if t.itemsize < 4 else t for t in (self.tensors[name] for name in floats)]
            values = torch.stack(torch._foreach_norm(wide)).tolist()  # of floats and doubles it makes doubles
        return dict(zip(floats, values, strict=True))

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of the parcel; the same tensors and metadata always give the same bytes."""
        travelling = {**self.tensors, **{name: image_codec.pack(images) for name, images in self._packed.items()}}
        travelling |= vars(self).get("_on_wire", (None, {}))[1]
        return save(contiguous_cpu_copies(travelling), {_METADATA_KEY: self._description})

    @cached_property
    def size(self) -> int:
        """The length of `encoded`, which is not made for it where that can be avoided."""
        return len(self.encoded) if self._is_encoded else len(self._header) + self.tensor_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`, which is not made for it where that can be avoided.

        Of a shortened parcel it is that of the numbers which its receiver finds, and of how they travelled: another
        build of zlib makes other bytes of the same numbers, and a run may be resumed on another machine.
        """
        return self._future.result() if "_future" in vars(self) else self._digest_now()

    def digest_soon(self) -> Future[str]:
        """The digest; that of a large parcel is computed beside other work. Nobody may change the tensors meanwhile."""
        return self._future

    @cached_property
    def _future(self) -> Future[str]:
        tensors = list(self.tensors.values())
        if "digest" in vars(self) or self.tensor_bytes < PAYS_FROM:
            future: Future[str] = Future()
            future.set_result(self.digest)
            return future
        versions = [tensor._version for tensor in tensors]
        return BACKGROUND.submit(lambda: self._digest_unchanged(versions), tensors)

    def _digest_unchanged(self, versions: list[int]) -> str:
        """The digest; WorkFailed if a tensor was changed in place meanwhile, which would make it another parcel."""
        found = self._digest_now()
        for (name, tensor), version in zip(self.tensors.items(), versions, strict=True):
            if tensor._version != version:
                raise WorkFailed(
                    f"tensor '{name}' of a parcel of kind '{self.kind}' was changed after the site released it; "
                    "the method must copy a tensor before it changes it in place"
                )
        return found

    @cached_property
    def digest_of_bytes(self) -> str:
        """SHA-256 of `encoded` in any case."""
        return hashlib.sha256(self.encoded).hexdigest() if "_on_wire" in vars(self) else self.digest

    def _digest_now(self) -> str:
        if "_on_wire" in vars(self) and not self.layout.is_known:
            content = save(contiguous_cpu_copies(self.tensors), {_METADATA_KEY: self._description})
            return hashlib.sha256(content).hexdigest()
        if self._is_encoded and "_on_wire" not in vars(self):
            return hashlib.sha256(self.encoded).hexdigest()
        return digest_of_file(self._header, self.layout.in_order(self.tensors))

    @property
    def _is_encoded(self) -> bool:
        """Whether size and digest are taken of the bytes themselves: they are there, or only they will do."""
        own_form = "encoded" in vars(self) or "_on_wire" in vars(self)
        return own_form or bool(self._packed) or not self.layout.is_known

    @cached_property
    def _header(self) -> bytes:
        return self.layout.header({_METADATA_KEY: self._description})

    @cached_property
    def _description(self) -> str:
        """Kind and metadata as JSON."""
        header: JsonObject = {"kind": self.kind, "metadata": dict(self.metadata)}
        if self.privacy is not None:
            header["privacy"] = dict(self.privacy)
        if self._packed:
            header["compressed"] = {name: list(images.shape) for name, images in self._packed.items()}
        if "_on_wire" in vars(self):
            header["wire"] = {"encoding": self.wire, "tensors": vars(self)["_on_wire"][2]}
        return _canonical_json(header)

    @cached_property
    def _packed(self) -> dict[str, Tensor]:
        """The images that travel compressed."""
        return {name: self.tensors[name] for name in self.compressed if image_codec.can_pack(self.tensors[name])}


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place; one that was made in inference mode does not know."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


def shortened(parcel: Parcel, encoding: Encoding, base: Mapping[str, Tensor] | None = None) -> Parcel:
    """The parcel as it travels with `engine.wire`: it holds the numbers that its receiver will find.

    `base`: tensors that sender and receiver both have, for differences.
    """
    if encoding == "exact" or parcel.kind not in wire_codec.KINDS or "_on_wire" in vars(parcel):
        return parcel
    blobs, told = wire_codec.pack(parcel.tensors, encoding, base or {})
    if not blobs:
        return parcel
    tensors = parcel.tensors
    if encoding in ROUNDING:
        described = {"encoding": encoding, "tensors": told}
        received = wire_codec.unpack(blobs, described, parcel.tensor_bytes + HEADER_LIMIT, None)
        moved = {name: tensor.to(parcel.tensors[name].device) for name, tensor in received.items()}
        tensors = {**tensors, **moved}
    found = replace(parcel, tensors=tensors)
    vars(found)["_on_wire"] = (encoding, blobs, told)
    return found


def digest_of(data: bytes) -> str:
    """The digest, as ledgers have it, of the parcel that these bytes are; of bytes that are none, their SHA-256."""
    try:
        return decode(data).digest
    except ParcelRejected:
        return hashlib.sha256(data).hexdigest()


def decode_all(blobs: Iterable[bytes], base: Mapping[str, Tensor] | None = None) -> list[Parcel]:
    """The parcels of one message. What a message may hold once it is read is bounded for all of them together."""
    found: list[Parcel] = []
    left = MESSAGE_LIMIT
    for blob in blobs:
        found.append(decode(blob, base=base, most=left))
        left -= found[-1].tensor_bytes
    return found


def decode(
    data: bytes,
    expected: Expected | None = None,
    base: Mapping[str, Tensor] | None = None,
    most: int | None = None,
) -> Parcel:
    """The parcel that `data` encodes, or ParcelRejected; checked against `expected` where it is given.

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
    if on_wire is not None and kind not in wire_codec.KINDS:
        raise ParcelRejected(f"{kind} never travels shortened")
    limit = Expected(kind).max_bytes if expected is None else expected.max_bytes
    limit = limit if most is None else min(limit, most)
    if expected is not None and len(data) > expected.max_bytes + HEADER_LIMIT:
        raise ParcelRejected(f"a parcel of {len(data)} bytes is above the limit of {expected.max_bytes}")
    try:
        tensors = _uncompressed(decode_tensors(data), compressed, limit)
        if on_wire is not None:
            tensors |= wire_codec.unpack(tensors, on_wire, limit - sum(one.nbytes for one in tensors.values()), base)
        parcel = Parcel(kind, tensors, metadata, privacy, tuple(compressed))
    except _UNREADABLE as error:
        raise ParcelRejected(f"the tensors of the parcel cannot be read: {error}") from error
    if expected is not None:
        expected.check(parcel)
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


def _uncompressed(tensors: dict[str, Tensor], shapes: object, limit: int) -> dict[str, Tensor]:
    """The tensors with the images that were compressed as they were, up to `limit` bytes of them."""
    if not isinstance(shapes, dict) or not all(_is_shape(shape) for shape in shapes.values()):
        raise ParcelRejected("a parcel's compressed images must come with their shapes")
    size = sum(math.prod(shape) for shape in shapes.values())
    if size > limit:
        raise ParcelRejected(f"a parcel of {size} bytes is above the limit of {limit}")
    return {**tensors, **{name: image_codec.unpack(tensors[name], shape) for name, shape in shapes.items()}}


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(side) is int and side >= 0 for side in value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
