"""An owner at work in FELICIA: its generator and discriminator, their optimisers, and draws of one round.

Everything here is at the site. What may leave are the images that `made` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.generators.gan.model import GAN, GANModel, RealBatches, private_losses
from polyclinic.generators.gan.trainer import Dice
from polyclinic.methods.shared.optimizer_state import optimizer_tensors, restore_optimizer
from polyclinic.methods.shared.site_generator import build_generator
from polyclinic.randomness import torch_rng
from polyclinic.training import private as at_site

if TYPE_CHECKING:
    from polyclinic.federation.federation import Federation
    from polyclinic.federation.site import Site

#: groups of a site's state
NETWORKS, OF_GENERATOR, OF_DISCRIMINATOR = "gan", "gan-generator-adam", "gan-discriminator-adam"
TAKEN = "gan-steps"


class Owner:
    """Lives for one round in a site's memory; `keep` puts what it learnt into the site's state."""

    def __init__(self, site: Site, *, shared_noise: bool = False, purpose: str = "gan") -> None:
        """`purpose` names this round's draws; several owners of one round need several."""
        self.site, self.settings = site, gan_settings(site)
        self.model = model_of(site)
        self.duel = self.model.duel()
        restore_optimizer(self.duel.of_generator, site.state.group(OF_GENERATOR))
        restore_optimizer(self.duel.of_discriminator, site.state.group(OF_DISCRIMINATOR))
        self.duel.taken = int(site.state[TAKEN]) if TAKEN in site.state else 0
        part = site.data.train
        rng = site.rng(purpose)
        self.batches = RealBatches(self.model, np.asarray(part.images), np.asarray(part.labels), rng)
        self.dice = Dice(rng, site.trainer.device)
        # PrivGAN's code: in every step all generators get the same noise
        self.noise = self.dice
        if shared_noise:
            self.noise = Dice(torch_rng(site.seed, "noise", purpose, site.round), site.trainer.device)
        self.private = at_site.is_private(site, "generator")
        self.fake: Tensor | None = None
        self.wanted = torch.empty(0)

    def judge(self) -> None:
        """The discriminator's steps; `wanted` are the labels to make images for next."""
        if self.private:
            self._judge_privately()
            return
        for _ in range(self.settings.critic_steps):
            real, labels = self.batches.next()
            self.wanted = self._wanted(labels)
            self.duel.judge(real, labels, self.wanted, self.dice)

    def make(self) -> Tensor:
        """Images in [-1, 1] that `learn` will learn from; they belong to the owner's graph."""
        self.fake = self.duel.make(self.wanted, self.noise)
        return self.fake

    def learn(self, slope: Tensor | None) -> None:
        """The generator's step, with the central term's slope at the images made last, where it acts."""
        assert self.fake is not None
        self.duel.learn(self.fake, self.wanted, self.dice, slope)
        self.fake = None

    @torch.no_grad()
    def more(self, count: int) -> Tensor:
        """So many images, made now and without a way back."""
        made: list[Tensor] = []
        while sum(len(some) for some in made) < count:
            labels = self._wanted(self.batches.next()[1]) if not self.private else self._drawn()
            made.append(self.duel.make(labels, self.noise))
        return torch.cat(made)[:count]

    def keep(self) -> None:
        state = self.site.state
        state.put(NETWORKS, self.model.state())
        state.put(OF_GENERATOR, optimizer_tensors(self.duel.of_generator))
        state.put(OF_DISCRIMINATOR, optimizer_tensors(self.duel.of_discriminator))
        state[TAKEN] = torch.tensor(self.duel.taken)

    # --- inside -----------------------------------------------------------------------------------

    def _wanted(self, labels: Tensor) -> Tensor:
        return self.settings.wanted(labels, self.model.target, self.dice)

    def _drawn(self) -> Tensor:
        """Labels that no real image has a part in."""
        return self._wanted(torch.zeros(self.settings.batch_size, device=self.dice.device))

    def _judge_privately(self) -> None:
        """DP-GAN: the discriminator's gradients are clipped for each image, and noisy; made images join each batch."""
        judging, size = self.model.networks["discriminator"], self.settings.batch_size
        self.wanted = self._drawn()

        def fetch(index: Tensor) -> tuple[Tensor, ...]:
            real, labels = self.batches.at(index)
            with torch.no_grad():
                fake = self.duel.make(self.wanted, self.dice)
            rows = torch.cat([self.duel.look(real, self.dice), self.duel.look(fake, self.dice)])
            is_real = torch.arange(len(rows), device=rows.device) < len(real)
            return rows, torch.cat([labels, self.wanted.to(labels.dtype)]), is_real

        losses, steps = private_losses(judging, self.settings.phi), self.settings.critic_steps
        at_site.descend(
            self.site, judging, losses, fetch, steps, self.duel.of_discriminator, batch_size=size, joined=size
        )


def gan_settings(at: Federation | Site) -> GAN:
    """The study's table [generator], at the coordinator or at a site."""
    assert isinstance(at.generator, GAN), "the coordinator checks it before it asks"
    return at.generator


def model_of(site: Site) -> GANModel:
    """The owner's GAN as it is now; in the beginning all owners' have the same weights."""
    model = build_generator(site, site.state.group(NETWORKS))
    assert isinstance(model, GANModel)
    return model
