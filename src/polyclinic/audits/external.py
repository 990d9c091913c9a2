"""Audits of what others made: an update that any federation saved, and the images of any generator.

The same attacks, scores and words as for a run, and the same power checks: where nothing is found, a leak is planted
in the same setting, and only an attack that finds it may say "withstood".
"""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import NOT_TESTED, Word
from polyclinic.attacks.copies import FEWEST
from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion
from polyclinic.attacks.gradient_inversion.objective import LocalTraining
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.attacks.membership import LossThreshold, NearestSynthetic
from polyclinic.attacks.near_copies import WEAKEST_WORDS, CopyIndex, weakest_copies
from polyclinic.audits.attack import Finding
from polyclinic.audits.attack_generators import near_copy_finding
from polyclinic.audits.audit import draw_plot, write_file
from polyclinic.audits.external_files import (
    ImageFolder,
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
from polyclinic.audits.run_inversion import ENOUGH, Search, geiping
from polyclinic.audits.truth import FEWEST_OWN
from polyclinic.audits.verdicts import CheckedFinding, PowerCheck, count_of, gravest, with_doubt
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.perceptual import Pixels
from polyclinic.study.tables import EFFORTS, Effort

Json = dict[str, Any]
FEWEST_MEMBERS = 8  #: images of either kind, below which nobody can tell members
MOST = 64  #: images of a folder that are looked at for a doubt
BETTER = 0.5  #: what was found explains the update, and the named images do not, where its distance is below this share


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
        return near_copy_finding(index, index.search(images), images, seed)

    begin = time.perf_counter()
    finding, checks = search(made.images), []
    if not finding.verdict.leak:
        spoiled = made.images.clone()
        spoiled[0] = weakest_copies(real.images[:1].float() / 255, seed)[0]
        checks = [("near copy", WEAKEST_WORDS, search(spoiled))]
    rows = [write_row(finding, checks, out, begin)]
    begin = time.perf_counter()
    members = NearestSynthetic().run(made.images, real.images, others.images, Pixels())
    told = Finding("nearest-synthetic", members.threat_model, members.verdict(), question="membership")
    rows.append(write_row(told, [], out, begin))
    facts = {"synthetic": len(made), "training": len(real), "held_out": len(others), "size": size}
    return write_report(out, {"audited": "images", "budget": budget, **facts}, rows)


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
    true = read_folder(images, "--images", size=settings.size, channels=settings.channels)
    update = open_update(before, after if isinstance(after, Sent) else Sent(after), model, settings, true)
    size, channels = true.images.shape[-1], true.images.shape[1]
    others = read_folder(held_out, "--held-out", size=size, channels=channels).without(true) if held_out else None
    labelled = others is not None and true.labels is not None and others.labels is not None
    if others is not None and labelled:
        true, others = share_classes(true, others, update.outputs)
    held = others.images.float() / 255 if others else torch.zeros(0, *update.shape)
    asked = Asked(true.images.float() / 255, held, EFFORTS[budget], seed, device)
    rows = [row for attack in (invert, compute) if (row := attack_update(attack, update, asked, out))]
    if others is not None and labelled and min(len(true), len(others)) >= FEWEST_MEMBERS:
        rows.append(membership(update, true, others, out))
    facts = {"model": model, "images": len(true), "held_out": len(held), "settings": settings.model_dump()}
    return write_report(out, {"audited": "update", "budget": budget, **facts}, rows)


def open_update(before: Path, sent: Sent, model: str, settings: UpdateSettings, true: ImageFolder) -> Update:
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


@dataclass(frozen=True)
class Asked:
    """The true images [N, C, H, W] in [0, 1] and held-out ones [M, ...] of an attack, and what it may cost."""

    truth: Tensor
    held: Tensor
    effort: Effort
    seed: int
    device: str


def attack_update(
    attack: Callable[[Update, Asked], Finding | None], update: Update, asked: Asked, out: Path
) -> Json | None:
    """One attack on the update; where it finds nothing, the same on the update of one held-out image."""
    begin, held = time.perf_counter(), asked.held
    found = attack(update, asked)
    if found is None:
        return None
    found, checks = with_doubt(found), []
    if not found.verdict.leak and len(held) > 1:
        check = attack(plant(update, held[:1]), replace(asked, truth=held[:1], held=held[1:]))
        if check is not None:
            checks = [("single image", "one step of plain descent on one held-out image", check)]
    if update.settings.images > 1:  # what is planted is easier than what was asked
        found = replace(found, doubt="the planted leak has one image in one step, and this update has more")
    return write_row(found, checks, out, begin)


def plant(update: Update, image: Tensor) -> Update:
    """The update of one step of plain descent on one image [1, C, H, W], of the first class."""
    network, lr = update.network.eval(), update.settings.lr  # batch norm of one image has no statistics of its own
    loss = nn.functional.cross_entropy(network(image), torch.zeros(len(image), dtype=torch.int64))
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    moved = {n: update.before[n] - lr * g for (n, _), g in zip(network.named_parameters(), gradients, strict=True)}
    changes = {"steps": 1, "batch": len(image), "batch_norm": "eval"}
    return replace(update, after={**update.before, **moved}, settings=update.settings.model_copy(update=changes))


def invert(update: Update, asked: Asked) -> Finding:
    """By a search: from the mean of the attacker's own images where there are some, as in an audit of a run.

    With enough held-out images, every second one is the attacker's own, and the others are compared with."""
    settings, held = update.settings, asked.held
    own, compared = (held[::2], held[1::2]) if len(held) >= 2 * FEWEST_OWN else (held[:0], held)
    search = plan_search(update, asked, own)
    try:
        found = search.settings.run(search.parcels, search.knowledge, seed=asked.seed, device=asked.device)
    except (BadInput, ValueError) as error:
        raise BadInput(f"--settings: this update cannot be attacked: {error}") from None
    made = f"{count_of(settings.images, 'image')} in {count_of(settings.steps, 'step')}"
    where = f"Update of {made}, {search.settings.name}"
    result = replace(recovery(found.images[0], asked.truth, compared, in_order=False), where=where)
    verdict = result.verdict()
    doubt = "" if verdict.leak else doubt_about(update, asked.truth, found.images[0])
    return Finding(search.settings.name, found.threat_model, verdict, search.assumed, result.draw, doubt=doubt)


def plan_search(update: Update, asked: Asked, own: Tensor) -> Search:
    """The attack, what it knows, and what it takes for granted."""
    settings = update.settings
    exact = settings.optimizer == "sgd" and settings.images <= asked.effort.images
    batch = settings.images if exact else min(settings.images, asked.effort.images)
    training = LocalTraining(settings.lr)
    if exact:
        training = LocalTraining(settings.lr, settings.steps, settings.batch, settings.momentum, settings.weight_decay)
    label = "sign" if batch == 1 else "counts"
    attack = geiping(asked.effort, batch, kind="weights", label=label, batch_norm=settings.batch_norm)
    knowledge = Knowledge(update.network, update.shape, batch_size=batch, classes=update.outputs, training=training)
    taken = "" if exact else f" are taken for one plain step on {batch}"
    words = f"{settings.images} images in {settings.steps} steps{taken}"
    sent = {name: update.after[name] for name, _ in update.network.named_parameters()}
    search = Search(attack, knowledge, [words], (Parcel("weights", sent),))
    if not len(own):
        return search
    whose = f"the attacker's own images, from whose mean it searches, are {len(own)} of --held-out"
    return search.from_images(own, asked.seed, whose)


def compute(update: Update, asked: Asked) -> Finding | None:
    """By algebra, where the network begins with a linear layer."""
    attack = AnalyticInversion(kind="weights")
    if not attack.fits(update.network, update.shape):
        return None
    moved = {name: (update.before[name] - update.after[name])[None] for name, _ in update.network.named_parameters()}
    found = attack.run(moved, update.network, update.shape)
    result = recovery(found.inputs.reshape(1, *update.shape), asked.truth, asked.held, in_order=False)
    return Finding(attack.name, str(attack), result.verdict(), draw=result.draw)


def membership(update: Update, true: ImageFolder, others: ImageFolder, out: Path) -> Json:
    begin, network = time.perf_counter(), copy.deepcopy(update.network).eval()
    network.load_state_dict({**network.state_dict(), **update.after})

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(images), labels, reduction="none")

    assert true.labels is not None
    assert others.labels is not None
    labels = {"member_labels": true.labels, "other_labels": others.labels}
    found = LossThreshold().run(losses, true.images, others.images, **labels)
    finding = Finding("loss-threshold", found.threat_model, found.verdict(), question="membership")
    return write_row(finding, [], out, begin)


