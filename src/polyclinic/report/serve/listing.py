"""What a folder holds: runs, comparisons and study files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyclinic.report.serve import places

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
    for place, folders, files in places.walk(folder):
        if is_run(files):
            found.runs.append(place)
            folders.clear()
        elif "startup" in folders and "local" in folders:  # a kit: `serve --kit` shows it
            folders.clear()
        else:
            if "comparison.json" in files or ("studies" in folders and _has_runs(place, folders)):
                found.comparisons.append(place)
                folders[:] = [one for one in folders if one != "studies"]
            found.studies += [place / one for one in files if one.endswith(".toml") and is_study(place / one)]
        if len(found.runs) + len(found.comparisons) + len(found.studies) >= MOST_ENTRIES:
            found.cut = True
            break
    return found


def is_run(files: list[str]) -> bool:
    """Whether a folder with these files is a run; a study of its own may be called study.toml as well."""
    return "study.toml" in files and bool({"format.json", "history.jsonl", "result.json"} & set(files))


def is_run_folder(place: Path) -> bool:
    return place.is_dir() and is_run([one.name for one in place.iterdir()])


def _has_runs(place: Path, folders: list[str]) -> bool:
    return any(is_run_folder(place / one) for one in folders)


def is_study(file: Path) -> bool:
    """Whether a TOML file looks like a study: it is read, and nothing in it is run."""
    try:
        if file.stat().st_size > LONGEST_STUDY:
            return False
        return bool(STUDY_TABLES & set(tomllib.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False


def files_of(entry: Path) -> Iterator[Path]:
    """The files of a run or comparison that can be fetched, those of the runs inside a comparison left out."""
    for place, folders, files in places.walk(entry):
        folders[:] = [one for one in folders if one != "studies" and not is_run_folder(place / one)]
        yield from (place / one for one in files if Path(one).suffix.lower() in places.TYPES)
