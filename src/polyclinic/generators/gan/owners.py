"""Owners of images who train GANs side by side in one process, with a central discriminator: FELICIA without its gates.

The method of the same name does these steps across sites. Here the owners of one or several federations (other seeds,
other lambdas) of one shape train as one stacked model, which on a GPU takes little longer than a single owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.central import Central, CentralTerm
from polyclinic.generators.gan.model import CHUNK_PIXELS, GAN, GANModel, centred
from polyclinic.generators.gan.networks import refine
from polyclinic.generators.gan.recorded import Recorded
from polyclinic.generators.gan.stack import Stacked, StackedPairs
from polyclinic.generators.gan.trainer import Dice, Duel, ManyDice, StackDice
from polyclinic.randomness import device_rng, seed_of, torch_rng
from polyclinic.tasks import Target


@dataclass(frozen=True)
class Images:
    """What one owner has: uint8 [N, C, H, W] and labels [N]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Federated:
    """One federation: its seed, its lambda, its owners' images by their names."""

    seed: int
    weight: float
    owners: dict[str, Images]


class Owners:
    """The owners of all federations, stacked. All federations have as many owners, images of one shape, and labels
    of one target."""

    def __init__(
        self,
        settings: GAN,
        term: CentralTerm,
        federations: Sequence[Federated],
        target: Target,
        *,
        device: str = "cpu",
        precision: str = "fp32",
        as_products: bool = False,
        recorded: bool = False,
    ) -> None:
        """`as_products`: compute convolutions as matrix products, which is faster where tensor cores are; `recorded`:
        have a GPU run a step as one CUDA graph."""
        if recorded and torch.device(device).type != "cuda":
            raise BadInput(
                f"owners: a step is recorded on a CUDA device, and not on '{device}'; leave out recorded=True"
            )
        if settings.condition == "apart":
            raise BadInput("owners: networks for each class do not stack; give each class a federation of its own")
        self.as_products = as_products
        self.settings, self.term, self.federations, self.target = settings, term, list(federations), target
        self.device, self.step_number = torch.device(device), 0
        self.names = [(f, name) for f, one in enumerate(federations) for name in one.owners]
        self.count = len(self.names) // len(federations)
        held = [federations[f].owners[name] for f, name in self.names]
        self.shape = (held[0].images.shape[1], held[0].images.shape[2])
        self.dice, self.coin = self._dice()
        self.batches = StackedBatches(held, settings.batch_size, settings.balance, self.device)
        by_seed = {seed: self._networks(seed) for seed in {one.seed for one in federations}}
        pairs = StackedPairs([by_seed[federations[f].seed] for f, _ in self.names], as_products=as_products)
        self.pairs = pairs
        how: dict[str, Any] = {"device": self.device, "precision": precision, "recordable": recorded}
        self.duel = Duel(pairs, settings.phi, **how, **settings.duel_settings())
        self.central = self._central(how) if self.count > 1 and any(one.weight for one in federations) else None
        weights = [federations[f].weight for f, _ in self.names]
        self.weights = torch.tensor(weights, device=self.device)[:, None, None, None, None]
        self.recorded = Recorded(self._step, (self.dice, self.coin)) if recorded else None

    def step(self) -> dict[str, Tensor]:
        """A step of every owner and of every central discriminator; what each lost or guessed, on the device."""
        if self.recorded is not None and self.term.settled(self.step_number):
            told = self.recorded()
        else:
            told = self._step(self.dice, self.coin)
        self.step_number += 1
        return told

    def _step(self, dice: Dice, coin: Dice) -> dict[str, Tensor]:
        told: dict[str, Tensor] = {}
        for _ in range(self.settings.critic_steps):
            real, labels = self.batches.next(dice)
            wanted = self.settings.wanted(labels, self.target, dice)
            told["discriminator"] = self.duel.judge(real, labels, wanted, dice)
        fake = self.duel.make(wanted, dice)
        slope = None
        if self.central is not None:
            slope = self._central_slope(self.central, fake, coin, told)
        told["generator"] = self.duel.learn(fake, wanted, dice, slope)
        return told

    def _central_slope(self, central: Central, fake: Tensor, coin: Dice, told: dict[str, Tensor]) -> Tensor | None:
        """lambda times the slope of the mean of R over each owner's images, [M, B, C, H, W]."""
        many, size = len(self.federations), self.count * fake.shape[1]
        together = fake.detach().reshape(many, size, *fake.shape[2:])
        owner = torch.arange(self.count, device=self.device).repeat_interleave(fake.shape[1]).expand(many, size)
        if self.term.learns(self.step_number):
            told["recognised"] = central.judge(together, owner)
        if not self.term.acts(self.step_number):
            return None
        slope = central.slope(together, owner, coin).reshape(fake.shape)
        return self.weights * slope / fake.shape[1]

    # --- what came of it --------------------------------------------------------------------------

    def model(self, federation: int, owner: str) -> GANModel:
        """One owner's generator as it is now, to sample from."""
        channels, size = self.shape
        seed = self.federations[federation].seed
        built = self.settings.build(
            channels=channels, size=size, target=self.target, seed=seed, device=str(self.device), precision="fp32"
        )
        built.load(self.pairs.state(self.names.index((federation, owner))))
        return built

    @torch.no_grad()
    def samples(self, labels: Tensor, purpose: str) -> Tensor:
        """What every owner's generator makes for these labels [N]: uint8 [M, N, C, H, W] on the CPU."""
        making = self.pairs.parts["average"]
        making.layout.eval()
        many = len(self.names)
        dice = [Dice(torch_rng(self.federations[f].seed, name, purpose), self.device) for f, name in self.names]
        made = []
        for some in labels.to(self.device).split(max(1, CHUNK_PIXELS // self.shape[1] ** 2 // many)):
            noise = torch.stack([one.normal(len(some), self.settings.latent) for one in dice])
            made.append(to_uint8((making(noise, some.expand(many, -1)) + 1) / 2))
        return torch.cat(made, 1)

    # --- inside -----------------------------------------------------------------------------------

    def _networks(self, seed: int) -> nn.ModuleDict:
        """As a site of the method begins: all owners of a federation from the same weights."""
        shape = self.settings.shape(*self.shape, self.target)
        made = initial_networks(lambda: self.settings.networks(shape), seed_of(seed, "generator"))
        return nn.ModuleDict(made).to(self.device)

    def _central(self, how: dict[str, Any]) -> Central:
        by_seed = {seed: self._central_network(seed) for seed in {one.seed for one in self.federations}}
        stacked = Stacked([by_seed[one.seed] for one in self.federations], as_products=self.as_products)
        return Central(
            stacked,
            list(stacked.parameters.values()),
            self.settings.phi,
            self.term,
            owners=self.count,
            lr=self.settings.lr_discriminator or self.settings.lr,
            refine_norms=lambda: refine(stacked.layout, stacked.tensors),
            **how,
        )

    def _central_network(self, seed: int) -> nn.Module:
        shape = self.settings.shape(*self.shape, self.target)
        made = initial_networks(lambda: {"central": self.settings.central(shape, self.count)}, seed_of(seed, "central"))
        return made["central"].to(self.device)

    def _dice(self) -> tuple[Dice, Dice]:
        """For the owners, [M, ...], and for whom a generator is to be taken for. A GPU draws its own numbers, for all
        owners at once: it would wait for a CPU's."""
        first = self.federations[0].seed
        if self.device.type == "cpu":
            each = [torch_rng(self.federations[f].seed, name, "owners") for f, name in self.names]
            return ManyDice(each, self.device), Dice(torch_rng(first, "other owner", "owners"), self.device)
        rngs = [device_rng(self.device, first, name, "owners") for name in ("all", "coin")]
        return StackDice(rngs[0], len(self.names), self.device), Dice(rngs[1], self.device)


class StackedBatches:
    """Mini-batches of every owner's images, [M, B, ...], drawn with replacement from where all of them lie together."""

    def __init__(self, held: Sequence[Images], size: int, balanced: bool, device: torch.device) -> None:
        self.size, self.device = size, device
        self.images = torch.cat([one.images for one in held]).to(device)
        self.labels = torch.cat([one.labels for one in held]).to(device)
        starts = torch.tensor([0, *[len(one.images) for one in held]]).cumsum(0)[:-1]
        groups = [_groups(one.labels, balanced) for one in held]
        self.table, self.begin, self.length = _table(groups, starts, size)
        self.table, self.begin, self.length = (x.to(device) for x in (self.table, self.begin, self.length))

    def next(self, dice: Dice) -> tuple[Tensor, Tensor]:
        """Images in [-1, 1] and labels; where batches are balanced, row b of an owner is of its class b mod classes."""
        place = self.begin + (dice.uniform(self.size) * self.length).long()
        index = self.table[place]
        return centred(self.images[index]), self.labels[index]


def _groups(labels: Tensor, balanced: bool) -> list[Tensor]:
    """Indices of an owner's images, class by class where each is to come as often."""
    if not balanced or labels.is_floating_point():
        return [torch.arange(len(labels))]
    return [torch.nonzero(labels == one)[:, 0] for one in labels.unique()]


def _table(groups: list[list[Tensor]], starts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All indices behind each other, and for each owner and row of a batch where in them its choices begin [M, B], and
    how many there are [M, B]."""
    table, begin, length = [], [], []
    at = 0
    for start, own in zip(starts.tolist(), groups, strict=True):
        sizes = [len(group) for group in own]
        places = [at + sum(sizes[:k]) for k in range(len(own))]
        begin.append([places[row % len(own)] for row in range(size)])
        length.append([sizes[row % len(own)] for row in range(size)])
        table += [group + start for group in own]
        at += sum(sizes)
    return torch.cat(table), torch.tensor(begin), torch.tensor(length)
