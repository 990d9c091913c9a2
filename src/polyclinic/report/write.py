"""Write the report of a run or a comparison: one HTML file that opens offline, and a PDF.

`evidence` reads a folder as data; `run_report` and `comparison` make sentences, charts and tables of it (`blocks`);
templates/report.html shows them. Nothing of a study is run, so that a folder from somebody else can be looked at. Every
text of the data is escaped, and a content security policy forbids scripts and connections.
"""

import base64
import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup, escape
from PIL import ImageFile

from polyclinic import __version__
from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.files import atomic_write
from polyclinic.palette import LIGHT, SERIES, Palette
from polyclinic.report.blocks import DEFINITIONS, Chart, Report, Table, anchor, is_number, shown
from polyclinic.report.comparison import report_of_comparison
from polyclinic.report.evidence import COMPARISON, open_comparison, open_run
from polyclinic.report.run_report import report_of_run
from polyclinic.templates import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: rows of a table that a page and paper show, and that the CSV behind it has
MOST_ROWS, MOST_ON_PAPER, MOST_IN_CSV = 500, 30, 20_000
MOST_LETTERS = 110  # of a table's line on paper: what A4 holds in the size of the print style
LONGEST_WORD = 24  # in a table on paper; longer ones are broken
#: terms that are explained, the longest first, so that no term is found inside another
TERMS = re.compile("|".join(rf"(?<![\w-]){re.escape(t)}(?![\w-])" for t in sorted(DEFINITIONS, key=len, reverse=True)))


def build_report(
    folder: Path, *, by: Sequence[str] = (), prevalence: float | None = None, images: bool = True, title: str = ""
) -> Report:
    """The report of a run folder, or of a comparison's."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise BadInput(f"{folder}: {what}; name that of a run or of a comparison")
    if prevalence is not None and not 0 < prevalence < 1:
        raise BadInput(f"--prevalence {prevalence}: choose a share between 0 and 1, such as 0.02 for 2 of 100 patients")
    with _damage_said(folder):
        if not (folder / COMPARISON).is_file():
            report = report_of_run(open_run(folder, images=images), by, prevalence)
        elif by or prevalence is not None:
            raise BadInput("--by and --prevalence are for the report of one run; name the folder of a run")
        else:
            report = report_of_comparison(open_comparison(folder, images=images))
    return replace(report, title=" ".join(title.split()) or report.title)


@contextlib.contextmanager
def _damage_said(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # files of somebody else may have any shape: a sentence then, and the place with POLYCLINIC_TRACEBACK
        raise BadInput(f"{folder}: a file of it is damaged or was changed ({error!r}); fetch it again") from error


def write_report(report: Report, folder: Path, out: Path | None = None, *, pdf: bool = False) -> list[Path]:
    """Write `report.html` (and `report.pdf`) into the run folder or comparison's, or to `out`; the files."""
    file = out or folder / "report.html"
    with _damage_said(folder):  # charts are drawn here; both pages before either is written
        pages: dict[Path, str | bytes] = {file: html_of(report)}
        if pdf:
            pages[file.with_suffix(".pdf")] = pdf_of(report)
    try:
        for place, content in pages.items():
            atomic_write(place, content)
    except OSError as error:
        raise BadInput(f"{file}: cannot be written ({error.strerror}); name another place with --out") from None
    return list(pages)


def html_of(report: Report) -> str:
    """The whole page."""
    return _page(report, svg=svg_of, parts=lambda table: [table], most_rows=MOST_ROWS, on_paper=False)


def paper_of(report: Report) -> str:
    """The page that is printed: without tables behind charts, links and the study file."""
    return _page(report, svg=svg_on_paper, parts=parts_of, most_rows=MOST_ON_PAPER, on_paper=True)


