"""Attacks on sums: second moments of features (statistics parcels) and histograms of scores (metrics parcels).

Both ask about membership: was this image among those that the sums are of? Of metrics parcels, all rounds that the site
kept are looked at together. The power check plants sums of held-out images, of as many as still leave an area of
`WEAKEST`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.sums import OUTLIER, histogram_scores
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_membership import FEWEST, WEAKEST, Candidates, membership_finding, unsent_names
from polyclinic.audits.planted_truth import truth_of_held_out
from polyclinic.audits.sum_layouts import MomentMatrices, read_sums, sums_like
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth, rows_of
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.one_round import project, projection
from polyclinic.metrics.roc import auc
from polyclinic.models import Backbone
from polyclinic.models.encoders import Encoded, kept_features
from polyclinic.tasks.classification import EDGES, margins

MOMENTS, HISTOGRAMS, QUESTION = "second-moments", "score-histograms", "membership"
NEEDS = frozenset({Capability.CANDIDATES, Capability.CANDIDATE_LABELS, Capability.ARCHITECTURE})
AT_ONCE = 128

#: a parcel like the real one, of these images uint8 and their answers
Make = Callable[[Tensor, Tensor], Parcel]
#: membership scores of images uint8 with their answers, under a parcel
Score = Callable[[Parcel, Tensor, Tensor], Tensor]


class SecondMomentsAttack(Attack):
    """Tells the images behind sums of features: they lie in the space that second moments span, or near the means."""

    kinds: ClassVar[tuple[str, ...]] = ("statistics",)

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        if read_sums(seen.parcel) is None or not isinstance(seen.network, Encoded):
            return [NotTried(MOMENTS, "the parcel holds no sums of an encoder's features", QUESTION)]
        if refused := why_not(MOMENTS, seen, truth):
            return [refused]
        asked = Candidates(seen, truth)
        features = torch.from_numpy(np.array(features_of(seen, (asked.images * 255).round().to(torch.uint8))))
        sums = read_sums(seen.parcel)
        assert sums is not None, "asked above"
        found = membership_finding(
            MOMENTS, threat("sums of features", "encoder"), sums.scores(features, asked.answers), asked, seen,
            "how well an image fits the sums",
        )  # fmt: skip
        figures: dict[str, float | int] = {"images_behind": sums.images, "features": features.shape[1]}
        figures["images_per_feature"] = sums.images / features.shape[1]
        if isinstance(sums, MomentMatrices):
            alone = sums.leverages(features, asked.answers)[: asked.members] > OUTLIER
            figures["outliers"] = int(alone.sum())
        return [replace(found, verdict=replace(found.verdict, evidence={**found.verdict.evidence, **figures}))]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        def make(images: Tensor, answers: Tensor) -> Parcel:
            return sums_like(seen.parcel, features_of(seen, images), answers)

        def score(parcel: Parcel, images: Tensor, answers: Tensor) -> Tensor:
            sums = read_sums(parcel)
            assert sums is not None, "made in this layout"
            return sums.scores(torch.from_numpy(np.array(features_of(seen, images))), answers)

        return planted_sums("sums of features", seen, truth, make, score)


class HistogramsAttack(Attack):
    """Tells the images behind histograms of scores: an image whose bin is empty was not among them."""

    kinds: ClassVar[tuple[str, ...]] = ("metrics",)

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        if histograms_of(seen.parcel) is None:
            return [NotTried(HISTOGRAMS, "the sums hold no histograms of scores", QUESTION)]
        if unsent_names(seen, sent=seen.received("weights")):
            return [NotTried(HISTOGRAMS, "the network that was scored is not known", QUESTION)]
        if refused := why_not(HISTOGRAMS, seen, truth):
            return [refused]
        asked = Candidates(seen, truth)
        rounds = [seen, *(one for one in seen.more() if is_same_question(seen, one))]
        scores = torch.stack([scores_in_round(one, asked.images, asked.answers) for one in rounds]).sum(0)
        found = membership_finding(
            HISTOGRAMS, threat("histograms of scores", "network that was scored"), scores, asked, seen,
            "minus the empty bins that an image falls into",
        )  # fmt: skip
        figures = {"images_behind": int(seen.parcel.tensors.get("count", torch.tensor(0))), "rounds": len(rounds)}
        return [replace(found, verdict=replace(found.verdict, evidence={**found.verdict.evidence, **figures}))]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        task, target = seen.tools.assembly.study.task, seen.tools.assembly.target

        def make(images: Tensor, answers: Tensor) -> Parcel:
            observed = task.observe(outputs(seen, images.float() / 255), answers, target)
            return Parcel(seen.kind, task.sums(observed, answers, None, target), {})

        def score(parcel: Parcel, images: Tensor, answers: Tensor) -> Tensor:
            return scores_in_round(replace(seen, parcel=parcel), images.float() / 255, answers)

        return planted_sums("histograms of scores", seen, truth, make, score)


def threat(what: str, network: str) -> str:
    return f"The attacker has the {what} that a site sent, the {network}, and images with labels that it asks about."


def why_not(name: str, seen: Seen, truth: Truth) -> NotTried | None:
    if missing := NEEDS - seen.tools.threat.granted:
        why = f"the threat model does not grant {', '.join(sorted(missing))}"
        return NotTried(name, why, QUESTION, excluded=True)
    if not Candidates(seen, truth).enough:
        return NotTried(name, f"fewer than {FEWEST} images of either kind to compare", QUESTION)
    return None


# --- second moments -------------------------------------------------------------------------------------


def features_of(seen: Seen, images: Tensor) -> np.ndarray:
    """Features [N, k] of images uint8 as the site computes them, projected where the study says so."""
    network = seen.network
    assert isinstance(network, Encoded), "asked before"
    found = kept_features(network.features.encoder(torch.device(seen.tools.device)), images.numpy())
    signs = projection(found.shape[1], getattr(seen.tools.assembly.study.method, "numbers", None))
    return found if signs is None else project(found, signs)


# --- histograms -----------------------------------------------------------------------------------------


def histograms_of(parcel: Parcel) -> Tensor | None:
    """[C, 2, bins], images of other classes and of the class itself; None where there are none."""
    found = parcel.tensors.get("histograms")
    fits = found is not None and found.dim() == 3 and tuple(found.shape[1:]) == (2, len(EDGES) + 1)
    return found if fits else None


def is_same_question(first: Seen, other: Seen) -> bool:
    """Whether another release scored the same images in another round, with a network that is known."""
    known = not unsent_names(other, sent=other.received("weights"))
    return other.split == first.split and histograms_of(other.parcel) is not None and known


def scores_in_round(seen: Seen, images: Tensor, answers: Tensor) -> Tensor:
    """Membership scores [M]: over all classes, empty bins that an image of its label falls into count against it."""
    counts = histograms_of(seen.parcel)
    assert counts is not None, "asked before"
    found = margins(outputs(seen, images).double())
    total = torch.zeros(len(images), dtype=torch.float64)
    for label in range(len(counts)):
        own = answers == label
        for rows, histogram in ((own, counts[label, 1]), (~own, counts[label, 0])):
            if bool(rows.any()):
                total[rows] += histogram_scores([histogram], [found[rows, label]], EDGES)
    return total


@torch.no_grad()
def outputs(seen: Seen, images: Tensor) -> Tensor:
    """What the network that was scored says of images [N, C, H, W] in [0, 1]."""
    network: Backbone = seen.network.to(seen.tools.device).eval()
    return torch.cat([network(some.to(seen.tools.device)).cpu() for some in images.split(AT_ONCE)])


# --- power ----------------------------------------------------------------------------------------------


def planted_sums(leak: str, seen: Seen, truth: Truth, make: Make, score: Score) -> list[Planted]:
    """Sums of held-out images: of as many as still give an area of `WEAKEST`, so that the leak is the weakest."""
    other = truth_of_held_out(truth, seen.tools.effort.candidates)
    if other is None:
        return []
    members, answers = other.members(len(other.data.train))
    rest = other.held_out(seen.tools.effort.candidates)
    count = len(members)
    while True:
        parcel = make(members[:count], answers[:count])
        area = auc(score(parcel, members[:count], answers[:count]), score(parcel, *rest))
        if area >= WEAKEST or count * 3 // 4 < FEWEST:
            break
        count = count * 3 // 4
    data = replace(other.data, train=rows_of(other.data.train, np.arange(count)))
    words = f"{leak} of {count} held-out images, which tell these from others with AUC {area:.2f}"
    changed = replace(seen, parcel=parcel, together=(parcel,), more=tuple)
    return [Planted(leak, words, changed, Truth([], data, truth.seed))]
