"""The steps in which a generator and a discriminator learn from each other, for one pair or for many stacked ones.

A pair of networks takes images [B, C, H, W]; a stack of M pairs, one per owner, takes [M, B, C, H, W]. Losses are means
over an owner's images and sums over owners, so that in a stack each owner gets the gradients it would get alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from polyclinic.generators.gan.augmentation import DRAWS, augment
from polyclinic.generators.gan.losses import Phi, gradient_penalty
from polyclinic.generators.gan.networks import LARGEST_GROUP, refine

BETAS = (0.5, 0.999)


class Dice:
    """Random numbers for one owner, drawn from `rng` wherever that lives, on the device."""

    def __init__(self, rng: torch.Generator, device: torch.device) -> None:
        self.rng, self.device = rng, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self.rng, device=self.rng.device).to(self.device)


class ManyDice(Dice):
    """The same for a stack: every owner's numbers come from a generator of its own, in an axis in front."""

    def __init__(self, rngs: Sequence[torch.Generator], device: torch.device) -> None:
        self.each = [Dice(rng, device) for rng in rngs]
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.stack([dice.normal(*shape) for dice in self.each])

    def uniform(self, *shape: int) -> Tensor:
        return torch.stack([dice.uniform(*shape) for dice in self.each])

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.stack([dice.below(bound, *shape) for dice in self.each])


class StackDice(Dice):
    """The same from one generator for all: on a GPU a draw for each owner would take longer than the step."""

    def __init__(self, rng: torch.Generator, owners: int, device: torch.device) -> None:
        super().__init__(rng, device)
        self.owners = owners

    def normal(self, *shape: int) -> Tensor:
        return super().normal(self.owners, *shape)

    def uniform(self, *shape: int) -> Tensor:
        return super().uniform(self.owners, *shape)

    def below(self, bound: int, *shape: int) -> Tensor:
        return super().below(bound, self.owners, *shape)


