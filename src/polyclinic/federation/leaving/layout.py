"""The layout of a parcel's bytes: size and digest of a safetensors file without making it.

safetensors writes a header and then the tensors, sorted by type and name. Who knows the header knows the size, and can
digest the tensors where they lie; a file of 45 MB need not be put together for that.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save
from torch import Tensor

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
#: what each thread keeps for itself
_OWN = threading.local()
_PLACES = {dtype: place for place, dtype in enumerate(TYPES)}


def is_known(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the layout of these tensors is known: their types, and the installed version of safetensors."""
    return all(tensor.dtype in TYPES for tensor in tensors.values()) and _is_as_installed()


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order in which safetensors writes them."""
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: (_PLACES[tensors[name].dtype], name))}


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What safetensors writes before the tensors, which come `in_order`."""
    entries = _entries(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()))
    text = (_json({"__metadata__": dict(metadata)})[:-1] + ("," + entries[1:] if tensors else "}")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.lru_cache(maxsize=32)
def _entries(shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> str:
    """The part about the tensors, as JSON: the same for all parcels of one network."""
    entries, start = {}, 0
    for name, dtype, shape in shapes:
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    return _json(entries)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def digest(start: bytes, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a file of this header and these tensors, which come `in_order`."""
    hasher = hashlib.sha256(start)
    for piece in _pieces(list(tensors.values())):
        hasher.update(piece.numpy().data)
    return hasher.hexdigest()


def _pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The bytes of the tensors on the CPU; those of a GPU come over in one copy."""
    if any(tensor.is_cuda for tensor in tensors):
        device = next(tensor.device for tensor in tensors if tensor.is_cuda)
        for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
            joined = torch.cat([tensor.detach().to(device, non_blocking=True).flatten() for tensor in group])
            copy = _staging(joined.nbytes).copy_(joined.view(torch.uint8), non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
            yield copy
    else:
        # NumPy knows float32 and takes it as it is; it does not know every type
        yield from (t.detach().contiguous() if t.dtype == torch.float32 else _bytes(t) for t in tensors)


def _staging(size: int) -> Tensor:
    """Pinned memory for so many bytes, which this thread has until it asks again: to allocate it takes milliseconds, in
    which the GPU may have to wait."""
    held: Tensor | None = getattr(_OWN, "staging", None)
    if held is None or len(held) < size:
        held = _OWN.staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return held[:size]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@functools.cache
def _is_as_installed() -> bool:
    """Whether the installed safetensors writes the header that is built here; another version might not."""
    sample = {f"{name}é": torch.zeros(3, 1).to(dtype) for dtype, name in TYPES.items()}
    sample |= {"b": torch.zeros(()), "a": torch.zeros(0, 2)}
    metadata = {"of": '{"a": "\x01\n\\é"}'}
    ordered = in_order(sample)
    made = header(ordered, metadata) + b"".join(bytes(_bytes(tensor).numpy()) for tensor in ordered.values())
    return made == save(sample, metadata)
