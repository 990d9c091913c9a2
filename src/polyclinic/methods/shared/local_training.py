"""Local training at a site: put the model together, and train it on the site's images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.methods.shared.optimizer_state import keep_optimizer, start_optimizer
from polyclinic.training import private

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.training.replayed import ReplayedBatches


def assemble(site: Site, weights: Weights, own: str = "current") -> dict[str, Tensor]:
    """The whole model at a site: shared weights, and the part that is the site's own (`current` or `best`)."""
    if own == "none":
        return dict(weights)
    kept = site.state.group("best" if own == "best" else "local")
    return {**site.trainer.initial_local, **weights, **kept}


def train(
    site: Site,
    weights: Weights,
    *,
    steps: int | None = None,
    part: ImageSet | None = None,
    class_weights: Tensor | None = None,
    correct: Callable[[nn.Module], None] | None = None,
    replayed: ReplayedBatches | None = None,
) -> Parcel:
    """Train from `weights` on the site's images (or on `part`) for floor(|D| / b) steps, or as many as given.

    `replayed` images join each mini-batch. `correct` may change gradients before a step. What stays at the
    site goes into its state; the rest is the parcel of weights.
    """
    trainer = site.trainer
    part = part or site.data.train
    steps = steps or trainer.steps_in(part)
    model = trainer.load(assemble(site, weights))
    optimizer = start_optimizer(site, model)
    metadata: dict[str, float] = {}
    if private.is_private(site, "classifier"):
        # its loss would tell about the images
        steps = private.train(site, steps, optimizer, correct=correct, replayed=replayed)
    else:
        real = trainer.batches(part, site.rng("batches"))
        metadata["loss"] = trainer.train(
            replayed.join(real) if replayed else real,
            steps,
            optimizer,
            class_weights=class_weights,
            correct=correct,
            mixing=site.rng("mixup"),
        )
    keep_optimizer(site, optimizer)
    trained = trainer.released_weights()
    if trainer.local_names:
        site.state.put("local", {name: trained.pop(name) for name in sorted(trainer.local_names)})
    metadata = {"samples": len(part), "steps": steps, **metadata}
    return Parcel("weights", trained, metadata, private.record_of(site, "classifier"))


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Weights that let every class a site has count alike: inverse to its frequency there, 0 where it is absent."""
    counts = torch.bincount(labels.long(), minlength=classes).float()
    return torch.where(counts > 0, counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)
