"""Colours of all charts and pages, on light and on dark paper; axes, legends, bars and heat maps drawn with them.

Series colours are Okabe and Ito's, which colour-blind readers tell apart, darker where white paper needs it; every
series has a line style and a marker of its own, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))
NAME = 30  #: letters in a line of a legend
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Palette:
    """Colours to draw with."""

    ink: str
    faint: str
    grid: str
    paper: str
    panel: str
    link: str
    bad: str
    good: str
    series: tuple[str, ...]

    def colour(self, i: int) -> str:
        return self.series[i % len(self.series)]

    def line(self, i: int) -> dict[str, Any]:
        """Colour and style of series i, as matplotlib takes them."""
        return {"color": self.colour(i), "linestyle": LINES[i % len(LINES)], "linewidth": 1.8}

    def marker(self, i: int) -> str:
        return MARKERS[i % len(MARKERS)]

    def variables(self) -> dict[str, str]:
        """The colours by the names of their CSS variables: `--ink`, ..., `--c0` for the first series."""
        plain = {f"--{name}": colour for name, colour in vars(self).items() if name != "series"}
        return plain | {f"--c{i}": colour for i, colour in enumerate(self.series)}


LIGHT = Palette(
    "#1d2730", "#5b6670", "#d9dee3", "#ffffff", "#f5f7f9", "#005a9c", "#a3200d", "#006b4f",
    ("#0072b2", "#d55e00", "#009e73", "#b3629a", "#b87a00", "#2f8fc4", "#7a6f00", "#555555"),
)  # fmt: skip
DARK = Palette(
    "#e6ebf0", "#a3aeb8", "#333d47", "#12171c", "#1b2229", "#7cc4ff", "#ff9d8c", "#6fd6b5",
    ("#4aa8e0", "#ff8a3d", "#2fc79a", "#e39bc4", "#f0b429", "#8fd0f5", "#d8cc4a", "#b0b0b0"),
)  # fmt: skip
INK, FAINT, SERIES = LIGHT.ink, LIGHT.faint, LIGHT.series
#: of an audit's verdicts
VERDICTS = {"leaks": LIGHT.bad, "withstood": LIGHT.good, "not tested": SERIES[4]}


def stylesheet() -> str:
    """The colours as CSS variables: light ones, and dark ones for who prefers them."""
    light, dark = ("; ".join(f"{name}: {value}" for name, value in one.variables().items()) for one in (LIGHT, DARK))
    return f""":root {{ color-scheme: light dark; {light}; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}"""


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
