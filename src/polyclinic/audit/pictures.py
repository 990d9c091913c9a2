"""Pictures of findings: histograms of members beside held-out images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from polyclinic.data.picture import FAINT, INK

COLOURS = ("#e07b54", "#4c8fbd", "#59a58b")


def histograms(measured: str, groups: Mapping[str, Tensor], *, limit: float | None = None) -> Callable[[Any], None]:
    """A function that draws one histogram per group over each other; `limit` is marked where there is one."""

    def draw(path: Path) -> None:
        figure = Figure(figsize=(6.4, 3.4), layout="constrained", facecolor="white")
        axes = figure.subplots()
        values = {name: np.asarray(tensor, dtype=float) for name, tensor in groups.items()}
        every = np.concatenate([one[np.isfinite(one)] for one in values.values()])
        edges = np.histogram_bin_edges(every, bins=24).tolist()
        for (name, one), colour in zip(values.items(), COLOURS, strict=False):
            axes.hist(one, edges, density=True, color=colour, alpha=0.55, label=f"{name} ({len(one)})")
        if limit is not None:
            axes.axvline(limit, color=INK, linestyle="--", linewidth=1.2, label="limit of a copy")
        _tidy(axes, measured)
        figure.savefig(path, dpi=120)

    return draw


def _tidy(axes: Any, measured: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.set_yticks([])
    axes.set_xlabel(measured, color=INK)
    axes.legend(frameon=False)
