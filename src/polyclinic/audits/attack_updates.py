"""Attacks on gradients and weights: gradient inversion from the weights that the site was sent, and by algebra."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion, exact_batch, first_layer, last_linear
from polyclinic.attacks.gradient_inversion.objective import LocalTraining
from polyclinic.attacks.gradient_inversion.priors import BatchNormPrior, batch_statistics
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.planting import planted_update
from polyclinic.audits.recovery import score_unordered
from polyclinic.audits.run_inversion import IMAGES_PRIOR, Search, geiping, invert_and_score, invert_front, is_front
from polyclinic.audits.truth import FEWEST_OWN, Truth, attacker_images
from polyclinic.audits.verdicts import count_of
from polyclinic.models.encoders import Encoded
from polyclinic.study.tables import EFFORTS

BATCH_NORM_PRIOR = 1.0  #: weight of the batch-norm statistics of the very batch, beside a cosine distance


class GradientInversionAttack(Attack):
    """Searches for images whose gradients, or whose training, give the update that was sent (Geiping et al. 2020)."""

    kinds: ClassVar[tuple[str, ...]] = ("gradients", "weights")
    questions: ClassVar[tuple[str, ...]] = ("images",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return [invert_gradients(seen, truth)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        return [] if is_front(seen) else planted_update(seen, truth)


# --- gradient inversion -------------------------------------------------------------------------------


def invert_gradients(seen: Seen, truth: Truth) -> Finding | NotTried:
    """Search for images whose update is the one that was sent."""
    name = "gradient-inversion"
    if is_front(seen):
        return invert_front(seen, truth)
    if isinstance(seen.network, Encoded):
        return NotTried(name, "the network is a head on an encoder, which gives no gradient with respect to the images")
    own = dict(seen.network.named_parameters()).keys() - seen.received("weights").keys()
    if own and seen.round > 1:  # in the first round what a site keeps to itself is as all sites start
        return NotTried(name, "the site was not sent the whole network, and the rest changed meanwhile")
    if not len(truth.used):
        return NotTried(name, "no image of the site took part (private training draws them at random)")
    plan = AttackPlan(seen)
    search = with_rounds(plan, with_priors(plan, with_start(plan, truth)))
    return invert_and_score(seen, truth, search, labels=plan.true_labels(truth) if plan.exact else None)


def with_start(plan: "AttackPlan", truth: Truth) -> Search:
    """The search as it is planned; from the mean of the attacker's own images, unless the study has another attack."""
    tools = plan.seen.tools
    search = Search(plan.settings(), plan.knowledge(truth), plan.assumed, (plan.seen.parcel,), plan.doubt)
    if plan.chosen or Capability.SIMILAR_IMAGES not in tools.threat.granted:
        return search
    own = attacker_images(tools, plan.seen.site, truth)
    if len(own.images) < FEWEST_OWN:
        return search
    words = f"the search starts at the mean of the attacker's own images, which are its prior as well: {own.words}"
    return search.from_images(own.images, tools.seed, words)


def with_priors(plan: "AttackPlan", search: Search) -> Search:
    """With the batch-norm statistics of the very batch, where they were sent after a single step."""
    seen = plan.seen
    if not plan.exact or plan.steps != 1 or seen.sites > 1 or plan.chosen:
        return search
    company = seen.companion("statistics") if seen.kind == "gradients" else seen.parcel
    blank = torch.zeros(plan.batch_size, *seen.tools.image_shape)
    try:
        found = None if company is None else batch_statistics(seen.network.cpu(), company.tensors, blank)
    except ValueError:  # batch norm of a single value
        found = None
    if found is None or Capability.BATCH_NORM_STATISTICS not in seen.tools.threat.granted:
        return search
    weights = {"batch_norm_prior": BATCH_NORM_PRIOR}
    if search.knowledge.image_prior is not None:
        weights["image_prior"] = IMAGES_PRIOR
    words = "the batch-norm statistics that left with the update are those of its images"
    return search.knowing({"batch_norm_prior": BatchNormPrior(seen.network, found)}, weights, words)


