"""The look of charts, and a chart as SVG.

On a page of HTML colours are those of the reader's choice, dark or light: a chart is drawn in stand-in colours, each of
which becomes a CSS variable.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
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
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(which="both", colors=theme.ink, length=0, labelsize=8.5)
    if grid:
        axes.grid(axis=grid, color=theme.grid, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.set_xlabel(x, color=theme.ink, fontsize=9)
    axes.set_ylabel(y, color=theme.ink, fontsize=9)


def legend(axes: Axes, theme: Palette, beside: float = 1, **where: Any) -> None:
    """A legend without a frame, right of the axes; long names take several lines, as a wide legend leaves no room for
    the axes."""
    handles, labels = axes.get_legend_handles_labels()
    where = where or {"loc": "upper left", "bbox_to_anchor": (beside, 1)}
    if labels:
        lines = ["\n".join(part for line in one.split("\n") for part in textwrap.wrap(line, NAME)) for one in labels]
        axes.legend(handles, lines, frameon=False, fontsize=8, labelcolor=theme.ink, **where)


def plain(text: str) -> str:
    """A text of the data as matplotlib shall write it: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def stacked_bars(axes: Axes, theme: Palette, rows: Mapping[str, Sequence[float]], names: Sequence[str], x: str) -> None:
    """A bar for each row, from top to bottom, with a colour for each name; beyond the colours there are hatches."""
    left = np.zeros(len(rows))
    for i, name in enumerate(names):
        values = np.array([own[i] for own in rows.values()], dtype=float)
        axes.barh(range(len(rows)), values, left=left, height=0.7, color=theme.colour(i), label=plain(name),
                  edgecolor=theme.paper, hatch=("", "//", "..", "xx")[i // len(theme.series) % 4])  # fmt: skip
        left += values
    axes.set_yticks(range(len(rows)), [plain(row) for row in rows])
    axes.invert_yaxis()
    tidy(axes, theme, x=x, grid="x")
    legend(axes, theme, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(4, len(names)))


def heat_map(
    axes: Any,
    theme: Palette,
    grid: np.ndarray,
    names: tuple[list[str], list[str]],
    limits: tuple[float, float] = (0.0, 1.0),
    form: str = ".2f",
) -> None:
    """A grid of numbers under the names of rows and columns; darker is more. Numbers are written where they can be
    read; NaN is an empty cell."""
    from matplotlib import colormaps

    low, high = limits
    axes.imshow(grid, cmap=colormaps["Blues"], vmin=low, vmax=high if high > low else low + 1, aspect="auto")
    for i, j in np.argwhere(np.isfinite(grid)) if grid.size <= 400 else []:
        share = (grid[i, j] - low) / ((high - low) or 1)
        axes.text(j, i, format(grid[i, j], form), ha="center", va="center", color="white" if share > 0.5 else "black",
                  fontsize=8 if max(grid.shape) <= 10 else 5.5)  # fmt: skip
    rows, columns = ([plain(name) for name in some] for some in names)
    level = len(columns) <= 8 and max((len(name) for name in columns), default=0) * len(columns) <= 40
    turned: dict[str, Any] = {} if level else {"rotation": 35, "ha": "right"}
    axes.set_xticks(range(len(columns)), columns, **turned)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(colors=theme.ink, length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def figure_of(chart: Chart, theme: Palette) -> Figure:
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
