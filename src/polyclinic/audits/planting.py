"""Planted updates: gradients or weights as the site would have sent them, were one image half of the update.

They show the power of an attack on updates. The images are held-out ones of the site, so that no training image is
copied; half of the update comes from one of them, the other half from others. No defence and no noise is applied: what
is planted is the weakest update without a defence that "withstood" excludes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyclinic.audits.views import Planted, Seen, Truth
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.leaving.parcel import Parcel


def planted_update(seen: Seen, truth: Truth, searched: int) -> list[Planted]:
    """An update of one step on `searched` held-out images, of which the first has half of the weight.

    Nothing without held-out images: some must be left to compare with.
    """
    images, labels = truth.held_out(seen.tools.effort.candidates, seen.tools.what)
    if len(images) < 2 * searched:
        return []
    gradients = mixed_gradients(seen, images[:searched].float() / 255, labels[:searched])
    data = site_of(truth.data, images, labels, members=searched, what=seen.tools.what)
    share = "it is the only one" if searched == 1 else f"half of it is by one, half by {searched - 1}"
    return [
        Planted(
            "dominant image",
            f"an update of one step on held-out images, without noise: {share}",
            replace(seen, parcel=_as_sent(seen, gradients, searched), together=(), sites=1),
            Truth([torch.arange(searched)], data, truth.seed),
        )
    ]


def mixed_gradients(seen: Seen, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of the network that the site was sent: half by the first image, half by all others."""
    tools, model = seen.tools, seen.network.to(seen.tools.device).train()
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


def _as_sent(seen: Seen, gradients: dict[str, Tensor], images: int) -> Parcel:
    """A parcel of the same kind with the same names, of so many images in one step."""
    optimizer = seen.tools.assembly.study.optimizer.at_site(seen.site)
    before = seen.received("weights")
    names = [name for name in seen.parcel.tensors if name in gradients]
    if seen.kind == "gradients":
        tensors = {name: gradients[name] for name in names}
    else:
        lr = optimizer.lr_in(seen.round)
        tensors = {name: before[name] - lr * gradients[name] for name in names if name in before}
        tensors |= {name: before.get(name, one) for name, one in seen.parcel.tensors.items() if name not in tensors}
    return Parcel(seen.kind, tensors, {"samples": images, "steps": 1})


def site_of(data: SiteData, images: Tensor, labels: Tensor, *, members: int, what: str) -> SiteData:
    """A site whose training images are the first `members` of these, and whose held-out ones are the rest."""
    parts = {"train": slice(0, members), "validation": slice(members, None), "test": slice(0, 0)}
    made = {split: _part(images[rows].numpy(), labels[rows].numpy(), what) for split, rows in parts.items()}
    return SiteData(data.name, made["train"], made["validation"], made["test"])


def _part(images: np.ndarray, answers: np.ndarray, what: str) -> ImageSet:
    if what == "masks":
        return ImageSet(images=images, labels=np.zeros(len(images), np.int64), masks=answers)
    return ImageSet(images=images, labels=answers)
