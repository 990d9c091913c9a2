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
    rows: list[str],
    columns: list[str],
    *,
    low: float,
    high: float,
    empty_diagonal: bool = False,
    form: str = ".2f",
) -> None:
    """A grid of numbers; darker is more. Numbers are written where they can be read."""
    from matplotlib import colormaps

    colours = colormaps["Blues"]
    axes.imshow(grid, cmap=colours, vmin=low, vmax=high if high > low else low + 1, aspect="auto")
    for i, j in np.ndindex(*grid.shape) if grid.size <= 400 else []:
        if np.isfinite(grid[i, j]) and not (empty_diagonal and i == j):
            share = (grid[i, j] - low) / ((high - low) or 1)
            size = 8 if max(grid.shape) <= 10 else 5.5
            axes.text(j, i, format(grid[i, j], form), ha="center", va="center", fontsize=size,
                      color="white" if share > 0.5 else "black")  # fmt: skip
    level = len(columns) <= 8 and max((len(name) for name in columns), default=0) * len(columns) <= 40
    turned: dict[str, Any] = {} if level else {"rotation": 35, "ha": "right"}
    axes.set_xticks(range(len(columns)), [plain(name) for name in columns], **turned)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows])
    axes.tick_params(colors=theme.ink, length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


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
