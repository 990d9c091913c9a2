"""Writes the dossier of a run: evidence, model card, data sheet, page, and a manifest of it all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyclinic import __version__
from polyclinic.data.own_images import find_kit
from polyclinic.errors import BadInput
from polyclinic.files import FINISHED, PARTIAL, check_noted
from polyclinic.formats import check_run_format
from polyclinic.json_types import parse_json
from polyclinic.report.dossier.data_sheet import data_sheet
from polyclinic.report.dossier.figures import Evidence, NoFigure, read
from polyclinic.report.dossier.page import page_of
from polyclinic.report.dossier.parts import figures_in
from polyclinic.report.dossier.sections import sections_of
from polyclinic.report.ledgers import read_ledgers
from polyclinic.runner.model_card import model_card
from polyclinic.runner.model_file import MODEL, read_model_file

FOLDER, EVIDENCE, PAGE = "dossier", "evidence", "index.html"
MANIFEST, SEAL, FIGURES = "manifest.json", "manifest.sha256", "figures.json"
#: files of a run that are copied where they are; pictures are not, as they may show patients
COPIED = (
    "format.json",
    "study.toml",
    "result.json",
    "history.jsonl",
    "plugins.json",
    "images.json",
    "audit.json",
    "digests.json",
)
NEEDED = ("study.toml", "result.json", MODEL)


@dataclass(frozen=True)
class Dossier:
    """A dossier on disk; `digest` is the SHA-256 of its manifest, which stands for all of it."""

    folder: Path
    digest: str
    files: int


def write_dossier(run: Path, out: Path | None = None) -> Dossier:
    """Write the dossier of a finished run into `out`, by default the folder `dossier` of the run.

    An older dossier there is replaced once the new one is complete. BadInput for another folder, for a run without a
    result, and for a model that is not the one the result names.
    """
    run, folder = Path(run), Path(out) if out is not None else Path(run) / FOLDER
    check_run_format(run)
    for name in NEEDED:
        if not (run / name).is_file():
            raise BadInput(f"{run}: has no {name}; name the folder of a finished run")
    check_noted(run, *FINISHED)
    if folder.is_symlink() or (folder.exists() and not _is_dossier(folder)):
        raise BadInput(f"--out {folder}: is there already and is no dossier; name another folder")
    try:
        with replaced_folder(folder.resolve()) as partial:  # "." has no name
            digest, files = _fill(partial, run)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror or error}); name another place") from None
    return Dossier(folder, digest, files)


def _is_dossier(folder: Path) -> bool:
    """Whether a folder has a sealed manifest and nothing that it does not name: only then may it be replaced."""
    try:
        content = (folder / MANIFEST).read_bytes()
        sealed = (folder / SEAL).read_text(encoding="utf-8").strip() == hashlib.sha256(content).hexdigest()
        named = parse_json(content)["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    return sealed and isinstance(named, dict) and there <= named.keys() | {MANIFEST, SEAL}


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends well. The old one is there until
    then, and comes back if the new one cannot take its place."""
    partial, old = (folder.with_name(f".{folder.name}{end}") for end in (PARTIAL, ".old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not folder.exists():  # killed between the two renames
        old.rename(folder)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        yield partial
        if folder.exists():
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, run: Path) -> tuple[str, int]:
    """Write all files; the digest of the manifest, and how many files there are."""
    card, _ = read_model_file(run / MODEL)
    ledgers = _copy_evidence(run, folder / EVIDENCE)
    _write(folder / "model_card.md", model_card(run, card, MODEL))
    known = {name: _content(folder / EVIDENCE / file) for name, file in _SHEET_FILES.items()}
    _write(folder / "data_sheet.md", data_sheet(known["result"], known["study"], known["audit"]))
    sections = sections_of(Evidence(folder), ledgers, broken_ledgers(folder))
    files = digests_in(folder)
    figures = [figure.as_json(files[figure.file]) for figure in figures_in(sections)]
    _write(folder / FIGURES, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    _write(folder / PAGE, page_of(run.resolve().name, sections, digests_in(folder)))
    recorded = digests_in(folder)
    content = {"polyclinic": __version__, "format": 1, "sha256": recorded}
    _write(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    digest = digest_of_file(folder / MANIFEST)
    _write(folder / SEAL, digest + "\n")
    return digest, len(recorded) + 2


_SHEET_FILES = {"result": "result.json", "study": "study.toml", "audit": "audit.json"}


def _content(path: Path) -> dict[str, object]:
    try:
        found = read(path)
    except NoFigure:
        return {}
    return found if isinstance(found, dict) else {}


def broken_ledgers(folder: Path) -> dict[str, str]:
    """What is wrong with the ledgers in a dossier's evidence, by site; nothing where all of them hold."""
    evidence = folder / EVIDENCE
    return read_ledgers(evidence, _content(evidence / "result.json"), _content(evidence / "study.toml"))[1]


def _copy_evidence(run: Path, evidence: Path) -> dict[str, str]:
    """Copy a run's files; the ledger of each site, as a file of the dossier. BadInput for one that cannot be read."""
    (evidence / "ledger").mkdir(parents=True)
    for name in COPIED:
        if (run / name).is_file():
            _copy(run / name, evidence / name)
    kit = find_kit(run)
    if kit is not None and (kit / "local" / "policy.toml").is_file():
        _copy(kit / "local" / "policy.toml", evidence / "policy.toml")
    ledgers = sorted((run / "ledger").glob("*.jsonl"))
    for ledger in ledgers:
        _copy(ledger, evidence / "ledger" / ledger.name)
    for name in ("result.json", "study.toml", "audit.json"):
        if (evidence / name).is_file() and not _content(evidence / name):
            raise BadInput(f"{run / name}: is damaged; fetch the run again")
    return {path.stem: f"{EVIDENCE}/ledger/{path.name}" for path in ledgers}


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        raise BadInput(f"{source}: is a link; evidence must be the files themselves")
    target.write_bytes(source.read_bytes())


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", errors="surrogatepass" if os.name == "nt" else "replace"))


def digests_in(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its name there."""
    return {p.relative_to(folder).as_posix(): digest_of_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
