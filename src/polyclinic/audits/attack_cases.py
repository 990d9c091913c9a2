"""Membership by case: was this volume trained on? By the loss of patches of it, alone and beside reference models.

A hospital has tens of volumes where it has thousands of images. With few of them only a strong leak can be told from
chance: the planted one is as weak as a test of so many cases can find, and its area under the curve is in the verdict.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.membership import LossThreshold, ShadowModels, shadow_memberships
from polyclinic.audits.attack import Attack, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_membership import (
    FEWEST,
    PASSES,
    STEPS,
    WEAKEST,
    Candidates,
    beside_references,
    membership_finding,
    unsent_names,
    weakest_between,
)
from polyclinic.audits.truth import Truth, join, truth_of
from polyclinic.data.parts import ImageSet
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import auc
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.training.volumes import VolumeTrainer

PATCHES = 8  #: of a case, always the same ones; their mean loss is the case's
FAR = 3.3  #: deviations above chance of the planted leak, where cases are few
MOST_AREA = 0.98
TOO_FEW = f"fewer than {FEWEST} training or held-out cases to compare"
QUESTION = "membership"


class CaseMembershipAttack(Attack):
    """Tells volumes that were trained on from others, by their loss and beside reference models (RMIA, LiRA)."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)
    questions: ClassVar[tuple[str, ...]] = (QUESTION,)
    tests: ClassVar[int] = 3
    volumes: ClassVar[bool] = True

    def attack(self, seen: Seen, truth: Truth) -> Results:
        alone, beside = LossThreshold(), ShadowModels(count=seen.tools.effort.references)
        if unsent_names(seen):
            return [NotTried(alone.name, "only a part of the network was sent", QUESTION)]
        if refused := not_granted(alone.name, alone.needs, seen, QUESTION):
            return [refused]
        asked = CasesAsked(seen, truth)
        if not asked.enough:
            return [NotTried(alone.name, TOO_FEW, QUESTION)]
        trainer = trainer_of(seen)
        trainer.load(seen.parcel.tensors)
        observed = -losses_of_cases(trainer, asked.part)
        measured = "minus the loss of a case"
        found: Results = [membership_finding(alone.name, str(alone), observed, asked, seen, measured)]
        if refused := not_granted(beside.name, beside.needs, seen, QUESTION):
            return [*found, refused]
        known = scores_of_references(seen, asked.part, beside.count)
        return [*found, *beside_references(seen, asked, str(beside), observed, known)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The sent model, trained further on half of the held-out cases until it just remembers them."""
        held_out = truth.part_held_out(2 * seen.tools.effort.candidates)
        half = len(held_out) // 2
        if unsent_names(seen) or half < FEWEST:
            return []
        weights, area = remembering(seen, held_out, half)
        words = f"the same model, trained until its loss tells {half} cases from {len(held_out) - half} with AUC "
        rows = np.arange(len(held_out))
        other = truth_of(truth, held_out, rows[:half], rows[half:])
        parcel = Parcel(seen.kind, weights, seen.parcel.metadata)
        return [seen.planted("memory", f"{words}{area:.2f}", other, parcel)]


class CasesAsked(Candidates):
    """Cases of volumes that are asked about, those that were trained on first; `part` has no images of one shape."""

    def __init__(self, seen: Seen, truth: Truth) -> None:
        count = seen.tools.effort.candidates
        inside, outside = truth.part_of_members(count), truth.part_held_out(count)
        self.members, self.others = len(inside), len(outside)
        self.part = join(inside, outside)
        self.answers = torch.zeros(len(self.part))
        self.cases = truth.cases(count)


def goal_of(members: int, others: int) -> float:
    """The area under the curve of the weakest leak that a rank test of so many cases can find."""
    deviation = math.sqrt((members + others + 1) / (12 * members * others))
    return min(max(WEAKEST, 0.5 + FAR * deviation), MOST_AREA)


def trainer_of(seen: Seen) -> VolumeTrainer:
    """A trainer of the site's network on the audit's device."""
    assembly = seen.tools.assembly
    there = replace(assembly, study=assembly.study.with_settings({"engine.device": seen.tools.device}))
    trainer = cast(VolumeTrainer, there.trainer(assembly.backbones.get(seen.site)))
    trainer.load(seen.network.state_dict())
    return trainer


def plain(trainer: VolumeTrainer) -> VolumeTrainer:
    """The same without augmentation."""
    return cast(VolumeTrainer, trainer.with_optimizer(trainer.optimizer.model_copy(update={"augment": ()})))


@torch.no_grad()
def losses_of_cases(trainer: VolumeTrainer, part: ImageSet) -> Tensor:
    """The mean loss of some patches of each case, [N] float64, with the weights that the trainer has."""
    own = plain(trainer)
    own.model.eval()
    seeds = torch.randint(2**62, (PATCHES,), generator=torch_rng("audit", "patches of a case"))
    found = []
    for case in range(len(part)):
        several = torch.full((PATCHES,), case)
        pairs = [
            own.batch(part, *some) for some in zip(several.split(2), seeds.split(2), strict=True)
        ]  # few at once, as in training
        losses = [own.task.losses(own.forward(x).float(), y, own.target) for x, y in pairs]
        found.append(torch.cat(losses).mean().double().cpu())
    return torch.stack(found)


def train_on(trainer: VolumeTrainer, part: ImageSet, steps: int, number: int, seed: int) -> None:
    """Train with the study's optimiser on patches of these cases, from the weights that the trainer has."""
    optimizer = trainer.optimizer.make(trainer.model.parameters(), number)
    trainer.train(trainer.batches(part, torch_rng(seed, "audit", "cases")), steps, optimizer)


def scores_of_references(seen: Seen, part: ImageSet, count: int) -> tuple[Tensor, Tensor]:
    """What networks say of the cases that were trained on halves of them, and which half. Halves, and orders in them,
    follow from what the cases show: where members stand cannot matter."""
    names = [volume.digest() for volume in part.images]
    order = torch.tensor(sorted(range(len(names)), key=names.__getitem__))
    inside = shadow_memberships(count, len(part), seen.tools.seed)[:, order.argsort()]
    trainer, assembly = trainer_of(seen), seen.tools.assembly
    method, first = assembly.study.method, assembly.initial_weights(assembly.backbones.get(seen.site))
    found = []
    for number, rows in enumerate(inside):
        half = part.take(order[rows[order]].numpy())
        epochs = getattr(method, "local_epochs", 1) or 1
        each = getattr(method, "local_steps", None) or trainer.steps_in(half) * epochs
        trainer.load(first)
        seed = seed_of(seen.tools.seed, "shadow model", number)
        train_on(trainer, half, min(STEPS, each * max(1, seen.round)), seen.round, seed)
        found.append(-losses_of_cases(trainer, part))
    return torch.stack(found), inside


def remembering(seen: Seen, part: ImageSet, half: int) -> tuple[Mapping[str, Tensor], float]:
    """Weights that tell the first `half` of the cases from the rest, and how well; the weakest that reach the goal."""
    trainer, own = trainer_of(seen), part.take(np.arange(half))
    goal = goal_of(half, len(part) - half)

    def area_of(state: Mapping[str, Tensor]) -> float:
        trainer.load(state)
        losses = losses_of_cases(trainer, part)
        return auc(-losses[:half], -losses[half:])

    after = {**trainer.weights(), **seen.parcel.tensors}
    for number in range(PASSES):
        before = after
        trainer.load(before)
        train_on(trainer, own, trainer.steps_in(own), seen.round, number)
        after = trainer.weights()
        if area_of(after) >= goal:
            break
    weakest, area = weakest_between(before, after, area_of, goal)
    return {name: weakest[name].clone() for name in seen.parcel.tensors if name in weakest}, area
