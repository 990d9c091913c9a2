"""Membership inference (GAN-Leaks, LOGAN, loss threshold, LiRA, RMIA): was this image in the training set?

An attack gives each candidate image a score, higher where membership is more likely, without knowing who is a member;
only the measure of how well members are told from held-out images (`separation`, in `roc`) knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capabilities, Capability, Verdict
from polyclinic.errors import BadInput
from polyclinic.metrics.images import Images, as_unit, digest, same_shape
from polyclinic.metrics.perceptual import Distance, nearest
from polyclinic.metrics.roc import Separation, separation
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import seed_of, torch_rng

AT_ONCE = 128
TINY = 1e-12  #: a distance below which images are the same

#: images [N, C, H, W] in [0, 1] and labels [N] to a number for each, [N]
Scorer = Callable[[Tensor, Tensor], Tensor]
#: (which images of the pool to train on, a seed) to the scorer of the model trained on them
Train = Callable[[Tensor, int], Scorer]
#: images that are asked about, with their labels
ASKED = (Capability.CANDIDATES, Capability.CANDIDATE_LABELS)


def nearness_scores(synthetic: Images, images: Images, distance: Distance, *, device: str = "cpu") -> Tensor:
    """The log likelihood of images [N] under a generator, up to a factor and a constant: by the nearest of the images
    that it made (the nearest-neighbour estimate of a density)."""
    near = nearest(images, synthetic, distance, turn=True, device=device).distance
    return -near.double().clamp(min=TINY).log()


def score_all(scorer: Scorer, images: Images, labels: Tensor) -> Tensor:
    """What a scorer says of each image, [N] float64 on the CPU."""
    unit, labels = as_unit(images, "candidates"), torch.as_tensor(labels)
    if len(labels) != len(unit):
        raise BadInput(f"membership: {len(labels)} labels for {len(unit)} images; give one for each")
    with torch.no_grad():
        found = []
        for some, theirs in zip(unit.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
            values, count = scorer(some, theirs), len(some)
            if values.numel() != count:
                shape = tuple(values.shape)
                raise BadInput(f"membership: the scorer gave {shape} for {count} images; one number for each")
            found.append(values.detach().reshape(count).double().cpu())
        return torch.cat(found)


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """log(p / (1 - p)) of the true class, [N] from logits [N, classes]: nearly Gaussian over models, unlike p."""
    true = logits.double().gather(1, labels[:, None].long())[:, 0]
    others = logits.double().scatter(1, labels[:, None].long(), -torch.inf)
    return true - others.logsumexp(1)


# --- shadow models --------------------------------------------------------------------------------------


def shadow_memberships(count: int, pool: int, seed: int) -> Tensor:
    """Which of `pool` images each of `count` shadow models is trained on, bool [count, pool].

    Models come in pairs that share the pool between them, so each image is inside exactly half of them.
    """
    if count < 4 or count % 2:
        raise BadInput(f"membership: {count} shadow models; give an even number of 4 or more")
    inside = torch.zeros(count, pool, dtype=torch.bool)
    for pair in range(count // 2):
        order = torch.randperm(pool, generator=torch_rng(seed, "shadow models", pair))
        inside[2 * pair, order[: pool // 2]] = True
        inside[2 * pair + 1] = ~inside[2 * pair]
    return inside


def shadow_scores(
    train: Train, images: Images, labels: Tensor, *, count: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Train `count` shadow models on halves of a pool of images; what each says of all of them, [count, N], and
    which ones it was trained on, bool [count, N]. The pool must hold the candidates for `lira`.

    Halves are drawn by the images' pixels, not by their places: where members stand in the pool cannot matter."""
    by_pixels = torch.tensor(sorted(range(len(images)), key=lambda row: digest(torch.as_tensor(images[row]))))
    inside = shadow_memberships(count, len(images), seed)[:, by_pixels.argsort()]
    found = []
    for number, members in enumerate(inside):
        scorer = train(members.nonzero()[:, 0], seed_of(seed, "shadow model", number))
        found.append(score_all(scorer, images, labels))
    return torch.stack(found), inside


