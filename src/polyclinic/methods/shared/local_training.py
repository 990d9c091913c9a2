"""Local training at a site: put the model together, and train it on the site's images."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.methods.shared.optimizer_state import keep_optimizer, start_optimizer
from polyclinic.training import private, stacking

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.collaborators import Batch, TrainerLike
    from polyclinic.training.replayed import ReplayedBatches


#: a logit so low that its class has no share in a softmax
HIDDEN = -1e4
#: changes a network's gradients before a step
Correct = Callable[[nn.Module], None]
#: what changes the gradients of the sites at these places, as one stacked network or of the one site
CorrectFor = Callable[[Sequence[int], bool], Any]
#: all weights after training, and what may be said about it: images, steps, perhaps the loss
Fitted = tuple[dict[str, Tensor], dict[str, float]]
#: the loss of images and targets
Objective = Callable[[Tensor, Tensor], Tensor]


def assemble(site: Site, weights: Weights, own: str = "current") -> dict[str, Tensor]:
    """The whole model at a site: shared weights, and the part that is the site's own (`current` or `best`)."""
    if own == "none":
        return dict(weights)
    kept = site.state.group("best" if own == "best" else "local")
    return {**site.trainer.initial_local, **weights, **kept}


@dataclass(frozen=True)
class FitSpec:
    """What a method changes in a site's training; by default it is one pass with the task's loss."""

    steps: int | None = None  #: floor(|D| / b) if not given
    part: ImageSet | None = None  #: the site's training images if not given
    class_weights: Tensor | None = None
    correct: Correct | None = None
    replayed: ReplayedBatches | None = None  #: images that join each mini-batch
    objective: Objective | None = None  #: another loss than the task's
    optimizer_group: str = "optimizer"  #: where the site's state keeps the optimiser
    purpose: str = "batches"  #: addresses the order of the batches


PLAIN = FitSpec()


def train(site: Site, weights: Weights, how: FitSpec = PLAIN) -> Parcel:
    """Train from `weights` on the site's images. What stays at the site goes into its state; the rest is the parcel."""
    trained, metadata = fit(site, assemble(site, weights), how)
    return release(site, trained, metadata)


def release(site: Site, trained: dict[str, Tensor], metadata: Mapping[str, float]) -> Parcel:
    """The parcel of what may leave of trained weights; the rest goes into the site's state."""
    shared = dict(trained)
    if site.trainer.local_names:
        site.state.put("local", {name: shared.pop(name) for name in sorted(site.trainer.local_names)})
    return Parcel("weights", shared, dict(metadata), private.record_of(site, "classifier"))


def fit(site: Site, weights: Weights, how: FitSpec = PLAIN) -> Fitted:
    """Train from `weights`.

    Nothing but the optimiser is put into the site's state.
    """
    trainer = site.trainer
    part = how.part or site.data.train
    steps = how.steps or trainer.steps_in(part)
    model = trainer.load(weights)
    optimizer = start_optimizer(site, model, how.optimizer_group)
    metadata: dict[str, float] = {}
    if private.is_private(site, "classifier"):
        assert how.objective is None, "a loss of one's own has no private form: refuse it in `privacy_obstacle`"
        # its loss would tell about the images
        steps = private.train(site, steps, optimizer, correct=how.correct, replayed=how.replayed)
    else:
        real = trainer.batches(part, site.rng(how.purpose))
        metadata["loss"] = trainer.train(
            how.replayed.join(real) if how.replayed else real,
            steps,
            optimizer,
            class_weights=how.class_weights,
            correct=how.correct,
            mixing=site.rng("mixup") if "mixup" in trainer.optimizer.augment else None,
            objective=how.objective or restricted_loss(site),
        )
    keep_optimizer(site, optimizer, how.optimizer_group)
    return trainer.released_weights(), {"samples": len(part), "steps": steps, **metadata}


def restricted_loss(site: Site) -> Objective | None:
    """The loss over the classes that a site knows (restricted softmax; FedRS, Li and Zhan 2021, with alpha 0): what the
    model says about others is not changed. None where the site knows all."""
    if not site.unknown_classes:
        return None
    trainer = site.trainer
    hidden = torch.zeros(len(trainer.target.classes), dtype=torch.bool)
    hidden[list(site.unknown_classes)] = True

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        output = trainer.forward(images)
        return trainer.loss(output.masked_fill(hidden.to(output.device), HIDDEN), targets)

    return loss


