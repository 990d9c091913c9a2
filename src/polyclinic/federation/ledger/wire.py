"""How the numbers of a parcel travel (`engine.wire`): in fewer bytes, and what the receiver makes of them.

`fp16` and `int8` round: each tensor (int8: each row of it) has a scale of its own, so that nothing overflows. `delta`
loses nothing: the bits that differ from a tensor that both ends have, which are few while training moves slowly.
All of them are compressed. Whoever unpacks knows from the declared shape how many bytes may come, before any do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Encoding = Literal["exact", "fp16", "int8", "delta"]
#: encodings of which the receiver gets other numbers than were sent
ROUNDING = frozenset({"fp16", "int8"})


#: kinds whose numbers may travel so; sums, scores, codes and keys stay as they are
KINDS = frozenset({"weights", "gradients", "activations", "latents", "generator"})
#: tensors of fewer numbers travel as they are: biases and statistics of norms, in which small errors matter
SMALLEST = 1024
#: tensors with larger numbers, or with NaN, travel as they are: a scale of them would overflow
MOST = 2**40  #: numbers along a side of a tensor
LARGEST = 1e38
#: quick compression: what is left to gain is small, and a wire is often faster than a thorough one
LEVEL = 1

_TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


class NotOnWire(Exception):  # noqa: N818
    """Bytes that are not what their description says."""


def pack(
    tensors: Mapping[str, Tensor], encoding: Encoding, base: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that travel in fewer bytes, as bytes, and what a receiver must know of each: type and shape."""
    blobs, told = {}, {}
    for name, tensor in tensors.items():
        known = base.get(name)
        if not _is_eligible(tensor, encoding, known):
            continue
        plain = tensor.detach().cpu().contiguous()
        raw = _delta(plain, known) if encoding == "delta" and known is not None else _rounded(plain, encoding)
        blobs[name] = torch.from_numpy(np.frombuffer(zlib.compress(raw, LEVEL), np.uint8).copy())
        told[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return blobs, told


def unpack(
    blobs: Mapping[str, Tensor], described: Any, limit: int, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The tensors that were packed; NotOnWire for anything that is not as described, or above `limit` bytes in all."""
    encoding, told = _checked(described, blobs)
    sizes = {name: _raw_size(encoding, _TYPES[one["dtype"]], one["shape"]) for name, one in told.items()}
    unpacked = sum(math.prod(one["shape"]) * _TYPES[one["dtype"]].itemsize for one in told.values())
    if max(unpacked, sum(sizes.values())) > limit:
        raise NotOnWire(f"{unpacked} bytes are declared, and the limit is {limit}")
    if encoding == "delta":
        for name, one in told.items():
            _check_base(name, _TYPES[one["dtype"]], tuple(one["shape"]), base or {})
    found = {}
    for name, one in told.items():
        raw = _inflated(blobs[name], sizes[name])
        dtype, shape = _TYPES[one["dtype"]], tuple(one["shape"])
        found[name] = (
            _undelta(raw, dtype, shape, (base or {})[name]) if encoding == "delta" else _unrounded(raw, encoding, shape)
        )
    return found


def _is_eligible(tensor: Tensor, encoding: str, known: Tensor | None) -> bool:
    if tensor.numel() < SMALLEST:
        return False
    if encoding == "delta":
        same = known is not None and known.dtype == tensor.dtype and known.shape == tensor.shape
        return same and str(tensor.dtype).removeprefix("torch.") in _TYPES
    return tensor.dtype == torch.float32 and float(tensor.abs().max()) < LARGEST  # not for NaN, either


def _checked(described: Any, blobs: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    if not isinstance(described, dict) or described.get("encoding") not in ("fp16", "int8", "delta"):
        raise NotOnWire("its encoding is unknown")
    told = described.get("tensors")
    if not isinstance(told, dict) or not all(_is_described(one) for one in told.values()):
        raise NotOnWire("its tensors must come with types and shapes")
    if not all(name in blobs and blobs[name].dtype == torch.uint8 and blobs[name].dim() == 1 for name in told):
        raise NotOnWire("a tensor that it describes is not there as bytes")
    if described["encoding"] != "delta" and any(one["dtype"] != "float32" for one in told.values()):
        raise NotOnWire("only float32 is rounded")
    return described["encoding"], told


def _is_described(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("dtype"), str) or one["dtype"] not in _TYPES:
        return False
    shape = one.get("shape")
    return isinstance(shape, list) and len(shape) <= 8 and all(type(side) is int and 0 < side <= MOST for side in shape)


def _raw_size(encoding: str, dtype: torch.dtype, shape: list[int]) -> int:
    numbers = math.prod(shape)
    if encoding == "fp16":
        return 4 + 2 * numbers
    return 4 * _rows(shape) + numbers if encoding == "int8" else dtype.itemsize * numbers


def _rows(shape: list[int] | tuple[int, ...]) -> int:
    """Scales of an int8 tensor: one for each row of a matrix or kernel, one for a vector."""
    return shape[0] if len(shape) > 1 else 1


def _inflated(blob: Tensor, size: int) -> bytes:
    """The bytes that were compressed; NotOnWire unless they are exactly `size`, and never more in memory."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(blob.numpy().tobytes(), size + 1)
    except zlib.error as error:
        raise NotOnWire(f"its bytes cannot be decompressed ({error})") from None
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        raise NotOnWire(f"other bytes came than the {size} that it declares")
    return raw


# --- rounding -----------------------------------------------------------------------------------------


def _rounded(tensor: Tensor, encoding: str) -> bytes:
    """Scales, then codes; those of fp16 with their first bytes together, which are alike."""
    if encoding == "fp16":
        scale = _never_zero(tensor.abs().max().reshape(1))
        halves = (tensor / scale).half().numpy().view(np.uint8).reshape(-1, 2)
        return scale.numpy().tobytes() + np.ascontiguousarray(halves.T).tobytes()
    rows = tensor.reshape(_rows(tensor.shape), -1)
    steps = _never_zero(rows.abs().amax(1, keepdim=True) / 127)
    codes = (rows / steps).round().clamp(-127, 127).to(torch.int8)
    return steps.numpy().tobytes() + codes.numpy().tobytes()


def _never_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _unrounded(raw: bytes, encoding: str, shape: tuple[int, ...]) -> Tensor:
    count = 1 if encoding == "fp16" else _rows(shape)
    scales = torch.from_numpy(np.frombuffer(raw, np.float32, count).copy())
    if not bool(torch.isfinite(scales).all()) or bool((scales <= 0).any()):
        raise NotOnWire("a scale is not a number above zero")
    codes = np.frombuffer(raw, np.uint8, offset=4 * count)
    if encoding == "fp16":
        halves = np.ascontiguousarray(codes.reshape(2, -1).T).view(np.float16)
        return (torch.from_numpy(halves).float() * scales).reshape(shape)
    rows = torch.from_numpy(codes.view(np.int8).copy()).float().reshape(count, -1)
    return (rows * scales[:, None]).reshape(shape)


# --- differences --------------------------------------------------------------------------------------


def _bits(tensor: Tensor) -> np.ndarray:
    """The bytes of each number: [numbers, bytes of one]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())


def _delta(tensor: Tensor, base: Tensor) -> bytes:
    """The bits that differ, the same byte of all numbers together: the first ones are mostly zero."""
    return np.ascontiguousarray((_bits(tensor) ^ _bits(base)).T).tobytes()


def _check_base(name: str, dtype: torch.dtype, shape: tuple[int, ...], base: Mapping[str, Tensor]) -> None:
    """Before a byte is decompressed."""
    known = base.get(name)
    if known is None or known.dtype != dtype or tuple(known.shape) != shape:
        raise NotOnWire(f"tensor '{name}' is a difference to one that the receiver does not have")


def _undelta(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], known: Tensor) -> Tensor:
    differing = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1).T
    return torch.from_numpy(np.ascontiguousarray(differing ^ _bits(known)).reshape(-1)).view(dtype).reshape(shape)
