"""A released model as one network: prepared images in, what users read out. `predict` and `export` use the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyclinic.tasks import Target, Task


class ReleasedModel(nn.Module):
    """One network, or several whose predictions are averaged.

    Input: uint8 [N, channels, size, size]. Output: probabilities [N, C], values in the label's unit [N], or
    probabilities of the mask [N, H, W]. A network's outputs are divided by its temperature first.
    """

    def __init__(
        self, networks: Sequence[nn.Module], temperatures: Sequence[float], task: Task, target: Target
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.temperatures = tuple(temperatures)
        self.task = task
        self.target = target
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        batch = images.float() / 255
        pairs = zip(self.networks, self.temperatures, strict=True)
        return torch.stack([self._predictions(network(batch), t) for network, t in pairs]).mean(0)

    def _predictions(self, output: Tensor, temperature: float) -> Tensor:
        return self.task.predictions(output if temperature == 1 else output / temperature, self.target)
