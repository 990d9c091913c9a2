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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
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
    #: names in the order in which safetensors writes the tensors; None where a type is not known
    order: tuple[str, ...] | None
    #: what its header says of them, as JSON
    entries: str = ""

    @property
    def is_known(self) -> bool:
        """Whether types are known, and the installed version of safetensors writes them as this module does."""
        return self.order is not None and _is_as_installed()

    def in_order(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors in the order in which safetensors writes them."""
        assert self.order is not None
        return [tensors[name] for name in self.order]

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """What safetensors writes before the tensors."""
        entries = "," + self.entries[1:] if self.shapes else "}"
        text = (_json({"__metadata__": dict(metadata)})[:-1] + entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return _layout(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))


@functools.lru_cache(maxsize=32)
def _layout(shapes: Shapes) -> Layout:
    """Found once for all parcels of one network."""
    size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in shapes)
    floats = tuple(name for name, dtype, shape in shapes if dtype.is_floating_point and 0 not in shape)
    if not all(dtype in TYPES for _, dtype, _ in shapes):
        return Layout(shapes, size, floats, None)
    entries, start = {}, 0
    for name, dtype, shape in sorted(shapes, key=lambda one: (_PLACES[one[1]], one[0])):
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    return Layout(shapes, size, floats, tuple(entries), _json(entries))


def digest_of_file(start: bytes, tensors: Sequence[Tensor]) -> str:
    """SHA-256 of a file of this header and these tensors, which come `in_order`."""
    hasher = hashlib.sha256(start)
    if any(tensor.is_cuda for tensor in tensors):
        for piece in _pieces_of_gpu(tensors):
            hasher.update(piece.numpy().data)
    else:
        for tensor in tensors:
            hasher.update(_array(tensor).data)
    return hasher.hexdigest()


def _pieces_of_gpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of tensors of a GPU, which come over in one copy for each type."""
    device = next(tensor.device for tensor in tensors if tensor.is_cuda)
    for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
        joined = torch.cat([tensor.detach().to(device, non_blocking=True).flatten() for tensor in group])
        copy = _staging(joined.nbytes).copy_(joined.view(torch.uint8), non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        yield copy


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers, one after the other. NumPy does not know every type."""
    if tensor.dtype not in (torch.float32, torch.int64):
        return _bytes(tensor).numpy()
    found = tensor.detach() if tensor.requires_grad else tensor
    return (found if found.is_contiguous() else found.contiguous()).numpy()


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
    layout = layout_of(sample)
    data = b"".join(bytes(_bytes(tensor).numpy()) for tensor in layout.in_order(sample))
    return layout.header(metadata) + data == save(sample, metadata)
