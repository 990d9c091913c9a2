"""Where files of images may lie: a table can name any file of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from polyclinic.errors import BadInput


def refuse_outside(files: Iterable[str | Path], folder: Path) -> None:
    """BadInput for a file that lies outside the folder, by its path or by a symbolic link."""
    top = os.path.realpath(folder)
    for file in files:
        if not os.path.realpath(file).startswith(f"{top}{os.sep}".replace(2 * os.sep, os.sep)):
            raise BadInput(
                f"data.path: '{file}' lies outside '{folder}'; move or copy it there, or set data.allow_outside = true"
            )
