"""A report as one HTML file that opens offline: no script, no font, no picture from anywhere else.

Every text of the data is escaped. A content security policy forbids scripts and connections, so that a text that slips
through does nothing.
"""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

from markupsafe import Markup, escape

from polyclinic import __version__
from polyclinic.report.blocks import Picture, Report, Table, anchor, is_number, shown
from polyclinic.report.metric_names import DEFINITIONS
from polyclinic.report.theme import svg_of
from polyclinic.templates import render

#: rows of a table that a page shows, and that the CSV behind it has
MOST_ROWS, MOST_IN_CSV = 500, 20_000
#: terms that are explained, the longest first, so that no term is found inside another
TERMS = re.compile(
    "|".join(rf"(?<![\w-]){re.escape(term)}(?![\w-])" for term in sorted(DEFINITIONS, key=len, reverse=True))
)


def html_of(report: Report) -> str:
    """The whole page."""
    return page_of(report, svg=svg_of, parts=lambda table: [table], most_rows=MOST_ROWS, on_paper=False)


def page_of(report: Report, **how: object) -> str:
    """The page for a screen or for paper."""
    return render(
        "report.html",
        title=report.title,
        report=report,
        titles={section.anchor: section.title for section in report.sections},
        version=__version__,
        most_in_csv=MOST_IN_CSV,
        anchor=anchor,
        is_number=is_number,
        shown=shown,
        explained=explained,
        png_link=_png_link,
        csv_link=_csv_link,
        **how,
    )


def _png_link(picture: Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"


def _csv_link(table: Table) -> str:
    return f"data:text/csv;charset=utf-8,{quote(table.csv(MOST_IN_CSV))}"


def explained(words: str) -> Markup:
    """Text as HTML, with the first use of each term explained on hover and focus, and `commands` as code."""
    seen: set[str] = set()

    def explain(match: re.Match[str]) -> str:
        term = match[0]
        if term in seen:
            return term
        seen.add(term)
        tip = f'<span class="tip" role="tooltip">{escape(DEFINITIONS[term])}</span>'
        return f'<span class="term" tabindex="0">{term}{tip}</span>'

    parts = re.split(r"(`[^`]*`)", str(words))
    return Markup("").join(
        Markup("<code>{}</code>").format(part[1:-1]) if len(part) > 1 and part[0] == part[-1] == "`"
        else Markup(TERMS.sub(explain, str(escape(part))))
        for part in parts
    )  # fmt: skip
