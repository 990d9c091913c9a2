"""The `[poisoning]` table of a study: what attackers at named sites do, to see what a defence saves. Simulated only.

- `label-flip`: class c of C becomes C - 1 - c in the training images (Fang et al. 2020).
- `backdoor`: a white square in a corner of a share of the training images, which get the target class (Gu et al. 2017).
- `scale`, `sign-flip`, `noise`: the update is multiplied, turned round, or drowned (Blanchard et al. 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Parcels, Transaction

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
    factor: float = Field(
        10.0, gt=0, description="scale, sign-flip: how many times as long the update becomes; noise: in its own lengths"
    )

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
        return replace(held, train=self._poisoned(held.train, chosen, classes))

    def _poisoned(self, train: ImageSet, chosen: np.ndarray, classes: int) -> ImageSet:
        labels = np.array(train.labels)
        if self.attack == "label-flip":
            labels[chosen] = classes - 1 - labels[chosen]
            return replace(train, labels=labels)
        images = np.array(train.images)
        images[chosen] = patched(images[chosen], self.patch)
        labels[chosen] = self.target
        return replace(train, images=images, labels=labels)

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