def with_rounds(plan: "AttackPlan", search: Search) -> Search:
    """Together with the other kept rounds, where every round was made of the same images by one step."""
    seen = plan.seen
    rounds = seen.more() if plan.same_images and search.settings.label != "known" else ()
    alike = [one for one in rounds if one.parcel.tensors.keys() == seen.parcel.tensors.keys()]
    if not alike or search.settings.batch_norm_prior:
        return search
    known: dict[str, Any] = {"model": [seen.network, *(one.network for one in alike)]}
    if search.knowledge.start_images is not None:
        known["start_images"] = search.knowledge.start_images.expand(1 + len(alike), -1, -1, -1, -1)
    words = f"{1 + len(alike)} rounds of the same images are searched together"
    joined = search.knowing(known, {"joined": True}, words)
    return replace(joined, parcels=(seen.parcel, *(one.parcel for one in alike)))


class AttackPlan:
    """How to attack an update: as it was computed where it is small (`exact`), else as one step on a few images."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        optimizer, metadata = seen.tools.assembly.study.optimizer.at_site(seen.site), seen.parcel.metadata
        self.samples = int(metadata.get("samples", optimizer.batch_size))
        size = min(optimizer.batch_size, self.samples)
        self.steps = int(metadata.get("steps", max(1, self.samples // size))) if seen.kind == "weights" else 1
        self.images = size * self.steps
        if seen.kind == "gradients":
            mini = getattr(seen.tools.assembly.study.method, "batch", "full") == "mini"
            self.images = seen.sites * size if mini else self.samples
        self.sgd = optimizer.name == "sgd" or seen.kind == "gradients"  # whose steps are the coordinator's
        # a site may keep momentum from earlier rounds, which the attacker does not know
        later = seen.round > 1 and seen.kind == "weights"
        self.unknown_momentum = bool(optimizer.keep_state and optimizer.momentum and later)
        # steps of several sites do not follow each other; the mean of their gradients is one gradient
        as_made = self.sgd and not self.unknown_momentum and (seen.kind == "gradients" or seen.sites == 1)
        self.exact = as_made and self.images <= seen.tools.effort.images
        self.batch_size = self.images if self.exact else min(self.images, seen.tools.effort.images)

    @property
    def chosen(self) -> GradientInversion | None:
        """The study's own attack, if it has one."""
        audit = self.seen.tools.assembly.study.audit
        return None if audit is None else audit.gradient_inversion

    @property
    def same_images(self) -> bool:
        """Whether every round's update is one step on all of the site's images."""
        whole = self.seen.kind == "gradients" and getattr(self.seen.tools.assembly.study.method, "batch", "") == "full"
        return whole and self.exact and self.seen.sites == 1

    @property
    def doubt(self) -> str:
        """Why a larger budget may win, whatever this one finds."""
        if self.exact:
            return ""
        most = EFFORTS["thorough"].images
        if self.unknown_momentum or not self.sgd or self.images > most:
            steps = "an attack that follows the site's own steps may find more"
            return f"{self._update_text} are taken for one step of plain descent; {steps}"
        return f"{self._update_text} are taken for one step; a larger budget simulates up to {most} images as they were"

    @property
    def assumed(self) -> list[str]:
        defence = self.seen.tools.assembly.study.defence
        blind = [f"what the defence '{defence.name}' did to the update is not taken into account"] if defence else []
        if self.exact:
            return [f"the update was made as it was: {self._update_text}", *blind]
        why = "" if self.sgd else f" ({self.seen.tools.assembly.study.optimizer.name} is taken for plain descent)"
        why += " (without the momentum that the site kept)" if self.unknown_momentum else ""
        return [f"{self._update_text} are taken for one step on {self.batch_size}{why}", *blind]

    @property
    def _update_text(self) -> str:
        return f"{count_of(self.images, 'image')} in {count_of(self.steps, 'step')}"

    def settings(self) -> GradientInversion:
        """The attack that the study has in `[audit.gradient_inversion]`, or else Geiping et al.'s."""
        if self.chosen is not None:
            return self.chosen.model_copy(update={"kind": self.seen.kind})
        labels_known = Capability.LABELS in self.seen.tools.threat.granted and self.exact
        found = "known" if labels_known else "sign" if self.batch_size == 1 else "counts"
        layer = last_linear(self.seen.network)  # whose gradients and bias tell the labels
        told = {f"{layer}.weight", f"{layer}.bias"} <= self.seen.parcel.tensors.keys()
        readable = self.seen.tools.assembly.study.task.like == "classification" and told
        label = found if readable or labels_known else "joint"
        return geiping(self.seen.tools.effort, self.batch_size, kind=self.seen.kind, label=label)

    def knowledge(self, truth: Truth) -> Knowledge:
        study, target = self.seen.tools.assembly.study, self.seen.tools.assembly.target
        classes = len(target.classes) if study.task.like == "classification" else None
        shape, dense = self.seen.tools.image_shape, study.task.dense
        granted = self.exact and Capability.LABELS in self.seen.tools.threat.granted
        known = self.true_labels(truth)[None] if granted else None
        return Knowledge(
            self.seen.network,
            shape,
            batch_size=self.batch_size,
            classes=classes,
            loss=None if classes else lambda output, values: study.task.loss(output, values, target),
            label_shape=(study.task.outputs(target), *shape[1:]) if dense else (),
            label_form="masks" if dense else "values",
            training=self._training(),
            labels=known,
        )

    def true_labels(self, truth: Truth) -> Tensor:
        """Labels [B] of the images behind the update, or masks: where they are granted, and for scoring."""
        answers = truth.labels(torch.cat(truth.batches)[: self.images], self.seen.tools.what)
        task = self.seen.tools.assembly.study.task
        return task.targets(answers, answers) if task.dense else answers

    def _training(self) -> LocalTraining | None:
        if self.seen.kind == "gradients":
            return None
        optimizer = self.seen.tools.assembly.study.optimizer.at_site(self.seen.site)
        lr = optimizer.lr_in(self.seen.round)
        if not self.exact:
            return LocalTraining(lr)
        return LocalTraining(
            lr,
            steps=self.steps,
            batch_size=min(optimizer.batch_size, self.samples),
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            proximal=getattr(self.seen.tools.assembly.study.method, "mu", 0.0),
        )


