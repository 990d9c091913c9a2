"""Run folders: their format, the digests of their files, one question (`check_whole`), and locks.

`format.json` is the first file that a run writes, and `digests.json` one of the last. Digests tell of damage, not of
forgery: who can write the folder can write this file; ledgers are signed. A study says `format = 1` at its top, and the
header of a model says it once more, since a model is copied without its folder. No number: format 1.

A run holds the file `.lock`. Each of its worker processes holds a lock file of its own in `.workers/`. When a run is
killed, `.lock` is free at once, but its workers take a moment to notice: the next run waits for their locks.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from polyclinic import __version__
from polyclinic.errors import BadInput, Damaged
from polyclinic.files import atomic_write, digest_of, lock, read_json, sha256_of
from polyclinic.json_types import JsonMapping, JsonObject, parse_json

#: raised when a reader of today would misread what is written tomorrow; a new optional setting does not raise it
STUDY_FORMAT = 1
RUN_FORMAT = 1
FORMAT_FILE = "format.json"
DIGESTS = "digests.json"
#: the files of a run that is over, which nothing changes from then on
FINISHED = (
    *("study.toml", "images.json", "history.jsonl", "model.safetensors", "result.json"),
    *("cases/test.npz", "cases/validation.npz"),
)
#: how the first line of a text begins that has the digest of all other lines
OWN_DIGEST = "# sha256 of the lines below: "
LOCK = ".lock"
WORKERS = ".workers"
#: seconds that the workers of a run that was killed have to end: they do at once, unless the machine is very busy
ENDS_WITHIN = 60.0
#: seconds for which the lock may be held by somebody who only looks (`is_held`), and does so for an instant
LOOKS_WITHIN = 0.5


def check_whole(folder: Path, *names: str) -> None:
    """BadInput if a run folder is of a newer format than this version reads; Damaged if its study is not the one that
    it was begun with, or if a file is not what it was when the run ended, of those that `names` match (`ledger/*`).

    Fine where nothing was noted: older versions noted nothing.
    """
    if (file := folder / FORMAT_FILE).is_file():
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
            found, writer = content["format"], str(content.get("polyclinic", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f'{file}: is damaged; write it anew as {{"format": {RUN_FORMAT}}}') from None
        check_format(found, RUN_FORMAT, str(file), writer)
    study, start = folder / "study.toml", OWN_DIGEST.encode()
    first, _, rest = study.read_bytes().partition(b"\n") if study.is_file() else (b"", b"", b"")
    if first.startswith(start) and first.removeprefix(start) != hashlib.sha256(rest).hexdigest().encode():
        raise Damaged(
            f"{study}: is damaged or was changed since the run began; bring it back from a copy, or run the study "
            "again into another folder"
        )
    if not names or not (folder / DIGESTS).is_file():
        return
    noted = read_json(folder / DIGESTS)
    if not isinstance(noted.get("files"), dict) or noted.get("sha256") != digest_of(noted["files"]):
        raise Damaged(f"{folder / DIGESTS}: is damaged; bring it back from a copy")
    for name, sha256 in noted["files"].items():
        if any(fnmatch.fnmatchcase(name, one) for one in names) and sha256_of(folder / name) != sha256:
            changed = "is damaged (its SHA-256 is not the one that was noted when the run ended)"
            what = changed if (folder / name).is_file() else "is gone, and the run had written it"
            raise Damaged(f"{folder / name}: {what}; bring it back from a copy, or run the study again")


def read_result(folder: Path) -> JsonObject:
    """The content of a run's `result.json`; Damaged if it is not what the run wrote."""
    check_whole(folder, "result.json")
    return read_json(folder / "result.json")


def history_of(text: str) -> list[JsonObject]:
    """The rounds of `history.jsonl`, without a line that is damaged or half written."""
    found = []
    for one in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            line = parse_json(one)
            if isinstance(line, dict) and isinstance(line.get("round"), int):
                found.append(line)
    return found


def write_result(folder: Path, values: JsonMapping, *, durable: bool = False) -> None:
    """Write `result.json`, which makes a run a finished one; the digests come first, lest it be one without them."""
    content = (json.dumps(values, indent=2) + "\n").encode()
    note_files(folder, durable=durable, result=content)
    atomic_write(folder / "result.json", content, durable=durable)


def note_files(folder: Path, *, durable: bool = False, result: bytes | None = None) -> None:
    """Write down the SHA-256 of those of a finished run's files that are there; `result`: a result to come."""
    more = sorted([*folder.glob("ledger/*.jsonl"), *folder.glob("handovers/*/*.safetensors")])
    names = (*FINISHED, *(path.relative_to(folder).as_posix() for path in more))
    found = {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}
    if result is not None:
        found["result.json"] = hashlib.sha256(result).hexdigest()
    content = json.dumps({"files": found, "sha256": digest_of(found)}, indent=1) + "\n"
    atomic_write(folder / DIGESTS, content, durable=durable)


def with_own_digest(text: str) -> str:
    """A text of TOML with a first line that has the digest of the others: both are written in one step."""
    return f"{OWN_DIGEST}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


# --- formats ------------------------------------------------------------------------------------------


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
    atomic_write(folder / FORMAT_FILE, json.dumps(content) + "\n")


# --- locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder: BadInput if another run holds it, or if a worker of an earlier run does not end."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(folder / LOCK, wait=LOOKS_WITHIN))
        except TimeoutError:
            raise BadInput(
                f"--out {folder}: another run is working in it; wait for it, or name another folder"
            ) from None
        for file in (folder / WORKERS).glob("*.lock"):
            try:
                with lock(file, wait=ENDS_WITHIN):
                    pass
            except TimeoutError:
                raise BadInput(
                    f"--out {folder}: process {file.stem}, a worker of an earlier run, has not ended yet; "
                    "wait for it or end it, or name another folder"
                ) from None
        shutil.rmtree(folder / WORKERS, ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(folder / WORKERS, ignore_errors=True)


def is_held(folder: Path) -> bool:
    """Whether a run works in the folder now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with lock(folder / LOCK, wait=0):
            return False
    except TimeoutError:
        return True


@contextlib.contextmanager
def worker_lock(folder: Path) -> Iterator[None]:
    """Hold a worker's lock, for as long as this process writes into the folder."""
    (folder / WORKERS).mkdir(parents=True, exist_ok=True)
    with lock(folder / WORKERS / f"{os.getpid()}.lock", wait=0):
        yield
