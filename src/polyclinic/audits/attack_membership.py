"""Membership of the model that was sent: by its loss, and by its loss beside that of reference models (RMIA, LiRA).

The power check trains the sent model further on some held-out images until it tells them from other held-out images
with an area of `WEAKEST`: a weaker leak is not claimed to be excluded.

Of a generator, the likelihood of an image is that of its nearest neighbour among made images: minus the logarithm of
the distance. Some images are near to anything; reference generators, which the attacker trains on halves of the
candidates as the study trains its own, tell which (GAN-Leaks' calibration, with several references instead of one).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from polyclinic.attacks import membership
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_generators import made_images
from polyclinic.audits.planting import planted_leaning
from polyclinic.audits.plots import histograms
from polyclinic.audits.truth import Truth, truth_of_asked, truth_of_images
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.archive import SUM_KINDS
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import Generator
from polyclinic.generators.base import even_labels
from polyclinic.metrics.images import digest
from polyclinic.metrics.roc import auc, separation
from polyclinic.models import Backbone
from polyclinic.randomness import torch_rng

WEAKEST = 0.7  #: area under the curve of the planted leak
FEWEST = 8  #: images of either kind
PASSES = 20  #: over the planted images, at most
HALVINGS = 6  #: of the last pass, to stop near the goal
STEPS = 400  #: of a reference model, at most
RARE = 0.001  #: the smaller of the two rates of false alarms that are reported
TOO_FEW = f"fewer than {FEWEST} training or held-out images to compare"
TITLE = "Membership: the further apart, the better an attacker tells whose images were used"


class LossMembershipAttack(Attack):
    """Tells training images from others by the loss of the model that was sent (Yeom et al. 2018)."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)
    questions: ClassVar[tuple[str, ...]] = ("membership",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        settings = membership.LossThreshold()
        if refused := why_not(seen, truth, settings):
            return [refused]
        asked = Candidates(seen, truth)
        losses = membership.score_all(losses_of(seen, sent_model(seen)), asked.images, asked.answers)
        return [membership_finding(settings.name, str(settings), -losses, asked, seen, "minus the loss of an image")]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The sent model, trained further on half of the held-out images until it just remembers them; the same one
        for all attacks on a parcel."""
        of, trained = (seen.site, seen.parcel.digest), seen.tools.trained
        if trained.get("memory", ("",))[0] != of:
            trained["memory"] = of, plant_memory(seen, truth)
        return trained["memory"][1]


class ReferenceMembershipAttack(LossMembershipAttack):
    """Compares the model that was sent with reference models (Zarifzadeh et al. 2024; Carlini et al. 2022)."""

    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        """RMIA and LiRA with the same reference models, which are trained as a site trains, on halves of the
        candidates."""
        settings = membership.ShadowModels(count=seen.tools.effort.references)
        if refused := why_not(seen, truth, settings):
            return [refused]
        asked = Candidates(seen, truth)
        observed = -membership.score_all(losses_of(seen, sent_model(seen)), asked.images, asked.answers)

        def train(index: Tensor, seed: int) -> membership.Scorer:
            losses = losses_of(seen, reference_model(seen, asked, index, seed))
            return lambda images, answers: -losses(images, answers)

        known = membership.shadow_scores(train, asked.images, asked.answers, count=settings.count, seed=seen.tools.seed)
        return [*beside_references(seen, asked, str(settings), observed, known)]


# --- attacks --------------------------------------------------------------------------------------------


class Candidates:
    """Images [N, C, H, W] that are asked about with their answers, those that were trained on first."""

    def __init__(self, seen: Seen, truth: Truth) -> None:
        count, what = seen.tools.effort.candidates, seen.tools.what
        (inside, answers), (outside, others) = truth.members(count, what), truth.held_out(count, what)
        self.members, self.others = len(inside), len(outside)
        self.images = torch.cat([inside, outside]).float() / 255
        self.answers = torch.cat([answers, others])
        self.cases = truth.cases(count)

    @property
    def enough(self) -> bool:
        return min(self.members, self.others) >= FEWEST


def why_not(seen: Seen, truth: Truth, settings: membership.LossThreshold | membership.ShadowModels) -> NotTried | None:
    if unsent_names(seen):
        return NotTried(settings.name, "only a part of the network was sent", "membership")
    if refused := not_granted(settings.name, settings.needs, seen, "membership"):
        return refused
    return None if Candidates(seen, truth).enough else NotTried(settings.name, TOO_FEW, "membership")


def beside_references(
    seen: Seen, asked: Candidates, threat: str, observed: Tensor, known: tuple[Tensor, Tensor], suffix: str = ""
) -> Iterator[Finding]:
    """RMIA and LiRA of scores `observed` [N]; `known`: those of references [S, N], and which of them saw each."""
    scores, inside = known
    population = torch.arange(len(observed)) >= asked.members
    for name, found in (
        ("rmia", membership.rmia(observed, scores, population)),
        ("lira", membership.lira(observed, scores, inside)),
    ):
        yield membership_finding(f"{name}{suffix}", threat, found, asked, seen, f"score of {name.upper()}")


def membership_finding(
    name: str, threat_model: str, scores: Tensor, asked: Candidates, seen: Seen, measured: str
) -> Finding:
    """Whether members score higher than chance has it, with figures by class."""
    inside, outside = scores[: asked.members], scores[asked.members :]
    behind = "images in these sums" if seen.kind in SUM_KINDS else "training images"
    result = membership.Memberships(inside, outside, threat_model, cases=asked.cases)
    said = result.verdict(seen.tools.level)
    rare = separation(inside, outside, false_alarms=RARE)
    rare_hits = {"hits_rare": rare.hits, "hits_rare_low": rare.hits_low, "hits_rare_high": rare.hits_high}
    evidence = {**said.evidence, **rare_hits, **by_class(scores, asked), "level": seen.tools.level}
    return Finding(
        name,
        threat_model,
        replace(said, evidence=evidence),
        draw=histograms(measured, {behind: inside, "held-out images": outside}, title=f"{seen.where}, {name}\n{TITLE}"),
        question="membership",
    )


def by_class(scores: Tensor, asked: Candidates) -> dict[str, float]:
    """Area under the curve, and members found at 1 % of false alarms with an interval, of each class that has enough
    images, where answers are classes. A class's own false alarms set its threshold."""
    answers = asked.answers
    if answers.dim() != 1 or answers.is_floating_point():
        return {}
    member = torch.arange(len(scores)) < asked.members
    groups = {int(label): answers == label for label in answers.unique()}
    figures: dict[str, float] = {}
    for label, rows in groups.items():
        if min(int((rows & member).sum()), int((rows & ~member).sum())) >= FEWEST:
            found = separation(scores[rows & member], scores[rows & ~member])
            figures |= {f"auc_class_{label}": found.auc, f"hits_class_{label}": found.hits}
            figures |= {f"hits_class_{label}_low": found.hits_low, f"hits_class_{label}_high": found.hits_high}
    return figures


# --- models ---------------------------------------------------------------------------------------------


def sent_model(seen: Seen) -> Backbone:
    """The network as it was sent, on the device."""
    model = copy.deepcopy(seen.network)  # other attacks start from the network that the site was sent
    model.load_state_dict({**model.state_dict(), **seen.parcel.tensors})
    return model.to(seen.tools.device)


def reference_model(seen: Seen, asked: Candidates, index: Tensor, seed: int) -> Backbone:
    """A network trained as the study's sites train, for as many passes, on some of the candidates."""
    study = seen.tools.assembly.study
    model = seen.tools.assembly.build_model(seen.tools.assembly.backbones.get(seen.site))
    model.load_state_dict(seen.tools.assembly.initial_weights(seen.tools.assembly.backbones.get(seen.site)))
    each = getattr(study.method, "local_steps", None) or max(1, len(index) // study.optimizer.batch_size)
    fit(seen, model, asked.images[index], asked.answers[index], min(STEPS, each * seen.round), seed)
    return model


def fit(seen: Seen, model: Backbone, images: Tensor, answers: Tensor, steps: int, seed: int) -> None:
    """Train with the study's optimiser on random batches."""
    study, device = seen.tools.assembly.study, seen.tools.device
    settings = study.optimizer.at_site(seen.site)
    model.to(device).train()
    optimizer = settings.make(model.parameters(), seen.round)
    rng = torch_rng(seed, "membership", "batches")
    size = min(settings.batch_size, len(images))
    for _ in range(steps):
        rows = torch.randperm(len(images), generator=rng)[:size]
        optimizer.zero_grad(set_to_none=True)
        losses_of(seen, model, train=True)(images[rows], answers[rows]).mean().backward()
        optimizer.step()


def losses_of(seen: Seen, model: Backbone, *, train: bool = False) -> membership.Scorer:
    """The loss of each image, evaluated as the model would be used (or trained)."""
    task, target, there = seen.tools.assembly.study.task, seen.tools.assembly.target, seen.tools.device
    model = model.to(there).train(train)

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        answers = labels.to(there)
        return task.losses(model(images.to(there)), task.targets(answers, answers if task.dense else None), target)

    return losses


# --- power ----------------------------------------------------------------------------------------------


def plant_memory(seen: Seen, truth: Truth) -> list[Planted]:
    if unsent_names(seen):
        return []
    images, answers = truth.held_out(2 * seen.tools.effort.candidates, seen.tools.what)
    half = len(images) // 2
    if half < FEWEST:
        return []
    weights, area = remembering(seen, images.float() / 255, answers, half)
    words = f"the same model, trained until its loss tells {half} images from {len(images) - half} with AUC {area:.2f}"
    other = truth_of_images(truth, images, answers, half, seen.tools.what)
    return [seen.planted("memory", words, other, Parcel(seen.kind, weights, seen.parcel.metadata))]


def unsent_names(seen: Seen, sent: Mapping[str, Tensor] | None = None) -> set[str]:
    """Parameters of the network that are not in the parcel, or in what was `sent` instead."""
    return set(dict(seen.network.named_parameters())) - set(seen.parcel.tensors if sent is None else sent)


def remembering(seen: Seen, images: Tensor, answers: Tensor, half: int) -> tuple[Mapping[str, Tensor], float]:
    """Weights that tell the first `half` of the images from the rest, and how well; the weakest that reach the goal."""
    model = sent_model(seen)
    size = seen.tools.assembly.study.optimizer.at_site(seen.site).batch_size

    def area_of(state: Mapping[str, Tensor]) -> float:
        model.load_state_dict(state)
        losses = membership.score_all(losses_of(seen, model), images, answers)
        return auc(-losses[:half], -losses[half:])

    after = copy.deepcopy(model.state_dict())
    for number in range(PASSES):
        before = after
        fit(seen, model, images[:half], answers[:half], max(1, half // size), number)
        after = copy.deepcopy(model.state_dict())
        if area_of(after) >= WEAKEST:
            break
    weakest, area = weakest_between(before, after, area_of)
    return {name: weakest[name].detach().cpu().clone() for name in seen.parcel.tensors if name in weakest}, area


def weakest_between(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    area_of: Callable[[Mapping[str, Tensor]], float],
    goal: float = WEAKEST,
) -> tuple[Mapping[str, Tensor], float]:
    """A state on the way from one to the other that just reaches the goal: a whole pass may go far beyond it."""
    found, area, low, high = after, area_of(after), 0.0, 1.0
    if area < goal:
        return after, area
    for _ in range(HALVINGS):
        share = (low + high) / 2
        floats = {n: torch.lerp(before[n], one, share) for n, one in after.items() if one.is_floating_point()}
        state = {**after, **floats}
        reached = area_of(state)
        low, high = (low, share) if reached >= goal else (share, high)
        found, area = (state, reached) if reached >= goal else (found, area)
    return found, area


PASS_SETTINGS = ("epochs", "prior_epochs")  #: settings of generators that count passes over the images
ONCE = "a search for settings ([tuning]) and differential privacy are not repeated for them"


class ReferenceGeneratorsAttack(Attack):
    """Compares how near made images come to an image with how near those of reference generators come."""

    kinds: ClassVar[tuple[str, ...]] = ("generator", "synthetic-images")
    questions: ClassVar[tuple[str, ...]] = ("membership",)
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        """RMIA and LiRA with the same reference generators."""
        tools, settings = seen.tools, membership.ReferenceGenerators(count=seen.tools.effort.references)
        if refused := not_granted(settings.name, settings.needs, seen, "membership"):
            return [refused]
        if tools.assembly.study.task.dense or tools.assembly.study.in_latents:
            return [NotTried(settings.name, "the generator makes more or other things than images", "membership")]
        made = some_made_images(seen)
        if isinstance(made, NotTried):
            return [replace(made, attack=settings.name, question="membership")]
        asked = Candidates(seen, truth)
        if not asked.enough:
            return [NotTried(settings.name, TOO_FEW, "membership")]
        observed = membership.nearness_scores(made, asked.images, tools.distance, device=tools.device)
        known = scores_of_references(seen, asked, len(made), settings.count)
        _, words = shortened(tools.assembly.study.generator, len(asked.images) // 2, tools.effort.generator_steps)
        found = beside_references(seen, asked, str(settings), observed, known, "-generators")
        return [replace(one, assumed=[words]) for one in found]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The images that were made, each mixed with a held-out image that the reference generators know, too."""
        made, other = some_made_images(seen), truth_of_asked(truth, seen.tools.effort.candidates)
        return [] if isinstance(made, NotTried) or other is None else planted_leaning(seen, other, made)


def some_made_images(seen: Seen) -> Tensor | NotTried:
    """As many of the images that the receiver has as the budget asks about."""
    made = made_images(seen)
    if isinstance(made, NotTried):
        return made
    rng = torch_rng(seen.tools.seed, "audit", "made")
    return made[torch.randperm(len(made), generator=rng)[: seen.tools.effort.candidates]]


def scores_of_references(seen: Seen, asked: Candidates, samples: int, count: int) -> tuple[Tensor, Tensor]:
    """What reference generators say of the candidates; trained once for a parcel and what is planted beside it."""
    of, names = (seen.site, seen.round), [digest(image) for image in asked.images]
    parcel, (scores, inside, place) = seen.tools.trained.get("generators", ("", (None, None, {})))
    if parcel != of or not set(names) <= place.keys():
        scores, inside = membership.shadow_scores(
            lambda index, seed: reference_scorer(seen, asked, index, samples, seed),
            asked.images,
            asked.answers,
            count=count,
            seed=seen.tools.seed,
        )
        place = {name: row for row, name in enumerate(names)}
        seen.tools.trained["generators"] = of, (scores, inside, place)
    rows = [place[name] for name in names]
    return scores[:, rows], inside[:, rows]


def reference_scorer(seen: Seen, asked: Candidates, index: Tensor, samples: int, seed: int) -> membership.Scorer:
    """The scorer of a generator of the study, trained on some of the candidates."""
    tools, study = seen.tools, seen.tools.assembly.study
    settings, _ = shortened(study.generator, len(index), tools.effort.generator_steps)
    model = settings.build_for(tools.image_shape, tools.assembly.target, seed=seed, device=tools.device)
    rng = torch_rng(seed, "audit", "reference generator")
    model.fit(to_uint8(asked.images[index]), asked.answers[index], rng)
    made = model.sample(even_labels(samples, model.target), rng)
    return lambda images, answers: membership.nearness_scores(made, images, tools.distance, device=tools.device)


def shortened(settings: Generator, images: int, most: int) -> tuple[Generator, str]:
    """The study's generator with at most so many steps, as a quick audit has no time for more; and that in words."""
    passes = max(1, images // settings.batch_size)
    limits = {name: max(1, most // passes) for name in PASS_SETTINGS if name in type(settings).model_fields}
    changes = {name: limit for name, limit in limits.items() if getattr(settings, name) > limit}
    if (settings.steps_on(images) or 0) > most:
        changes["steps"] = most
    if not changes:
        return settings, f"reference generators are trained with the study's settings of its generator; {ONCE}"
    said = ", ".join(f"{name} {value}" for name, value in changes.items())
    words = f"reference generators are trained for less than the study's own: {said}; {ONCE}"
    return settings.model_copy(update=changes), words