def _page(report: Report, **how: object) -> str:
    return render(
        "report.html",
        title=report.title,
        report=report,
        titles={anchor(section.key): section.title for section in report.sections},
        version=__version__,
        most_in_csv=MOST_IN_CSV,
        anchor=anchor,
        is_number=is_number,
        shown=shown,
        explained=explained,
        png_link=lambda picture: f"data:image/png;base64,{base64.b64encode(picture.png).decode()}",
        csv_link=lambda table: f"data:text/csv;charset=utf-8,{quote(table.csv(MOST_IN_CSV))}",
        **how,
    )


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

    return Markup("").join(
        Markup("<code>{}</code>").format(part[1:-1]) if len(part) > 1 and part[0] == part[-1] == "`"
        else Markup(TERMS.sub(explain, str(escape(part))))
        for part in re.split(r"(`[^`]*`)", str(words))
    )  # fmt: skip


def pdf_of(report: Report) -> bytes:
    """The page with its print style, laid out by WeasyPrint; BadInput where it or its system libraries are missing."""
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
    asks_nobody = URLFetcher(allowed_protocols=["data"])
    return HTML(string=paper_of(report), url_fetcher=asks_nobody).write_pdf()


def parts_of(table: Table) -> list[Table]:
    """The table, or several with some of its columns each, where words would be broken to make all of them fit; each
    begins with the first column."""
    wide = [_letters([name, *(row[c] for row in table.rows[:MOST_ON_PAPER] if c < len(row))])
            for c, name in enumerate(table.columns)]  # fmt: skip
    groups: list[list[int]] = [[0]]
    for column in range(1, len(wide)):
        if len(groups[-1]) > 1 and sum(wide[c] for c in [*groups[-1], column]) > MOST_LETTERS:
            groups.append([0])
        groups[-1].append(column)
    return [
        Table(_chosen(table.columns, group), [_chosen(row, group) for row in table.rows], "" if number else table.title)
        for number, group in enumerate(groups)
    ]


def _letters(cells: Sequence[Any]) -> int:
    """Letters that a column needs for its longest word; of a very long one, some."""
    return min(LONGEST_WORD, max((len(word) for cell in cells for word in shown(cell).split()), default=1)) + 2


def _chosen(cells: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [cells[place] for place in places if place < len(cells)]


# --- charts as SVG: on a page of HTML in the colours of the reader's choice, dark or light -------------------


#: stand-ins for the CSS variables of a page: each becomes its variable, and no drawing uses them otherwise
WEB = Palette(
    "#010101", "#010102", "#010103", "#010104", "#010105", "#010106", "#010107", "#010108",
    tuple(f"#0102{i:02x}" for i in range(16, 16 + len(SERIES))),
)  # fmt: skip


def figure_of(chart: Chart, theme: Palette) -> "Figure":
    """The chart, drawn by matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=chart.size, layout="constrained")
    figure.patch.set_alpha(0)
    chart.draw(figure.subplots(chart.panels, 1, sharex=True), theme)
    return figure


def svg_of(chart: Chart) -> Markup:
    """The chart as an SVG element for a page: colours are CSS variables, texts are texts."""
    svg = _svg(chart, WEB, "none")
    for variable, stand_in in WEB.variables().items():
        svg = svg.replace(stand_in, f"var({variable})")
    return Markup(svg)


def svg_on_paper(chart: Chart) -> Markup:
    """The chart as an SVG element for paper: colours are light, texts are drawn."""
    return Markup(_svg(chart, LIGHT, "path"))


def _svg(chart: Chart, theme: Palette, texts: str) -> str:
    import matplotlib

    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": texts, "svg.hashsalt": chart.key, "font.family": "sans-serif"}):
        figure_of(chart, theme).savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    svg = content.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # numbered names of groups are the same in every drawing, and nobody asks for them
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    words, wide = escape(f"{chart.title}. The table below has its figures."), round(chart.size[0] * 105)
    # no pattern: a backslash in a title is a letter
    return svg.replace("<svg ", f'<svg role="img" aria-label="{words}" style="max-width: {wide}px" ', 1)