class Pair(Protocol):
    """A generator and a discriminator, or a stack of such."""

    def make(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images in [-1, 1], [..., B, C, H, W], from noise [..., B, latent]."""

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        """How real they look, [..., B]."""

    def refine(self) -> None:
        """Bring the spectral norms up to date, where there are any."""

    def follow(self, decay: float | Tensor) -> None:
        """Move the averaged generator towards the present one; `decay` [] may lie on the device."""

    @property
    def generator(self) -> list[nn.Parameter]: ...
    @property
    def discriminator(self) -> list[nn.Parameter]: ...


class Modules:
    """One pair: `networks` holds generator, discriminator and average."""

    def __init__(self, networks: nn.ModuleDict) -> None:
        self.networks = networks.train()

    def make(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.networks["generator"](noise, labels)

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.networks["discriminator"](images, labels)[:, 0]

    def refine(self) -> None:
        refine(self.networks["discriminator"])

    @torch.no_grad()
    def follow(self, decay: float | Tensor) -> None:
        average, now = self.networks["average"].state_dict(), self.networks["generator"].state_dict()
        for name, tensor in now.items():
            if tensor.is_floating_point():
                average[name].lerp_(tensor, 1 - decay)
            else:
                average[name].copy_(tensor)

    @property
    def generator(self) -> list[nn.Parameter]:
        return list(self.networks["generator"].parameters())

    @property
    def discriminator(self) -> list[nn.Parameter]:
        return list(self.networks["discriminator"].parameters())


def adam(
    parameters: list[nn.Parameter], lr: float, *, betas: tuple[float, float] = (0.9, 0.999), recordable: bool = False
) -> torch.optim.Adam:
    """Adam; where it is to be `recordable` in a CUDA graph, its counts lie on the device and its step is one kernel."""
    return torch.optim.Adam(parameters, lr, betas=betas, capturable=recordable, fused=recordable or None)


class Duel:
    """A pair with its two optimisers. `taken` counts the generator's steps; where they are to be recorded as a CUDA
    graph (`recordable`), it lies on the device, as the optimisers' counts do."""

    def __init__(
        self,
        pair: Pair,
        phi: Phi,
        *,
        latent: int,
        lr: float,
        lr_discriminator: float,
        penalty: float = 0.0,
        augmented: bool = False,
        average: float = 0.999,
        separately: bool = False,
        precision: str = "fp32",
        device: torch.device | str = "cpu",
        recordable: bool = False,
    ) -> None:
        self.pair, self.phi = pair, phi
        self.latent, self.penalty, self.augmented, self.average = latent, penalty, augmented, average
        self.device = torch.device(device)
        self.precision, self.separately = precision, separately
        self.taken: int | Tensor = torch.zeros((), device=self.device) if recordable else 0
        self.of_generator = adam(pair.generator, lr, betas=BETAS, recordable=recordable)
        self.of_discriminator = adam(pair.discriminator, lr_discriminator, betas=BETAS, recordable=recordable)

    # --- the discriminator ------------------------------------------------------------------------

    def judge(self, real: Tensor, labels: Tensor, wanted: Tensor, dice: Dice) -> Tensor:
        """A step of the discriminator on real images with their labels and as many made ones; its loss, [...]."""
        with torch.no_grad():
            fake = self.make(wanted, dice)
        self.pair.refine()
        rows = [real.shape[-4], fake.shape[-4]]
        seen, made = self.look(torch.cat([real, fake], -4), dice).split(rows, -4)
        if_real, if_fake = self.scores([seen, made], [labels, wanted])
        loss = self.phi.real(if_real).mean(-1) + self.phi.fake(if_fake).mean(-1)
        if self.penalty:
            share = dice.uniform(labels.shape[-1])
            steep = gradient_penalty(lambda between: self.score(between, labels), seen, made, share)
            loss = loss + self.penalty * steep.mean(-1)
        self.of_discriminator.zero_grad(set_to_none=True)
        loss.sum().backward()
        self.of_discriminator.step()
        return loss.detach()

    # --- the generator ----------------------------------------------------------------------------

    def make(self, labels: Tensor, dice: Dice) -> Tensor:
        """New images in [-1, 1] for labels [..., B], with the way back to the generator's weights."""
        noise = dice.normal(labels.shape[-1], self.latent)
        with self.autocast():
            return self.pair.make(noise, labels)

    def learn(self, fake: Tensor, labels: Tensor, dice: Dice, central: Tensor | None = None) -> Tensor:
        """A step of the generator for images that `make` just made; its loss, [...].

        `central` is the gradient of whatever else is to be lowered with respect to those images, of their shape.
        """
        scores = self.score(self.look(fake, dice), labels)
        loss = self.phi.fool(scores).mean(-1)
        self.of_generator.zero_grad(set_to_none=True)
        ends, gradients = ([loss.sum()], [None]) if central is None else ([loss.sum(), fake], [None, central])
        torch.autograd.backward(ends, gradients, inputs=self.pair.generator)
        self.of_generator.step()
        self.taken += 1
        self.pair.follow(self._decay())
        return loss.detach()

    def _decay(self) -> float | Tensor:
        """An average over a thousand steps says little after ten."""
        early = (1 + self.taken) / (10 + self.taken)
        return early.clamp(max=self.average) if isinstance(early, Tensor) else min(self.average, early)

    # --- both -------------------------------------------------------------------------------------

    def look(self, images: Tensor, dice: Dice) -> Tensor:
        """What the discriminator gets to see of images [..., B, C, H, W]."""
        return augment(images, dice.uniform(images.shape[-4], DRAWS)) if self.augmented else images

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.autocast():
            return self.pair.score(images, labels)

    def scores(self, parts: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
        """Of several sets of images: in one pass, where no group whose spread is taken would hold images of two.

        Where each class has networks of its own (`separately`), those of one class may be any number.
        """
        if self.separately or any(part.shape[-4] % LARGEST_GROUP for part in parts):
            return [self.score(part, known) for part, known in zip(parts, labels, strict=True)]
        together = self.score(torch.cat(parts, -4), torch.cat(labels, -1))
        return list(together.split([part.shape[-4] for part in parts], -1))

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


#: gives real images [..., B, C, H, W] in [-1, 1] and their labels [..., B]
NextBatch = Callable[[], tuple[Tensor, Tensor]]


def judge_times(duel: Duel, batch: NextBatch, wanted: Callable[[Tensor], Tensor], times: int, dice: Dice) -> Tensor:
    """So many steps of the discriminator, each on a batch of its own; labels to make images for come last."""
    labels = torch.empty(0)
    for _ in range(times):
        real, labels = batch()
        duel.judge(real, labels, wanted(labels), dice)
    return wanted(labels)
