"""What made images are worth: train on real, on synthetic, on both; test on real ones; let validation decide.

Works for any generator and any task: it gets images, trains the study's network on them from the same first weights for
the same number of steps, and keeps the one of several moments that does best on the owner's real validation images.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.collaborators import TrainerLike
from polyclinic.generators.labels import even_labels
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.data.parts import Part
    from polyclinic.generators.base import GeneratorModel

#: what a network can be trained on
DIETS = ("real", "synthetic", "augmented")
CHECKS = 5  # moments at which a network is scored on validation images


@dataclass(frozen=True)
class Learnt:
    """A network's weights and how it does on validation images: `score` is larger where it is better."""

    weights: dict[str, Tensor]
    score: float


def learn(
    trainer: TrainerLike,
    initial: Mapping[str, Tensor],
    train: Part,
    validation: Part,
    *,
    steps: int,
    rng: torch.Generator,
) -> Learnt:
    """The network after the best of several moments of training; after the last if there are no validation images."""
    model = trainer.load(initial)
    optimizer = trainer.optimizer.make(model.parameters(), 1)
    batches = trainer.batches(train, rng)
    best: Learnt | None = None
    for some in _even_parts(steps, CHECKS):
        trainer.train(batches, some, optimizer)
        now = Learnt(trainer.weights(), score(trainer, validation) if len(validation) else 0.0)
        if best is None or now.score > best.score or not len(validation):
            best = now
    assert best is not None
    return best


def learn_all(
    trainer: TrainerLike,
    initial: Mapping[str, Tensor],
    real: Part,
    synthetic: Part,
    validation: Part,
    *,
    steps: int,
    rng: torch.Generator,
    known: Mapping[str, Learnt] | None = None,
) -> dict[str, Learnt]:
    """A network for each of `DIETS`, all from the same weights and seed; those in `known` are not trained again."""
    seed = int(torch.randint(2**62, (), generator=rng))
    parts = {"real": real, "synthetic": synthetic, "augmented": joined(real, synthetic)}
    found = dict(known or {})
    for diet, part in parts.items():
        if diet not in found:
            found[diet] = learn(trainer, initial, part, validation, steps=steps, rng=torch_rng(seed))
    return found


def appraise(
    model: GeneratorModel,
    trainer: TrainerLike,
    initial: Mapping[str, Tensor],
    real: Part,
    validation: Part,
    test: Part,
    *,
    images: int,
    steps: int,
    rng: torch.Generator,
) -> dict[str, Any]:
    """What `images` of a fitted generator are worth: for each diet its `validation` score, and its metrics on real test
    images in all (`test`) and by sub-group (`subgroups`); `released` is the diet that validation images chose."""
    labels = even_labels(images, trainer.target)
    pixels, known = model.sample(labels, rng).numpy(), labels.numpy().astype(real.labels.dtype)
    made = replace(real, images=pixels, labels=known, masks=None, cases=None, subgroup=None)
    found = learn_all(trainer, initial, real, made, validation, steps=steps, rng=rng)
    marks: dict[str, Any] = {"released": gated(found)}
    for diet, learnt in found.items():
        trainer.load(learnt.weights)
        metrics = trainer.task.finish(trainer.evaluate(test))
        marks[diet] = {"validation": learnt.score, "test": metrics, "subgroups": by_subgroup(trainer, test)}
    return marks


def helped(found: Mapping[str, Learnt], margin: float = 0.0) -> bool:
    """Whether adding synthetic images helped, as the owner's validation images say; test images are not asked."""
    return found["augmented"].score > found["real"].score + margin


def gated(found: Mapping[str, Learnt], margin: float = 0.0) -> str:
    """What to release: the network that saw synthetic images too where they helped, else the one that saw real ones."""
    return "augmented" if helped(found, margin) else "real"


def score(trainer: TrainerLike, part: Part) -> float:
    """The task's own metric of the network as it stands, signed so that more is better; of two, ties go by the loss."""
    found = trainer.task.finish(trainer.evaluate(part))
    value = found.get("auc", found.get(trainer.task.metric, float("nan")))
    higher = trainer.task.better == "higher"
    return (value if higher else -value) - 1e-6 * found.get("loss", 0.0)


def by_subgroup(trainer: TrainerLike, part: Part) -> dict[str, dict[str, float]]:
    """The metrics of the network as it stands on each sub-group of a part; an empty table where there are none."""
    if part.subgroup is None:
        return {}
    groups = {str(name): np.flatnonzero(part.subgroup == name) for name in np.unique(part.subgroup)}
    return {name: trainer.task.finish(trainer.evaluate(some(part, index))) for name, index in groups.items()}


def some(part: Part, index: np.ndarray) -> Part:
    """Some of the images of a part, with what is known of each."""
    known = {name: getattr(part, name) for name in ("masks", "cases", "subgroup")}
    chosen = {name: None if array is None else array[index] for name, array in known.items()}
    return replace(part, images=part.images[index], labels=part.labels[index], **chosen)


def joined(a: Part, b: Part) -> Part:
    """The images of two parts; of masks and sub-groups, which made images do not have, nothing is kept."""
    images, labels = (np.concatenate([getattr(part, name) for part in (a, b)]) for name in ("images", "labels"))
    return replace(a, images=images, labels=labels.astype(a.labels.dtype), masks=None, cases=None, subgroup=None)


def _even_parts(total: int, parts: int) -> list[int]:
    cuts = [round(total * k / parts) for k in range(parts + 1)]
    return [b - a for a, b in itertools.pairwise(cuts) if b > a]
