"""Figures of a dossier: each is a value in a file of evidence, shown in one of a few ways, and can be looked up again.

A place is a JSON pointer (`/metrics/test/auc`), or for a file of lines `lines` (how many), `sum NAME KEY=VALUE`
(the sum of a field over the lines where another has a value) or `count KEY=VALUE`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from polyclinic.json_types import parse_json

Form = Literal["text", "number", "count", "bytes", "list"]


@dataclass(frozen=True)
class Figure:
    """What is shown, and the place in the evidence that it comes from."""

    file: str  #: in the folder of the dossier
    place: str
    form: Form
    text: str

    def as_json(self, sha256: str) -> dict[str, str]:
        return {**asdict(self), "sha256": sha256}


class NoFigure(Exception):  # noqa: N818 - reads as a sentence where it is caught
    """There is no value at a place."""


@dataclass(frozen=True)
class Evidence:
    """The files of evidence in a folder, read once."""

    folder: Path

    def figure(self, file: str, place: str, form: Form = "number") -> Figure | None:
        """The figure at a place; None where there is none."""
        try:
            return Figure(file, place, form, shown(self.value(file, place), form))
        except NoFigure:
            return None

    def value(self, file: str, place: str) -> Any:
        """What stands at a place; NoFigure where nothing does."""
        content = read(self.folder / file)
        return in_lines(content, place) if file.endswith(".jsonl") else at_pointer(content, place)


@functools.lru_cache(maxsize=256)
def _read(path: Path, stamp: tuple[int, int]) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in text.splitlines() if line]
        return parse_json(text)
    except (OSError, ValueError) as error:
        raise NoFigure(f"{path.name} cannot be read ({' '.join(str(error).split())[:100]})") from None


def read(path: Path) -> Any:
    """The content of a file of JSON, lines of JSON or TOML; NoFigure where it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        raise NoFigure(f"{path.name} is not there") from None
    return _read(path, (found.st_mtime_ns, found.st_size))


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
    if form in ("number", "count", "bytes") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise NoFigure("it is not a number")
    if form == "number":
        return f"{value:.4g}"
    if form == "count":
        return f"{value:,}"
    if form == "bytes":
        return in_bytes(value)
    if form == "text" and isinstance(value, str | int | float) and value is not None:
        return str(value)
    raise NoFigure("it is not of that form")


def in_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


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
            form: str = self._open.get("data-form", "")
            file, place = (unquote(self._open.get(name, "")) for name in ("data-file", "data-place"))
            figure = Figure(file, place, form, self._text)  # type: ignore[arg-type]
            self.found.append(figure)
            self._open = None


def figures_on(page: str) -> Iterator[Figure]:
    """The figures that a page shows, with their places."""
    parser = _Figures()
    parser.feed(page)
    yield from parser.found
