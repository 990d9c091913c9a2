"""How a label enters a network: a vector for each class, or a smooth curve of vectors for a value such as an age."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.tasks import Target
from polyclinic.tasks.regression import scale

WAVES = 8  # the finest tells values apart that lie a sixteenth of the public range from each other


class LabelEmbedding(nn.Module):
    """Labels [B] to vectors [B, width]: of classes where the target has some, of values where it has a range,
    and the same vector for every image where it has neither."""

    def __init__(self, target: Target, width: int) -> None:
        super().__init__()
        self.classes = len(target.classes)
        self.values = not target.classes and target.label_range is not None
        if self.values:
            self.middle, self.reach = scale(target)
            self.embed: nn.Module = nn.Sequential(nn.Linear(2 * WAVES + 1, width), nn.ReLU(), nn.Linear(width, width))
        else:
            self.embed = nn.Embedding(max(1, self.classes), width)

    def forward(self, labels: Tensor) -> Tensor:
        if self.values:
            return self.embed(self._waves(labels))
        return self.embed(labels.long() if self.classes else torch.zeros_like(labels, dtype=torch.long))

    def _waves(self, labels: Tensor) -> Tensor:
        at = ((labels.to(self.embed[0].weight.dtype) - self.middle) / self.reach)[:, None]  # type: ignore[index]
        angle = at * torch.arange(1, WAVES + 1, device=labels.device) * (math.pi / 2)
        return torch.cat([at, angle.sin(), angle.cos()], 1)


def even_labels(count: int, target: Target) -> Tensor:
    """Labels spread evenly over the classes, or over the public range of values: nothing of any site is in them."""
    if target.classes:
        return torch.arange(count) % len(target.classes)
    low, high = target.label_range or (0.0, 0.0)
    return torch.linspace(low, high, count)


def check_labels(labels: Tensor, count: int, target: Target) -> Tensor:
    """The labels, or BadInput where they are not one per image or not of the target's classes."""
    if tuple(labels.shape) != (count,):
        raise BadInput(f"generator: {count} images came with labels of shape {tuple(labels.shape)}; give one each")
    if target.classes and count and not 0 <= int(labels.min()) <= int(labels.max()) < len(target.classes):
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise BadInput(f"generator: labels run from {found}, but there are {len(target.classes)} classes from 0 on")
    return labels