# --- doubts: was the update of one image searched to its end, and is it of the images that were named? ------


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


# --- what is written ----------------------------------------------------------------------------------


def write_row(finding: Finding, planted: list[tuple[str, str, Finding]], out: Path, begin: float) -> Json:
    """What audit.json says of a finding, whose picture is drawn. `planted`: leaks, in words, and what was found."""
    checks = [PowerCheck(f.attack, leak, words, f.verdict.leak, f.verdict.evidence) for leak, words, f in planted]
    picture = out / f"{finding.attack}.png"
    shown = finding.draw is not None and draw_plot(finding.draw, picture)
    took = time.perf_counter() - begin
    return {
        "attack": finding.attack, "question": finding.question,
        "verdict": CheckedFinding(finding, tuple(checks), took).word, "words": str(finding.verdict),
        "doubt": finding.doubt, "evidence": finding.verdict.evidence,
        "power": [{name: getattr(one, name) for name in ("leak", "words", "found", "evidence")} for one in checks],
        "threat_model": finding.threat_model, "assumed": finding.assumed, "picture": picture.name if shown else None,
        "seconds": round(took, 1),
    }  # fmt: skip


def write_report(out: Path, facts: Json, rows: list[Json]) -> Json:
    questions: dict[str, list[Word]] = {}
    for row in rows:
        questions.setdefault(row["question"], []).append(row["verdict"])
    # every attack that asks a question must have power; a leak of any is a leak
    words: dict[str, Word] = {name: gravest(found) for name, found in questions.items()}
    if facts["audited"] == "update":
        words.setdefault("membership", NOT_TESTED)  # without labels of both folders it was not asked
    report = {**facts, "verdict": gravest(list(words.values())), "questions": words, "findings": rows}
    write_file(out / "audit.json", json.dumps(report, indent=2) + "\n")
    return report
