"""Random numbers for each image: seeds of the images of a private batch, and shares of images in a gradient.

Differential privacy compares a site with and without one image. If augmentation and dropout were drawn by place, one
image less would change what all images behind it contribute, and the sum could move by far more than the clipping norm.
So private draws belong to the image, not to its place in the batch.

Shares: a coordinator that moves a threshold by a small step each round subtracts two gradients, and what is left is the
image that the threshold has passed. With shares from a secret of the site nothing cancels. The shares are those of the
Bayesian bootstrap (Rubin 1981): exponential numbers over their sum. A unit that answers to few images of a batch, or to
one above all, has their gradient for itself, whatever their shares: it is held back.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from polyclinic.errors import WorkFailed
from polyclinic.randomness import seed_of, torch_rng

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet


# --- seeds of each image of a private batch -------------------------------------------------------


Address = tuple[str | int, ...]


def image_names(images: "ImageSet") -> list[str]:
    """A name for each image, by its pixels and its label: the same whatever other images a site has."""
    return row_names(*(one for one in (images.images, images.labels, images.masks) if one is not None))


def row_names(*arrays: np.ndarray) -> list[str]:
    """A name for each row of arrays [B, ...] by what is in it, whatever other rows there are."""
    rows = ([np.ascontiguousarray(array[place]).tobytes() for array in arrays] for place in range(len(arrays[0])))
    return [hashlib.blake2b(b"".join(row), digest_size=16).hexdigest() for row in rows]


def image_seeds(names: list[str], index: Tensor, *address: str | int) -> Tensor:
    """A seed for each of the images at `index`, int64 [B]."""
    return torch.tensor([seed_of(*address, "image", names[place]) for place in index.tolist()], dtype=torch.int64)


def joined_seeds(count: int, *address: str | int) -> Tensor:
    """Seeds of rows that joined a batch and are nobody's images, by their place behind the images, int64 [count]."""
    return torch.tensor([seed_of(*address, "joined", place) for place in range(count)], dtype=torch.int64)


def uniform(seeds: Tensor, *shape: int, purpose: str) -> Tensor:
    """Numbers in [0, 1) for each row, [B, *shape]."""
    rows = [torch.rand(shape, generator=torch_rng(seed, purpose)) for seed in seeds.tolist()]
    return torch.stack(rows) if rows else torch.empty(0, *shape)


@contextmanager
def dropout_by_row(module: nn.Module, seeds: Tensor) -> Iterator[None]:
    """A while in which every dropout layer of `module` drops in each row of its input what that row's seed says."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _DropoutNd)}
    for name, layer in layers.items():
        layer.forward = _dropping(layer, name, seeds)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def _dropping(layer: _DropoutNd, name: str, seeds: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer's pass: whole channels where the layer drops channels, single numbers otherwise."""
    calls = 0

    def forward(rows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if not layer.training or layer.p == 0:
            return rows
        if len(rows) != len(seeds):
            raise WorkFailed(f"'{name}' drops numbers of {len(rows)} rows where a batch has {len(seeds)} images")
        channels = isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
        shape = (rows.shape[1], *(1 for _ in rows.shape[2:])) if channels else tuple(rows.shape[1:])
        kept = uniform(seeds, *shape, purpose=f"dropout {name} {calls}") >= layer.p
        return rows * kept.to(rows) / (1 - layer.p) if layer.p < 1 else torch.zeros_like(rows)

    return forward


# --- shares of images in a gradient ---------------------------------------------------------------


#: a unit of a dense layer, or a channel of a convolution, learns from a batch if more images than this have a gradient
#: in it; in a small batch, more than this part of it
FEW, PART = 3, 4
#: and if no image has more than this share of the gradient. A unit in which all images have one, as those of the last
#: layer, learns all the same: late in training few images are left to learn from
MOST = 0.6


def draw_shares(count: int, rng: torch.Generator) -> Tensor:
    """Weights of so many images, float32 [count], 1 in the mean."""
    return torch.empty(count).exponential_(generator=rng)


@contextmanager
def hold_rows_of_few(model: nn.Module) -> Iterator[None]:
    """A while in which no unit of a dense layer and no channel of a convolution learns from few images of a batch
    alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]

    def hold_when_it_learns(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and output.dim() in (2, 4):
            output.register_hook(_held)

    hooks = [layer.register_forward_hook(hold_when_it_learns) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _held(gradient: Tensor) -> Tensor:
    """The gradient of a layer's output, [N, U] or [N, U, H, W], without the units in which only a few images have one:
    at any place, where there are places."""
    size = gradient.abs() if gradient.dim() == 2 else gradient.abs().sum((2, 3))
    images = (size > 0).sum(0)
    alone = (size.amax(0) > MOST * size.sum(0)) & (images < len(gradient))
    learns = (images > min(FEW, len(gradient) // PART)) & ~alone
    return gradient * learns.view(-1, *[1] * (gradient.dim() - 2))
