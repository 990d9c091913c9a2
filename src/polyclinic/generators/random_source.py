"""Random source: tensors of random numbers on a device, drawn from a generator that lives anywhere."""

from __future__ import annotations

import torch
from torch import Tensor


class RandomSource:
    """Draws from `rng`, wherever that lives, and gives tensors on `device`."""

    def __init__(self, rng: torch.Generator, device: torch.device) -> None:
        self.rng, self.device = rng, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def integers(self, bound: int, *shape: int) -> Tensor:
        """From 0 up to, and without, `bound`."""
        return torch.randint(bound, shape, generator=self.rng, device=self.rng.device).to(self.device)
