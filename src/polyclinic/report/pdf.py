"""A report as PDF: the page of the HTML report with its print style, laid out by WeasyPrint; no browser is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import ImageFile

from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.report.blocks import Report, Table, shown
from polyclinic.report.html import page_of
from polyclinic.report.theme import svg_on_paper

MOST_ROWS = 30  # of a table
MOST_LETTERS = 110  # of a table's line: what A4 holds in the size of the print style
LONGEST_WORD = 24  # in a table; longer ones are broken


def pdf_of(report: Report) -> bytes:
    """The report as the content of a PDF file; BadInput where WeasyPrint or its system libraries are missing."""
    need("weasyprint", "--pdf")
    strict = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        from weasyprint import HTML
        from weasyprint.urls import URLFetcher
    except OSError:  # Pango, which is no Python package
        raise BadInput(
            "--pdf needs Pango, a library of the system that WeasyPrint draws text with, and it is not installed; "
            "install it, or print report.html from a browser"
        ) from None
    finally:  # WeasyPrint's import lets Pillow read damaged images in silence, in the whole process
        ImageFile.LOAD_TRUNCATED_IMAGES = strict
    return HTML(
        string=paper_of(report), url_fetcher=URLFetcher(allowed_protocols=["data"])
    ).write_pdf()  # it asks nobody


def paper_of(report: Report) -> str:
    """The page that is printed: without tables behind charts, links and the study file."""
    return page_of(report, svg=svg_on_paper, parts=parts_of, most_rows=MOST_ROWS, on_paper=True)


def parts_of(table: Table) -> list[Table]:
    """The table, or several with some of its columns each, where words would be broken to make all of them fit; each
    begins with the first column."""
    wide = [_letters([name, *(row[c] for row in table.rows[:MOST_ROWS] if c < len(row))])
            for c, name in enumerate(table.columns)]  # fmt: skip
    groups: list[list[int]] = [[0]]
    for column in range(1, len(wide)):
        if len(groups[-1]) > 1 and sum(wide[c] for c in [*groups[-1], column]) > MOST_LETTERS:
            groups.append([0])
        groups[-1].append(column)
    return [
        replace(table, columns=_chosen(table.columns, group), rows=[_chosen(row, group) for row in table.rows],
                title=table.title if not number else "")
        for number, group in enumerate(groups)
    ]  # fmt: skip


def _letters(cells: Sequence[Any]) -> int:
    """Letters that a column needs for its longest word; of a very long one, some."""
    return min(LONGEST_WORD, max((len(word) for cell in cells for word in shown(cell).split()), default=1)) + 2


def _chosen(cells: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [cells[place] for place in places if place < len(cells)]
