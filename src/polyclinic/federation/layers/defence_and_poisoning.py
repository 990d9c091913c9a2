"""Layers of the tables `[defence]` and `[poisoning]`: what sites, or attackers among them, do to gradients and updates
before these leave.

Weights are defended through their difference to the weights that the site was sent. (Two more defences have tables of
their own: clipping and noise are `[privacy]`, a deeper cut is `model.cut`. The secure sum is a defence, too: attack
`secure_sum` of what the sites would have sent.) Attackers at named sites of a simulation show what a defence saves:

- `label-flip`: class c of C becomes C - 1 - c in the training images (Fang et al. 2020).
- `backdoor`: a white square in a corner of a share of the training images, which get the target class (Gu et al. 2017).
- `scale`, `sign-flip`, `noise`: the update is multiplied, turned round, or drowned (Blanchard et al. 2017).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Parcels, Transaction
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.settings import Settings

Gradients = Mapping[str, Tensor]


class Defended(Layer):
    """The study's defence changes what leaves."""

    def is_needed(self) -> bool:
        return self.spec.study.defence is not None

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        defend = self.spec.study.defence
        assert defend
        return tuple(defend(parcel, transaction.received) for parcel in parcels)


class Defence(Settings):
    """One defence. It costs accuracy and promises nothing: see what an audit says."""

    name: Literal["sparsify", "prune", "quantise"] = Field(
        description="sparsify: only the largest entries leave; prune: the smallest of each tensor become 0; quantise: "
        "entries are rounded to few levels"
    )
    keep: float = Field(0.1, gt=0, le=1, description="sparsify: share of all entries that leave")
    fraction: float = Field(0.9, ge=0, lt=1, description="prune: share of each tensor's entries that become 0")
    bits: int = Field(8, ge=2, le=16, description="quantise: bits of an entry")

    def __call__(self, parcel: Parcel, received: Mapping[str, Parcel]) -> Parcel:
        """The parcel that leaves instead: other kinds than gradients and weights leave as they are."""
        if parcel.kind == "gradients":
            return replace(parcel, tensors=self.applied(parcel.tensors))
        if parcel.kind == "weights" and "weights" in received:
            sent, start = parcel.tensors, received["weights"].tensors
            moved = {n: t - start[n].to(t) for n, t in sent.items() if n in start and t.is_floating_point()}
            defended = {name: start[name].to(change) + change for name, change in self.applied(moved).items()}
            return replace(parcel, tensors={**sent, **defended})
        return parcel

    def applied(self, tensors: Gradients) -> dict[str, Tensor]:
        if self.name == "sparsify":
            return sparsify(tensors, keep=self.keep)
        if self.name == "prune":
            return prune(tensors, fraction=self.fraction)
        return quantise(tensors, bits=self.bits)


def sparsify(gradients: Gradients, *, keep: float) -> dict[str, Tensor]:
    """Only the share `keep` of all entries, the largest over all tensors together (top-k); the rest is 0."""
    sizes = torch.cat([tensor.abs().flatten() for tensor in gradients.values()])
    count = max(1, round(keep * sizes.numel()))
    mask = torch.zeros_like(sizes, dtype=torch.bool)
    mask[sizes.topk(count).indices] = True
    masks = mask.split([tensor.numel() for tensor in gradients.values()])
    pairs = zip(gradients.items(), masks, strict=True)
    return {name: torch.where(kept.view_as(tensor), tensor, 0) for (name, tensor), kept in pairs}


def prune(gradients: Gradients, *, fraction: float) -> dict[str, Tensor]:
    """In each tensor on its own, the share `fraction` of its smallest entries becomes 0."""
    pruned = {}
    for name, tensor in gradients.items():
        flat = tensor.flatten().clone()
        count = min(flat.numel() - 1, round(fraction * flat.numel()))
        flat[flat.abs().topk(count, largest=False).indices] = 0
        pruned[name] = flat.view_as(tensor)
    return pruned


def quantise(gradients: Gradients, *, bits: int = 8) -> dict[str, Tensor]:
    """Each tensor rounded to 2^bits - 1 even levels between plus and minus its largest entry."""
    levels = 2 ** (bits - 1) - 1
    rounded = {}
    for name, tensor in gradients.items():
        step = tensor.abs().amax() / levels
        rounded[name] = torch.where(step > 0, (tensor / step).round() * step, tensor)
    return rounded


