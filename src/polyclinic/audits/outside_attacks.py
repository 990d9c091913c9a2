"""Attacks on an update that any program saved: by a search, and by algebra where a network begins with a linear layer.

They are those of an audit of a run, with the same start, priors and number of steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion
from polyclinic.attacks.gradient_inversion.priors import GaussianPrior
from polyclinic.attacks.gradient_inversion.settings import PRESETS, GradientInversion
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.audits.attack_updates import FEW, FEW_TIMES, FROM_IMAGES, IMAGE_PRIOR, IMAGES_PRIOR
from polyclinic.audits.attacker_images import FEWEST, start_near
from polyclinic.audits.outside_doubts import doubt_about
from polyclinic.audits.outside_update import Update
from polyclinic.audits.recovery import recovery
from polyclinic.audits.verdicts import count_of
from polyclinic.audits.views import Finding
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.study.audit_settings import Effort


def plant(update: Update, image: Tensor) -> Update:
    """The update of one step of plain descent on one image [1, C, H, W], of the first class."""
    network, lr = update.network.train(update.settings.batch_norm == "train"), update.settings.lr
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()  # batch norm of one image has no statistics of its own
    loss = nn.functional.cross_entropy(network(image), torch.zeros(len(image), dtype=torch.int64))
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    network.load_state_dict(buffers, strict=False)
    names = [name for name, _ in network.named_parameters()]
    moved = {n: update.before[n] - lr * g for n, g in zip(names, gradients, strict=True)}
    changes = {"steps": 1, "batch": len(image), "batch_norm": "eval"}
    return replace(update, after={**update.before, **moved}, settings=update.settings.model_copy(update=changes))


def invert(update: Update, truth: Tensor, held: Tensor, effort: Effort, seed: int, device: str) -> Finding | None:
    """By a search: from the mean of the attacker's own images where there are some, as in an audit of a run."""
    settings = update.settings
    exact = settings.optimizer == "sgd" and settings.images <= effort.images
    batch = settings.images if exact else min(settings.images, effort.images)
    own, compared = shared_out(held)
    attack, knowledge, words = search_plan(update, effort, batch, exact, own, seed)
    sent = {name: tensor for name, tensor in update.after.items() if name in dict(update.network.named_parameters())}
    try:
        found = attack.run([Parcel("weights", sent)], knowledge, seed=seed, device=device)
    except (BadInput, ValueError) as error:
        raise BadInput(f"--settings: this update cannot be attacked: {error}") from None
    made = f"{count_of(settings.images, 'image')} in {count_of(settings.steps, 'step')}"
    where = f"Update of {made}, {attack.name}"
    result = recovery(found.images[0], truth, compared, in_order=False, where=where)
    verdict = result.verdict()
    doubt = "" if verdict.leak else doubt_about(update, truth, found.images[0])
    return Finding(attack.name, found.threat_model, verdict, words, result.draw, doubt=doubt)


def shared_out(held: Tensor) -> tuple[Tensor, Tensor]:
    """Held-out images: every second one is the attacker's own, the others are compared with; with few, all are."""
    return (held[::2], held[1::2]) if len(held) >= 2 * FEWEST else (held[:0], held)


def search_plan(
    update: Update, effort: Effort, batch: int, exact: bool, own: Tensor, seed: int
) -> tuple[GradientInversion, Knowledge, list[str]]:
    """The attack, what it knows, and what it takes for granted."""
    settings = update.settings
    training = LocalTraining(settings.lr)
    if exact:
        training = LocalTraining(settings.lr, settings.steps, settings.batch, settings.momentum, settings.weight_decay)
    changes: dict[str, Any] = {
        "kind": "weights",
        "iterations": effort.update_steps * (FEW_TIMES if batch <= FEW else 1),
        "total_variation": 1e-4,
        "label": "sign" if batch == 1 else "counts",
        "batch_norm": settings.batch_norm,
    }
    knowledge = Knowledge(update.network, update.shape, batch_size=batch, classes=update.outputs, training=training)
    taken = "" if exact else f" are taken for one plain step on {batch}"
    words = [f"{settings.images} images in {settings.steps} steps{taken}"]
    if len(own):
        changes |= {"start": "given", "lr": FROM_IMAGES, "image_prior": IMAGE_PRIOR if batch == 1 else IMAGES_PRIOR}
        start = start_near(own, batch, seed)[None]
        knowledge = replace(knowledge, start_images=start, image_prior=GaussianPrior.of(own))
        words.append(f"the attacker's own images, from whose mean it searches, are {len(own)} of --held-out")
    return PRESETS["geiping"].model_copy(update=changes), knowledge, words


def compute(update: Update, truth: Tensor, held: Tensor, effort: Effort, seed: int, device: str) -> Finding | None:
    """By algebra, where the network begins with a linear layer."""
    attack = AnalyticInversion(kind="weights")
    if not attack.fits(update.network, update.shape):
        return None
    moved = {name: (update.before[name] - update.after[name])[None] for name, _ in update.network.named_parameters()}
    found = attack.run(moved, update.network, update.shape)
    result = recovery(found.inputs.reshape(1, *update.shape), truth, held, in_order=False)
    return Finding(attack.name, str(attack), result.verdict(), draw=result.draw)