def lira(observed: Tensor, shadows: Tensor, inside: Tensor, *, online: bool = True) -> Tensor:
    """Likelihood ratio attack (Carlini et al. 2022): a score [N] for each candidate.

    `observed` [N]: what the attacked model says of each image (log odds of the true class, or minus the loss);
    `shadows` [S, N]: what S shadow models say; `inside` bool [S, N]: which of them were trained on it. Both spreads
    are taken over all images together, which is steadier than one for each with fewer than 64 models. Not `online`
    uses only the models that did not see an image: how unusually high the attacked model's word is.
    """
    if shadows.shape != inside.shape or observed.shape != shadows.shape[1:]:
        raise BadInput(
            f"membership: LiRA got scores {tuple(observed.shape)}, of shadow models {tuple(shadows.shape)} and "
            f"memberships {tuple(inside.shape)}; give [N], [S, N] and [S, N]"
        )
    mean_out, spread_out = _moments(shadows, ~inside)
    far_out = (observed.double() - mean_out) / spread_out
    if not online:
        return far_out
    mean_in, spread_in = _moments(shadows, inside)
    far_in = (observed.double() - mean_in) / spread_in
    return (far_out.square() - far_in.square()) / 2 + spread_out.log() - spread_in.log()


def rmia(observed: Tensor, shadows: Tensor, population: Tensor) -> Tensor:
    """Robust membership inference (Zarifzadeh et al. 2024, RMIA): a score [N] in [0, 1] for each candidate.

    `observed` [N] and `shadows` [S, N]: log probabilities of the true class (or minus the loss) under the attacked
    model and under S reference models, of which half saw each candidate. The likelihood ratio of a candidate is its
    probability under the attacked model over its mean under the reference models. The score is the share of the
    images `population` (bool [N], not trained on) whose ratio it beats; ties count half.
    """
    if shadows.shape[1:] != observed.shape or population.shape != observed.shape or not bool(population.any()):
        raise BadInput("membership: RMIA takes scores [N], of reference models [S, N], and a population bool [N]")
    count = torch.tensor(float(len(shadows)), dtype=torch.float64).log()
    ratio = observed.double() - (shadows.double().logsumexp(0) - count)
    ahead = ratio[:, None] - ratio[None, population]
    # ties count half for everybody, an image of the population beside itself included: images that no model tells
    # apart must have the same score, whoever was trained on
    return ((ahead > 0).double() + 0.5 * (ahead == 0).double()).mean(1)


