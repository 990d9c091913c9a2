"""Colours of charts, and a chart as SVG or on a page of paper.

On a page of HTML colours are those of the reader's choice, dark or light: a chart is drawn in stand-in colours, each of
which becomes a CSS variable. The series colours are Okabe and Ito's, which colour-blind readers tell apart, and every
series has a line style and a marker of its own, too.
"""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from polyclinic.report.blocks import Chart

OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6f00", "#555555")
#: the same for dark paper
BRIGHT = ("#4aa8e0", "#ff8a3d", "#2fc79a", "#e39bc4", "#f0b429", "#8fd0f5", "#d8cc4a", "#b0b0b0")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Theme:
    """Colours to draw with."""

    ink: str
    faint: str
    grid: str
    paper: str
    series: tuple[str, ...]

    def colour(self, i: int) -> str:
        return self.series[i % len(self.series)]

    def line(self, i: int) -> dict[str, Any]:
        """Colour and style of series i."""
        return {"color": self.colour(i), "linestyle": LINES[i % len(LINES)], "linewidth": 1.8}

    def marker(self, i: int) -> str:
        return MARKERS[i % len(MARKERS)]


PRINT = Theme("#1d2730", "#66717c", "#d9dee3", "#ffffff", OKABE_ITO)
#: stand-ins that no drawing uses otherwise
WEB = Theme("#010101", "#010102", "#010103", "#010104", tuple(f"#0102{i:02x}" for i in range(16, 16 + len(OKABE_ITO))))
VARIABLES = {
    WEB.ink: "var(--ink)",
    WEB.faint: "var(--faint)",
    WEB.grid: "var(--grid)",
    WEB.paper: "var(--paper)",
    **{stand_in: f"var(--c{i})" for i, stand_in in enumerate(WEB.series)},
}

NAME = 30  #: letters in a line of a legend


def tidy(axes: Axes, theme: Theme, *, x: str = "", y: str = "", grid: str = "both") -> None:
    """Quiet axes: no frame at the top and right, a faint grid, labels in words."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.faint)
    axes.tick_params(which="both", colors=theme.ink, length=0, labelsize=8.5)
    if grid:
        axes.grid(axis=grid, color=theme.grid, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    if x:
        axes.set_xlabel(x, color=theme.ink, fontsize=9)
    if y:
        axes.set_ylabel(y, color=theme.ink, fontsize=9)


def legend(axes: Axes, theme: Theme, **where: Any) -> None:
    """A legend without a frame; long names take several lines, as a wide legend leaves no room for the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        lines = ["\n".join(part for line in one.split("\n") for part in textwrap.wrap(line, NAME)) for one in labels]
        axes.legend(handles, lines, frameon=False, fontsize=8, labelcolor=theme.ink, **where)


def plain(text: str) -> str:
    """A text of the data as matplotlib shall write it: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def new_figure(chart: Chart) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=chart.size, layout="constrained")


def svg_of(chart: Chart) -> str:
    """The chart as an SVG element for a page: colours are CSS variables, texts are texts."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.key, "font.family": "sans-serif"}):
        figure = new_figure(chart)
        figure.patch.set_alpha(0)
        chart.draw(figure, WEB)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    return _inline(text[text.index("<svg") :], chart)


def _inline(svg: str, chart: Chart) -> str:
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    # numbered names of groups are the same in every drawing, and nobody asks for them
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    words = escape(f"{chart.title}. The table below has its figures.", quote=True)
    wide = round(chart.size[0] * 105)
    opening = f'<svg role="img" aria-label="{words}" style="max-width: {wide}px" '
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg ", opening, 1)  # no pattern: a backslash in a title is a letter