def mean_gradient(trainer: TrainerLike, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The mean gradient of the trainer's network over all images of some batches, by parameter, on the CPU."""
    model, seen = trainer.model.train(), 0
    model.zero_grad(set_to_none=True)
    for images, targets in batches:
        (trainer.loss(trainer.forward(images), targets) * len(images)).backward()
        seen += len(images)
    return {name: one.grad.cpu() / seen for name, one in model.named_parameters() if one.grad is not None}


@dataclass(frozen=True)
class StackedLosses:
    """Other losses of a stack than the task's: made once for a number of networks, and loaded before each training."""

    make: Callable[[int], stacking.LossesOf]
    load: Callable[[Any, Sequence[int]], None]  #: what `make` gave, for the sites at these places


def train_together(
    sites: Sequence[Site],
    weights: Sequence[Weights],
    how: Callable[[Site], FitSpec],
    *,
    correct_for: CorrectFor | None = None,
    losses: StackedLosses | None = None,
    alone: Callable[[int], Fitted] | None = None,
) -> list[Parcel]:
    """What `train` gives for each of several simulated sites, up to rounding; see `fit_together`."""
    starts = [assemble(site, own) for site, own in zip(sites, weights, strict=True)]
    found = fit_together(sites, starts, how, correct_for=correct_for, losses=losses, alone=alone)
    return [release(site, *one) for site, one in zip(sites, found, strict=True)]


def fit_together(
    sites: Sequence[Site],
    starts: Sequence[Weights],
    how: Callable[[Site], FitSpec],
    *,
    correct_for: CorrectFor | None = None,
    losses: StackedLosses | None = None,
    alone: Callable[[int], Fitted] | None = None,
) -> list[Fitted]:
    """What `fit` gives for each of several simulated sites, up to rounding: sites with batches of one size train as one
    stacked network. `how(site)` has the site's steps, images and what is replayed, anew at every call.

    `correct_for(places, stacked)` gives what changes gradients, by name, of the sites at these places: with `stacked`
    those of all of them at once, [M, ...], else those of the only one. `alone` trains the site at a place by itself,
    where `fit` cannot."""
    plans = [how(site) for site in sites]
    members = [_member(site, plan) for site, plan in zip(sites, plans, strict=True)]
    found: dict[int, Fitted] = {}
    for rows in dict.fromkeys(member.rows for member in members):
        places = [place for place, member in enumerate(members) if member.rows == rows]
        stack = _Stack(
            [sites[place] for place in places],
            [starts[place] for place in places],
            [plans[place] for place in places],
            [members[place] for place in places],
        )
        correct = functools.partial(correct_for, places, True) if correct_for else None
        fitted = stack.train(correct, losses, places)
        if fitted is None:
            trained = alone or functools.partial(_fit_alone, sites, starts, how, correct_for)
            fitted = [trained(place) for place in places]
        found |= dict(zip(places, fitted, strict=True))
    return [found[place] for place in range(len(sites))]


def _member(site: Site, plan: FitSpec) -> stacking.Member:
    return stacking.Member(site.trainer, plan.part or site.data.train, site.rng(plan.purpose), plan.replayed)


def _fit_alone(
    sites: Sequence[Site],
    starts: Sequence[Weights],
    how: Callable[[Site], FitSpec],
    correct_for: CorrectFor | None,
    place: int,
) -> Fitted:
    correct = correct_for([place], False) if correct_for else None
    return fit(sites[place], starts[place], replace(how(sites[place]), correct=correct))


@dataclass(frozen=True)
class _Stack:
    """Sites that may train as one stacked network, with the weights that they begin with."""

    sites: Sequence[Site]
    starts: Sequence[Weights]
    plans: Sequence[FitSpec]
    members: Sequence[stacking.Member]

    def train(
        self,
        correct_all: Callable[[], Any] | None,
        other: StackedLosses | None,
        places: Sequence[int],
    ) -> list[Fitted] | None:
        """None where a stack does not pay, or fails: then nothing has happened."""
        if not stacking.is_worthwhile(self.members):
            return None
        trainer = self.sites[0].trainer
        steps = [
            plan.steps or one.trainer.steps_in(one.part) for plan, one in zip(self.plans, self.members, strict=True)
        ]
        try:
            stack = stacking.stacked_trainer(trainer, len(self.sites), other.make if other else None)
            if other is not None:
                other.load(stack.gradients.losses_of, places)
            stack.model.load(self.starts)
            optimizer = trainer.optimizer.make(iter(stack.model.parameters.values()), self.sites[0].round)
            batches, device = stacking.stacked_batches(self.members), None if trainer.weights_stay else "cpu"
            correct = correct_all() if correct_all else None
            losses, states = stack.train(batches, steps, optimizer, correct=correct, device=device)
        except RuntimeError as error:  # no memory, or no kernel
            warnings.warn(f"engine.stacked: sites train one after the other, more slowly: {error}", stacklevel=4)
            return None
        counts = [len(member.part) for member in self.members]
        return [
            (state, {"samples": count, "steps": own, "loss": loss})
            for state, count, own, loss in zip(states, counts, steps, losses, strict=True)
        ]


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Weights that let every class a site has count alike: inverse to its frequency there, 0 where it is absent."""
    counts = torch.bincount(labels.long(), minlength=classes).float()
    return torch.where(counts > 0, counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)
