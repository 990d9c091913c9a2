"""Attacks on sums of few images' features with a decoder that the attacker trains on images of its own.

A decoded vector is compared with the site's images of its class and with held-out images of that class: a mean looks
like its class, and that alone is no leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from polyclinic.attacks.decoders import FeatureDecoder
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_sums import features_of
from polyclinic.audits.attacker_images import FEWEST, attacker_images
from polyclinic.audits.few_images import MOST, FewImages, few_images
from polyclinic.audits.planting import site_of
from polyclinic.audits.recovery import Identification, Recovery, correlations, recovery, without_grey
from polyclinic.audits.sum_layouts import read_sums, sums_like
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth, not_granted
from polyclinic.metrics.perceptual import squared_distances
from polyclinic.metrics.statistics.significance import chance_of_groups
from polyclinic.models.encoders import Encoded
from polyclinic.randomness import torch_rng

NAME = FeatureDecoder().name
NOISE = 0.5  #: of the weakest planted features, in deviations of the features


class FeatureDecoderAttack(Attack):
    """Decodes features of single images, or means of few, out of sums; a decoder learnt from others' images."""

    kinds: ClassVar[tuple[str, ...]] = ("statistics",)

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        if read_sums(seen.parcel) is None or not isinstance(seen.network, Encoded):
            return []  # nothing to read features out of; the attack on second moments says so
        groups = few_images(seen.parcel) if seen.sites == 1 else []
        if not groups:
            why = f"no sum is of {MOST} images or fewer, and a mean of more shows none of them"
            return [NotTried(NAME, why, excluded=True)]
        return [decode_sums(seen, truth, groups)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The same sums of held-out images, as many of each class, with noise on the features of each."""
        chosen = _alike(seen, truth)
        if chosen is None:
            return []
        images, labels, members = chosen
        features = features_of(seen, images)
        spread = NOISE * features.std(0, keepdims=True)
        noise = torch.randn(members, features.shape[1], generator=torch_rng(seen.tools.seed, "audit", "planted sums"))
        parcel = sums_like(seen.parcel, features[:members] + spread * noise.numpy(), labels[:members])
        if [one.shape for one in few_images(parcel)] != [one.shape for one in few_images(seen.parcel)]:
            return []  # fewer held-out images of a class than the real sums have: the plant would be an easier one
        data = site_of(truth.data, images, labels, members=members, what="labels")
        words = f"the same sums of held-out images, with noise of {NOISE:g} of the features' deviation on each image"
        changed = replace(seen, parcel=parcel, together=(parcel,), more=tuple)
        return [Planted("noisy sums", words, changed, Truth([], data, truth.seed))]


def decode_sums(seen: Seen, truth: Truth, groups: Sequence[FewImages]) -> Finding | NotTried:
    """Train a decoder, and score what it makes of the vectors of each group."""
    tools = seen.tools
    settings = FeatureDecoder(steps=tools.effort.latent_steps)
    if refused := not_granted(settings, seen):
        return refused
    own = attacker_images(tools, seen.site, truth)
    if len(own.images) < FEWEST:
        return NotTried(NAME, f"the attacker has {len(own.images)} images of its own; {FEWEST} are needed")
    known = torch.from_numpy(np.array(features_of(seen, (own.images * 255).round().to(torch.uint8))))
    vectors = torch.cat([group.vectors for group in groups]).float()
    found = settings.decode_vectors(vectors, own.images, known, seed=tools.seed, device=tools.device)
    labels = truth.held_out(tools.effort.candidates)[1]
    labels = labels if len(labels) == len(own.held_out) else labels[1::2]  # the attacker took the others
    sets = [one for one in _sets(groups, found.images, truth, own.held_out, labels) if len(one.held_out)]
    if not sets:
        return NotTried(NAME, "there are no held-out images of these classes to compare with")
    result = score_sets(sets, own.held_out, f"{seen.where}, {NAME}")
    verdict = result.verdict(tools.level)
    figures = {"sums_of_few_images": len(groups), "fewest_images": min(group.images for group in groups)}
    return Finding(
        NAME, found.threat_model, replace(verdict, evidence={**verdict.evidence, **figures}),
        [f"the attacker's own: {own.words}"], result.draw, doubt=_doubt(groups, len(sets)),
    )  # fmt: skip


def _doubt(groups: Sequence[FewImages], compared: int) -> str:
    """Why nothing found would not be enough, if so."""
    means = [group.images for group in groups if len(group.vectors) < group.images]
    if means:
        return f"of {len(means)} of {len(groups)} sums only the mean was decoded, and they tell more than their mean"
    return "a class has no held-out image to compare with" if compared < len(groups) else ""


# --- scores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedSet:
    """What was decoded of one class [K, ...], the site's images of it [N, ...], and held-out ones of it [M, ...]."""

    found: Tensor
    true: Tensor
    held_out: Tensor


def _sets(
    groups: Sequence[FewImages], found: Tensor, truth: Truth, held_out: Tensor, labels: Tensor
) -> list[ComparedSet]:
    own = truth.labels(truth.used)
    pieces = found.split([len(group.vectors) for group in groups])
    sets = [
        ComparedSet(piece, truth.images(truth.used[group.is_of(own)]), held_out[group.is_of(labels)])
        for group, piece in zip(groups, pieces, strict=True)
    ]
    return [one for one in sets if len(one.true) >= len(one.found)]


def score_sets(sets: Sequence[ComparedSet], held_out: Tensor, where: str = "") -> Recovery:
    """Each decoded image beside the site's image of its class that it is nearest to; chance is counted within classes,
    and a guess may be the mean of a class."""
    found, true = torch.cat([one.found for one in sets]), torch.cat([_paired(one) for one in sets])
    means = torch.stack([one.held_out.mean(0) for one in sets])
    result = recovery(found, true, torch.cat([held_out, means]), in_order=True, where=where)
    return replace(result, identified=identify_in_classes(sets))


def _paired(one: ComparedSet) -> Tensor:
    """The site's images of the class in the order of least total error."""
    errors = squared_distances(one.found.nan_to_num(0.5).flatten(1), one.true.flatten(1))
    return one.true[torch.from_numpy(linear_sum_assignment(errors.numpy())[1])]


def identify_in_classes(sets: Sequence[ComparedSet]) -> Identification:
    """How many images of the site are pointed to, each once; by chance the site's images of a class and held-out ones
    of it change places."""
    pointed = [_pointed(one) for one in sets]
    count = sum(int((places >= len(one.held_out)).sum()) for places, one in zip(pointed, sets, strict=True))
    sizes = [
        (len(places), len(one.true), len(one.true) + len(one.held_out))
        for places, one in zip(pointed, sets, strict=True)
    ]
    most = [(min(len(one.found), len(one.true)), len(one.true), len(one.true) + len(one.held_out)) for one in sets]
    chance, reach = chance_of_groups(sizes, count), chance_of_groups(most, sum(size for size, _, _ in most))
    total, others = sum(len(one.found) for one in sets), sum(len(one.held_out) for one in sets)
    return Identification(count, total, chance, others, reach)


def _pointed(one: ComparedSet) -> Tensor:
    """Places of the images that are pointed to, among those of the class: held-out ones first, then the site's.

    Where a held-out image is the same as one of the site's, the held-out one is meant."""
    images = torch.cat([one.held_out, one.true])
    mean = images.mean(0)  # of all: it must not tell who was held out
    found = without_grey(one.found.nan_to_num(0.5), mean)
    nearest = correlations(found - mean, images - mean).max(1)
    return nearest.indices[nearest.values > 0].unique()


# --- power ----------------------------------------------------------------------------------------------


def _alike(seen: Seen, truth: Truth) -> tuple[Tensor, Tensor, int] | None:
    """Held-out images and labels; the first of them, so many, are as many of each class as the site has, at most half
    of each."""
    images, labels = truth.held_out(seen.tools.effort.candidates)
    values, counts = truth.labels(truth.used).unique(return_counts=True)
    wanted = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if labels.is_floating_point():  # a regression: classes play no part
        rows = torch.arange(min(len(truth.used), len(labels) // 2))
    else:
        places = {label: (labels == label).nonzero().flatten() for label in wanted}
        rows = torch.cat([of[: min(wanted[label], len(of) // 2)] for label, of in places.items()])
    if not len(rows):
        return None
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[rows] = False
    order = torch.cat([rows, rest.nonzero().flatten()])
    return images[order], labels[order], len(rows)
