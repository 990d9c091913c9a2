"""The course of a study as a site sees it: how far each row of a layer has moved since weights last arrived.

The first weights follow from the study's seed, so that a site knows them by itself. Later ones are compared with those
that arrived before. What is usual depends on the study: so a site also knows how far its own training moves a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyclinic.federation.arriving.orders import Weights, floating, numbers
from polyclinic.federation.arriving.settings import Figure, Incoming

#: ends of the names of batch-norm statistics, which follow the images and not a gradient
STATISTICS = ("running_mean", "running_var")
#: the length of a vector that stands alone counts as no less than this for each of its numbers
LEAST = 0.1
#: a step of a site's own training counts as no longer than this: a study's learning rate must not make room for weights
#: that no training leads to
LONGEST_STEP = 0.11
#: a layer may move as if the site's training moved it by this share of how far it moved the layer that moved farthest:
#: which layers move in a round differs from one to the next
OTHER_LAYERS = 0.25


def layers(weights: Weights) -> dict[str, Tensor]:
    """Rows [R, n] of every layer by its name: a unit's weights and its bias together; a lone vector is one row."""
    tensors = {name: t.float() for name, t in floating(weights).items() if not name.endswith(STATISTICS)}
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        bias = tensors.get(f"{layer}.bias") if kind == "weight" else None
        if kind == "bias" and _belongs(tensor, tensors.get(f"{layer}.weight")):
            continue
        own = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] if kind == "weight" else tensor.reshape(1, -1)
        if bias is not None and _belongs(bias, own):
            own = torch.cat([own, bias[:, None]], 1)
        found[layer if kind == "weight" else name] = own
    return found


def _belongs(bias: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and bias.dim() == 1 and len(bias) == len(weight)


def movement(weights: Weights, reference: Weights) -> dict[str, float]:
    """How far the row of each layer moved that moved farthest, in units of its length (or of the layer's mean one)."""
    common = {name: tensor for name, tensor in weights.items() if name in reference}
    before = layers({name: reference[name].to(tensor.device) for name, tensor in common.items()})
    found = {}
    for layer, now in layers(common).items():
        length = before[layer].norm(dim=1)
        alone = length.new_tensor(LEAST * before[layer].shape[1] ** 0.5)
        least = length.mean() if len(length) > 1 and bool(length.any()) else alone  # a layer may begin at zero
        found[layer] = ((now - before[layer]).norm(dim=1) / length.clamp(min=least)).max()
    return dict(zip(found, numbers(list(found.values())), strict=True))


def moved(
    found: Mapping[str, float], own: Mapping[str, float], limits: Incoming, how: str = "", *, rounds: int = 1
) -> Iterator[Figure]:
    """The movement of each layer in so many `rounds` and what is allowed, by `own` movement in the site's training so
    far. `how` says what moves it, where that is not the weights themselves."""
    least = OTHER_LAYERS * max(own.values(), default=0.0)
    for layer, value in found.items():
        room = max(limits.moved, limits.times_own * max(own.get(layer, 0.0), least))
        yield Figure("moved", layer + how, value, rounds * room)


def steps(found: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    """How far one step of a study's optimiser moves the rows of each layer."""
    for layer, value in found.items():
        yield Figure("step", layer, value, limits.step)


def counted(found: Mapping[str, float], steps: int) -> dict[str, float]:
    """The movement by so many steps of training, as far as it counts."""
    return {layer: min(value, LONGEST_STEP * max(steps, 1)) for layer, value in found.items()}


def stepped(weights: Weights, gradients: Weights, lr: float, *, by_sign: bool) -> dict[str, Tensor]:
    """The weights after a step along gradients; `by_sign`: every number moves by about lr, as in Adam."""
    return {
        name: weights[name].to(gradient) - (gradient.sign() if by_sign else gradient) * lr
        for name, gradient in gradients.items()
        if name in weights and weights[name].shape == gradient.shape
    }
