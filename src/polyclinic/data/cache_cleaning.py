"""What lies in the cache of prepared images, and its removal. All of it can be made again."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from polyclinic.data.cache import entry_lock
from polyclinic.files import cache_folder

#: folders of the cache, and what is in them
SHELVES = {
    "prepared": "images as they were read",
    "parts": "images of each site",
    "generators": "trained generators",
}
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
