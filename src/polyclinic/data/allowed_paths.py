"""Names and paths that are allowed: names of sites become folders, and a table of images can name any file."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NewType

import numpy as np

from polyclinic.errors import BadInput

SAFE = re.compile(r"\w(?:[\w .+()-]{0,98}[\w+)-])?")


#: who asks the sites; a site of this name would get what is meant for the coordinator
COORDINATOR = "coordinator"


#: a name that becomes a folder, of a site or a run; a plain text in a random address
FolderName = NewType("FolderName", str)


def folder_name(name: str) -> FolderName:
    """The name, if it has letters, digits, _ and, inside, also space . + - ( ); BadInput for anything else, such as
    what a path could be made of."""
    if not SAFE.fullmatch(name):
        raise BadInput(
            f"sites: '{name}' cannot be the name of a site; "
            "use at most 100 letters, digits, '_', '-', '.' or spaces, starting with a letter or digit"
        )
    return FolderName(name)


def check_site_names(names: Iterable[str]) -> None:
    """Refuses unsafe names, and names that a file system without upper case would take for one."""
    seen: dict[str, str] = {}
    for name in names:
        folder_name(name)
        refuse_coordinator(name)
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BadInput(f"sites: '{other}' and '{name}' differ by upper case only; rename one of them")


def refuse_coordinator(name: str) -> None:
    """BadInput for a site that is called as the coordinator is."""
    if name.casefold() == COORDINATOR:
        raise BadInput("sites: a site cannot be called 'coordinator', as the one who asks the sites is; rename it")


def safe_name(text: str) -> str:
    """The nearest name that a site may have: "other/unknown" becomes "other-unknown"."""
    cleaned = re.sub(r"^\W+|[ .(]+$", "", re.sub(r"[^\w .+()-]+", "-", text)[:100])
    return cleaned or "unnamed"


def safe_names(texts: Iterable[str]) -> np.ndarray:
    """str [N]: the safe name of each institution; refuses two that would become one site."""
    texts = [str(text) for text in texts]
    owners: dict[str, str] = {}
    for text in sorted(set(texts)):
        other = owners.setdefault(safe_name(text).casefold(), text)
        if other != text:
            raise BadInput(f"data: the sites '{other}' and '{text}' would have the same name; rename one in the data")
    return np.array([safe_name(text) for text in texts])


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
