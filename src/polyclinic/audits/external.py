"""Audits of what others made: an update that any federation saved, and the images of any generator.

The same attacks, scores and words as for a run, and the same power checks: where nothing is found, a leak is planted
in the same setting, and only an attack that finds it may say "withstood".
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Word
from polyclinic.attacks.copies import FEWEST, CopySearch
from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion
from polyclinic.attacks.gradient_inversion.priors import GaussianPrior
from polyclinic.attacks.gradient_inversion.settings import PRESETS, GradientInversion
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.attacks.membership import LossThreshold, NearestSynthetic
from polyclinic.attacks.near_copies import WEAKEST_WORDS, CopyIndex, weakest_copies
from polyclinic.audits.attack import Finding
from polyclinic.audits.attack_generators import finding_of
from polyclinic.audits.attack_updates import FEW, FEW_TIMES, FROM_IMAGES, IMAGE_PRIOR, IMAGES_PRIOR
from polyclinic.audits.audit import write_file
from polyclinic.audits.external_files import (
    OutsideImages,
    Sent,
    Update,
    UpdateSettings,
    build_network,
    fit_names,
    read_folder,
    read_tensors,
    share_classes,
)
from polyclinic.audits.recovery import recovery
from polyclinic.audits.run_inversion import ENOUGH
from polyclinic.audits.truth import FEWEST_OWN, start_near
from polyclinic.audits.verdicts import count_of, gravest, with_doubt
from polyclinic.errors import BadInput
from polyclinic.extras import picture_if_possible
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.perceptual import Pixels
from polyclinic.study.tables import EFFORTS, Effort

Json = dict[str, Any]
FEWEST_MEMBERS = 8  #: images of either kind, below which nobody can tell members


# --- images -------------------------------------------------------------------------------------------


def audit_images(
    synthetic: Path, training: Path, held_out: Path, out: Path, *, budget: str = "quick", seed: int = 0
) -> Json:
    """Search the images of any generator for copies of its training images; the content of `out`/audit.json."""
    real = read_folder(training, "--training")
    size, channels = real.images.shape[-1], real.images.shape[1]
    others = read_folder(held_out, "--held-out", size=size, channels=channels).without(real)
    made = read_folder(synthetic, "SYNTHETIC", size=size, channels=channels)
    if min(len(real), len(others)) < FEWEST:
        raise BadInput(
            f"--held-out: {len(real)} training and {len(others)} held-out images; give {FEWEST} or more of each"
        )
    index = CopyIndex(real.images, others.images)

    def search(images: Tensor) -> Finding:
        return finding_of(index, index.search(images), images, seed, str(CopySearch()))

    begin = time.perf_counter()
    finding = search(made.images)
    spoiled = made.images.clone()
    spoiled[0] = weakest_copies(real.images[:1].float() / 255, seed)[0]
    check = {} if finding.verdict.leak else _power("near copy", WEAKEST_WORDS, search(spoiled))
    rows = [_row(finding, [check] if check else [], out, time.perf_counter() - begin)]
    begin = time.perf_counter()
    members = NearestSynthetic().run(made.images, real.images, others.images, Pixels())
    told = Finding("nearest-synthetic", members.threat_model, members.verdict(), question="membership")
    rows.append(_row(told, [], out, time.perf_counter() - begin))
    facts = {"synthetic": len(made), "training": len(real), "held_out": len(others), "size": size}
    return _write(out, {"audited": "images", "budget": budget, **facts}, rows)


# --- updates ------------------------------------------------------------------------------------------


def audit_update(
    before: Path,
    after: Path | Sent,
    model: str,
    images: Path,
    out: Path,
    *,
    settings: UpdateSettings,
    held_out: Path | None = None,
    budget: str = "quick",
    device: str = "cpu",
    seed: int = 0,
) -> Json:
    """Attack the update between two files; the content of `out`/audit.json.

    `after`: the weights that the site sent, or `Sent(path, "--change")` for their difference to those before.
    `images`: those that the site trained with, for scoring; `held_out`: others, to compare with.
    """
    effort = EFFORTS[budget]
    true = read_folder(images, "--images", size=settings.size, channels=settings.channels)
    sent = after if isinstance(after, Sent) else Sent(after)
    update = open_update(before, sent, model, settings, true)
    size, channels = true.images.shape[-1], true.images.shape[1]
    others = read_folder(held_out, "--held-out", size=size, channels=channels).without(true) if held_out else None
    if others is not None and true.labels is not None and others.labels is not None:
        true, others = share_classes(true, others, update.outputs)
    held = others.images.float() / 255 if others else torch.zeros(0, *update.shape)
    truth = true.images.float() / 255
    rows = []
    for attack in (invert, compute):
        row = _attacked(attack, update, truth, held, effort, out, seed, device)
        rows += [row] if row else []
    labelled = others is not None and true.labels is not None and others.labels is not None
    if labelled and min(len(true), len(others)) >= FEWEST_MEMBERS:  # type: ignore[arg-type]
        rows.append(_membership(update, true, others, out))  # type: ignore[arg-type]
    facts = {"model": model, "images": len(true), "held_out": len(held), "settings": settings.model_dump()}
    return _write(out, {"audited": "update", "budget": budget, **facts}, rows)


def open_update(before: Path, sent: Sent, model: str, settings: UpdateSettings, true: OutsideImages) -> Update:
    """The two files, under the names of the network that they are of."""
    first = read_tensors(before, "--before")
    shape = (true.images.shape[1], *true.images.shape[2:])
    network = build_network(model, settings, first, shape[-1], shape[0])
    start = fit_names(first, network, before, "--before")
    after = sent.weights(network, start)
    if all(torch.equal(start[name], after[name]) for name, _ in network.named_parameters()):
        raise BadInput(f"{sent.flag}: changes nothing in the weights of --before; name what the site sent")
    network.load_state_dict({**network.state_dict(), **start})
    with torch.no_grad():
        outputs = int(network.eval()(torch.zeros(1, *shape)).shape[1])
    return Update(network, start, after, settings, shape, outputs)


Attack = Callable[[Update, Tensor, Tensor, Effort, int, str], Finding | None]


def _attacked(
    attack: Attack, update: Update, truth: Tensor, held: Tensor, effort: Effort, out: Path, seed: int, device: str
) -> Json | None:
    """One attack on the update; where it finds nothing, the same on the update of one held-out image."""
    begin = time.perf_counter()
    found = attack(update, truth, held, effort, seed, device)
    if found is None:
        return None
    found = with_doubt(found)
    checks = []
    if not found.verdict.leak and len(held) > 1:
        planted = plant(update, held[:1])
        check = attack(planted, held[:1], held[1:], effort, seed, device)
        if check is not None:
            checks = [_power("single image", "one step of plain descent on one held-out image", check)]
    if update.settings.images > 1:  # what is planted is easier than what was asked
        found = replace(found, doubt="the planted leak has one image in one step, and this update has more")
    return _row(found, checks, out, time.perf_counter() - begin)


def _membership(update: Update, true: OutsideImages, others: OutsideImages, out: Path) -> Json:
    begin = time.perf_counter()
    network = update.network
    network.load_state_dict({**network.state_dict(), **update.after})
    network.eval()

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(images), labels, reduction="none")

    assert true.labels is not None
    assert others.labels is not None
    found = LossThreshold().run(
        losses, true.images, others.images, member_labels=true.labels, other_labels=others.labels
    )
    network.load_state_dict({**network.state_dict(), **update.before})
    finding = Finding("loss-threshold", found.threat_model, found.verdict(), question="membership")
    return _row(finding, [], out, time.perf_counter() - begin)


# --- what is written ----------------------------------------------------------------------------------


def _power(leak: str, words: str, found: Finding) -> Json:
    return {"leak": leak, "words": words, "found": found.verdict.leak, "evidence": found.verdict.evidence}


def _row(finding: Finding, checks: list[Json], out: Path, seconds: float) -> Json:
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{finding.attack}.png"
    if finding.draw is not None:
        with picture_if_possible():
            finding.draw(picture)
    earned = checks and all(check["found"] for check in checks) and not finding.doubt
    word: Word = LEAKS if finding.verdict.leak else WITHSTOOD if earned else NOT_TESTED
    return {
        "attack": finding.attack,
        "question": finding.question,
        "verdict": word,
        "words": str(finding.verdict),
        "doubt": finding.doubt,
        "evidence": finding.verdict.evidence,
        "power": checks,
        "threat_model": finding.threat_model,
        "assumed": finding.assumed,
        "picture": picture.name if picture.is_file() else None,
        "seconds": round(seconds, 1),
    }


def _write(out: Path, facts: Json, rows: list[Json]) -> Json:
    questions: dict[str, list[Word]] = {}
    for row in rows:
        questions.setdefault(row["question"], []).append(row["verdict"])
    # every attack that asks a question must have power; a leak of any is a leak
    words: dict[str, Word] = {
        name: LEAKS if LEAKS in found else WITHSTOOD if set(found) == {WITHSTOOD} else NOT_TESTED
        for name, found in questions.items()
    }
    if facts["audited"] == "update":
        words.setdefault("membership", NOT_TESTED)  # without labels of both folders it was not asked
    report = {**facts, "verdict": gravest(list(words.values())), "questions": words, "findings": rows}
    write_file(out / "audit.json", json.dumps(report, indent=2) + "\n")
    return report


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
    return (held[::2], held[1::2]) if len(held) >= 2 * FEWEST_OWN else (held[:0], held)


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


MOST = 64  #: images of a folder that are looked at
BETTER = 0.5  #: what was found explains the update, and the named images do not, where its distance is below this share


def doubt_about(update: Update, truth: Tensor, found: Tensor) -> str:
    """Why nothing found would say nothing: a longer search may win, or the images named are not those trained on."""
    settings = update.settings
    if settings.images > 1 or settings.optimizer != "sgd" or not len(truth):
        return ""
    best, own = (float(distances(update, images).min()) for images in (truth[:MOST], found[:1]))
    if not own <= best * (1 + ENOUGH):  # as NaN is, too
        return f"the search had not ended: its distance is {own:.2g}, that of the true image {best:.2g}; use --budget"
    if own < BETTER * best:
        return "what was found explains the update, and none of --images does; name the images that the site used"
    return ""


def distances(update: Update, images: Tensor) -> Tensor:
    """How far the gradient of each image [N, C, H, W] points from the change that was sent, [N]: 0 for the same
    direction, with the class that fits best."""
    network = copy.deepcopy(update.network).train(update.settings.batch_norm == "train")
    names = [name for name, _ in network.named_parameters()]
    moved = [(update.before[n] - update.after[n]) / update.settings.lr for n in names]
    sent = torch.cat([
        (one - update.settings.weight_decay * update.before[name]).flatten()
        for name, one in zip(names, moved, strict=True)
    ])  # fmt: skip
    return torch.stack([_nearest(network, image[None], sent, update.outputs) for image in images])


def _nearest(network: nn.Module, image: Tensor, sent: Tensor, outputs: int) -> Tensor:
    found = []
    for label in range(outputs):
        loss = nn.functional.cross_entropy(network(image), torch.tensor([label]))
        gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
        pairs = zip(gradients, network.parameters(), strict=True)
        flat = torch.cat([(torch.zeros_like(one) if g is None else g).flatten() for g, one in pairs])
        found.append(1 - nn.functional.cosine_similarity(flat, sent, dim=0))
    return torch.stack(found).min()
