"""Where files of images may lie: a table can name any file of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from polyclinic.errors import BadInput


def refuse_outside(files: Iterable[str | Path], folder: Path) -> None:
    """BadInput for a file that lies outside the folder, by its path or by a symbolic link."""
    file = first_outside(files, folder)
    if file is not None:
        raise BadInput(
            f"data.path: '{file}' lies outside '{folder}'; move or copy it there, or set data.allow_outside = true"
        )


def first_outside(files: Iterable[str | Path], folder: Path) -> str | Path | None:
    """The first file that lies outside the folder; None where none does."""
    top = f"{os.path.realpath(folder)}{os.sep}".replace(2 * os.sep, os.sep)
    return next((file for file in files if not os.path.realpath(file).startswith(top)), None)
