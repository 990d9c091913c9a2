"""Plots of findings: histograms of members beside held-out images, and images beside their nearest ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from polyclinic.data.plots import draw_rows
from polyclinic.palette import FAINT, INK, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADROOM = 1.3


@dataclass(frozen=True)
class Pairs:
    """Images that belong together, uint8 [N, C, H, W] each by the name of their row, with words above each pair."""

    rows: Mapping[str, Tensor]
    captions: Sequence[str]


def histograms(
    measured: str,
    groups: Mapping[str, Tensor],
    *,
    limit: float | None = None,
    pairs: Pairs | None = None,
    title: str = "",
) -> Callable[[Path], None]:
    """A function that draws one histogram per group over each other; `limit` is marked where there is one, and `pairs`
    of images are shown below."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure  # here: not everybody has it

        figure = Figure(figsize=(6.4, 3.4 if pairs is None else 5.6), layout="constrained", facecolor="white")
        parts: Any = [figure] if pairs is None else figure.subfigures(2, 1, height_ratios=(3.4, 2.2))
        axes = parts[0].subplots()
        values = {name: np.asarray(tensor, dtype=float) for name, tensor in groups.items()}
        every = np.concatenate([one[np.isfinite(one)] for one in values.values()])
        edges = np.histogram_bin_edges(every, bins=24).tolist()
        for (name, one), colour in zip(values.items(), SERIES, strict=False):
            axes.hist(one, edges, density=True, color=colour, alpha=0.55, label=f"{name} ({len(one)})")
        if limit is not None:
            axes.axvline(limit, color=INK, linestyle="--", linewidth=1.2, label="limit of a copy")
        axes.set_ylim(top=HEADROOM * axes.get_ylim()[1])  # for the legend
        _tidy(axes, measured)
        axes.set_title(title or f"How {measured} is distributed; numbers of images in brackets", fontsize=9, loc="left")
        if pairs is not None:
            draw_rows(parts[1].subplots(), pairs.rows, pairs.captions, size=7)
        figure.savefig(path, dpi=120)

    return draw


def _tidy(axes: "Axes", measured: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.set_yticks([])
    axes.set_xlabel(measured, color=INK)
    axes.legend(frameon=False)
