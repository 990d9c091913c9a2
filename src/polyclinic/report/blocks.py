"""Blocks of a report: sections of sentences, charts, tables and pictures. They know neither HTML nor PDF."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from polyclinic.palette import Palette

Cell = str | float | int | None


@dataclass(frozen=True)
class Text:
    """A paragraph in plain words; `kind` is "text", "note" for what limits a figure, or "code"."""

    form: ClassVar = "text"
    words: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows of numbers and texts under named columns. A cell is a number, a text, or None (`Cell`);
    `shown` says how to write one."""

    form: ClassVar = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def csv(self, most: int | None = None) -> str:
        """As CSV, of `most` rows at most. A text that a spreadsheet would take for a formula gets a quote in front."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerows([harmless(cell) for cell in row] for row in [self.columns, *self.rows[:most]])
        return text.getvalue()

    def has_numbers(self, column: int, most: int) -> bool:
        """True where cells of a column are numbers, by its first `most` rows."""
        return any(is_number(row[column]) for row in self.rows[:most] if column < len(row))


def harmless(cell: Any) -> Any:
    """A cell of a CSV file; a text that a spreadsheet would take for a formula gets a quote in front."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


@dataclass(frozen=True)
class Chart:
    """A drawing with the table behind it. `draw(axes, theme)` draws with matplotlib; `size` is in inches.

    With several `panels`, one below the other, `axes` is an array of them.
    """

    form: ClassVar = "chart"
    key: str
    title: str
    draw: Callable[[Any, Palette], None]
    table: Table
    note: str = ""
    size: tuple[float, float] = (6.4, 3.8)
    panels: int = 1


@dataclass(frozen=True)
class Picture:
    """A raster image, a PNG, with words below it."""

    form: ClassVar = "picture"
    key: str
    png: bytes
    words: str


Block = Text | Table | Chart | Picture


@dataclass(frozen=True)
class Section:
    """A part of a report under a title; `key` is its anchor."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """All of it: the summary first."""

    title: str
    subtitle: str
    summary: Sequence[str]
    sections: Sequence[Section]
    #: sentences that a run warned with, below the summary
    warnings: Sequence[str] = ()

    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]


def anchor(key: str) -> str:
    """A key as the id of an HTML element."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", key) or "section"


def is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def shown(cell: Any) -> str:
    """A cell as it is written for a person."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return number(cell) if isinstance(cell, float) else str(cell)


def number(value: float) -> str:
    """A number with three digits behind the point where it is small, and fewer where it is large."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"
