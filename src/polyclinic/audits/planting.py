"""Planted updates: gradients or weights as the site would have sent them, were one image half of the update.

They show the power of an attack on updates. The images are held-out ones of the site, so that no training image is
copied. The update is made as the real one was: as many steps, batches, momentum and decay. In every step one image has
half of the weight, the others share the other half. No defence and no noise is applied: what is planted is the weakest
update without a defence that "withstood" excludes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.audits.views import Planted, Seen, Truth
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.ledger.parcel import Parcel


@dataclass(frozen=True)
class Steps:
    """How the real update was made, which the planted one repeats."""

    number: int = 1
    batch: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0

    @property
    def images(self) -> int:
        """Different images: one that is in every step, and the others, each in one step."""
        return 1 + self.number * (self.batch - 1)

    def rows(self, step: int) -> Tensor:
        others = torch.arange(1 + step * (self.batch - 1), 1 + (step + 1) * (self.batch - 1))
        return torch.cat([torch.zeros(1, dtype=torch.int64), others])


def planted_update(seen: Seen, truth: Truth, steps: Steps) -> list[Planted]:
    """The update of these steps on held-out images, of which the first has half of the weight in each.

    Nothing without held-out images: some must be left to compare with.
    """
    images, labels = truth.held_out(seen.tools.effort.candidates, seen.tools.what)
    if len(images) < 2 * steps.images:
        return []
    sent, buffers = planted_tensors(seen, images.float() / 255, labels, steps)
    data = site_of(truth.data, images, labels, members=steps.images, what=seen.tools.what)
    share = "it is the only one" if steps.batch == 1 else f"half of each step is by one, half by {steps.batch - 1}"
    made = "one step" if steps.number == 1 else f"{steps.number} steps"
    parcel = Parcel(seen.kind, sent, seen.parcel.metadata)
    return [
        Planted(
            "dominant image",
            f"an update of {made} on held-out images, without noise: {share}",
            replace(seen, parcel=parcel, together=companions(seen, parcel, buffers), more=tuple),
            Truth([steps.rows(step) for step in range(steps.number)], data, truth.seed),
        )
    ]


def companions(seen: Seen, parcel: Parcel, buffers: dict[str, Tensor]) -> tuple[Parcel, ...]:
    """What leaves together with the planted update: batch-norm statistics, where the real one had such company."""
    real = seen.companion("statistics")
    if real is None or not set(real.tensors) <= set(buffers):
        return (parcel,)
    return parcel, Parcel("statistics", {name: buffers[name] for name in real.tensors}, real.metadata)


def planted_tensors(
    seen: Seen, images: Tensor, labels: Tensor, steps: Steps
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the site would have sent: gradients, or weights after all steps, under the names of the real parcel; and the
    network's buffers after it."""
    model = copy.deepcopy(seen.network).to(seen.tools.device).train()
    if seen.kind == "gradients":
        gradients = mixed_gradients(seen, model, images[steps.rows(0)], labels[steps.rows(0)])
        return {name: gradients[name] for name in seen.parcel.tensors if name in gradients}, _buffers(model)
    weights = dict(model.named_parameters())
    start, velocity = {name: one.detach().clone() for name, one in weights.items()}, dict[str, Tensor]()
    for step in range(steps.number):
        gradients = mixed_gradients(seen, model, images[steps.rows(step)], labels[steps.rows(step)])
        with torch.no_grad():
            for name, gradient in gradients.items():
                one = weights[name]
                pull = steps.weight_decay * one + steps.proximal * (one - start[name])
                moved = steps.momentum * velocity[name] if name in velocity else 0.0
                velocity[name] = moved + gradient.to(one.device) + pull
                one.sub_(velocity[name], alpha=steps.lr)
    after = {**{name: one.detach().cpu() for name, one in weights.items()}, **_buffers(model)}
    before = seen.received("weights")
    return {name: after.get(name, before.get(name, one)) for name, one in seen.parcel.tensors.items()}, _buffers(model)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in model.named_buffers()}


def mixed_gradients(seen: Seen, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of a network: half by the first image, half by all others."""
    tools = seen.tools
    task, target = tools.assembly.study.task, tools.assembly.target
    answers = labels.to(tools.device)
    targets = task.targets(answers, answers if task.dense else None)
    losses = task.losses(model(images.to(tools.device)), targets, target)
    weights = torch.full((len(images),), 0.5 / max(1, len(images) - 1), device=losses.device)
    weights[0] = 0.5
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = torch.autograd.grad((losses * weights).sum(), list(parameters.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(one) if gradient is None else gradient).detach().cpu()
        for (name, one), gradient in zip(parameters.items(), found, strict=True)
    }


def site_of(data: SiteData, images: Tensor, labels: Tensor, *, members: int, what: str) -> SiteData:
    """A site whose training images are the first `members` of these, and whose held-out ones are the rest."""
    parts = {"train": slice(0, members), "validation": slice(members, None), "test": slice(0, 0)}
    made = {split: _part(images[rows].numpy(), labels[rows].numpy(), what) for split, rows in parts.items()}
    return SiteData(data.name, made["train"], made["validation"], made["test"])


def _part(images: np.ndarray, answers: np.ndarray, what: str) -> ImageSet:
    if what == "masks":
        return ImageSet(images=images, labels=np.zeros(len(images), np.int64), masks=answers)
    return ImageSet(images=images, labels=answers)
