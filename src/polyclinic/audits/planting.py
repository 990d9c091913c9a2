"""Planted leaks, which show the power of an attack: updates, images of generators, and codes.

Held-out images take the place of training images, so that no private image is copied. The leaks are as weak as the
verdict claims to exclude; no defence and no noise is applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.attacks.copies import FEWEST
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.attacks.projection import Projected
from polyclinic.audits.attack import Planted, Seen, Tools
from polyclinic.audits.attack_latents import public_trainer
from polyclinic.audits.truth import Truth, truth_of_held_out, truth_of_images
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel
from polyclinic.generators.base import as_tensor
from polyclinic.generators.replay_stream import SiteCodes, to_groups
from polyclinic.methods.shared.replay_space import public_limits
from polyclinic.metrics.roc import auc
from polyclinic.randomness import torch_rng


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
    rows = [steps.rows(step) for step in range(steps.number)]
    other = truth_of_images(truth, images, labels, steps.images, seen.tools.what, rows)
    share = "it is the only one" if steps.batch == 1 else f"half of each step is by one, half by {steps.batch - 1}"
    made = "one step" if steps.number == 1 else f"{steps.number} steps"
    parcels, real = [Parcel(seen.kind, sent, seen.parcel.metadata)], seen.companion("statistics")
    if real is not None and set(real.tensors) <= set(buffers):  # batch-norm statistics left with the real one
        parcels.append(Parcel("statistics", {name: buffers[name] for name in real.tensors}, real.metadata))
    words = f"an update of {made} on held-out images, without noise: {share}"
    return [seen.planted("dominant image", words, other, *parcels)]


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


LEANING, REACHED = 0.7, 0.85  #: areas under the curve of the two leaks
HALVINGS = 5  #: of the share by which images lean
STEPS = 20  #: shares of the way into the generator's reach that are tried
#: images uint8 and their labels to the closest that the generator can make
Project = Callable[[Tensor, Tensor], Projected]


def planted_leaning(seen: Seen, other: Truth | None, made: Tensor) -> list[Planted]:
    """The images that were made, each mixed with an image that is to be remembered (a training image of `other`), as
    little as gives the goal."""
    tools = seen.tools
    count = tools.effort.candidates
    if other is None or not len(made):
        return []
    members, others = other.members(count)[0], other.held_out(count)[0]
    if min(len(members), len(others)) < FEWEST:
        return []
    made = made[:count]
    towards = members[torch.arange(len(made)) % len(members)].float() / 255

    def leaning(share: float) -> Tensor:
        return to_uint8((1 - share) * made.float() / 255 + share * towards)

    def area(share: float) -> float:
        attack = NearestSynthetic()
        return attack.run(leaning(share), members, others, tools.distance, device=tools.device).separation.auc

    share, reached = least_share(area)
    words = f"images that were made, mixed with {share:.0%} of held-out ones, which tells these with AUC {reached:.2f}"
    parcel = Parcel("synthetic-images", {"images": leaning(share)}, {"samples": len(made)})
    return [seen.planted("leaning images", words, other, parcel, question="membership")]


def least_share(area: Callable[[float], float]) -> tuple[float, float]:
    """The smallest share that reaches the goal, by halving, and the area that it has."""
    low, high, reached = 0.0, 1.0, area(1.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = area(middle)
        low, high, reached = (low, middle, found) if found >= LEANING else (middle, high, reached)
    return high, reached


def planted_within_reach(seen: Seen, truth: Truth, project: Project) -> list[Planted]:
    """Held-out images, moved towards the closest ones that the generator can make, as little as gives the goal."""
    count = seen.tools.effort.projected
    other = truth_of_held_out(truth, count)
    if other is None:
        return []
    inside, outside = project(*other.members(count)), project(*other.held_out(count))
    shares = [step / STEPS for step in range(STEPS + 1)]
    areas = [auc(-inside.distances * (1 - share) ** 2, -outside.distances) for share in shares]
    share, area = next(((s, a) for s, a in zip(shares, areas, strict=True) if a >= REACHED), (1.0, areas[-1]))
    moved = moved_towards(other, inside, count, share)
    words = f"held-out images, moved by {share:.0%} to what the generator can make, which gives AUC {area:.2f}"
    return [seen.planted("images within reach", words, moved, question="membership")]


def moved_towards(truth: Truth, projected: Projected, count: int, share: float) -> Truth:
    """The same truth with its first `count` members moved by a share of the way to their projections."""
    train = truth.data.train
    images = torch.from_numpy(np.array(train.images[:count])).float() / 255
    mixed = to_uint8((1 - share) * images + share * projected.images[: len(images)].cpu())
    data = replace(truth.data, train=replace(train, images=mixed.numpy()))
    return Truth([], data, truth.seed)


EXCHANGED = 0.5  #: the share of an image's codes that are other images'


def planted_codes(seen: Seen, truth: Truth, model: CodedModel) -> list[Planted]:
    """Codes of as many held-out images as the budget asks about, half of each drawn anew."""
    other = truth_of_held_out(truth, seen.tools.effort.candidates)
    if other is None:
        return []
    part = other.data.train
    codes = model.encode(learned_images(seen.tools, as_tensor(part.images)))
    rng = torch_rng(seen.tools.seed, "audit", "planted codes")
    mixed = {level: exchange(values, EXCHANGED, rng) for level, values in codes.items()}
    groups = to_groups({seen.site: SiteCodes(mixed, as_tensor(part.labels))}, model)
    parcels = {kind: Parcel(kind, tensors) for kind, tensors in groups.items()}
    rest = tuple(one for one in seen.together if one.kind not in parcels)
    words = f"codes of {len(part)} held-out images, of which {EXCHANGED:.0%} are other images' codes"
    return [seen.planted("mixed codes", words, other, parcels.pop("codes"), *parcels.values(), *rest)]


def learned_images(tools: Tools, images: Tensor) -> Tensor:
    """What the study's generator learns of images uint8: themselves, or their latents rounded to bytes."""
    if not tools.assembly.study.in_latents:
        return images
    trainer = public_trainer(tools)
    return public_limits(trainer, tools.image_shape).to_bytes(trainer.latents(images.numpy()))


def exchange(codes: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Codes [N, h, w] in which a share of the places of each image have another image's code of the same place."""
    flat = codes.flatten(1)
    other = torch.rand(flat.shape, generator=rng).argsort(0)
    taken = torch.rand(flat.shape, generator=rng) < share
    return torch.where(taken, flat.gather(0, other), flat).reshape(codes.shape)
