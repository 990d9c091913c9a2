"""FELICIA's central discriminator D_p: it identifies the site that made an image, and never sees a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from polyclinic.federation.collaborators import TrainerLike
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.adversarial import AdversarialGenerator, confusion_loss, site_cross_entropy
from polyclinic.generators.gan.networks import OfEachClass, update_spectral_norms
from polyclinic.randomness import seed_of
from polyclinic.training.gpu.graphs import GraphedFunction


class ImagesOfSites(NamedTuple):
    """Synthetic images of all sites, for the central discriminator."""

    images: Tensor  #: [N, C, H, W] in [-1, 1]
    site: Tensor  #: [N], the number of the site that made each
    labels: Tensor  #: [N], the class that each was made for, where each class has a central discriminator
    turns: bool  #: whether the classes take turns image by image (0, 1, 0, 1, ...)


class CentralDiscriminator:
    """D_p: a network that identifies the site that made an image, and its optimiser. It never sees a real image.

    Images are [N, C, H, W] in [-1, 1], `site` [N] is the number of the site that made each, logits are [N, K]. Where
    each class has a central discriminator, this holds all of them, and `labels` [N] choose one for each image.
    """

    def __init__(
        self,
        settings: AdversarialGenerator,
        trainer: TrainerLike,
        images: Sequence[int],
        sites: int,
        seed: int,
        *,
        towards: Literal["away", "other"] = "away",
        lr: float | None = None,
        per_class: bool = False,
    ) -> None:
        """`images` is the shape [N, C, H, W]; `seed` draws the first weights; `lr`: the discriminators' if None."""
        shape: dict[str, Any] = {"channels": images[1], "size": images[2], "target": trainer.target, "sites": sites}
        shape["per_class"] = per_class
        built = initial_networks(lambda: {"central": settings.central_discriminator(**shape)}, seed_of(seed, "central"))
        self.network: nn.Module = built["central"].to(trainer.device).train()
        self.towards, self.loss, self.sites = towards, settings.gan_loss, sites
        self.precision, self.device = trainer.precision, trainer.device
        parameters = self.network.parameters()
        self.optimizer = settings.central_optimizer(parameters, lr, capturable=trainer.graphs)
        name = "a step of FELICIA's central discriminator"
        self._both = GraphedFunction(self._step_and_gradient, name) if trainer.graphs else self._step_and_gradient

    def expect_turns(self, turns: bool) -> None:
        """Whether classes take turns in the images to come: then those of each class are found without sorting."""
        if isinstance(self.network, OfEachClass):
            self.network.in_turns = turns

    def step_and_gradient(self, batch: ImagesOfSites, other: Tensor, *, learn: bool, act: bool) -> Tensor | None:
        """A step, where it is to learn; then the gradient of R w.r.t. the images, where that is to act."""
        images, site, labels, turns = batch
        self.expect_turns(turns)
        if learn and act:
            both = self._both if turns else self._step_and_gradient  # a graph is recorded for images in turns
            return both(images, site, other, labels)
        if learn:
            self.step(images, site, labels)
        return self.image_gradient(images, site, other, labels) if act else None

    def _step_and_gradient(self, images: Tensor, site: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        self.step(images, site, labels)
        return self.image_gradient(images, site, other, labels)

    def step(self, images: Tensor, site: Tensor, labels: Tensor) -> Tensor:
        """A step on synthetic images; the share of them whose site it named."""
        update_spectral_norms(self.network)
        logits = self.logits(images.detach(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        site_cross_entropy(logits, site).mean().backward()
        self.optimizer.step()
        return (logits.argmax(-1) == site).float().mean().detach()

    def image_gradient(self, images: Tensor, site: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        """The gradient of R, summed over images, w.r.t. each image; `other` [N]: sites to be taken for instead."""
        images = images.detach().requires_grad_()
        logits = self.logits(images, labels)
        confused = self.towards == "other"
        loss = confusion_loss(logits, other) if confused else self.loss.identification_loss(logits, site)
        (gradient,) = torch.autograd.grad(loss.sum(), images)
        return gradient

    def other_sites(self, site: Tensor, rng: torch.Generator) -> Tensor:
        """For each image one of the other sites, all alike; nobody draws where Eq. 6 is used as printed."""
        if self.towards == "away":
            return site
        ahead = torch.randint(max(1, self.sites - 1), site.shape, generator=rng).to(site.device)
        return (site + 1 + ahead) % self.sites

    def logits(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.autocast():
            return self.network(images, labels)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
