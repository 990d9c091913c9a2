"""The dossier of a run for whoever decides about its release: evidence, and no claim that a rule is met.

It has evidence, model card, data sheet, page, and a manifest of it all. What stands in it is in
templates/dossier_sections.html and templates/data_sheet.md; `dossier_check` looks every figure up again.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from polyclinic import __version__
from polyclinic.attacks.attack import verdict_word
from polyclinic.data.own_images import find_kit
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import DANGEROUS, KINDS_IN_WORDS
from polyclinic.files import atomic_folder, check_place, sha256_of
from polyclinic.json_types import parse_json
from polyclinic.report import dossier_check as check
from polyclinic.report.dossier_check import EVIDENCE, MANIFEST, SEAL, Evidence, Figure, Form, content_of
from polyclinic.run_folder import FINISHED, check_whole
from polyclinic.runner.export.model_card import EACH_ITS_OWN, LIMITS, model_card
from polyclinic.runner.predict.model_file import MODEL, read_model_file
from polyclinic.templates import render, visible

FOLDER = "dossier"
#: files of a run that are copied where they are; pictures are not, as they may show patients
COPIED = ("format.json", "study.toml", "result.json", "history.jsonl", "plugins.json", "images.json", "audit.json",
          "digests.json")  # fmt: skip
NEEDED = ("study.toml", "result.json", MODEL)
#: kinds of parcel that are, or make, images that no patient is in
SYNTHETIC = ("synthetic-images", "generator")
#: kinds of parcel that are computed from real training images
ENCODED = ("codes", "latents", "activations")
#: sections in the order in which hospitals are asked
TITLES = {
    "model": "1. The model",
    "performance": "2. How good it is",
    "limits": "3. Limits of use",
    "left": "4. What left each site",
    "policy": "5. Under which policy",
    "audit": "6. What an attacker could recover",
    "privacy": "7. Differential privacy",
    "synthetic": "8. Synthetic images",
    "open": "9. What only the institution knows",
    "files": "10. Files of evidence",
}
LONG = 40  # characters of a digest


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
    check_whole(run)
    for name in NEEDED:
        if not (run / name).is_file():
            raise BadInput(f"{run}: has no {name}; name the folder of a finished run")
    check_whole(run, *FINISHED)
    check_place(folder)
    if folder.is_symlink() or (folder.exists() and not _is_dossier(folder)):
        raise BadInput(f"--out {folder}: is there already and is no dossier; name another folder")
    try:
        with replaced_folder(folder.resolve()) as partial:  # "." has no name
            digest, files = _fill(partial, run)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror or error}); name another place") from None
    return Dossier(folder, digest, files)


def _is_dossier(folder: Path) -> bool:
    """True for a folder with a sealed manifest and nothing that it does not name: only then may it be replaced."""
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
    old = folder.with_name(f".{folder.name}.old")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not folder.exists():  # killed between the two renames
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        with atomic_folder(folder) as partial:
            yield partial
            if folder.exists():
                folder.rename(old)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _fill(folder: Path, run: Path) -> tuple[str, int]:
    """Write all files; the digest of the manifest, and how many files there are."""
    card, _ = read_model_file(run / MODEL)
    ledgers = _copy_evidence(run, folder / EVIDENCE)
    _write(folder / "model_card.md", model_card(run, card, MODEL))
    _write(folder / "data_sheet.md", data_sheet(folder / EVIDENCE))
    shown = ShownFigures(Evidence(folder), digests_in(folder))
    body = Markup(_sections(shown, folder, ledgers))
    figures = [{**asdict(figure), "sha256": shown.digests[figure.file]} for figure in shown.figures]
    _write(folder / check.FIGURES, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    title, files = f"Dossier: {run.resolve().name}", digests_in(folder)
    _write(folder / check.PAGE, render("dossier.html", title=title, titles=TITLES, body=body, files=files, quote=quote))
    recorded = digests_in(folder)
    content = {"polyclinic": __version__, "format": 1, "sha256": recorded}
    _write(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    digest = sha256_of(folder / MANIFEST)
    _write(folder / SEAL, digest + "\n")
    return digest, len(recorded) + 2


@dataclass
class ShownFigures:
    """Figures as links to their evidence, noted in the order in which a page shows them."""

    evidence: Evidence
    digests: Mapping[str, str]
    figures: list[Figure] = field(default_factory=list)

    def at(self, file: str, *steps: object, form: Form = "number") -> Markup | str:
        """The figure at a place of a file of JSON or TOML."""
        return self.in_lines(file, check.pointer(*steps), form)

    def in_lines(self, file: str, place: str, form: Form) -> Markup | str:
        """The figure at a place; a word where there is none."""
        figure = self.evidence.figure(file, place, form)
        if figure is None:
            return "not known"
        self.figures.append(figure)
        link = Markup('<a class="{}" href="{}" title="{}" data-file="{}" data-place="{}" data-form="{}">{}</a>')
        source = visible(f"{file}, {place}; SHA-256 {self.digests[file]}")
        look = "figure digest" if len(figure.text) > LONG and " " not in figure.text else "figure"
        return link.format(look, quote(file), source, quote(file), quote(place), form, visible(figure.text))

    def has(self, file: str, *steps: object, form: Form = "number") -> bool:
        return self.evidence.figure(file, check.pointer(*steps), form) is not None

    def tables(self, file: str, *steps: str) -> Mapping[str, Any]:
        """A table of a file; empty where there is none."""
        try:
            found = self.evidence.value(file, check.pointer(*steps))
        except check.NoFigure:
            return {}
        return found if isinstance(found, Mapping) else {}


def _sections(shown: ShownFigures, folder: Path, ledgers: Mapping[str, str]) -> str:
    """The sections, in the order in which hospitals are asked; `ledgers` names the ledger file of each site."""
    left = shown.tables(f"{EVIDENCE}/result.json", "communication", "by_kind")
    return render(
        "dossier_sections.html",
        of=shown.at,
        in_lines=shown.in_lines,
        has=shown.has,
        tables=shown.tables,
        first_seen=lambda tables: list(dict.fromkeys(name for table in tables.values() for name in table)),
        tested=lambda name: ("metrics", "test", name),
        pooled=lambda name: ("metrics", "intervals", "pooled", name, "value"),
        verdict_word=verdict_word,
        each_its_own=EACH_ITS_OWN,
        titles=TITLES,
        limits=LIMITS,
        words_of=KINDS_IN_WORDS,
        dangerous=DANGEROUS,
        ledgers=ledgers,
        broken=check.broken_ledgers(folder),
        synthetic=[kind for kind in SYNTHETIC if kind in left],
        encoded=[kind for kind in ENCODED if kind in left],
    )


def data_sheet(evidence: Path) -> str:
    """The data sheet of synthetic images that left sites, after Gebru et al. (2021), Datasheets for Datasets."""
    result, study, audit = (content_of(evidence / name) for name in ("result.json", "study.toml", "audit.json"))
    by_kind, verdicts = result.get("communication", {}).get("by_kind", {}), audit.get("verdicts", {})
    left = [kind for kind in SYNTHETIC if kind in by_kind]
    return render(
        "data_sheet.md",
        synthetic=[(kind, check.in_bytes(by_kind[kind])) for kind in left],
        encoded=[kind for kind in ENCODED if kind in by_kind],
        size=study.get("data", {}).get("size", "the study's number of"),
        source=result.get("data", {}).get("source", "not known"),
        generator=study.get("generator", {}),
        private=result.get("privacy"),
        verdicts=[(kind, verdicts[kind].get("words", "no words")) for kind in left if kind in verdicts],
    )


def _copy_evidence(run: Path, evidence: Path) -> dict[str, str]:
    """Copy a run's files; the ledger of each site, as a file of the dossier. BadInput for one that cannot be read."""
    (evidence / "ledger").mkdir(parents=True)
    for name in COPIED:
        if (run / name).is_file():
            _copy(run / name, evidence / name)
    kit = find_kit(run)
    for name in check.OF_KIT:
        if kit is not None and (kit / "local" / name).is_file():
            _copy(kit / "local" / name, evidence / name)
    ledgers = sorted((run / "ledger").glob("*.jsonl"))
    for ledger in ledgers:
        _copy(ledger, evidence / "ledger" / ledger.name)
    for name in ("result.json", "study.toml", "audit.json"):
        if (evidence / name).is_file() and not content_of(evidence / name):
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
    return {p.relative_to(folder).as_posix(): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
