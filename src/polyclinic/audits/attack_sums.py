"""Attacks on sums: second moments of features (statistics parcels) and histograms of scores (metrics parcels).

Two ask about membership: was this image among those that the sums are of? Of metrics parcels, all rounds that the site
kept are looked at together. The power check plants sums of held-out images, of as many as still leave an area of
`WEAKEST`. The third decodes sums of few images' features with a decoder that the attacker trains on images of its own;
a decoded vector is compared with the site's images of its class and with held-out images of that class: a mean looks
like its class, and that alone is no leak.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.decoders import FeatureDecoder
from polyclinic.audits import sum_layouts
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_membership import FEWEST, WEAKEST, Candidates, membership_finding, unsent_names
from polyclinic.audits.recovery import Identification, Recovery, correlations, recovery, without_grey
from polyclinic.audits.truth import FEWEST_OWN, Truth, attacker_images, truth_of_held_out, truth_of_images
from polyclinic.federation.layers.leaving import USUAL_COHORT
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.one_round import project, projection
from polyclinic.metrics.perceptual import squared_distances
from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics.significance import chance_of_groups
from polyclinic.models import Backbone
from polyclinic.models.encoders import Encoded, kept_features
from polyclinic.randomness import torch_rng
from polyclinic.tasks.classification import CELL_EDGES, EDGES, margins
from polyclinic.tasks.task import LARGEST_SUM

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
    questions: ClassVar[tuple[str, ...]] = ("membership",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        sums = sum_layouts.read_sums(seen.parcel)
        if sums is None or not isinstance(seen.network, Encoded):
            return [NotTried(MOMENTS, "the parcel holds no sums of an encoder's features", QUESTION)]
        if refused := why_not(MOMENTS, seen, truth):
            return [refused]
        asked = Candidates(seen, truth)
        features = features_of(seen, (asked.images * 255).round().to(torch.uint8))
        found = membership_finding(
            MOMENTS, threat("sums of features", "encoder"), sums.scores(features, asked.answers), asked, seen,
            "how well an image fits the sums",
        )  # fmt: skip
        figures: dict[str, float | int] = {"images_behind": sums.images, "features": features.shape[1]}
        figures["images_per_feature"] = sums.images / features.shape[1]
        if isinstance(sums, sum_layouts.MomentMatrices):
            alone = sums.leverages(features, asked.answers)[: asked.members] > sum_layouts.OUTLIER
            figures["outliers"] = int(alone.sum())
        return [found.with_figures(figures)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        def make(images: Tensor, answers: Tensor) -> Parcel:
            return sum_layouts.sums_like(seen.parcel, features_of(seen, images).numpy(), answers)

        def score(parcel: Parcel, images: Tensor, answers: Tensor) -> Tensor:
            sums = sum_layouts.read_sums(parcel)
            assert sums is not None, "made in this layout"
            return sums.scores(features_of(seen, images), answers)

        return planted_sums("sums of features", seen, truth, make, score)


class HistogramsAttack(Attack):
    """Tells the images behind histograms of scores: an image whose bin is empty was not among them."""

    kinds: ClassVar[tuple[str, ...]] = ("metrics",)
    questions: ClassVar[tuple[str, ...]] = ("membership",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if histograms_of(seen.parcel) is None:
            return [NotTried(HISTOGRAMS, "the sums hold no histograms of scores", QUESTION)]
        if unsent_names(seen, sent=seen.received("weights")):
            return [NotTried(HISTOGRAMS, "the network that was scored is not known", QUESTION)]
        if refused := why_not(HISTOGRAMS, seen, truth):
            return [refused]
        asked = Candidates(seen, truth)
        alike = [one for one in seen.more() if one.split == seen.split and histograms_of(one.parcel) is not None]
        rounds = [seen, *(one for one in alike if not unsent_names(one, sent=one.received("weights")))]
        scores = torch.stack([scores_in_round(one, asked.images, asked.answers) for one in rounds]).sum(0)
        found = membership_finding(
            HISTOGRAMS, threat("histograms of scores", "network that was scored"), scores, asked, seen,
            "minus the empty bins that an image falls into",
        )  # fmt: skip
        figures = {"images_behind": int(seen.parcel.tensors.get("count", torch.tensor(0))), "rounds": len(rounds)}
        return [found.with_figures(figures)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        task, target = seen.tools.assembly.study.task, seen.tools.assembly.target

        def make(images: Tensor, answers: Tensor) -> Parcel:
            observed = task.observe(outputs(seen, images.float() / 255), answers, target)
            sums = task.sums(observed, answers, None, target)
            if seen.sites > 1:
                sums = task.summable(sums, LARGEST_SUM)
            elif seen.parcel.tensors["histograms"].is_floating_point():
                sums = task.coarse(sums, USUAL_COHORT, target)
            return Parcel(seen.kind, sums, {})

        def score(parcel: Parcel, images: Tensor, answers: Tensor) -> Tensor:
            return scores_in_round(replace(seen, parcel=parcel), images.float() / 255, answers)

        return planted_sums("histograms of scores", seen, truth, make, score)


def threat(what: str, network: str) -> str:
    return f"The attacker has the {what} that a site sent, the {network}, and images with labels that it asks about."


def why_not(name: str, seen: Seen, truth: Truth) -> NotTried | None:
    if refused := not_granted(name, NEEDS, seen, QUESTION):
        return refused
    if not Candidates(seen, truth).enough:
        return NotTried(name, f"fewer than {FEWEST} images of either kind to compare", QUESTION)
    return None


# --- second moments -------------------------------------------------------------------------------------


def features_of(seen: Seen, images: Tensor) -> Tensor:
    """Features [N, k] of images uint8 as the site computes them, projected where the study says so."""
    network = seen.network
    assert isinstance(network, Encoded), "asked before"
    found = kept_features(network.features.encoder(torch.device(seen.tools.device)), images.numpy())
    signs = projection(found.shape[1], getattr(seen.tools.assembly.study.method, "numbers", None))
    return torch.from_numpy(np.array(found if signs is None else project(found, signs)))


# --- histograms -----------------------------------------------------------------------------------------


def histograms_of(parcel: Parcel) -> Tensor | None:
    """[C, 2, bins], images of other classes and of the class itself; None where there are none."""
    found = parcel.tensors.get("histograms")
    bins = (len(EDGES) + 1, len(CELL_EDGES) + 1)
    fits = found is not None and found.dim() == 3 and found.shape[1] == 2 and found.shape[2] in bins
    return found if fits else None


def scores_in_round(seen: Seen, images: Tensor, answers: Tensor) -> Tensor:
    """Membership scores [M]: over all classes, empty bins that an image of its label falls into count against it."""
    counts = histograms_of(seen.parcel)
    assert counts is not None, "asked before"
    edges = EDGES if counts.shape[2] > len(CELL_EDGES) + 1 else CELL_EDGES
    found = margins(outputs(seen, images).double())
    total = torch.zeros(len(images), dtype=torch.float64)
    for label in range(len(counts)):
        own = answers == label
        for rows, histogram in ((own, counts[label, 1]), (~own, counts[label, 0])):
            if bool(rows.any()):
                total[rows] += sum_layouts.histogram_scores(histogram, found[rows, label], edges)
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
    fewer = replace(other.data, train=other.data.train.take(np.arange(count)))
    words = f"{leak} of {count} held-out images, which tell these from others with AUC {area:.2f}"
    return [seen.planted(leak, words, Truth([], fewer, truth.seed), parcel)]


NAME = FeatureDecoder().name
NOISE = 0.5  #: of the weakest planted features, in deviations of the features


class FeatureDecoderAttack(Attack):
    """Decodes features of single images, or means of few, out of sums; a decoder learnt from others' images."""

    kinds: ClassVar[tuple[str, ...]] = ("statistics",)
    questions: ClassVar[tuple[str, ...]] = ("images",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if sum_layouts.read_sums(seen.parcel) is None or not isinstance(seen.network, Encoded):
            return []  # nothing to read features out of; the attack on second moments says so
        groups = sum_layouts.few_images(seen.parcel) if seen.sites == 1 else []
        if not groups:
            why = f"no sum is of {sum_layouts.MOST} images or fewer, and a mean of more shows none of them"
            return [NotTried(NAME, why, excluded=True)]
        return [decode_sums(seen, truth, groups)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The same sums of held-out images, as many of each class, with noise on the features of each."""
        chosen = _alike(seen, truth)
        if chosen is None:
            return []
        images, labels, members = chosen
        features = features_of(seen, images).numpy()
        spread = NOISE * features.std(0, keepdims=True)
        noise = torch.randn(members, features.shape[1], generator=torch_rng(seen.tools.seed, "audit", "planted sums"))
        parcel = sum_layouts.sums_like(seen.parcel, features[:members] + spread * noise.numpy(), labels[:members])
        if [one.shape for one in sum_layouts.few_images(parcel)] != [
            one.shape for one in sum_layouts.few_images(seen.parcel)
        ]:
            return []  # fewer held-out images of a class than the real sums have: the plant would be an easier one
        words = f"the same sums of held-out images, with noise of {NOISE:g} of the features' deviation on each image"
        return [seen.planted("noisy sums", words, truth_of_images(truth, images, labels, members), parcel)]


def decode_sums(seen: Seen, truth: Truth, groups: Sequence[sum_layouts.FewImages]) -> Finding | NotTried:
    """Train a decoder, and score what it makes of the vectors of each group."""
    tools = seen.tools
    settings = FeatureDecoder(steps=tools.effort.latent_steps)
    if refused := not_granted(settings.name, settings.needs, seen):
        return refused
    own = attacker_images(tools, seen.site, truth)
    if len(own.images) < FEWEST_OWN:
        return NotTried(NAME, f"the attacker has {len(own.images)} images of its own; {FEWEST_OWN} are needed")
    known = features_of(seen, (own.images * 255).round().to(torch.uint8))
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
    words, doubt = f"the attacker's own: {own.words}", _doubt(groups, len(sets))
    return Finding(NAME, found.threat_model, verdict, [words], result.draw, doubt=doubt).with_figures(figures)


def _doubt(groups: Sequence[sum_layouts.FewImages], compared: int) -> str:
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
    groups: Sequence[sum_layouts.FewImages], found: Tensor, truth: Truth, held_out: Tensor, labels: Tensor
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
    result = recovery(found, true, torch.cat([held_out, means]), in_order=True)
    return replace(result, identified=identify_in_classes(sets), where=where)


def _paired(one: ComparedSet) -> Tensor:
    """The site's images of the class in the order of least total error."""
    errors = squared_distances(one.found.nan_to_num(0.5).flatten(1), one.true.flatten(1))
    return one.true[torch.from_numpy(linear_sum_assignment(errors.numpy())[1])]


def identify_in_classes(sets: Sequence[ComparedSet]) -> Identification:
    """How many images of the site are pointed to, each once; by chance the site's images of a class and held-out ones
    of it change places."""
    pointed = [_pointed(one) for one in sets]
    count = sum(int((places >= len(one.held_out)).sum()) for places, one in zip(pointed, sets, strict=True))
    pairs = zip(pointed, sets, strict=True)
    sizes = [(len(places), len(one.true), len(one.true) + len(one.held_out)) for places, one in pairs]
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
