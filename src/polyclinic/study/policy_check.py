"""What a site's policy will refuse about a study, with the cure: said before anybody approves, and not in the run.

What cannot be foreseen (what arrives in a run, batches that are drawn) is still refused or suspends the study there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polyclinic.data.survey_study import numbers_for
from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import EVALUATE, floor_of
from polyclinic.methods.analytic import Analytic
from polyclinic.methods.gaussian_heads import GaussianHeads
from polyclinic.methods.private_head import PrivateHead
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.one_round import OneRound
from polyclinic.models import Encoded
from polyclinic.study.checks import backbone_of
from polyclinic.study.release_checks import operations_of

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.study.study import Study


class Counts(NamedTuple):
    """A site's training images; patients (images, where nobody knows whose they are), and those of each class."""

    images: int
    patients: int
    of_class: Mapping[str, int] = {}

    @classmethod
    def of(cls, part: ImageSet, classes: tuple[str, ...] = ()) -> Counts:
        """The counts of a site's training images."""
        who = np.arange(len(part)) if part.cases is None else np.asarray(part.cases)
        labels = np.asarray(part.labels)
        of_class = {name: len(set(who[labels == number].tolist())) for number, name in enumerate(classes)}
        return cls(len(part), len(set(who.tolist())), of_class)


class Refusal(NamedTuple):
    """What a policy refuses, and what to change. `by_images`: it depends on the site's own images, and so it is for the
    site's people only, never for the coordinator."""

    what: str
    cure: str
    by_images: bool = False

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


def refused_by(study: Study, policy: Policy, own: Counts | None = None, pinned: int = 0) -> list[Refusal]:
    """What a site with this policy will refuse about a study; nothing where all that can be foreseen may leave.

    `own`: its images, where they are known (at the site, and in a simulation); else limits are named as conditions.
    `pinned`: sites whose keys its kit pins, on which its floor of a secure sum depends.
    """
    return [
        *_kinds(study, policy),
        *_sums(study, policy, pinned),
        *_few_images(study, policy, own),
        *_cohorts(study, policy, own),
        *_budgets(study, policy),
        *_rates(study, policy),
    ]


def _kinds(study: Study, policy: Policy) -> Iterator[Refusal]:
    method, is_secure = study.method, study.federation.sum == "secure"
    needless = {"masks"} if not study.task.dense else {"labels"}
    if study.evaluation.every == 0 and study.evaluation.final == "none":
        needless.add(SCORES)
    kept: dict[str, str] = {}
    for name, declared in operations_of(method).items():
        summed = is_secure and name in (*method.SUMMED, EVALUATE)
        kinds = ("masked", "shares", "keys") if summed else declared.releases
        if declared.partner != "simulator":
            kept |= {kind: name for kind in kinds if kind not in {*policy.kinds, *needless} and kind not in kept}
    for kind, name in kept.items():
        yield Refusal(
            f"'{name}' of '{method.name}' releases {kind}, which the policy keeps back",
            "choose another method, or add the kind to kinds of policy.toml",
        )
    if method.name in ("centralized", "fedavg-share"):
        yield Refusal(f"'{method.name}' collects images, which exists in simulation only", "choose another method")
    if isinstance(method, PrivateHead) and method.noise == "shared" and not is_secure:
        words = f"'{method.name}' shares the noise of open sums in simulation only"
        yield Refusal(words, "set federation.sum = 'secure'")
    if policy.samples == "hide" and not is_secure and method.SUMMED and getattr(method, "weighting", "") != "uniform":
        yield Refusal(
            "the policy hides how many images an answer is of (samples)",
            "set federation.sum = 'secure', or method.weighting = 'uniform' where the method has it",
        )


def _sums(study: Study, policy: Policy, pinned: int) -> Iterator[Refusal]:
    sites = len(study.sites.site_names()) or pinned
    if study.federation.sum != "secure" or not sites:
        return
    asked = max(1, round(study.method.fraction * sites))
    try:
        floor_of(policy, pinned or sites).threshold(study.federation, asked)
    except GateRefused as refusal:
        what, _, cure = str(refusal).partition("; ")
        yield Refusal(what, cure or "take more sites, or set federation.sum = 'float'")


