"""Files that exist for a visitor: those inside the folder that is served, by their path below it, and no others; and
which of its folders are runs, comparisons and studies."""

import os
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
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
    """A path outside the served folder: 404, whether it exists or not."""

    def __init__(self) -> None:
        super().__init__("there is nothing of this name in the folder that is served")


def find(folder: Path, name: str) -> Path:
    """The file or folder `name` below `folder`; Outside for all that leads, or could lead, out of it.

    `name` is written with "/", as `name_of` gives it. Hidden names and symbolic links do not exist here.
    """
    place = folder
    try:
        for part in _parts(name):
            place = place / part
            if place.is_symlink() or getattr(place, "is_junction", lambda: False)():
                raise Outside
        if place == folder or not place.exists() or not place.resolve().is_relative_to(folder.resolve()):
            raise Outside
    except (OSError, ValueError):
        raise Outside from None
    return place


def _parts(name: str) -> tuple[str, ...]:
    """The folders and the file that a name is made of; Outside if it is not the plainest way to write them."""
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name) or "\\" in name
    long = len(name) > LONGEST_NAME or len(path.parts) > DEEPEST + 1
    elsewhere = path.is_absolute() or windows.is_absolute() or windows.drive
    hidden = any(part.startswith(".") for part in path.parts)
    if not name or str(path) != name or odd or long or elsewhere or hidden:
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
    """The entry of TYPES; Outside for kinds that are never sent (images of patients are not kept as PNG in a run)."""
    if place.suffix.lower() not in TYPES or not place.is_file():
        raise Outside
    return TYPES[place.suffix.lower()]


#: entries of a folder that are listed
MOST_ENTRIES = 1000
#: a TOML file with one of these tables is a study
STUDY_TABLES = {"method", "data", "sites"}
LONGEST_STUDY = 200_000


@dataclass
class Listing:
    """The entries of a folder, each as a path."""

    runs: list[Path]
    comparisons: list[Path]
    studies: list[Path]
    cut: bool = False


def listing(folder: Path) -> Listing:
    """All runs, comparisons and study files below a folder; `cut` where there are more than are listed."""
    found = Listing([], [], [])
    for place, folders, files in walk(folder):
        if is_run(files):
            found.runs.append(place)
            folders.clear()
        elif {"startup", "local"} <= {*folders} or {"manifest.json", "figures.json"} <= {*files}:
            # a kit, which `serve --kit` shows; or a dossier, whose evidence is that of a run
            folders.clear()
        else:
            has_runs = "studies" in folders and any(is_run_folder(place / one) for one in folders)
            if "comparison.json" in files or has_runs:
                found.comparisons.append(place)
                folders[:] = [one for one in folders if one != "studies"]
            found.studies += [place / one for one in files if one.endswith(".toml") and is_study(place / one)]
        if len(found.runs) + len(found.comparisons) + len(found.studies) >= MOST_ENTRIES:
            found.cut = True
            break
    return found


def is_run(files: list[str]) -> bool:
    """True for the files of a run; a study of its own may be called study.toml as well."""
    return "study.toml" in files and bool({"format.json", "history.jsonl", "result.json"} & set(files))


def is_run_folder(place: Path) -> bool:
    return place.is_dir() and is_run([one.name for one in place.iterdir()])


def is_study(file: Path) -> bool:
    """True for a TOML file that looks like a study: it is read, and nothing in it is run."""
    try:
        if file.stat().st_size > LONGEST_STUDY:
            return False
        return bool(STUDY_TABLES & set(tomllib.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False


def files_of(entry: Path) -> Iterator[Path]:
    """The files of a run or comparison that can be fetched, those of the runs inside a comparison left out."""
    for place, folders, files in walk(entry):
        folders[:] = [one for one in folders if one != "studies" and not is_run_folder(place / one)]
        yield from (place / one for one in files if Path(one).suffix.lower() in TYPES)
