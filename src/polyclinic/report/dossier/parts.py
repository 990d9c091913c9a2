"""What sections of a dossier are made of: paragraphs, lists and tables, of words and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from polyclinic.report.dossier.figures import Figure

Inline = str | Figure


@dataclass(frozen=True)
class Paragraph:
    words: Sequence[Inline]


@dataclass(frozen=True)
class Bullets:
    items: Sequence[Sequence[Inline]]


@dataclass(frozen=True)
class Table:
    """`head` are words; a cell is words or a figure."""

    head: Sequence[str]
    rows: Sequence[Sequence[Inline]]


Part = Paragraph | Bullets | Table


@dataclass(frozen=True)
class Section:
    name: str  #: for links
    title: str
    asked: str  #: who asks for this
    parts: Sequence[Part] = field(default_factory=list)


def say(*words: Inline | None) -> Paragraph:
    """A paragraph; a figure that does not exist is said not to be known."""
    return Paragraph(["not known" if word is None else word for word in words])


def cells(*words: Inline | None) -> list[Inline]:
    return ["not known" if word is None else word for word in words]


def figures_in(sections: Sequence[Section]) -> Iterator[Figure]:
    """All figures, in the order of the page."""
    for section in sections:
        for part in section.parts:
            lists = (
                [part.words] if isinstance(part, Paragraph) else part.items if isinstance(part, Bullets) else part.rows
            )
            for words in lists:
                yield from (word for word in words if isinstance(word, Figure))
