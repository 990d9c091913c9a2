"""The look of charts, and a chart as SVG.

On a page of HTML colours are those of the reader's choice, dark or light: a chart is drawn in stand-in colours, each of
which becomes a CSS variable.
"""

from __future__ import annotations

import io
import re
import textwrap
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from polyclinic.palette import LIGHT, SERIES, Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from polyclinic.report.blocks import Chart

#: stand-ins for a page's CSS variables, which no drawing uses otherwise
WEB = Palette(
    "#010101", "#010102", "#010103", "#010104", "#010105", "#010106", "#010107", "#010108",
    tuple(f"#0102{i:02x}" for i in range(16, 16 + len(SERIES))),
)  # fmt: skip
NAME = 30  #: letters in a line of a legend


def tidy(axes: Axes, theme: Palette, *, x: str = "", y: str = "", grid: str = "both") -> None:
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


def legend(axes: Axes, theme: Palette, **where: Any) -> None:
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


def svg_of(chart: Chart) -> Markup:
    """The chart as an SVG element for a page: colours are CSS variables, texts are texts."""
    svg = _drawn(chart, WEB, "none")
    for variable, stand_in in WEB.variables().items():
        svg = svg.replace(stand_in, f"var({variable})")
    return Markup(svg)


def svg_on_paper(chart: Chart) -> Markup:
    """The chart as an SVG element for paper: colours are light, texts are drawn."""
    return Markup(_drawn(chart, LIGHT, "path"))


def _drawn(chart: Chart, theme: Palette, texts: str) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": texts, "svg.hashsalt": chart.key, "font.family": "sans-serif"}):
        figure = new_figure(chart)
        figure.patch.set_alpha(0)
        chart.draw(figure, theme)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    return _inline(text[text.index("<svg") :], chart)


def _inline(svg: str, chart: Chart) -> str:
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # numbered names of groups are the same in every drawing, and nobody asks for them
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    words = escape(f"{chart.title}. The table below has its figures.")
    wide = round(chart.size[0] * 105)
    # no pattern: a backslash in a title is a letter
    return svg.replace("<svg ", f'<svg role="img" aria-label="{words}" style="max-width: {wide}px" ', 1)
