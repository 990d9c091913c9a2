"""Local training at a site: put the model together, train it on the site's images, release what may leave."""

from collections.abc import Iterable, Iterator
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.collaborators import Batch, TrainerLike
from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Work, carry_out
from polyclinic.federation.site import Site
from polyclinic.settings import Settings
from polyclinic.training import private
from polyclinic.training.plans import Correction as Correction
from polyclinic.training.plans import Fit, FitSpec, Fitted
from polyclinic.training.plans import Reference as Reference

#: one pass with the task's loss
PLAIN = FitSpec()


def assemble(site: Site, weights: Weights, own: str = "current") -> dict[str, Tensor]:
    """The whole model at a site: shared weights, and the part that is the site's own (`current` or `best`)."""
    if own == "none":
        return dict(weights)
    kept = site.state.group("best" if own == "best" else "local")
    return {**site.trainer.initial_local, **weights, **kept}


def train(site: Site, weights: Weights, spec: FitSpec = PLAIN) -> Parcel:
    """Train from `weights` on the site's images, at once and alone. What stays at the site goes into its state; the
    rest is the parcel."""
    [parcel] = carry_out([plan_train(site, weights, spec)])
    return parcel


def plan_train(site: Site, weights: Weights, spec: FitSpec = PLAIN) -> Work[Parcel]:
    """The same as a plan: simulated sites that hand it in at once may be trained as a stack."""
    return release(site, (yield Fit(site, assemble(site, weights), spec)))


def release(site: Site, fitted: Fitted) -> Parcel:
    """The parcel of what may leave of trained weights; the rest goes into the site's state."""
    shared = dict(fitted.weights)
    if site.trainer.local_names:
        site.state.put("local", {name: shared.pop(name) for name in sorted(site.trainer.local_names)})
    record = private.record_of(site, "classifier") if site.trainer.privacy is not None else None
    return Parcel("weights", shared, dict(fitted.metadata), record)


def mean_gradient(trainer: TrainerLike, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The mean gradient of the trainer's network over all images of some batches, by parameter, on the CPU."""
    model, seen = trainer.model.train(), 0
    model.zero_grad(set_to_none=True)
    for images, targets in batches:
        (trainer.loss(trainer.forward(images), targets) * len(images)).backward()
        seen += len(images)
    return {name: one.grad.cpu() / seen for name, one in model.named_parameters() if one.grad is not None}


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Weights that let every class a site has count alike: inverse to its frequency there, 0 where it is absent."""
    counts = torch.bincount(labels.long(), minlength=classes).float()
    return torch.where(counts > 0, counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)


def one_pass(rows: Tensor, targets: Tensor, size: int, rng: torch.Generator, device: torch.device) -> Iterator[Batch]:
    """One shuffled pass over rows [N, ...], as float32, without an incomplete last batch."""
    order = torch.randperm(len(rows), generator=rng)
    for index in order[: len(rows) // size * size].split(size):
        yield rows[index].to(device, non_blocking=True).float(), targets[index].to(device, non_blocking=True)


# --- how long a site trains ---------------------------------------------------------------------------


class LocalWork(Settings):
    """Either so many steps, or so many passes over the site's images; one pass if neither is given."""

    local_steps: int | None = Field(None, ge=1, description="steps in a round (or turn); floor(|D_k| / b) if not given")
    local_epochs: int | None = Field(
        None,
        ge=1,
        description="passes of a site over its own images in a round (or turn), instead of local_steps: a large site "
        "takes more steps than a small one",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs both say how long a site trains; give one of them")
        return self

    def steps_at(self, site: Site, part: ImageSet | None = None) -> int:
        """Steps of a site in a round, on its training images or on `part`."""
        if self.local_steps is not None:
            return self.local_steps
        return (self.local_epochs or 1) * site.trainer.steps_in(site.data.train if part is None else part)
