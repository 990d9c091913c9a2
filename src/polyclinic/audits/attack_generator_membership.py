"""Membership of a generator beside reference generators (RMIA, LiRA): how near does it come to an image, and they?

The likelihood of an image is that of its nearest neighbour among made images: minus the logarithm of the distance. Some
images are near to anything; reference generators, which the attacker trains on halves of the candidates as the study
trains its own, tell which (GAN-Leaks' calibration, with several references instead of one).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from polyclinic.attacks.membership import ReferenceGenerators, Scorer, lira, nearness_scores, rmia, shadow_scores
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_membership import FEWEST, Candidates, membership_finding
from polyclinic.audits.attack_near_copies import made_images
from polyclinic.audits.planted_generator import planted_leaning
from polyclinic.audits.planted_truth import truth_of_asked
from polyclinic.audits.views import Finding, NotTried, Planted, PoolScores, Seen, Truth, not_granted
from polyclinic.data.pixels import to_uint8
from polyclinic.generators import Generator
from polyclinic.generators.base import even_labels
from polyclinic.metrics.images import digest
from polyclinic.randomness import torch_rng

QUESTION = "membership"
PASSES = ("epochs", "prior_epochs")  #: settings of generators that count passes over the images
ONCE = "a search for settings ([tuning]) and differential privacy are not repeated for them"


class ReferenceGeneratorsAttack(Attack):
    """Compares how near made images come to an image with how near those of reference generators come."""

    kinds: ClassVar[tuple[str, ...]] = ("generator", "synthetic-images")
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        return reference_generators(seen, truth)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The images that were made, each mixed with a held-out image that the reference generators know, too."""
        made, other = some_made_images(seen), truth_of_asked(truth, seen.tools.effort.candidates)
        return [] if isinstance(made, NotTried) or other is None else planted_leaning(seen, other, made)


def reference_generators(seen: Seen, truth: Truth) -> list[Finding | NotTried]:
    """RMIA and LiRA with the same reference generators."""
    settings = ReferenceGenerators(count=seen.tools.effort.references)
    if refused := not_granted(settings, seen, QUESTION):
        return [refused]
    if seen.tools.assembly.study.task.dense or seen.tools.assembly.study.in_latents:
        return [NotTried(settings.name, "the generator makes more or other things than images", QUESTION)]
    made = some_made_images(seen)
    if isinstance(made, NotTried):
        return [replace(made, attack=settings.name, question=QUESTION)]
    asked = Candidates(seen, truth)
    if not asked.enough:
        return [NotTried(settings.name, f"fewer than {FEWEST} training or held-out images to compare", QUESTION)]
    observed = nearness_scores(made, asked.images, seen.tools.distance, device=seen.tools.device)
    known = scores_of_references(seen, asked, len(made), settings.count)
    population = torch.arange(len(observed)) >= asked.members
    by_name = {
        "rmia-generators": rmia(observed, known.scores, population),
        "lira-generators": lira(observed, known.scores, known.inside),
    }
    _, words = shortened(seen.tools.assembly.study.generator, len(asked.images) // 2, seen.tools.effort.generator_steps)
    found = [
        membership_finding(name, str(settings), scores, asked, seen, f"score of {name.split('-')[0].upper()}")
        for name, scores in by_name.items()
    ]
    return [replace(one, assumed=[words]) for one in found]


def some_made_images(seen: Seen) -> Tensor | NotTried:
    """As many of the images that the receiver has as the budget asks about."""
    made = made_images(seen)
    if isinstance(made, NotTried):
        return made
    rng = torch_rng(seen.tools.seed, "audit", "made")
    return made[torch.randperm(len(made), generator=rng)[: seen.tools.effort.candidates]]


def scores_of_references(seen: Seen, asked: Candidates, samples: int, count: int) -> PoolScores:
    """What reference generators say of the candidates; trained once for a parcel and what is planted beside it."""
    key = ("generators", seen.site, str(seen.round))
    names = [digest(image) for image in asked.images]
    known = seen.tools.references.get(key)
    if known is None or not set(names) <= known.place.keys():
        scores, inside = shadow_scores(
            lambda index, seed: reference_scorer(seen, asked, index, samples, seed),
            asked.images,
            asked.answers,
            count=count,
            seed=seen.tools.seed,
        )
        known = PoolScores(scores, inside, {name: place for place, name in enumerate(names)})
        seen.tools.references.clear()  # of the parcel before
        seen.tools.references[key] = known
    rows = [known.place[name] for name in names]
    return known._replace(scores=known.scores[:, rows], inside=known.inside[:, rows])


def reference_scorer(seen: Seen, asked: Candidates, index: Tensor, samples: int, seed: int) -> Scorer:
    """The scorer of a generator of the study, trained on some of the candidates."""
    tools, study = seen.tools, seen.tools.assembly.study
    settings, _ = shortened(study.generator, len(index), tools.effort.generator_steps)
    model = settings.build_for(tools.image_shape, tools.assembly.target, seed=seed, device=tools.device)
    rng = torch_rng(seed, "audit", "reference generator")
    model.fit(to_uint8(asked.images[index]), asked.answers[index], rng)
    made = model.sample(even_labels(samples, model.target), rng)
    return lambda images, answers: nearness_scores(made, images, tools.distance, device=tools.device)


def shortened(settings: Generator, images: int, most: int) -> tuple[Generator, str]:
    """The study's generator with at most so many steps, as a quick audit has no time for more; and that in words."""
    passes = max(1, images // settings.batch_size)
    limits = {name: max(1, most // passes) for name in PASSES if name in type(settings).model_fields}
    changes = {name: limit for name, limit in limits.items() if getattr(settings, name) > limit}
    if (settings.steps_on(images) or 0) > most:
        changes["steps"] = most
    if not changes:
        return settings, f"reference generators are trained with the study's settings of its generator; {ONCE}"
    said = ", ".join(f"{name} {value}" for name, value in changes.items())
    words = f"reference generators are trained for less than the study's own: {said}; {ONCE}"
    return settings.model_copy(update=changes), words
