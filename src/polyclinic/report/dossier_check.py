"""Figures of a dossier, and the check that finds every change of it: files that are other, gone, new, hidden or links,
and figures without evidence.

A figure is a value in a file of evidence, shown in one of a few ways, so that it can be looked up again. Its place is a
JSON pointer (`/metrics/test/auc`), or for a file of lines `lines` (how many), `sum NAME KEY=VALUE` (the sum of a field
over the lines where another has a value) or `count KEY=VALUE`.

Whoever can write the folder could write a whole new dossier. So the digest of the manifest, which `report --dossier`
prints, is kept elsewhere and given to the check.
"""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from polyclinic.errors import BadInput
from polyclinic.files import sha256_of
from polyclinic.json_types import parse_json
from polyclinic.report.evidence import read_ledgers
from polyclinic.templates import visible

EVIDENCE, PAGE = "evidence", "index.html"
#: files of a site's kit that are copied, and need not stay as they were
OF_KIT = ("policy.toml", "confirmed.json")
MANIFEST, SEAL, FIGURES = "manifest.json", "manifest.sha256", "figures.json"
Form = Literal["text", "number", "count", "bytes", "list"]


@dataclass(frozen=True)
class Figure:
    """A text that is shown, and the place in the evidence that it comes from."""

    file: str  #: in the folder of the dossier
    place: str
    form: Form
    text: str


class NoFigure(Exception):  # noqa: N818 - reads as a sentence where it is caught
    """There is no value at a place."""


@dataclass(frozen=True)
class Evidence:
    """The files of evidence in a folder, read once."""

    folder: Path
    _contents: dict[str, Any] = field(default_factory=dict)

    def figure(self, file: str, place: str, form: Form = "number") -> Figure | None:
        """The figure at a place; None where there is none."""
        try:
            return Figure(file, place, form, shown(self.value(file, place), form))
        except NoFigure:
            return None

    def value(self, file: str, place: str) -> Any:
        """The value at a place; NoFigure where there is none."""
        if file not in self._contents:
            self._contents[file] = read(self.folder / file)
        content = self._contents[file]
        return in_lines(content, place) if file.endswith(".jsonl") else at_pointer(content, place)


def read(path: Path) -> Any:
    """The content of a file of JSON, lines of JSON or TOML; NoFigure where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in text.splitlines() if line]
        return parse_json(text)
    except (OSError, ValueError) as error:
        raise NoFigure(f"{path.name} cannot be read ({' '.join(str(error).split())[:100]})") from None


def pointer(*steps: object) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def at_pointer(content: Any, place: str) -> Any:
    """The value at a JSON pointer; NoFigure where there is none."""
    for step in place.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            content = content[int(name)] if isinstance(content, list) else content[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise NoFigure(f"there is no {place}") from None
    return content


def in_lines(lines: Sequence[Any], place: str) -> Any:
    """A count or a sum over the lines of a file; NoFigure for a place that means nothing."""
    what, *rest = place.split(" ", 2 if place.startswith("sum ") else 1)
    if what == "lines":
        return len(lines)
    if what == "sum" and len(rest) == 2:
        return sum(line[rest[0]] for line in _where(lines, rest[1]))
    if what == "count" and len(rest) == 1:
        return len(_where(lines, rest[0]))
    raise NoFigure(f"there is no {place}")


def _where(lines: Sequence[Any], condition: str) -> list[Any]:
    key, _, value = condition.partition("=")
    return [line for line in lines if isinstance(line, dict) and str(line.get(key)) == value]


def shown(value: Any, form: str) -> str:
    """A value as it stands on the page; NoFigure if it is not of that form."""
    if form == "list" and isinstance(value, list):
        return "; ".join(str(one) for one in value) or "nothing"
    if form == "text" and isinstance(value, str | int | float):
        return str(value)
    forms = {"number": "{:.4g}".format, "count": "{:,}".format, "bytes": in_bytes}
    if form not in forms or isinstance(value, bool) or not isinstance(value, int | float):
        raise NoFigure("it is not of that form")
    return forms[form](value)


def in_bytes(count: float) -> str:
    """A number of bytes for people."""
    if count < 1000:
        return f"{count:.0f} B"
    unit = "kB" if count < 1e6 else "MB" if count < 1e9 else "GB"
    return f"{count / {'kB': 1e3, 'MB': 1e6, 'GB': 1e9}[unit]:.3g} {unit}"


class _Figures(HTMLParser):
    """Collects the figures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Figure] = []
        self._open: dict[str, str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "a" and "data-place" in known:
            self._open, self._text = known, ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open is not None:
            file, place = (unquote(self._open.get(name, "")) for name in ("data-file", "data-place"))
            form: Any = self._open.get("data-form", "")
            self.found.append(Figure(file, place, form, self._text))
            self._open = None


def figures_on(page: str) -> list[Figure]:
    """The figures that a page shows, with their places."""
    parser = _Figures()
    parser.feed(page)
    return parser.found


def content_of(path: Path) -> dict[str, Any]:
    """The table in a file; empty where there is none."""
    try:
        found = read(path)
    except NoFigure:
        return {}
    return found if isinstance(found, dict) else {}


def broken_ledgers(folder: Path) -> dict[str, str]:
    """Problems of the ledgers in a dossier's evidence, by site; nothing where all of them hold."""
    evidence = folder / EVIDENCE
    return read_ledgers(evidence, content_of(evidence / "result.json"), content_of(evidence / "study.toml")).broken


# --- the check ------------------------------------------------------------------------------------------


def verify_dossier(folder: Path, digest: str | None = None, run: Path | None = None) -> list[str]:
    """Problems of a dossier, one sentence each; nothing where all is as it was written.

    `digest`: the manifest's SHA-256 that was noted when it was made. `run`: a run folder to compare the evidence with.
    """
    if not folder.is_dir() or not (folder / MANIFEST).exists():
        raise BadInput(f"{folder}: is no dossier (it has no {MANIFEST}); name the folder that report --dossier wrote")
    found = [*([folder] if folder.is_symlink() else []), *folder.rglob("*")]  # hidden ones too; follows no link
    odd = [path for path in found if path.is_symlink() or not (path.is_file() or path.is_dir())]
    if odd:  # nothing is read through a link
        names = [path.name if path == folder else path.relative_to(folder).as_posix() for path in odd]
        return [f"{name}: is a link, or no file at all" for name in names]
    recorded, problems = _manifest(folder, digest)
    if recorded is None:
        return problems
    problems += [*_files(folder, recorded), *_figures(folder, recorded)]
    for site, why in broken_ledgers(folder).items():
        problems.append(f"{EVIDENCE}/ledger/{site}.jsonl: its chain does not hold ({why[:200]})")
    return problems + (list(_against_run(folder, recorded, run)) if run else [])


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
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    folders = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()}
    needed = {parent.as_posix() for name in recorded for parent in Path(name).parents}
    same = {name for name in there & recorded.keys() if sha256_of(folder / name) == recorded[name]}
    found = {
        "is gone": recorded.keys() - there,
        "was added": there - recorded.keys() - {MANIFEST, SEAL},
        "is a folder that was added": folders - needed - {EVIDENCE, f"{EVIDENCE}/ledger"},
        "was changed": (there & recorded.keys()) - same,
    }
    return [f"{name}: {words}" for words, names in found.items() for name in sorted(names)]


