"""The cache of prepared images: entries are named by a digest of their inputs, locked while they are made.

A cache entry is a folder named by a digest. It is written atomically, so an entry that exists is whole; of two
processes that prepare the same thing, the second waits for the first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from polyclinic import __version__, randomness
from polyclinic.files import lock, make_folder

#: called with (what is being done, how many are done, how many there are)
Progress = Callable[[str, int, int], None]

PACKAGE = Path(__file__).parent
CHUNK_BYTES = 64 << 20


def code_digest(files: Iterable[Path]) -> str:
    """A digest of the package's version, the given files and that of random draws: prepared images do not outlive
    their code."""
    total = hashlib.sha256(__version__.encode())
    for file in (Path(randomness.__file__), *sorted(files)):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def files_digest(files: Iterable[str | Path], root: Path) -> str:
    """Names the content of files by relative path, size and modification time, without reading them."""
    total = hashlib.sha256()
    inside = os.path.join(root, "")
    for file in sorted(os.fspath(file) for file in files):
        total.update(f"{file.removeprefix(inside)}\x1f{_state(file)}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def _state(file: str) -> str:
    try:
        state = os.stat(file)
    except OSError:
        return "missing"
    return f"{state.st_size}\x1f{state.st_mtime_ns}"


def files_below(folder: Path) -> list[str]:
    """Paths of all files at any depth, sorted: text, as a hundred thousand of them are handled in a blink."""
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)


@contextmanager
def entry_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry: of two processes that make the same one, the second waits and finds it made."""
    locks = folder.parent.parent / "locks"
    make_folder(locks)
    with lock(locks / f"{folder.parent.name}-{folder.name}.lock"):
        yield


def chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Slices over `count` items of about 64 MiB each."""
    step = max(1, CHUNK_BYTES // max(1, bytes_each))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def bytes_each(array: np.ndarray) -> int:
    """Bytes of one entry along the first axis."""
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
