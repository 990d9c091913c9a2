"""Trials: what a network with given weights does with some of a site's training images, in a copy of its network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.data.parts import ImageSet
from polyclinic.federation.arriving import units
from polyclinic.randomness import seeded, torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.federation.site import Site

Weights = Mapping[str, Tensor]


class Tried(NamedTuple):
    """What a network does with N images."""

    found: dict[str, units.Responses]
    losses: Tensor  #: [N]
    gradients: Tensor  #: the length of each image's gradient w.r.t. the output, [N]

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


class Trials:
    """Tries weights on `images` training images of a site: the same ones each time, spread evenly over all."""

    def __init__(self, images: int) -> None:
        self.images = images
        self._twins: dict[int, nn.Module] = {}

    def try_weights(self, site: Site, trainer: TrainerLike, weights: Weights) -> Tried:
        """Batch norm goes by the images at hand; there is no dropout."""
        twin = self._twin(trainer)
        _load(twin, weights)
        images, targets = self._some_images(site, trainer)
        with torch.no_grad(), trainer.autocast():
            found, output = units.watch(twin, images)
        output = output.float().requires_grad_()
        losses = trainer.task.losses(output, targets, trainer.target)
        (gradient,) = torch.autograd.grad(losses.sum(), output)
        return Tried(found, losses.detach(), gradient.flatten(1).norm(dim=1))

    def rehearse(self, site: Site, weights: Weights, steps: int) -> dict[str, Tensor]:
        """The weights after so many steps of plain training from `weights` on the site's images; nothing of it is kept
        or leaves. A site that gets trained weights before it has trained itself sees here what training does."""
        trainer, address = site.trainer, site.address("rehearsal", site.round)
        copied = copy.deepcopy(trainer.model).train().requires_grad_(True)
        _load(copied, weights)
        optimizer = trainer.optimizer.make(copied.parameters(), site.round)
        with seeded(*address, gpus=range(torch.cuda.device_count())):
            trainer.train(trainer.batches(site.data.train, torch_rng(*address)), steps, optimizer, model=copied)
        return {name: tensor.detach().cpu() for name, tensor in copied.state_dict().items()}

    def _some_images(self, site: Site, trainer: TrainerLike) -> tuple[Tensor, Tensor]:
        part = site.data.train
        places = np.unique(np.linspace(0, len(part) - 1, min(self.images, len(part))).round().astype(int))
        masks = None if part.masks is None else part.masks[places]
        return next(trainer.in_order(ImageSet(part.images[places], part.labels[places], masks)))

    def _twin(self, trainer: TrainerLike) -> nn.Module:
        """A copy of the trainer's network to try weights in."""
        if id(trainer.model) not in self._twins:
            twin = copy.deepcopy(trainer.model).train().requires_grad_(False)
            for module in twin.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            self._twins[id(trainer.model)] = twin
        return self._twins[id(trainer.model)]


def _load(model: nn.Module, weights: Weights) -> None:
    own = model.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
