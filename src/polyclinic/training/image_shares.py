"""Random shares: how much each image of a batch weighs in its gradient, drawn anew for every batch.

A coordinator that moves a threshold by a small step each round subtracts two gradients, and what is left is the image
that the threshold has passed. With shares from a secret of the site nothing cancels. The shares are those of the
Bayesian bootstrap (Rubin 1981): exponential numbers over their sum. A unit that answers to few images of a batch, or to
one above all, has their gradient for itself, whatever their shares: it is held back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

#: a unit of a dense layer, or a channel of a convolution, learns from a batch if more images than this have a gradient
#: in it; in a small batch, more than this part of it
FEW, PART = 3, 4
#: and if no image has more than this share of the gradient. A unit in which all images have one, as those of the last
#: layer, learns all the same: late in training few images are left to learn from
MOST = 0.6


def draw_shares(count: int, rng: torch.Generator) -> Tensor:
    """Weights of so many images, float32 [count], 1 in the mean."""
    return torch.empty(count).exponential_(generator=rng)


@contextlib.contextmanager
def hold_rows_of_few(model: nn.Module) -> Iterator[None]:
    """A while in which no unit of a dense layer and no channel of a convolution learns from few images of a batch
    alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(_hold_when_it_learns) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hold_when_it_learns(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if output.requires_grad and output.dim() in (2, 4):
        output.register_hook(_held)


def _held(gradient: Tensor) -> Tensor:
    """The gradient of a layer's output, [N, U] or [N, U, H, W], without the units in which only a few images have one:
    at any place, where there are places."""
    size = gradient.abs() if gradient.dim() == 2 else gradient.abs().sum((2, 3))
    images = (size > 0).sum(0)
    alone = (size.amax(0) > MOST * size.sum(0)) & (images < len(gradient))
    learns = (images > min(FEW, len(gradient) // PART)) & ~alone
    return gradient * learns.view(-1, *[1] * (gradient.dim() - 2))
