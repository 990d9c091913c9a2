"""Random shares: how much each image of a batch weighs in its gradient, drawn anew for every batch.

A coordinator that moves a threshold by a small step each round subtracts two gradients, and what is left is the image
that the threshold has passed. With shares from a secret of the site nothing cancels. The shares are those of the
Bayesian bootstrap (Rubin 1981): exponential numbers over their sum. A unit that answers to one or two images of a batch
has their gradient for itself, whatever their shares: it is held back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

#: a unit of a dense layer learns from a batch if more images than this have a gradient in it
FEW = 2
#: but in a small batch this part of the images is enough to be held back
SMALL = 4


def draw_shares(count: int, rng: torch.Generator) -> Tensor:
    """Weights of so many images, float32 [count], 1 in the mean."""
    return torch.empty(count).exponential_(generator=rng)


@contextlib.contextmanager
def hold_rows_of_few(model: nn.Module) -> Iterator[None]:
    """A while in which no unit of a dense layer learns from one or two images of a batch alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(_hold_when_it_learns) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hold_when_it_learns(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if output.requires_grad and output.dim() == 2:
        output.register_hook(_held)


def _held(gradient: Tensor) -> Tensor:
    """The gradient [N, U] of a layer's output without the units in which only a few images have one."""
    few = min(FEW, len(gradient) // SMALL)
    return gradient * ((gradient != 0).sum(0) > few)
