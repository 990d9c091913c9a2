"""Plots of trajectories: what is drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch

from polyclinic.attacks import draw_curves, draw_images
from polyclinic.attacks.scoring import TrajectoryScore
from polyclinic.errors import BadInput


def test_images_through_the_steps(tmp_path: Path):
    """A wider picture where there is a true image; what is no number or outside [0, 1] can be shown."""
    rows = {"Euclidean": torch.rand(3, 1, 8, 8), "adaptive Gaussian": torch.full((3, 1, 8, 8), torch.nan)}
    rows["Euclidean"][1] = 7
    draw_images(tmp_path / "without.png", rows, (0, 10, 100))
    draw_images(tmp_path / "with.png", rows, (0, 10, 100), torch.rand(1, 8, 8))
    without, beside = (matplotlib.image.imread(tmp_path / name).shape for name in ("without.png", "with.png"))
    assert beside[1] > without[1]
    with pytest.raises(BadInput, match="'Euclidean' has 3 images for 2 steps"):
        draw_images(tmp_path / "x.png", rows, (0, 10))


def test_curves(tmp_path: Path):
    """One line for each configuration; one where all failed has no mean, and does no harm."""
    errors = torch.tensor([[0.1, 0.01, 0.001], [0.2, 0.05, 4.0]]).double()
    score = TrajectoryScore((0, 10, 100), errors, 1 - errors, torch.tensor([False, True]))
    lost = TrajectoryScore((0, 10, 100), errors, 1 - errors, torch.tensor([True, True]))
    draw_curves(tmp_path / "curves.png", {"TG": score, "Unif": lost}, baseline={"mse": 0.05, "ssim": 0.5})
    picture = matplotlib.image.imread(tmp_path / "curves.png")
    strong = picture[..., :3].max(-1) - picture[..., :3].min(-1) > 0.2
    assert strong.sum() > 100  # the line of the first configuration, in a colour
