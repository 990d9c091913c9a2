"""A report as one HTML file that opens offline: no script, no font, no picture from anywhere else.

Every text of the data is escaped. A content security policy forbids scripts and connections, so that a text that slips
through does nothing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from urllib.parse import quote

from polyclinic import __version__
from polyclinic.report.blocks import Block, Cell, Chart, Picture, Report, Section, Table, Text, shown
from polyclinic.report.theme import svg_of
from polyclinic.report.words import DEFINITIONS, WARNINGS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
NUMBER = ' class="number"'
#: rows of a table that a page shows, and that the CSV behind it has
MOST_ROWS, MOST_IN_CSV = 500, 20_000
#: terms that are explained, the longest first, so that no term is found inside another
TERMS = re.compile(
    "|".join(rf"(?<![\w-]){re.escape(escape(term))}(?![\w-])" for term in sorted(DEFINITIONS, key=len, reverse=True))
)


def html_of(report: Report) -> str:
    """The whole page."""
    style = (files("polyclinic.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<li><a href="#{_id(s.key)}">{escape(s.title)}</a></li>' for s in report.sections)
    summary = _list(report.summary)
    if report.warnings:
        summary += f"<h3>{WARNINGS}</h3>{_list(report.warnings)}"
    body = "".join(_section(section) for section in report.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="referrer" content="no-referrer">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#summary">Skip to the summary</a>
<div class="frame">
<nav aria-label="Sections"><ol><li><a href="#summary">Summary</a></li>{links}</ol></nav>
<main>
<h1>{escape(report.title)}</h1>
<p class="subtitle">{escape(report.subtitle)}</p>
<section id="summary" class="summary" aria-label="Summary">{summary}</section>
{body}
<footer>Written by polyclinic {escape(__version__)}. Dotted words are explained when you point at them or reach them
with the Tab key. Every chart has its figures in a table below it.</footer>
</main>
</div>
</body>
</html>
"""


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{explained(sentence)}</li>' for sentence in sentences)}</ul>"


def _id(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", key) or "section"


def _section(section: Section) -> str:
    blocks = "".join(_block(block) for block in section.blocks)
    return f'<section id="{_id(section.key)}"><h2>{escape(section.title)}</h2>{blocks}</section>\n'


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return _text(block)
    if isinstance(block, Chart):
        return _chart(block)
    if isinstance(block, Picture):
        content = base64.b64encode(block.png).decode()
        picture = f'<img alt="{escape(block.words, quote=True)}" src="data:image/png;base64,{content}">'
        return f'<figure id="{_id(block.key)}">{picture}<figcaption>{explained(block.words)}</figcaption></figure>'
    return _table(block)


def _text(text: Text) -> str:
    if text.kind == "code":
        return f"<pre tabindex=0>{escape(text.words)}</pre>"
    return f'<p class="{text.kind}">{explained(text.words)}</p>'


def _chart(chart: Chart) -> str:
    note = f" {explained(chart.note)}" if chart.note else ""
    return (
        f'<figure id="chart-{_id(chart.key)}" class="chart"><h3>{escape(chart.title)}</h3>{svg_of(chart)}'
        f"<figcaption>{note}</figcaption>"
        f"<details><summary>Table of '{escape(chart.title)}'</summary>{_table(chart.table, chart.key)}</details>"
        "</figure>"
    )


def _table(table: Table, key: str = "") -> str:
    head = "".join(
        f'<th scope="col"{_of_numbers(table, c)}>{explained(str(n))}</th>' for c, n in enumerate(table.columns)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows[:MOST_ROWS])
    in_csv = "all of them" if len(table.rows) <= MOST_IN_CSV else f"the first {MOST_IN_CSV:,}"
    more = f"<p class=note>The first {MOST_ROWS} of {len(table.rows):,} rows; the CSV has {in_csv}.</p>"
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    heads = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    name = _id(key or table.title or "table")
    content = quote(table.csv(MOST_IN_CSV))
    link = f'<a class="csv" download="{name}.csv" href="data:text/csv;charset=utf-8,{content}">CSV</a>'
    words = escape(table.title or key or "table", quote=True)
    inside = f"<table>{heads}<tbody>{rows}</tbody></table>"
    return (
        f'{title}<div class="scroll" tabindex="0" role="region" aria-label="{words}">{inside}</div>'
        f"{more if len(table.rows) > MOST_ROWS else ''}{link}"
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _of_numbers(table: Table, column: int) -> str:
    """How the head of a column is marked whose cells are numbers."""
    cells = [row[column] for row in table.rows[:MOST_ROWS] if column < len(row)]
    return NUMBER if any(map(_is_number, cells)) else ""


def _cell(cell: Cell) -> str:
    return f"<td{NUMBER if _is_number(cell) or cell is None else ''}>{escape(shown(cell))}</td>"


def explained(words: str) -> str:
    """Text as HTML, with the first use of each term explained on hover and focus, and `commands` as code."""
    seen: set[str] = set()

    def explain(match: re.Match[str]) -> str:
        term = match[0]
        if term in seen:
            return term
        seen.add(term)
        tip = f'<span class="tip" role="tooltip">{escape(DEFINITIONS[term])}</span>'
        return f'<span class="term" tabindex="0">{term}{tip}</span>'

    parts = re.split(r"(`[^`]*`)", words)
    return "".join(
        f"<code>{escape(part[1:-1])}</code>" if part.startswith("`") and part.endswith("`") and len(part) > 1
        else TERMS.sub(explain, escape(part))
        for part in parts
    )  # fmt: skip
