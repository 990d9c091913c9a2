"""A report as PDF pages, drawn with matplotlib: no browser is needed. Texts are wrapped, tables are cut where long."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import numpy as np
from PIL import Image

from polyclinic.report.blocks import Block, Chart, Picture, Report, Section, Table, Text, shown
from polyclinic.report.theme import PRINT, plain
from polyclinic.report.words import WARNINGS

#: A4 in inches, and its margins
WIDTH, HEIGHT, MARGIN = 8.27, 11.69, 0.8
LINE = 0.2  # of text, in inches
LETTERS = 92  # in a line of text
LETTER = 0.062  # of a table's text, in inches
MOST_ROWS = 30  # of a table
MOST_LETTERS = int((WIDTH - 2 * MARGIN) / LETTER)  # of a table's line
LONGEST_WORD = 24  # in a table; longer ones are broken
FONTS: dict[Any, Any] = {"font.family": ["DejaVu Sans"], "pdf.fonttype": 42}


class Pages:
    """Pages that are filled from the top; what does not fit goes on the next one."""

    def __init__(self, file: Any) -> None:
        from matplotlib.backends.backend_pdf import PdfPages

        self.pdf = PdfPages(file, metadata={"CreationDate": None, "Creator": "polyclinic", "Producer": "matplotlib"})
        self.figure: Any = None
        self.used = 0.0
        self.number = 0

    def room(self, inches: float) -> float:
        """Where a block of this height begins, from the top of the page; a new page where it does not fit."""
        if self.figure is None or self.used + inches > HEIGHT - MARGIN:
            self.end_page()
            from matplotlib.figure import Figure

            self.figure, self.used = Figure(figsize=(WIDTH, HEIGHT)), MARGIN
            self.number += 1
            self.figure.text(0.5, 0.4 / HEIGHT, str(self.number), ha="center", fontsize=8, color=PRINT.faint)
        top, self.used = self.used, self.used + inches
        return top

    def end_page(self) -> None:
        if self.figure is not None:
            self.pdf.savefig(self.figure)
            self.figure = None

    def close(self) -> None:
        self.end_page()
        self.pdf.close()

    # --- blocks -----------------------------------------------------------------------------------

    def text(
        self, words: str, *, size: float = 9.5, colour: str = PRINT.ink, bold: bool = False, bullet: str = ""
    ) -> None:
        letters = int(LETTERS * 9.5 / size)
        lines = textwrap.wrap(words, letters - len(bullet)) or [""]
        for number, line in enumerate(lines):
            top = self.room(LINE * size / 9.5)
            self.figure.text(
                MARGIN / WIDTH, 1 - (top + 0.14) / HEIGHT, plain((bullet if not number else " " * len(bullet)) + line),
                fontsize=size, color=colour, weight="bold" if bold else "normal",
            )  # fmt: skip
        self.used += 0.08

    def chart(self, chart: Chart) -> None:
        width = min(chart.size[0], WIDTH - 2 * MARGIN)
        height = chart.size[1] * width / chart.size[0]
        if self.used + height + 1.0 > HEIGHT - MARGIN:
            self.used = HEIGHT  # title, chart and note stay together
        self.text(chart.title, bold=True)
        top = self.room(height)
        self._place(chart, top, width, height)
        if chart.note:
            self.text(chart.note, size=8, colour=PRINT.faint)

    def _place(self, chart: Chart, top: float, width: float, height: float) -> None:
        """Draw the chart by itself and put it on the page as a picture of 200 dots an inch."""
        from matplotlib.figure import Figure

        own = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        chart.draw(own, PRINT)
        content = io.BytesIO()
        own.savefig(content, dpi=200, format="png")
        content.seek(0)
        with Image.open(content) as picture:
            self._picture(np.asarray(picture.convert("RGB")), top, width, height)

    def _picture(self, pixels: np.ndarray, top: float, width: float, height: float) -> None:
        box = (MARGIN / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT)
        axes = self.figure.add_axes(box)
        axes.imshow(pixels, aspect="auto", interpolation="antialiased")
        axes.set_axis_off()

    def picture(self, picture: Picture) -> None:
        with Image.open(io.BytesIO(picture.png)) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        width = min(WIDTH - 2 * MARGIN, pixels.shape[1] / 110)
        height = width * pixels.shape[0] / pixels.shape[1]
        if height > 8:
            width, height = width * 8 / height, 8.0
        self._picture(pixels, self.room(height + 0.05), width, height)
        self.text(picture.words, size=8, colour=PRINT.faint)

    def table(self, table: Table) -> None:
        head = [[str(name) for name in table.columns]] if any(table.columns) else []
        cells = [*head, *([shown(cell) for cell in row] for row in table.rows[:MOST_ROWS])]
        for number, part in enumerate(parts_of(cells)):
            self._part(part, len(head), table.title if not number else "")
        if len(table.rows) > MOST_ROWS:
            self.text(f"The first {MOST_ROWS} of {len(table.rows):,} rows; the HTML report has more.", size=8)
        self.used += 0.12

    def _part(self, cells: Cells, heads: int, title: str) -> None:
        """Columns that fit on a page. A title does not stand alone, and a further page repeats the head."""
        widths = widths_of(cells)
        heights = [_height(_wrapped(row, widths)) for row in cells]
        if not self._fits(sum(heights[: heads + 2]) + (0.4 if title else 0.0)):
            self.used = HEIGHT
        if title:
            self.text(title, bold=True)
        for number, row in enumerate(cells):
            if number > heads and not self._fits(heights[number]):
                self.used = HEIGHT
                for again in cells[:heads]:
                    self._row(again, widths, "bold")
            self._row(row, widths, "bold" if number < heads else "normal")

    def _fits(self, inches: float) -> bool:
        return self.figure is not None and self.used + inches <= HEIGHT - MARGIN

    def _row(self, row: list[str], widths: list[int], weight: str) -> None:
        """Cells side by side, each wrapped to the letters of its column."""
        wrapped = _wrapped(row, widths)
        top, left = self.room(_height(wrapped)), MARGIN
        for lines, wide in zip(wrapped, widths, strict=False):
            for k, line in enumerate(lines):
                place = (left / WIDTH, 1 - (top + 0.12 + 0.155 * k) / HEIGHT)
                self.figure.text(*place, plain(line), fontsize=7.2, color=PRINT.ink, weight=weight)
            left += wide * LETTER


Cells = list[list[str]]


def _wrapped(row: list[str], widths: list[int]) -> Cells:
    return [textwrap.wrap(cell, max(4, wide - 2)) or [""] for cell, wide in zip(row, widths, strict=False)]


def _height(wrapped: Cells) -> float:
    return 0.155 * max(map(len, wrapped)) + 0.04


def parts_of(cells: Cells) -> list[Cells]:
    """The table, or several with some of its columns each, where words would be broken to make all of them fit; each
    begins with the first column."""
    least = _least(cells)
    groups: list[list[int]] = [[0]]
    for column in range(1, len(cells[0])):
        if len(groups[-1]) > 1 and sum(least[c] for c in groups[-1]) + least[column] > MOST_LETTERS:
            groups.append([0])
        groups[-1].append(column)
    return [[[row[c] for c in group if c < len(row)] for row in cells] for group in groups]


def widths_of(cells: Cells) -> list[int]:
    """Letters of each column, together no wider than the page: long columns give way, and no word is broken that could
    stay whole."""
    widths = [max(len(row[c]) for row in cells if c < len(row)) + 2 for c in range(len(cells[0]))]
    for least in (_least(cells), [6] * len(widths)):
        while sum(widths) > MOST_LETTERS and (long := [c for c, wide in enumerate(widths) if wide > least[c]]):
            widths[max(long, key=lambda c: widths[c])] -= 1
    return widths


def _least(cells: Cells) -> list[int]:
    """Letters that a column needs for its longest word; of a very long one, some."""
    words = [[word for row in cells if c < len(row) for word in row[c].split()] for c in range(len(cells[0]))]
    return [min(LONGEST_WORD, max(map(len, own), default=1)) + 2 for own in words]


def pdf_of(report: Report) -> bytes:
    """The report as the content of a PDF file."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(FONTS):
        pages = Pages(content)
        pages.text(report.title, size=17, bold=True)
        pages.text(report.subtitle, colour=PRINT.faint)
        for sentence in report.summary:
            pages.text(sentence.replace("`", ""), bullet="• ")
        if report.warnings:
            pages.text(WARNINGS, bold=True)
        for sentence in report.warnings:
            pages.text(sentence.replace("`", ""), bullet="• ")
        for section in report.sections:
            if pages.used + _first_height(section) > HEIGHT - MARGIN:
                pages.used = HEIGHT  # a title does not stand alone at the end of a page
            pages.used += 0.15
            pages.text(section.title, size=13, bold=True)
            for block in section.blocks:
                _add(pages, block)
        pages.close()
    return content.getvalue()


def _first_height(section: Section) -> float:
    """Inches of a section's title and of what follows it."""
    first = section.blocks[0] if section.blocks else None
    return 2.0 + (first.size[1] * 1.05 if isinstance(first, Chart) else 0.0)


def _add(pages: Pages, block: Block) -> None:
    if isinstance(block, Text) and block.kind == "code":
        pages.text("The study file is in the HTML report and in the run folder (study.toml).", size=8.5)
    elif isinstance(block, Text):
        pages.text(block.words.replace("`", ""), colour=PRINT.faint if block.kind == "note" else PRINT.ink)
    elif isinstance(block, Chart):
        pages.chart(block)
    elif isinstance(block, Picture):
        pages.picture(block)
    elif block.rows:
        pages.table(block)
