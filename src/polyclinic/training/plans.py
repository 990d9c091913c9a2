"""Plans of training and scoring: what a method asks of a site's trainer, carried out alone or as a stack."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from polyclinic.data.parts import ImageSet
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.site import Site
from polyclinic.models import split
from polyclinic.training import private_steps
from polyclinic.training.batches import ReplayedBatches
from polyclinic.training.gpu import stacking
from polyclinic.training.optimizer import keep_optimizer, start_optimizer

Weights = Mapping[str, Tensor]
#: the loss of images and targets
Loss = Callable[[Tensor, Tensor], Tensor]
#: a logit so low that its class has no share in a softmax
HIDDEN = -1e4


@dataclass(frozen=True)
class Correction:
    """A change of the gradients before every step: `change(gradients, weights, given, state)` returns gradients and
    state anew. Tensors are those of one network; a parameter without a gradient in the answer stays as it is.

    It must not keep anything in Python, and must do the same at all sites but for `given` and `state`, which have the
    same names everywhere: in a stack the first site's function is mapped over all networks.
    """

    change: Callable[[Weights, Weights, Mapping[str, Weights], Weights], tuple[Weights, Weights]]
    given: Mapping[str, Weights] = field(default_factory=dict)  #: the site's own tensors, the same in all steps
    state: Weights = field(default_factory=dict)  #: before the first step


@dataclass(frozen=True)
class Reference:
    """A loss that is added to the task's: `loss(own, *others)`, from what the network in training and some networks
    with fixed weights have at `cut`."""

    cut: str
    weights: Sequence[Weights]  #: of the networks that stay as they are; their batch norm is that of evaluation
    loss: Callable[..., Tensor]


@dataclass(frozen=True)
class FitSpec:
    """What a method changes in a site's training; by default it is one pass with the task's loss."""

    steps: int | None = None  #: floor(|D| / b) if not given
    part: ImageSet | None = None  #: the site's training images if not given
    class_weights: Tensor | None = None
    correction: Correction | None = None
    replayed: Callable[[], ReplayedBatches | None] | None = None  #: makes the images that join each mini-batch
    reference: Reference | None = None
    optimizer_group: str = "optimizer"  #: where the site's state keeps the optimiser
    purpose: str = "batches"  #: addresses the order of the batches


class Fitted(NamedTuple):
    """All weights after training, what may be said about it (images, steps, perhaps the loss), and a correction's
    last state."""

    weights: dict[str, Tensor]
    metadata: dict[str, float]
    state: Weights


@dataclass(frozen=True)
class Fit:
    """Train the site's network from `start`. Nothing but the optimiser is put into the site's state."""

    site: Site
    start: Weights
    spec: FitSpec = FitSpec()

    divides: ClassVar[bool] = True

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        return not noted and stacking.can_stack(trainer, sites)

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[Fitted]:
        if len(plans) == 1:
            return [plans[0].alone()]
        if not stacking.can_stack(plans[0].site.trainer, len(plans)):
            return [plan.alone() for plan in plans]
        members = [plan.member() for plan in plans]
        found: dict[int, Fitted] = {}
        for rows in dict.fromkeys(member.rows for member in members):
            places = [place for place, member in enumerate(members) if member.rows == rows]
            some = [plans[place] for place in places]
            fitted = _stacked(some, [members[place] for place in places]) or [plan.alone() for plan in some]
            found |= zip(places, fitted, strict=True)
        return [found[place] for place in range(len(plans))]

    @property
    def part(self) -> ImageSet:
        return self.spec.part or self.site.data.train

    @property
    def steps(self) -> int:
        return self.spec.steps or self.site.trainer.steps_in(self.part)

    def member(self) -> stacking.Member:
        replayed = self.spec.replayed() if self.spec.replayed else None
        return stacking.Member(self.site.trainer, self.part, self.site.rng(self.spec.purpose), replayed)

    def alone(self) -> Fitted:
        site, spec, trainer = self.site, self.spec, self.site.trainer
        replayed = spec.replayed() if spec.replayed else None
        objective = _with_reference(trainer, spec.reference) if spec.reference else None
        if objective is None and site.unknown_classes:
            objective = restricted_loss(site)
        model, steps = trainer.load(self.start), self.steps
        optimizer = start_optimizer(site, model, spec.optimizer_group)
        correct = _Corrector(spec.correction, trainer.device) if spec.correction else None
        metadata: dict[str, float] = {}
        if trainer.privacy is not None and "classifier" in trainer.privacy.on:
            assert spec.reference is None, "an added loss has no private form: refuse it in `privacy_obstacle`"
            # its loss would tell about the images
            steps = private_steps.train(site, steps, optimizer, correct=correct, replayed=replayed)
        else:
            batches = trainer.batches(self.part, site.rng(spec.purpose))
            if replayed is not None:
                batches = replayed.join(batches)
            if "mixup" in trainer.optimizer.augment:
                batches = trainer.mixed(batches, site.rng("mixup"))
            metadata["loss"] = trainer.train(
                batches, steps, optimizer, class_weights=spec.class_weights, correct=correct, objective=objective
            )
        keep_optimizer(site, optimizer, spec.optimizer_group)
        metadata = {"samples": len(self.part), "steps": steps, **metadata}
        return Fitted(trainer.released_weights(), metadata, correct.state if correct else {})


class _Corrector:
    """A correction on the gradients of one network."""

    def __init__(self, correction: Correction, device: torch.device) -> None:
        self.change = correction.change
        given = correction.given.items()
        self.given = {key: {name: one.to(device) for name, one in some.items()} for key, some in given}
        self.state: Weights = {name: one.to(device) for name, one in correction.state.items()}

    def __call__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        weights = {name: one.detach() for name, one in parameters.items()}
        changed, self.state = self.change(gradients, weights, self.given, self.state)
        for name, one in parameters.items():
            one.grad = changed.get(name)


def _with_reference(trainer: TrainerLike, reference: Reference) -> Loss:
    """The task's loss and the added one, of the trainer's network as it will be loaded."""
    fixed_networks = [copy.deepcopy(trainer.load(weights)).eval() for weights in reference.weights]
    others = [split(one, reference.cut)[0] for one in fixed_networks]
    front, rest = split(trainer.model.train(), reference.cut)

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        with trainer.autocast():
            own = front(images)
            output = rest(own)
            with torch.no_grad():
                fixed = [other(images) for other in others]
        return trainer.loss(output, targets) + reference.loss(own, *fixed)

    return loss


def restricted_loss(site: Site) -> Loss:
    """The loss over the classes that a site knows (restricted softmax; FedRS, Li and Zhan 2021, with alpha 0): what the
    model says about others is not changed."""
    trainer = site.trainer
    hidden = torch.zeros(len(trainer.target.classes), dtype=torch.bool)
    hidden[list(site.unknown_classes)] = True

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        output = trainer.forward(images)
        return trainer.loss(output.masked_fill(hidden.to(output.device), HIDDEN), targets)

    return loss


def _stacked(plans: Sequence[Fit], members: Sequence[stacking.Member]) -> list[Fitted] | None:
    """The plans of sites with batches of one size, carried out as one stacked network. None where a stack cannot be,
    does not pay, or fails: then nothing has happened."""
    special = any(plan.spec.class_weights is not None for plan in plans)
    kinds = {(plan.spec.correction is None, plan.spec.reference is None) for plan in plans}
    if special or len(kinds) > 1 or not stacking.is_worthwhile(members):
        return None
    site, spec = plans[0].site, plans[0].spec
    trainer, steps = site.trainer, [plan.steps for plan in plans]
    try:
        stack = stacking.stacked_trainer(trainer, len(plans), spec.reference)
        if spec.reference is not None:
            stack.load_references([plan.spec.reference.weights for plan in plans if plan.spec.reference])
        stack.model.load([plan.start for plan in plans])
        optimizer = trainer.optimizer.make(iter(stack.model.parameters.values()), site.round)
        corrections = [plan.spec.correction for plan in plans if plan.spec.correction]
        correct = stacking.StackedCorrector(corrections, steps, trainer.device) if corrections else None
        device = None if trainer.weights_stay else "cpu"
        losses, states = stack.train(
            stacking.stacked_batches(members), steps, optimizer, correct=correct, device=device
        )
    except RuntimeError as error:  # no memory, or no kernel
        warnings.warn(f"engine.stacked: sites train one after the other, more slowly: {error}", stacklevel=4)
        return None
    return [
        Fitted(
            state,
            {"samples": len(plan.part), "steps": plan.steps, "loss": loss},
            correct.state_of(place) if correct else {},
        )
        for place, (plan, state, loss) in enumerate(zip(plans, states, losses, strict=True))
    ]


@dataclass(frozen=True)
class Score:
    """Sums of the task's metrics over images of a site, as `score` gives them. Where several simulated sites score the
    very same model, it is loaded once, and the images of all go through it together."""

    site: Site
    part: ImageSet
    weights: Weights
    score: Callable[[], dict[str, Tensor]]

    divides: ClassVar[bool] = True

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        # masks of all sites would fill the memory
        return not noted and trainer.stacked != "never" and method.scores_one_model(trainer) and not trainer.task.dense

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[dict[str, Tensor]]:
        if len(plans) == 1:
            return [plans[0].score()]
        weights, trainer = plans[0].weights, plans[0].site.trainer
        # one model, whole and handed over by reference
        same = all(plan.weights is weights and plan.site.trainer is trainer for plan in plans)
        own = any(plan.site.state.group(name) for plan in plans for name in ("local", "best"))
        if not weights or not same or own or weights.keys() != trainer.state().keys():
            return [plan.score() for plan in plans]
        scored = [plan for plan in plans if len(plan.part)]
        trainer.load(weights)
        sums = iter(trainer.evaluate_parts([plan.part for plan in scored]) if scored else [])
        return [next(sums) if len(plan.part) else {} for plan in plans]