def _figures(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """Every figure must stand in its file as the page shows it, and the list and the page must name the same ones."""
    try:
        listed = [
            (Figure(*(str(one[name]) for name in ("file", "place", "form", "text"))), one["sha256"])  # type: ignore[arg-type]
            for one in parse_json((folder / FIGURES).read_text(encoding="utf-8"))
        ]
        page = (folder / PAGE).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{FIGURES}, {PAGE}: cannot be read"]
    evidence = Evidence(folder)
    problems = []
    for figure, sha256 in listed:
        where, text = f"{figure.file}, {figure.place}", None
        if figure.file not in recorded or recorded[figure.file] != sha256:
            problems.append(f"{where}: the figure {figure.text} names another file than the manifest")
            continue
        with contextlib.suppress(NoFigure, TypeError, KeyError):
            text = shown(evidence.value(figure.file, figure.place), figure.form)
        if text != figure.text:
            problems.append(f"{where}: has {'no figure' if text is None else text}, and the page shows {figure.text}")
    if figures_on(page) != [Figure(f.file, f.place, f.form, visible(f.text)) for f, _ in listed]:
        problems.append(f"{PAGE}: does not show the figures that {FIGURES} lists")
    return problems


def _against_run(folder: Path, recorded: Mapping[str, str], run: Path) -> Iterator[str]:
    """Files of a run folder that are not those that the dossier was made of, and a model that it does not name."""
    if not run.is_dir():
        raise BadInput(f"--run {run}: there is no such folder; name the run that the dossier is of")
    for name, sha256 in recorded.items():
        if not name.startswith(f"{EVIDENCE}/") or name in [f"{EVIDENCE}/{one}" for one in OF_KIT]:
            continue
        file = run / name.removeprefix(f"{EVIDENCE}/")
        if not file.is_file() or sha256_of(file) != sha256:
            yield f"{file}: is not the file that the dossier was made of"
    result = content_of(folder / EVIDENCE / "result.json")
    if not result:
        yield f"{EVIDENCE}/result.json: cannot be read, so that the model of the run was not compared"
        return
    named = result.get("model_sha256")
    model = run / "model.safetensors"
    if named is not None and (not model.is_file() or sha256_of(model) != named):
        yield f"{model}: is not the model that the dossier names"
