"""Colours of all charts and pages, on light and on dark paper.

Series colours are Okabe and Ito's, which colour-blind readers tell apart, darker where white paper needs it; every
series has a line style and a marker of its own, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))
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
