"""Files: atomic writes, the cache folder, digests of descriptions."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from polyclinic.errors import BadInput


def atomic_write(path: Path, content: str | bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def cache_folder(chosen: Path | None = None) -> Path:
    """The folder chosen, else $POLYCLINIC_CACHE, else polyclinic in the user's cache folder."""
    if chosen is not None:
        return Path(chosen)
    if given := os.environ.get("POLYCLINIC_CACHE"):
        return Path(given)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "polyclinic"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyclinic"


def digest_of(description: Any) -> str:
    """A name of 32 hex digits for a description in plain values (dicts, lists, strings, numbers)."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_folder(folder: Path) -> None:
    """Creates the folder and its parents, or says which setting names a better place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"POLYCLINIC_CACHE: cannot write in '{folder.parent}' ({reason}); set it elsewhere") from None