AGREES = 0.95  #: share of units and images at which a solved batch agrees with ReLU


class AnalyticInversionAttack(Attack):
    """Computes the image behind an update of a network that begins with a linear layer (Phong et al. 2018)."""

    kinds: ClassVar[tuple[str, ...]] = ("gradients", "weights")
    questions: ClassVar[tuple[str, ...]] = ("images",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        """Nothing where the network begins with another layer: no image can be computed then."""
        settings, tools = AnalyticInversion(kind=seen.kind), seen.tools
        shape, update = tools.image_shape, _update(seen)
        if not settings.fits(seen.network, shape) or not len(truth.used) or not update:
            return []
        if refused := not_granted(settings.name, settings.needs, seen):
            return [refused]
        found = settings.run(update, seen.network, shape)
        batch = exact_images(update, seen.network)
        images = torch.cat([found.inputs, batch]).reshape(-1, *shape)
        result = score_unordered(seen, truth, images, settings.name)
        unexplained = f"{float(found.residual):.1%} of the first layer's gradient is not explained by one image"
        solved = [f"a batch of {len(batch)} images was solved for, and agrees with ReLU"] if len(batch) else []
        assumed = [unexplained, *solved]
        return [Finding(settings.name, str(settings), result.verdict(tools.level), assumed, result.draw)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        return planted_update(seen, truth)


def exact_images(update: dict[str, Tensor], network: nn.Module) -> Tensor:
    """A small batch behind the first layer's gradient, [B, in], where ReLU lets it be solved for; else none."""
    name, layer = first_layer(network)  # type: ignore[misc]
    prefix = f"{name}." if name else ""
    found = exact_batch(layer, update[f"{prefix}weight"][0], update[f"{prefix}bias"][0])
    return found.images if found is not None and found.agreement > AGREES else torch.zeros(0, layer.in_features)


def _update(seen: Seen) -> dict[str, Tensor]:
    """Gradients as they were sent; of weights their change. Each with a leading dimension for the one target."""
    if seen.kind == "gradients":
        return {name: tensor[None] for name, tensor in seen.parcel.tensors.items()}
    before = seen.received("weights")
    return {name: (before[name] - tensor)[None] for name, tensor in seen.parcel.tensors.items() if name in before}