def secure_sum(sent: Sequence[Gradients]) -> dict[str, Tensor]:
    """The mean of several sites' gradients: all that an attacker sees when only their sum is revealed.

    It is the gradient over all sites' images together, so attack it with as many images as all sites used.
    """
    return {name: torch.stack([gradients[name] for gradients in sent]).mean(0) for name in sent[0]}


DATA_ATTACKS = ("label-flip", "backdoor")


class Poisoned(Layer):
    """Attackers of a simulation send another update than they made."""

    def is_needed(self) -> bool:
        return self.spec.study.poisoning is not None

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        attack, call = self.spec.study.poisoning, transaction.call
        assert attack
        told = (self.spec.study.seed, call.round)
        return tuple(attack.update(call.site, parcel, transaction.received, *told) for parcel in parcels)


class Poisoning(Settings):
    """Attackers at named sites of a simulation."""

    sites: tuple[str, ...] = Field(min_length=1, description="the sites that attack")
    attack: Literal["label-flip", "backdoor", "scale", "sign-flip", "noise"] = Field(
        description="label-flip, backdoor: what they train on; scale, sign-flip, noise: what they send"
    )
    share: float = Field(1.0, gt=0, le=1, description="label-flip, backdoor: share of their training images")
    target: int = Field(0, ge=0, description="backdoor: the class, from 0 on, that a patched image is to be taken for")
    patch: int = Field(4, ge=1, description="backdoor: side of the white square, in pixels")
    factor: float = Field(10.0, gt=0, description="scale, sign-flip: times the update's length; noise: in its lengths")

    def check(self, names: tuple[str, ...], classes: int) -> None:
        """BadInput for sites or a class that the study does not have."""
        unknown = sorted(set(self.sites) - set(names))
        if unknown:
            raise BadInput(f"poisoning.sites: there is no site '{unknown[0]}'; choose from {', '.join(names[:20])}")
        if self.attack in DATA_ATTACKS and classes < 2:
            raise BadInput(f"poisoning.attack: '{self.attack}' changes classes, and the task has none; choose another")
        if self.attack == "backdoor" and self.target >= classes:
            raise BadInput(f"poisoning.target: there is no class {self.target}; the last one is {classes - 1}")

    def data(self, held: SiteData, classes: int, seed: int) -> SiteData:
        """What an attacker trains on; its validation and test images stay as they are."""
        if held.name not in self.sites or self.attack not in DATA_ATTACKS:
            return held
        count = round(self.share * len(held.train))
        chosen = numpy_rng(seed, "poisoning", held.name).permutation(len(held.train))[:count]
        images, labels = held.train.images, np.array(held.train.labels)
        if self.attack == "label-flip":
            labels[chosen] = classes - 1 - labels[chosen]
        else:
            images = np.array(images)
            images[chosen] = patched(images[chosen], self.patch)
            labels[chosen] = self.target
        return replace(held, train=replace(held.train, images=images, labels=labels))

    def update(self, site: str, parcel: Parcel, received: Mapping[str, Parcel], seed: int, round: int) -> Parcel:
        """What an attacker sends instead of a parcel of weights or gradients."""
        if site not in self.sites or self.attack in DATA_ATTACKS:
            return parcel
        generator = torch_rng(seed, site, "poisoning", round)
        if parcel.kind == "gradients":
            return replace(parcel, tensors=self._moved(dict(parcel.tensors), {}, generator))
        if parcel.kind == "weights" and "weights" in received:
            return replace(parcel, tensors=self._moved(dict(parcel.tensors), received["weights"].tensors, generator))
        return parcel

    def _moved(
        self, sent: dict[str, Tensor], start: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The tensors with other updates; `start` is what the site was sent, nothing for gradients."""
        changed = {}
        for name, tensor in sent.items():
            if not tensor.is_floating_point() or (start and name not in start):
                continue
            before = start[name].to(tensor) if start else torch.zeros_like(tensor)
            changed[name] = before + self._attacked(tensor - before, generator)
        return {**sent, **changed}

    def _attacked(self, update: Tensor, generator: torch.Generator) -> Tensor:
        if self.attack == "noise":
            drawn = torch.randn(update.shape, generator=generator).to(update)
            return update + self.factor * update.square().mean().sqrt() * drawn
        return update * (self.factor if self.attack == "scale" else -self.factor)


def patched(images: np.ndarray, side: int) -> np.ndarray:
    """Images [N, C, H, W] with a white square in the lower right corner."""
    found = np.array(images)
    found[..., -side:, -side:] = 255
    return found
