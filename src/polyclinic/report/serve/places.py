"""Which files exist for a visitor: those inside the folder that is served, by their path below it, and no others."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from polyclinic.errors import BadInput

#: how a file is sent: its type, and whether a browser may show it (else it is saved)
TYPES: dict[str, tuple[str, bool]] = {
    ".png": ("image/png", True),
    ".pdf": ("application/pdf", True),
    ".html": ("text/html; charset=utf-8", True),
    ".csv": ("text/csv; charset=utf-8", False),
    ".json": ("application/json", False),
    ".jsonl": ("application/jsonl", False),
    ".toml": ("text/plain; charset=utf-8", False),
    ".md": ("text/plain; charset=utf-8", False),
    ".safetensors": ("application/octet-stream", False),
}
#: folders below the one that is served
DEEPEST = 6
LONGEST_NAME = 1000


class Outside(BadInput):
    """A path that does not exist for a visitor. It never says whether there is something at its end."""

    def __init__(self) -> None:
        super().__init__("there is nothing of this name in the folder that is served")


def find(folder: Path, name: str) -> Path:
    """The file or folder `name` below `folder`; Outside for all that leads, or could lead, out of it.

    `name` is written with "/", as `name_of` gives it. Hidden names and symbolic links do not exist here.
    """
    parts = _parts(name)
    place = folder
    for part in parts:
        place = place / part
        if _is_link(place):
            raise Outside
    if not parts or not place.exists() or not place.resolve().is_relative_to(folder.resolve()):
        raise Outside
    return place


def _is_link(place: Path) -> bool:
    try:
        return place.is_symlink() or getattr(place, "is_junction", lambda: False)()
    except (OSError, ValueError):
        raise Outside from None


def _parts(name: str) -> tuple[str, ...]:
    """The folders and the file that a name is made of; Outside if it is not the plainest way to write them."""
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name)
    if odd or not name or len(name) > LONGEST_NAME or "\\" in name:
        raise Outside
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or len(path.parts) > DEEPEST + 1:
        raise Outside
    windows = PureWindowsPath(name)
    if windows.drive or windows.is_absolute() or any(part.startswith(".") for part in path.parts):
        raise Outside
    return path.parts


def name_of(folder: Path, place: Path) -> str:
    """The name of a file or folder for a visitor."""
    return place.relative_to(folder).as_posix()


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Folders that a visitor may see, with their folders and files. Take a folder out of its list to skip it."""
    for here, folders, files in os.walk(folder, followlinks=False):
        place = Path(here)
        depth = len(place.relative_to(folder).parts)
        visible = [one for one in sorted(folders) if _visible(place / one)]
        folders[:] = visible if depth < DEEPEST - 1 else []
        yield place, folders, [one for one in sorted(files) if _visible(place / one)]


def _visible(place: Path) -> bool:
    try:
        _parts(place.name)
    except Outside:
        return False
    return not place.is_symlink()


def type_of(place: Path) -> tuple[str, bool]:
    """How a file is sent; Outside for kinds that are never sent (images of patients are not kept as PNG in a run)."""
    if place.suffix.lower() not in TYPES or not place.is_file():
        raise Outside
    return TYPES[place.suffix.lower()]
