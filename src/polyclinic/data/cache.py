"""The cache of prepared images: entries are named by a digest of their inputs, locked while they are made.

A cache entry is a folder named by a digest. It is written atomically, so an entry that exists is whole; of two
processes that prepare the same thing, the second waits for the first. All of it can be made again (`data clean`).
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyclinic import __version__, randomness
from polyclinic.files import cache_folder, lock, make_folder

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
        try:
            state = os.stat(file)
            found = f"{state.st_size}\x1f{state.st_mtime_ns}"
        except OSError:
            found = "missing"
        total.update(f"{file.removeprefix(inside)}\x1f{found}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


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


# --- cleaning -------------------------------------------------------------------------------------------------


#: folders of the cache, and what is in them
SHELVES = {"prepared": "images as they were read", "parts": "images of each site", "generators": "trained generators"}
DAY = 86400.0


@dataclass(frozen=True)
class Entry:
    """A folder or file of the cache."""

    shelf: str
    path: Path
    bytes: int
    days: float


def entries(older_than: float = 0.0, cache: Path | None = None) -> list[Entry]:
    """Entries that nobody has used for so many days, the oldest first. When a file was last read or written counts."""
    now, found = time.time(), []
    for shelf in SHELVES:
        folder = cache_folder(cache) / shelf
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            states = [file.stat() for file in files] or [path.stat()]
            used = max(max(state.st_mtime, state.st_atime) for state in states)
            days = max(0.0, now - used) / DAY  # to look into an empty folder is to use it
            entry = Entry(shelf, path, sum(state.st_size for state in states if files), days)
            found += [entry] if entry.days >= older_than and path.suffix != ".lock" else []
    return sorted(found, key=lambda entry: -entry.days)


def remove(entry: Entry) -> None:
    """Remove an entry; one that is being made is waited for."""
    with entry_lock(entry.path):
        if entry.path.is_dir():
            gone = entry.path.with_name(f"{entry.path.name}.removed")
            entry.path.rename(gone)  # at once: an entry that exists is whole
            shutil.rmtree(gone, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
