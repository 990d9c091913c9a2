"""A denoiser as a prior of gradient inversion: a small network that learns to take noise off public images.

What the denoiser would change about an image is unlikely in it (regularisation by denoising, Romano et al. 2017). It
needs no diffusion: one network for all levels of noise, trained in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from polyclinic.randomness import seed_of, torch_rng

WIDTH = 32
BATCH = 16
NOISE = 0.3  #: deviation of the noise, at most
LEAST = 1e-6  #: squared change of a public image that counts as none


class Denoiser(nn.Module):
    """Takes what four convolutions find off an image [N, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels, WIDTH, WIDTH, WIDTH, channels]
        layers = [nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(widths)]
        self.noise = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])

    def forward(self, images: Tensor) -> Tensor:
        return images - self.noise(images)


@dataclass(frozen=True)
class DenoiserPrior:
    """A denoiser, and what it changes about public images: the mean square."""

    denoiser: Denoiser
    usual: float

    @classmethod
    def of(cls, images: Tensor, *, steps: int = 600, seed: int = 0) -> DenoiserPrior:
        """Learnt from four fifths of public images [M, C, H, W] in [0, 1]; what is usual, from the others."""
        tried = max(1, len(images) // 5)
        denoiser = train(images[tried:].float(), steps, seed)
        with torch.no_grad():
            usual = (denoiser(images[:tried].float()) - images[:tried]).square().mean()
        return cls(denoiser, max(float(usual), LEAST))

    def __call__(self, images: Tensor) -> Tensor:
        """About 1 for images like the public ones, larger for others."""
        flat = images.flatten(0, 1)
        change = (self.denoiser(flat) - flat).square().flatten(1).mean(1) / self.usual
        return change.unflatten(0, images.shape[:2]).mean(1)

    def select_rows(self, rows: Tensor) -> DenoiserPrior:
        return self

    def to(self, device: str, dtype: torch.dtype) -> DenoiserPrior:
        return DenoiserPrior(self.denoiser.to(device, dtype), self.usual)


def train(images: Tensor, steps: int, seed: int) -> Denoiser:
    """A denoiser of images [M, C, H, W] with noise of any deviation up to `NOISE`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, "denoiser", "weights"))
        denoiser = Denoiser(images.shape[1])
    optimizer, rng = Adam(denoiser.parameters(), 1e-3), torch_rng(seed, "denoiser", "batches")
    for _ in range(steps):
        clean = images[torch.randint(len(images), (BATCH,), generator=rng)]
        level = NOISE * torch.rand(BATCH, 1, 1, 1, generator=rng)
        noisy = clean + level * torch.randn(clean.shape, generator=rng)
        optimizer.zero_grad()
        F.mse_loss(denoiser(noisy), clean).backward()
        optimizer.step()
    return denoiser.eval().requires_grad_(False)
