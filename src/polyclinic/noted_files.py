"""Digests of a finished run's files (`digests.json`), so that a file that was damaged later is noticed when it is read.

They tell of damage, not of forgery: who can write the folder can write `digests.json`, too. Ledgers are signed, and
`polyclinic ledger verify` is what tells of that.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from polyclinic.errors import Damaged
from polyclinic.files import atomic_write, digest_of, read_json
from polyclinic.json_types import JsonMapping, JsonObject

FILE = "digests.json"
#: the files of a run that is over, which nothing changes from then on
FINISHED = (
    *("study.toml", "images.json", "history.jsonl", "model.safetensors", "result.json"),
    *("cases/test.npz", "cases/validation.npz"),
)


#: how the first line of a text begins that has the digest of all other lines
OWN_DIGEST = "# sha256 of the lines below: "


def note_files(folder: Path, *, durable: bool = False, result: bytes | None = None) -> None:
    """Write down the SHA-256 of those of a finished run's files that are there; `result`: a result to come."""
    more = sorted([*folder.glob("ledger/*.jsonl"), *folder.glob("handovers/*/*.safetensors")])
    names = (*FINISHED, *(path.relative_to(folder).as_posix() for path in more))
    found = {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}
    if result is not None:
        found["result.json"] = hashlib.sha256(result).hexdigest()
    content = json.dumps({"files": found, "sha256": digest_of(found)}, indent=1) + "\n"
    atomic_write(folder / FILE, content, durable=durable)


def write_result(folder: Path, values: JsonMapping, *, durable: bool = False) -> None:
    """Write `result.json`, which makes a run a finished one; the digests come first, lest it be one without them."""
    content = (json.dumps(values, indent=2) + "\n").encode()
    note_files(folder, durable=durable, result=content)
    atomic_write(folder / "result.json", content, durable=durable)


def with_own_digest(text: str) -> str:
    """A text of TOML with a first line that has the digest of the others: both are written in one step."""
    return f"{OWN_DIGEST}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def check_own_digest(path: Path) -> None:
    """Damaged if a file's first line has a digest, and it is not that of the other lines."""
    first, _, rest = path.read_bytes().partition(b"\n") if path.is_file() else (b"", b"", b"")
    start = OWN_DIGEST.encode()
    if first.startswith(start) and first.removeprefix(start) != hashlib.sha256(rest).hexdigest().encode():
        raise Damaged(
            f"{path}: is damaged or was changed since the run began; bring it back from a copy, or run the study again "
            "into another folder"
        )


def check_noted(folder: Path, *names: str) -> None:
    """Damaged if one of these files is not what it was when its digest was noted; fine where none was noted."""
    if not (folder / FILE).is_file():
        return
    noted = read_json(folder / FILE)
    if not isinstance(noted.get("files"), dict) or noted.get("sha256") != digest_of(noted["files"]):
        raise Damaged(f"{folder / FILE}: is damaged; bring it back from a copy")
    for name in names:
        if name in noted["files"] and sha256_of(folder / name) != noted["files"][name]:
            raise Damaged(
                f"{folder / name}: is damaged (its SHA-256 is not the one that was noted when the run ended); "
                "bring it back from a copy, or run the study again"
            )


def check_finished(folder: Path, below: str = "") -> None:
    """Damaged if any file of a finished run, its ledgers too, is not what it was when the run ended; `below`: only
    those whose names begin so."""
    noted = read_json(folder / FILE).get("files") if (folder / FILE).is_file() else None
    names = noted if isinstance(noted, dict) else FINISHED
    check_noted(folder, *(name for name in names if name.startswith(below)))


def read_result(folder: Path) -> JsonObject:
    """The content of a run's `result.json`; Damaged if it is not what the run wrote."""
    check_noted(folder, "result.json")
    return read_json(folder / "result.json")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, or "" if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
