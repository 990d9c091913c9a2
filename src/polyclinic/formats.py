"""Format numbers: which study files and run folders this version can read.

A study says `format = 1` at its top. A run folder says it in `format.json`, the first file that a run writes and the
first that every reader looks at: an interrupted run has it as well as a finished one, and no other file has to be
understood to read it. The header of `model.safetensors` says it once more, since a model is copied without its folder.
A file without a number is of format 1, from before there were numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

from polyclinic import __version__
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write
from polyclinic.json_types import parse_json

#: raised when a reader of today would misread what is written tomorrow; a new optional setting does not raise it
STUDY_FORMAT = 1
RUN_FORMAT = 1

RUN_FORMAT_FILE = "format.json"


def check_format(found: object, known: int, where: str, writer: str = "") -> None:
    """BadInput if `found` is newer than the `known` format; `writer` is the version of Polyclinic that wrote it."""
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise BadInput(f"{where}: the format must be a whole number from 1 to {known}, not {found!r}; correct it")
    if found > known:
        needed = f"polyclinic {writer} or newer" if writer else "a newer polyclinic"
        raise BadInput(
            f"{where}: has format {found}, and polyclinic {__version__} reads formats up to {known}; install {needed}"
        )


def write_run_format(folder: Path) -> None:
    """Say in a new run folder which format it has, and which version of Polyclinic wrote it."""
    content = {"format": RUN_FORMAT, "polyclinic": __version__}
    atomic_write(folder / RUN_FORMAT_FILE, json.dumps(content) + "\n")


def check_run_format(folder: Path) -> None:
    """BadInput if a run folder is of a newer format than this version reads."""
    file = folder / RUN_FORMAT_FILE
    if not file.is_file():
        return
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        found, writer = content["format"], str(content.get("polyclinic", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f'{file}: is damaged; write it anew as {{"format": {RUN_FORMAT}}}') from None
    check_format(found, RUN_FORMAT, str(file), writer)
