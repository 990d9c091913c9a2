"""What the units of a network do with a site's images: which of them answer to few images, or measure the same thing.

A unit is a row of a dense layer, or a channel of a convolution. Each activation of the network (ReLU, tanh, ...) is
watched: what enters it says for which images a unit has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyclinic.federation.arriving.settings import Figure, Incoming

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Hardswish)
SIGMOIDS = (nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Softsign)
#: beyond this, tanh has no gradient worth the name
SATURATED = 3.0
#: a unit is quiet if it answers to this share of the images or less
QUIET = 1 / 8
#: correlation over images from which two units measure the same thing
SAME = 0.99
#: thresholds farther out, in standard deviations, separate no images
FARTHEST = 3.0
#: layers with fewer units are not looked at
FEWEST = 4
#: fewest images of which one that stands out tells something: of five, one often has a unit for itself, and many
#: units measure the same thing
ENOUGH_IMAGES = 16
#: how many times as many units may measure the same thing as after the site's own training
TIMES_GRADED = 1.5


class Responses(NamedTuple):
    """What enters one activation: for which images a unit has a gradient, or an output of its own, and its values."""

    alive: Tensor  #: bool [N, U]: has a gradient; of a convolution: at any place of an image
    answers: Tensor  #: bool [N, U]: the output is not the constant one that the unit has for most images
    level: Tensor | None  #: [N, U]; None for a convolution


def watch(model: nn.Module, images: Tensor) -> tuple[dict[str, Responses], Tensor]:
    """The responses of every activation, by its name, and the network's output."""
    found: dict[str, Responses] = {}

    def note(name: str, kind: nn.Module, entering: Tensor) -> None:
        key = name if name not in found else f"{name}, {len(found)}"
        found[key] = responses_to(entering.detach().float(), rectifier=isinstance(kind, RECTIFIERS))

    hooks = [
        module.register_forward_pre_hook(lambda kind, inputs, name=name: note(name, kind, inputs[0]))
        for name, module in model.named_modules()
        if isinstance(module, RECTIFIERS + SIGMOIDS)
    ]
    try:
        output = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return at_hand(found), output


def at_hand(found: dict[str, Responses]) -> dict[str, Responses]:
    """The same on the CPU, where all figures are computed: a GPU is waited for once, and not for each."""
    devices = {one.alive.device for one in found.values() if one.alive.device.type == "cuda"}
    copies = {
        name: Responses(
            one.alive.to("cpu", non_blocking=True),
            one.answers.to("cpu", non_blocking=True),
            None if one.level is None else one.level.to("cpu", non_blocking=True),
        )
        for name, one in found.items()
    }
    for device in devices:
        torch.cuda.synchronize(device)
    return copies


def responses_to(z: Tensor, *, rectifier: bool) -> Responses:
    """Responses to what enters an activation, [N, U] or [N, U, ...].

    A rectifier is constant below zero. A saturated tanh is constant on one side: a unit that is saturated on one side
    for some images and on the other for the rest tells them apart, so it answers to those on the rarer side.
    """
    if rectifier:
        alive = answers = z > 0
    else:
        alive = z.abs() < SATURATED
        answers = alive | (z.sign() != z.sign().sum(0).sign())
    if z.dim() == 2:
        return Responses(alive, answers, z)
    return Responses(alive.flatten(2).any(2), answers.flatten(2).any(2), None)


def quiet_units(responses: Responses) -> Tensor:
    """bool [U]: units that answer to few of the images; of a dense layer, also to none.

    A dense unit that answers to no image that is tried may wait for another one. A channel of a convolution that is
    constant at every place of every image shows none: large steps of honest training make such channels.
    """
    share = responses.answers.float().mean(0)
    return (share <= QUIET) if responses.level is not None else (share <= QUIET) & (share > 0)


def quiet(found: Mapping[str, Responses], first: Mapping[str, Tensor], limits: Incoming) -> Iterator[Figure]:
    """Shares of units that are quiet, and were not with the first weights (`first`: bool [U] of each layer)."""
    for name, responses in found.items():
        now = quiet_units(responses)
        if len(now) >= FEWEST:
            earlier = first.get(name, torch.zeros_like(now)).to(now)
            yield Figure("quiet", name, float((now & ~earlier).float().mean()), limits.quiet)


def exposed(responses: Responses) -> float:
    """The share of images that have a unit of a dense layer for themselves: its gradient is that image alone."""
    if responses.level is None:
        return 0.0
    alone = responses.alive[:, responses.alive.sum(0) == 1]
    return float(alone.any(1).float().mean())


def exposure(found: Mapping[str, Responses], first: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    """By how much the share of images with a unit for themselves has grown since the first weights."""
    for name, responses in found.items():
        if responses.level is not None:
            yield Figure("exposed", name, exposed(responses) - first.get(name, 0.0), limits.exposed)


def graded(found: Mapping[str, Responses], own: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    """Units that measure the same thing, each with another threshold: what an imprinted layer sorts images by. `own`:
    how many did after the site's own training."""
    for name, responses in found.items():
        if responses.level is not None and responses.level.shape[1] >= FEWEST:
            most = max(limits.graded, TIMES_GRADED * own.get(name, 0.0))
            yield Figure("graded", name, float(thresholds(responses.level)), most)


def thresholds(level: Tensor) -> int:
    """The most units [N, U] of one direction whose thresholds separate the images differently."""
    spread = level.std(0, correction=0)
    kept = spread > 1e-6 * spread.max()
    mean, spread = level.mean(0)[kept], spread[kept]
    standard = (level[:, kept] - mean) / spread
    correlation = standard.T @ standard / len(level)
    same = correlation.abs() >= SAME
    most = 0
    for unit in (same.sum(1) > 2).nonzero().flatten().tolist():
        others = same[unit].nonzero().flatten()
        crossing = -(mean / spread)[others] * correlation[unit, others].sign()
        crossing = crossing[crossing.abs() < FARTHEST].contiguous()
        below = torch.searchsorted(standard[:, unit].sort().values.contiguous(), crossing).unique()
        most = max(most, int(((below > 0) & (below < len(level))).sum()))
    return most
