"""Small `.npy` files, read quickly: a study with a thousand sites opens thousands of them, whose headers are alike."""

from __future__ import annotations

import functools
import io
import math
import os
from pathlib import Path

import numpy as np

#: how a file of format 1.0 begins: then come the length of its header in two bytes, and the header
MAGIC = b"\x93NUMPY\x01\x00"


def read(file: str | Path, most: int) -> np.ndarray | None:
    """What `np.load` gives, read-only; None for a file of more than `most` bytes. Whatever is unusual is left to
    `np.load`, and so is every complaint."""
    opened = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        size = os.fstat(opened).st_size
        data = os.read(opened, size) if size <= most else None
    finally:
        os.close(opened)
    return None if data is None else _array(data, file)


def _array(data: bytes, file: str | Path) -> np.ndarray:
    start = len(MAGIC) + 2 + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "little")
    known = _shape_and_type(data[:start]) if data.startswith(MAGIC) else None
    if known is None or len(data) != start + math.prod(known[0]) * known[1].itemsize:
        array = np.load(file, allow_pickle=False)
        array.flags.writeable = False
        return array
    shape, kind = known
    return np.ndarray(shape, kind, data, start)  # bytes never change


@functools.lru_cache(maxsize=256)
def _shape_and_type(head: bytes) -> tuple[tuple[int, ...], np.dtype] | None:
    """What a file's first bytes, up to the end of its header, say; None unless it is a plain array, row by row."""
    file = io.BytesIO(head)
    try:
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy reads a header as Python does: a damaged one fails in many ways
        return None
    return None if by_columns or kind.hasobject else (shape, kind)