def _moments(shadows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the chosen models for each image [N], and the deviation around it over all images."""
    counts = chosen.sum(0)
    if bool((counts < 2).any()):
        raise BadInput("membership: LiRA needs every image inside two shadow models and outside two; train more")
    values = torch.where(chosen, shadows.double(), 0.0)
    mean = values.sum(0) / counts
    squares = torch.where(chosen, (shadows.double() - mean).square(), 0.0).sum()
    return mean, (squares / (counts - 1).sum()).sqrt().clamp(min=1e-12)


@dataclass(frozen=True)
class Memberships:
    """Scores of the members [N] and of the others [M], higher where membership is more likely. `features`: what
    distances were measured with, empty where none were."""

    members: Tensor
    others: Tensor
    threat_model: str
    features: str = ""
    cases: tuple[np.ndarray, np.ndarray] | None = None  #: of members and of others, equal for images of one patient

    @cached_property
    def separation(self) -> Separation:
        """How well members are told from the others."""
        return separation(self.members, self.others)

    def verdict(self, level: float | None = None) -> Verdict:
        """In words, with the figures. `level`: the chance of a false alarm, which the exact test of the order has;
        without one, that of a 95 % interval."""
        found, chance = self.separation, self.chance
        told = found.significant if level is None else chance <= level
        words = "can" if told else "cannot"
        with_what = f" (by {self.features})" if self.features else ""
        because = f"members {words} be told from images that were held out{with_what}: {found}"
        return Verdict(told, because, {**vars(found), "features": self.features, "order_by_chance": chance})

    @property
    def chance(self) -> float:
        """How often a lot puts members as far above the others; patients count once."""
        own, other = self.cases or (None, None)
        return chance_of_order(self.members, self.others, own, other)


class MembershipAttack(AttackSettings):
    """An attack whose scores are compared: members come first."""

    def _result(self, scores: Tensor, members: int, features: str = "") -> Memberships:
        return Memberships(scores[:members], scores[members:], str(self), features)


class NearestSynthetic(MembershipAttack):
    """GAN-Leaks (Chen et al. 2020), black box: `NearestSynthetic().run(synthetic, members, others, distance)`."""

    name: Literal["nearest-synthetic"] = "nearest-synthetic"
    turn: bool = Field(True, description="also look for mirrored and turned neighbours")

    reads: ClassVar[tuple[str, ...]] = ("synthetic-images", "generator", "codes")
    needs: ClassVar[Capabilities] = frozenset({Capability.SYNTHETIC_IMAGES, Capability.CANDIDATES})
    assumptions: ClassVar[str] = "a member lies closer to its nearest synthetic image"

    def run(
        self,
        synthetic: Images,
        members: Images,
        others: Images,
        distance: Distance,
        *,
        reference: Images | None = None,
        device: str = "cpu",
    ) -> Memberships:
        """`reference`: synthetic images of a generator that saw neither. Some images are close to anything; how close
        they are to these is subtracted (the paper's calibration)."""
        asked = _candidates(members, others)
        near, *usual = (
            nearest(asked, made, distance, turn=self.turn, device=device).distance
            for made in (synthetic, reference)
            if made is not None
        )
        return self._result(usual[0] - near if usual else -near, len(members), distance.name)


class ReferenceGenerators(MembershipAttack):
    """What an attacker of a generator needs who trains reference generators; the audit's `reference-generators`."""

    name: Literal["reference-generators"] = "reference-generators"
    count: int = Field(4, ge=4, multiple_of=2, description="reference generators; each takes a training of its own")

    reads: ClassVar[tuple[str, ...]] = ("synthetic-images", "generator")
    needs: ClassVar[Capabilities] = frozenset({Capability.SYNTHETIC_IMAGES, Capability.SIMILAR_IMAGES, *ASKED})
    assumptions: ClassVar[str] = (
        "reference generators are trained on halves of all candidates; a member lies closer than they explain"
    )


class LabelledMembershipAttack(MembershipAttack):
    """Scores come from a network that sees candidates with their labels: [N], higher where membership is more likely
    (lower, where `lower`)."""

    lower: ClassVar[bool] = False

    def run(
        self, network: Scorer, members: Images, others: Images, *, member_labels: Tensor, other_labels: Tensor
    ) -> Memberships:
        """`network`: images [N, C, H, W] in [0, 1] and labels [N] to a number for each."""
        scores = score_all(network, _candidates(members, others), _all_labels(member_labels, other_labels))
        return self._result(-scores if self.lower else scores, len(members))


class DiscriminatorScore(LabelledMembershipAttack):
    """LOGAN (Hayes et al. 2019), white box: `DiscriminatorScore().run(discriminator, members, others, labels...)`."""

    name: Literal["discriminator-score"] = "discriminator-score"

    reads: ClassVar[tuple[str, ...]] = ("generator",)
    needs: ClassVar[Capabilities] = frozenset({Capability.DISCRIMINATOR, *ASKED})
    assumptions: ClassVar[str] = "the discriminator takes what it was trained on for more real"


class LossThreshold(LabelledMembershipAttack):
    """Yeom et al. 2018: `LossThreshold().run(loss, members, others, labels...)`, `loss` being one per image."""

    name: Literal["loss-threshold"] = "loss-threshold"

    lower: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("weights",)
    needs: ClassVar[Capabilities] = frozenset({Capability.CLASSIFIER, *ASKED})
    assumptions: ClassVar[str] = "what was trained on has a low loss"


class ShadowModels(MembershipAttack):
    """LiRA: `ShadowModels().run(observed, train, members, others, labels...)`."""

    name: Literal["shadow-models"] = "shadow-models"
    count: int = Field(16, ge=4, multiple_of=2, description="shadow models; each takes a training of its own")
    online: bool = Field(True, description="also use the shadow models that were trained on a candidate")

    reads: ClassVar[tuple[str, ...]] = ("weights",)
    needs: ClassVar[Capabilities] = frozenset({Capability.CLASSIFIER, Capability.SIMILAR_IMAGES, *ASKED})
    assumptions: ClassVar[str] = "shadow models are trained as the attacked one was, on halves of all candidates"

    def run(
        self,
        observed: Scorer,
        train: Train,
        members: Images,
        others: Images,
        *,
        member_labels: Tensor,
        other_labels: Tensor,
        seed: int = 0,
    ) -> Memberships:
        """`observed`: what the attacked model says of images (`log_odds` of its outputs, or minus the loss);
        `train(indices, seed)`: the same of a model trained on some of the candidates, members first."""
        images, labels = _candidates(members, others), _all_labels(member_labels, other_labels)
        shadows, inside = shadow_scores(train, images, labels, count=self.count, seed=seed)
        scores = lira(score_all(observed, images, labels), shadows, inside, online=self.online)
        return self._result(scores, len(members))


def _candidates(members: Images, others: Images) -> Tensor:
    inside, outside = as_unit(members, "members"), as_unit(others, "held-out images")
    same_shape(inside, outside, "held-out images")
    return torch.cat([inside, outside])


def _all_labels(member_labels: Tensor, other_labels: Tensor) -> Tensor:
    return torch.cat([torch.as_tensor(member_labels), torch.as_tensor(other_labels)])
