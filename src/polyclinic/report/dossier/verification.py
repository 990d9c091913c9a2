"""Finds every change of a dossier: files that are other, gone, new, hidden or links, and figures without evidence.

Whoever can write the folder could write a whole new dossier. So the digest of the manifest, which `report --dossier`
prints, is kept elsewhere and given to the check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyclinic.errors import BadInput
from polyclinic.files import sha256_of
from polyclinic.json_types import parse_json
from polyclinic.report.dossier.figures import Evidence, Figure, NoFigure, figures_on, read, shown
from polyclinic.report.dossier.writing import EVIDENCE, FIGURES, MANIFEST, PAGE, SEAL, broken_ledgers
from polyclinic.templates import visible


def verify_dossier(folder: Path, digest: str | None = None, run: Path | None = None) -> list[str]:
    """What is wrong with a dossier, one sentence each; nothing where all is as it was written.

    `digest`: the manifest's SHA-256 that was noted when it was made. `run`: a run folder to compare the evidence with.
    """
    if not folder.is_dir() or not (folder / MANIFEST).exists():
        raise BadInput(f"{folder}: is no dossier (it has no {MANIFEST}); name the folder that report --dossier wrote")
    found = list(_links(folder))
    if found:  # nothing is read through a link
        return found
    recorded, problems = _manifest(folder, digest)
    if recorded is None:
        return problems
    problems += _files(folder, recorded)
    problems += _figures(folder, recorded)
    problems += _ledgers(folder)
    return problems + (list(_against_run(folder, recorded, run)) if run else [])


def _links(folder: Path) -> Iterator[str]:
    if folder.is_symlink():
        yield f"{folder}: is a link"
    for path in _everything(folder):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            yield f"{_name(path, folder)}: is a link, or no file at all"


def _everything(folder: Path) -> Iterator[Path]:
    """All files and folders below, hidden ones too, without following links."""
    for place, folders, files in os.walk(folder, followlinks=False):
        yield from (Path(place) / name for name in [*folders, *files])


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _manifest(folder: Path, digest: str | None) -> tuple[Mapping[str, str] | None, list[str]]:
    """The digests that the manifest names, and what is wrong with it; None where it cannot be believed."""
    own = sha256_of(folder / MANIFEST)
    problems = []
    seal = folder / SEAL
    if not seal.is_file() or seal.read_bytes() != f"{own}\n".encode():
        problems.append(f"{MANIFEST}: is not the one that {SEAL} names")
    if digest is not None and digest.strip().lower() != own:
        problems.append(f"{MANIFEST}: has the digest {own}, and {digest.strip()} was given: this is another dossier")
    try:
        recorded = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        if not isinstance(recorded, dict) or not all(isinstance(value, str) for value in recorded.values()):
            raise ValueError
        if any(name.startswith("/") or ".." in name.split("/") for name in recorded):  # nothing outside is read
            raise ValueError
    except (ValueError, KeyError, TypeError):
        return None, [*problems, f"{MANIFEST}: is damaged"]
    return recorded, problems


def _files(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    there = {_name(path, folder) for path in _everything(folder) if path.is_file()}
    folders = {_name(path, folder) for path in _everything(folder) if path.is_dir()}
    needed = {parent.as_posix() for name in recorded for parent in Path(name).parents} | {
        EVIDENCE,
        f"{EVIDENCE}/ledger",
    }
    gone = [f"{name}: is gone" for name in sorted(recorded.keys() - there)]
    new = [f"{name}: was added" for name in sorted(there - recorded.keys() - {MANIFEST, SEAL})]
    new += [f"{name}: is a folder that was added" for name in sorted(folders - needed)]
    other = [
        f"{name}: was changed" for name in sorted(there & recorded.keys()) if sha256_of(folder / name) != recorded[name]
    ]
    return gone + new + other


def _figures(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """Every figure must stand in its file as the page shows it, and the list and the page must name the same ones."""
    try:
        listed = [(_figure(one), one["sha256"]) for one in parse_json((folder / FIGURES).read_text(encoding="utf-8"))]
        page = (folder / PAGE).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{FIGURES}, {PAGE}: cannot be read"]
    evidence = Evidence(folder)
    problems = [problem for figure, sha256 in listed if (problem := _wrong(evidence, figure, sha256, recorded))]
    on_page = list(figures_on(page))
    if on_page != [Figure(f.file, f.place, f.form, visible(f.text)) for f, _ in listed]:
        problems.append(f"{PAGE}: does not show the figures that {FIGURES} lists")
    return problems


def _figure(one: Mapping[str, Any]) -> Figure:
    return Figure(*(str(one[name]) for name in ("file", "place", "form", "text")))  # type: ignore[arg-type]


def _wrong(evidence: Evidence, figure: Figure, sha256: str, recorded: Mapping[str, str]) -> str | None:
    where = f"{figure.file}, {figure.place}"
    if figure.file not in recorded or recorded[figure.file] != sha256:
        return f"{where}: the figure {figure.text} names another file than the manifest"
    try:
        text = shown(evidence.value(figure.file, figure.place), figure.form)
    except (NoFigure, TypeError, KeyError):
        return f"{where}: has no figure, and the page shows {figure.text}"
    return None if text == figure.text else f"{where}: has {text}, and the page shows {figure.text}"


def _ledgers(folder: Path) -> list[str]:
    return [
        f"{EVIDENCE}/ledger/{site}.jsonl: its chain does not hold ({why[:200]})"
        for site, why in broken_ledgers(folder).items()
    ]


def _against_run(folder: Path, recorded: Mapping[str, str], run: Path) -> Iterator[str]:
    """Whether a run folder still has the files that the dossier was made of, and the model that it names."""
    if not run.is_dir():
        raise BadInput(f"--run {run}: there is no such folder; name the run that the dossier is of")
    for name, sha256 in recorded.items():
        if not name.startswith(f"{EVIDENCE}/") or name == f"{EVIDENCE}/policy.toml":
            continue
        file = run / name.removeprefix(f"{EVIDENCE}/")
        if not file.is_file() or sha256_of(file) != sha256:
            yield f"{file}: is not the file that the dossier was made of"
    try:
        result = read(folder / EVIDENCE / "result.json")
        named = result.get("model_sha256")
    except (NoFigure, AttributeError):
        yield f"{EVIDENCE}/result.json: cannot be read, so that the model of the run was not compared"
        return
    model = run / "model.safetensors"
    if named is not None and (not model.is_file() or sha256_of(model) != named):
        yield f"{model}: is not the model that the dossier names"