def _few_images(study: Study, policy: Policy, own: Counts | None) -> Iterator[Refusal]:
    """Sums of products of features of fewer images than features."""
    method, rule = study.method, getattr(study.method, "rule", "")
    if policy.few_images == "allow" or not isinstance(method, Analytic | GaussianHeads) or rule == "naive-bayes":
        return
    kind = backbone_of(study)
    features = kind.encoder_class.width if issubclass(kind, Encoded) else 0
    width = min(features, method.numbers or features)
    whose = "images of its rarest class" if rule == "qda" else "training images"
    what = (
        f"no sums of products of {width:,} features, from which those of single images follow (few_images; a secure "
        "sum does not change that)"
    )
    if own is None:
        cure = "set method.numbers well below the images of the smallest site"
        yield Refusal(f"a site with {width:,} {whose} or fewer sends {what}", cure)
        return
    fewest = min(filter(None, own.of_class.values()), default=0) if rule == "qda" else own.images
    if 0 < fewest <= width:
        behind = fewest * (len(study.sites.site_names()) or 1 if study.federation.sum == "secure" else 1)
        cure = f"set method.numbers = {min(numbers_for(behind), max(1, fewest - 1))}"
        cure = "set method.rule = 'lda'" if rule == "qda" else cure
        yield Refusal(f"the site, with {fewest} {whose}, sends {what}", cure, by_images=True)


def _cohorts(study: Study, policy: Policy, own: Counts | None) -> Iterator[Refusal]:
    """Fewer patients than min_cohort behind what leaves."""
    least, method = policy.min_cohort, study.method
    fewer = f"fewer than {least} patients (min_cohort)"
    if own is not None and own.patients < least:
        yield Refusal(f"the site has training images of {fewer}", "leave the site out", by_images=True)
    if isinstance(method, OneRound) and study.task.like == "classification" and least > 1:
        cure = "merge rare classes (data.merge), name classes that sites leave out (federation.label_sets), or choose "
        cure += "a method that releases nothing about each class"
        rare = [] if own is None else [name for name, count in own.of_class.items() if 0 < count < least]
        if rare:
            yield Refusal(f"class '{rare[0]}' has training images of {fewer}", cure, by_images=True)
        elif own is None:
            yield Refusal(f"a site with a class of {fewer} sends nothing", cure)
    drawn = math.inf
    if isinstance(method, LocalWork) and method.local_steps is not None:
        drawn = method.local_steps * study.optimizer.batch_size
    elif method.traits.trains == "network in steps":
        drawn = study.optimizer.batch_size
    if study.privacy is None and drawn < least:
        yield Refusal(
            f"an answer is of {drawn} images, of {fewer}", "raise optimizer.batch_size, or take more steps in a round"
        )


def _budgets(study: Study, policy: Policy) -> Iterator[Refusal]:
    privacy, every = study.privacy, study.evaluation.every
    scores = (study.method.rounds // every if every else 0) + (study.evaluation.final != "none")
    if policy.max_scores is not None and scores > policy.max_scores:
        yield Refusal(
            f"scores would leave {scores:,} times, and the policy allows {policy.max_scores:,} over all runs",
            "raise evaluation.every",
        )
    if policy.max_epsilon is None:
        return
    if privacy is None:
        yield Refusal(
            f"the policy has an epsilon budget of {policy.max_epsilon:g}, and nothing in the study is private",
            "choose private-head, or add the table [privacy] with cover = 'all'",
        )
    elif privacy.accountant not in policy.accountants:
        yield Refusal(
            f"the policy does not accept the accountant '{privacy.accountant}'",
            f"set privacy.accountant = '{policy.accountants[0]}'",
        )
    elif privacy.target_epsilon is not None and privacy.target_epsilon > policy.max_epsilon:
        yield Refusal(
            f"epsilon {privacy.target_epsilon:g} is wanted, and the policy allows {policy.max_epsilon:g} over all runs",
            f"set privacy.target_epsilon to {policy.max_epsilon:g} or less",
        )


def _rates(study: Study, policy: Policy) -> Iterator[Refusal]:
    """Steps of SGD that are too long; those of Adam depend on the network, and are looked at when weights arrive."""
    optimizer, limit = study.optimizer, policy.incoming.sgd_rate
    trains = study.method.traits.trains in ("network", "network in steps")
    if policy.incoming.on and trains and optimizer.name == "sgd" and optimizer.lr > limit:
        yield Refusal(
            f"optimizer.lr = {optimizer.lr:g} is above the {limit:g} that the policy allows for SGD (sgd_rate)",
            f"set optimizer.lr to {limit:g} or less",
        )
