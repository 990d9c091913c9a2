"""Membership inference attacks: settings, what each needs, and a verdict. Their scores are in `scores.py`.

Each `run` takes candidates that were trained on and candidates that were not. Scores are computed without knowing which
is which; only the measure of how well they are told apart knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capability, ThreatModel
from polyclinic.attacks.membership.scores import (
    Scorer,
    Train,
    discriminator_scores,
    lira,
    loss_scores,
    nearest_synthetic_scores,
    score_all,
    shadow_scores,
)
from polyclinic.attacks.verdict import Verdict
from polyclinic.metrics.images import Images, as_unit, same_shape
from polyclinic.metrics.perceptual import Distance
from polyclinic.metrics.roc import Separation, separation
from polyclinic.metrics.statistics.significance import chance_of_order


@dataclass(frozen=True)
class Memberships:
    """Scores of the members [N] and of the others [M], higher where membership is more likely, and how well these
    are told apart. `features`: what distances were measured with, empty where none were."""

    members: Tensor
    others: Tensor
    separation: Separation
    features: str
    threat_model: str
    cases: tuple[np.ndarray, np.ndarray] | None = None  #: of members and of others, equal for images of one patient

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
    """What all four have in common."""

    def _result(self, scores: Tensor, members: int, features: str = "") -> Memberships:
        inside, outside = scores[:members], scores[members:]
        return Memberships(inside, outside, separation(inside, outside), features, str(self))

    def _check_threat(self, threat: ThreatModel | None) -> None:
        if threat is not None:
            self.check(threat)


class NearestSynthetic(MembershipAttack):
    """GAN-Leaks, black box: `NearestSynthetic().run(synthetic, members, others, distance)`."""

    name: Literal["nearest-synthetic"] = "nearest-synthetic"
    turn: bool = Field(True, description="also look for mirrored and turned neighbours")

    reads: ClassVar[tuple[str, ...]] = ("synthetic-images", "generator", "codes")

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability.SYNTHETIC_IMAGES, Capability.CANDIDATES})

    @property
    def assumptions(self) -> str:
        return "a member lies closer to its nearest synthetic image"

    def run(
        self,
        synthetic: Images,
        members: Images,
        others: Images,
        distance: Distance,
        *,
        reference: Images | None = None,
        threat: ThreatModel | None = None,
        device: str = "cpu",
    ) -> Memberships:
        """`reference`: synthetic images of a generator that saw neither, for the calibrated attack."""
        self._check_threat(threat)
        scores = nearest_synthetic_scores(
            synthetic, _candidates(members, others), distance, reference=reference, turn=self.turn, device=device
        )
        return self._result(scores, len(members), distance.name)


class ReferenceGenerators(MembershipAttack):
    """What an attacker of a generator needs who trains reference generators; the audit's `reference-generators`."""

    name: Literal["reference-generators"] = "reference-generators"
    count: int = Field(4, ge=4, multiple_of=2, description="reference generators; each takes a training of its own")

    reads: ClassVar[tuple[str, ...]] = ("synthetic-images", "generator")

    @property
    def needs(self) -> frozenset[Capability]:
        asked = {Capability.CANDIDATES, Capability.CANDIDATE_LABELS}
        return frozenset({Capability.SYNTHETIC_IMAGES, Capability.SIMILAR_IMAGES, *asked})

    @property
    def assumptions(self) -> str:
        return "reference generators are trained on halves of all candidates; a member lies closer than they explain"


class LabelledMembershipAttack(MembershipAttack):
    """Scores come from a network that sees candidates with their labels."""

    def _score(self, network: Scorer, images: Tensor, labels: Tensor) -> Tensor:
        """[N], higher where membership is more likely."""
        raise NotImplementedError

    def run(
        self,
        network: Scorer,
        members: Images,
        others: Images,
        *,
        member_labels: Tensor,
        other_labels: Tensor,
        threat: ThreatModel | None = None,
    ) -> Memberships:
        """`network`: images [N, C, H, W] in [0, 1] and labels [N] to a number for each."""
        self._check_threat(threat)
        labels = _all_labels(member_labels, other_labels)
        return self._result(self._score(network, _candidates(members, others), labels), len(members))


class DiscriminatorScore(LabelledMembershipAttack):
    """LOGAN, white box: `DiscriminatorScore().run(discriminator, members, others, labels...)`."""

    name: Literal["discriminator-score"] = "discriminator-score"

    reads: ClassVar[tuple[str, ...]] = ("generator",)

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability.DISCRIMINATOR, Capability.CANDIDATES, Capability.CANDIDATE_LABELS})

    @property
    def assumptions(self) -> str:
        return "the discriminator takes what it was trained on for more real"

    def _score(self, network: Scorer, images: Tensor, labels: Tensor) -> Tensor:
        return discriminator_scores(network, images, labels)


class LossThreshold(LabelledMembershipAttack):
    """Against a trained model: `LossThreshold().run(loss, members, others, labels...)`, `loss` being one per image."""

    name: Literal["loss-threshold"] = "loss-threshold"

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability.CLASSIFIER, Capability.CANDIDATES, Capability.CANDIDATE_LABELS})

    @property
    def assumptions(self) -> str:
        return "what was trained on has a low loss"

    def _score(self, network: Scorer, images: Tensor, labels: Tensor) -> Tensor:
        return loss_scores(network, images, labels)


class ShadowModels(MembershipAttack):
    """LiRA: `ShadowModels().run(observed, train, members, others, labels...)`."""

    name: Literal["shadow-models"] = "shadow-models"
    count: int = Field(16, ge=4, multiple_of=2, description="shadow models; each takes a training of its own")
    online: bool = Field(True, description="also use the shadow models that were trained on a candidate")

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    @property
    def needs(self) -> frozenset[Capability]:
        asked = {Capability.CANDIDATES, Capability.CANDIDATE_LABELS}
        return frozenset({Capability.CLASSIFIER, Capability.SIMILAR_IMAGES, *asked})

    @property
    def assumptions(self) -> str:
        return "shadow models are trained as the attacked one was, on halves of all candidates"

    def run(
        self,
        observed: Scorer,
        train: Train,
        members: Images,
        others: Images,
        *,
        member_labels: Tensor,
        other_labels: Tensor,
        threat: ThreatModel | None = None,
        seed: int = 0,
    ) -> Memberships:
        """`observed`: what the attacked model says of images (`membership.log_odds` of its outputs, or minus the loss);
        `train(indices, seed)`: the same of a model trained on some of the candidates, members first."""
        self._check_threat(threat)
        images = _candidates(members, others)
        labels = _all_labels(member_labels, other_labels)
        shadows, inside = shadow_scores(train, images, labels, count=self.count, seed=seed)
        scores = lira(score_all(observed, images, labels), shadows, inside, online=self.online)
        return self._result(scores, len(members))


def _candidates(members: Images, others: Images) -> Tensor:
    inside, outside = as_unit(members, "members"), as_unit(others, "held-out images")
    same_shape(inside, outside, "held-out images")
    return torch.cat([inside, outside])


def _all_labels(member_labels: Tensor, other_labels: Tensor) -> Tensor:
    return torch.cat([torch.as_tensor(member_labels), torch.as_tensor(other_labels)])
