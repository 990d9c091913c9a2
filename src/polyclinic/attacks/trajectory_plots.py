"""Plots of trajectories: images through the steps of a search, and mean error and similarity against the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.data.pixels import to_uint8
from polyclinic.data.plots import contact_sheet
from polyclinic.errors import BadInput
from polyclinic.palette import FAINT, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from polyclinic.attacks.scoring import TrajectoryScore


def draw_images(
    path: Path, rows: Mapping[str, Tensor], steps: Sequence[int], truth: Tensor | None = None, where: str = ""
) -> None:
    """A row of images [K, C, H, W] for each name, one for each of `steps`; the true image [C, H, W] (or one for each
    row, [R, C, H, W]) ends each row. What lies outside [0, 1] is cut off. `where` says whose they are."""
    captions = [f"step {step}" for step in steps]
    shown = {name: images.float().nan_to_num(0.5).clamp(0, 1).cpu() for name, images in rows.items()}
    for name, images in shown.items():
        if len(images) != len(steps):
            raise BadInput(f"trajectory: '{name}' has {len(images)} images for {len(steps)} steps; give one for each")
    if truth is not None:
        captions.append("true image")
        true = truth.expand(len(shown), *truth.shape[-3:]).cpu()
        shown = {name: torch.cat((shown[name], true[i : i + 1])) for i, name in enumerate(shown)}
    title = "Reconstructions through the steps of the search" + (", and the true images" if truth is not None else "")
    title = f"{where}. {title}" if where else title
    contact_sheet({name: to_uint8(images) for name, images in shown.items()}, path, captions, title)


def draw_curves(
    path: Path, scores: Mapping[str, TrajectoryScore], *, baseline: Mapping[str, float] | None = None, title: str = ""
) -> None:
    """Mean squared error (logarithmic) and SSIM against the steps, a line for each name; means over the images that
    converged.

    `baseline`: "mse" and "ssim" of an attack that returns another image at random, drawn as dotted lines.
    """
    from matplotlib.figure import Figure  # here: every user of attacks would pay for it

    figure = Figure(figsize=(9.6, 3.6), layout="constrained", facecolor="white")
    both = figure.subplots(1, 2)
    for place, (name, score) in enumerate(scores.items()):
        means, failed = score.means(), int(score.non_converging.sum())
        label = f"{name} ({failed} failed)" if failed else name
        for axes, key in zip(both, ("mse", "ssim"), strict=True):
            axes.plot(score.steps, means[key].tolist(), color=LIGHT.colour(place), label=label, linewidth=1.6)
    for axes, key, words in zip(both, ("mse", "ssim"), ("mean squared error", "SSIM"), strict=True):
        if baseline is not None:
            axes.axhline(baseline[key], color=FAINT, linestyle=":", label="another image at random")
        _tidy(axes, words)
    both[0].set_yscale("log")
    both[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)


def _tidy(axes: Axes, words: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color=LIGHT.grid, linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(words)
