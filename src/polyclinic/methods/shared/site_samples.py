"""Samples of a site's own generator, which leave in the place of its images: trained, audited, drawn and checked.

Their labels are drawn from rounded counts of the site's own (`label_cells`). While it trains, the site's audit looks at
what the generator remembers (`self_audit`); the site keeps the last state at which nothing was found.

With differential privacy the number of steps is fixed beforehand, the counts have noise of their own, and samples are
post-processing. The audit then looks once, at the end, and may refuse the whole release: this one bit is not covered.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.data.plots import contact_sheet, label_words
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import GateRefusedData
from polyclinic.federation.layers.cohort import patients_in
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import atomic_write
from polyclinic.generators.base import FitOptions, GeneratorModel
from polyclinic.methods.shared import replay_space, self_audit, site_generator
from polyclinic.methods.shared.self_audit import Learned, Look
from polyclinic.metrics.perceptual import Pixels, nearest
from polyclinic.training import private, private_steps

if TYPE_CHECKING:
    from polyclinic.federation.call import Reply
    from polyclinic.federation.federation import Federation
    from polyclinic.federation.site import Site
    from polyclinic.tasks import Target

#: groups of a site's state: the generator, its optimiser, the last state at which nothing was found; parts trained
MODEL, MOMENTS, GOOD, LEG = "samples generator", "samples moments", "samples kept", "samples leg"
COUNTS = "samples counts"  #: private counts of labels
#: what an audit says of the generator whose samples are sent
VERDICTS = NOTHING, EARLY, UNTESTED = ("nothing found", "stopped early", "not tested")
SAMPLES, NOISY_COUNTS = "samples of the generator", "counts of labels, with noise"
REFUSAL = "one bit: whether the site's audit lets the samples leave at all"
#: counts are rounded to multiples of it, and a site with fewer images sends nothing
ROUND = 10
#: cells of the range of values, by which these are counted; the noise of private counts, in images or patients, and
#: how many times its deviation a private count must have
CELLS, COUNT_NOISE, CLEAR = 16, 15.0, 2
SHOWN = 12
#: samples that a coordinator takes of one site
MOST_SAMPLES = 2**20


# --- training and audit at a site ---------------------------------------------------------------------


def train(site: Site, leg: int, legs: int, *, looks: bool) -> None:
    """A part of the training of the site's generator, counted from 1; once the audit, which `looks` after each, has
    found something, the parts that follow are left out."""
    done = int(site.state.get(LEG, torch.tensor(0)))
    if leg != done + 1:
        raise WorkFailed(f"site '{site.name}': part {leg} of the generator's training came after part {done}")
    site.state[LEG] = torch.tensor(leg)
    if leg == 1:
        _check_images(site)
    elif not site.state.group(MODEL):  # the audit has stopped it
        return
    model, kept, labels = built(site, MODEL), dict(site.state.group(MOMENTS)), np.array(site.data.train.labels)
    learners = private_steps.learners(site, "generator") if _is_private(site) else {}
    told = site_generator.generator_progress(site)
    options = FitOptions(report=told, private=learners, leg=(leg, legs), kept=kept)
    model.fit(learned(site), labels, site.rng(f"generator {leg}"), options)
    stopped = False
    if looks and not learners:
        made = model.sample(cell_labels(site, min(len(labels), self_audit.MOST)), site.rng(f"look {leg}"))
        found = look(site, made, f"{leg}", model=model, looks=legs + 1)
        stopped = found is not None and found.found
    if not stopped:
        site.state.put(GOOD, model.state())
    site.state.put(MODEL, {} if stopped else model.state())
    site.state.put(MOMENTS, {} if stopped else kept)


def _is_private(site: Site) -> bool:
    """Whether all that a sample comes from learns with differential privacy; a prior over codes would be left out."""
    return private.is_private(site, "generator") and not site_generator.generator_settings(site).has_codes


def _check_images(site: Site) -> None:
    part = site.data.train
    if len(part) < ROUND:
        raise GateRefusedData(
            f"it has {len(part)} training images, and a generator of fewer than {ROUND} would show them; leave it out"
        )
    if bool((np.asarray(part.images[:64]) == part.images[0]).all()):
        warnings.warn(
            f"site '{site.name}': its training images are all the same, so its samples will teach nothing; look at "
            "them with `polyclinic data inspect`",
            stacklevel=2,
        )


def learned(site: Site, split: str = "train") -> np.ndarray | Tensor:
    """What the site's generator learns, uint8 [N, C, H, W]: images, with masks behind them, or features."""
    if not replay_space.in_latents(site):
        return site_generator.training_images(site, split)
    return (
        replay_space.learned(site) if split == "train" else replay_space.latent_bytes(site, site.data.validation.images)
    )


def built(site: Site, group: str) -> GeneratorModel:
    """The study's generator in the state of a group of the site's, or with first weights of the site's own."""
    return site_generator.build_generator(site, site.state.group(group) or None, shape=tuple(learned(site).shape[1:]))


def look(site: Site, made: Tensor, name: str, *, model: GeneratorModel | None = None, looks: int = 1) -> Look | None:
    """What the site's audit finds in samples, written into the site's folder for its own people; None where there are
    too few validation images to tell by."""
    part, others = site.data.train, site.data.validation
    if min(len(part), len(others)) < self_audit.FEWEST:
        return None
    train = Learned.some(learned(site), part, site.seed)
    held_out = Learned.some(learned(site, "validation"), others, site.seed)
    found = self_audit.look(made, train, held_out, model=model, looks=looks, seed=site.seed)
    atomic_write(site.folder / f"samples-look-{name}.json", found.to_json())
    return found


# --- samples ------------------------------------------------------------------------------------------


def give(site: Site, count: int | None, *, looks: bool) -> Parcel:
    """Samples of the last state at which nothing was found, and the verdict; a refusal where there is no such state."""
    is_private = _is_private(site)
    if not site.state.group(GOOD):
        raise GateRefusedData(
            "its audit found training images in the samples from the first look on, and nothing is sent; train for "
            "fewer generator.steps, look more often (method.looks), or leave the site out"
        )
    model = built(site, GOOD)
    labels = cell_labels(site, count)
    made = model.sample(labels, site.rng("samples"))
    verdict = NOTHING if site.state.group(MODEL) else EARLY
    if looks:
        some = torch.randperm(len(made), generator=site.rng("looked at"))
        found = look(site, made[some], "sent", looks=int(site.state[LEG]) + 1)
        if found is not None and found.found:
            raise GateRefusedData("its audit found training images among the samples, and none of them is sent")
        verdict = verdict if found is not None else UNTESTED
    else:
        verdict = UNTESTED
    buffer = {"images": made, "labels": labels}
    if site.trainer.task.dense:
        buffer |= {"images": made[:, :-1].contiguous(), "masks": (made[:, -1] >= 128).to(torch.uint8)}
    if not replay_space.in_latents(site):
        _draw_sheet(site, buffer)
    covers = [SAMPLES, NOISY_COUNTS]
    record = private.record_for(site, covers, [REFUSAL] if looks else []) if is_private else None
    return Parcel("synthetic-images", buffer, {"audit": verdict}, record, compressed=("images",))


def most_numbers(site: Site, count: int | None) -> int:
    """Numbers that samples may have: of so many, or of about as many as the site has training images."""
    images = count or len(site.data.train) + ROUND * (CELLS + len(site.trainer.target.classes))
    return images * (1 + 2 * math.prod(learned(site).shape[1:]))


def cell_labels(site: Site, count: int | None) -> Tensor:
    """Labels of so many samples: as many of each class, or cell of the range of values, as the site's rounded counts
    have it. Within a cell values are drawn evenly, so that no label is a patient's. None: as many as were counted."""
    target, part = site.trainer.target, site.data.train
    own = torch.from_numpy(np.array(part.labels))
    low, high = target.label_range or (0.0, 1.0)
    cells = len(target.classes) or CELLS
    cell = own.long() if target.classes else ((own - low) / (high - low) * CELLS).long().clamp(0, CELLS - 1)
    is_private = _is_private(site)
    counts = _private_counts(site, cell, cells) if is_private else _counts(site, cell, cells)
    if not bool(counts.any()):  # few of each: those that occur count alike, or in private all
        if site.min_cohort:
            raise GateRefusedData("no class, or range of values, has images of min_cohort patients; leave the site out")
        occurring = torch.bincount(cell, minlength=cells).clamp(max=1)
        counts = ROUND * (torch.ones_like(occurring) if is_private else occurring)
    wanted = counts if count is None else (counts * count / counts.sum()).round().long()
    if not bool(wanted.any()):
        raise GateRefusedData(f"method.samples = {count} leaves no sample for any class or range of values; raise it")
    chosen = torch.repeat_interleave(torch.arange(cells), wanted)
    if target.classes:
        return chosen
    place = torch.rand(len(chosen), generator=site.rng("labels of samples"))
    return low + (chosen + place) * ((high - low) / CELLS)


def _counts(site: Site, cell: Tensor, cells: int) -> Tensor:
    """Rounded counts; a cell of fewer patients than the site's policy wants is empty."""
    counts = (torch.bincount(cell, minlength=cells) + ROUND // 2) // ROUND * ROUND
    enough = [patients_in(site.data.train, [(cell == one).nonzero()]) >= site.min_cohort for one in range(cells)]
    return counts * torch.tensor(enough)


def _private_counts(site: Site, cell: Tensor, cells: int) -> Tensor:
    """Counts with noise, which are charged once and kept; cells that noise alone could fill are empty."""
    if COUNTS not in site.state:
        clip = private.settings_of(site).max_grad_norm

        def total(index: Tensor, patients: Tensor | None) -> Tensor:
            rows = F.one_hot(cell[index], cells).double()
            if patients is not None:
                rows = torch.stack([rows[patients == one].sum(0) for one in patients.unique()])
                rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
            return clip * rows.sum(0)

        noisy, _ = private_steps.release_sum(site, total, None, noise=COUNT_NOISE)
        site.state[COUNTS] = noisy / clip
    counts = site.state[COUNTS]
    return torch.where(counts >= CLEAR * COUNT_NOISE, (counts / ROUND).round() * ROUND, 0.0).long()


def _draw_sheet(site: Site, buffer: dict[str, Tensor]) -> None:
    """Samples above the training images that are nearest to them, in the site's own folder."""
    chosen = torch.linspace(0, len(buffer["images"]) - 1, SHOWN).round().long().unique()
    samples, labels = buffer["images"][chosen], buffer["labels"][chosen]
    own = torch.from_numpy(np.array(site.data.train.images[: 10 * self_audit.MOST]))
    rows = {"samples": samples, "nearest training images": own[nearest(samples, own, Pixels()).index]}
    target, title = site.trainer.target, f"{site.name}: some of its {len(buffer['images'])} samples"
    contact_sheet(rows, site.folder / "synthetic.png", label_words(labels, target.classes, target.unit), title)


# --- at the coordinator -------------------------------------------------------------------------------


def most_samples(target: Target, count: int | None) -> int:
    """Samples that a coordinator takes of a site: so many, and half a one for each class or cell, which are rounded."""
    return MOST_SAMPLES if count is None else count + (len(target.classes) or CELLS) // 2


def train_at_sites(federation: Federation, operation: str, looks: int) -> None:
    """Have all sites train their generators, in as many parts as their audits look, of which each is kept."""
    generator, privacy = federation.generator, federation.trainer.privacy
    in_parts = getattr(generator, "resumable", False) and (privacy is None or "generator" not in privacy.on)
    legs = max(1, looks) if in_parts else 1

    def train_part(leg: int) -> dict[str, Tensor]:
        return {"sites": torch.tensor(len(federation.ask_all(operation, leg=leg, legs=legs)))}

    for leg in range(1, legs + 1):
        federation.once(f"trained-{leg}", functools.partial(train_part, leg))


def collect(federation: Federation, operation: str) -> dict[str, Tensor]:
    """The samples of all sites as `images`, `labels`, perhaps `masks`, kept for a resumed run; figures are reported."""
    sent = federation.once("samples", lambda: _collect(federation, operation))
    _tell(federation, sent)
    return {name: tensor for name, tensor in sent.items() if "/" not in name}


def _collect(federation: Federation, operation: str) -> dict[str, Tensor]:
    replies = federation.ask_all(operation)
    sent = [reply.parcel("synthetic-images") for reply in replies]
    figures = {
        f"{reply.site}/figures": torch.tensor([len(one.tensors["labels"]), VERDICTS.index(one.metadata["audit"])])
        for reply, one in zip(replies, sent, strict=True)
    }
    return {name: torch.cat([one.tensors[name] for one in sent]) for name in sent[0].tensors} | figures


def _tell(federation: Federation, sent: Mapping[str, Tensor]) -> None:
    """Put numbers of samples and verdicts into the result, and warn where no audit could be made."""
    figures = {name.removesuffix("/figures"): one.tolist() for name, one in sent.items() if "/" in name}
    federation.report("samples", {site: {"samples": n, "audit": VERDICTS[v]} for site, (n, v) in figures.items()})
    untested = [site for site, (_, verdict) in figures.items() if VERDICTS[verdict] == UNTESTED]
    if untested:
        federation.warn(
            f"no audit of their own tested the samples of {', '.join(untested)}: it wants looks (not 0), and "
            f"{self_audit.FEWEST} training and as many validation images; raise looks or data.validation"
        )


def check(federation: Federation, reply: Reply, shape: tuple[int, ...], most: int = MOST_SAMPLES) -> None:
    """ParcelRejected unless the reply has samples uint8 of a shape [C, H, W], not too many, a label for each, and a
    verdict."""
    parcel, target = reply.parcel("synthetic-images"), federation.trainer.target
    images, labels = (parcel.tensors.get(name, torch.empty(0)) for name in ("images", "labels"))
    wanted = {"images", "labels", *(["masks"] if federation.trainer.task.dense else [])}
    count = len(labels) if labels.dim() == 1 else 0
    if parcel.tensors.keys() != wanted or images.dtype != torch.uint8 or tuple(images.shape) != (count, *shape):
        raise ParcelRejected(f"synthetic-images: they are not samples of the shape {shape} with labels")
    if labels.dtype != (torch.int64 if target.classes else torch.float32):
        raise ParcelRejected("synthetic-images: labels are not numbers of classes, or float32 values")
    if not 0 < count <= most or parcel.metadata.get("audit") not in VERDICTS:
        raise ParcelRejected("synthetic-images: there are no samples, too many, or no verdict of an audit")
    low, high = (0, len(target.classes) - 1) if target.classes else (target.label_range or (0.0, 0.0))
    if not bool(((labels >= low) & (labels <= high)).all()):
        raise ParcelRejected(f"synthetic-images: labels are not all from {low} to {high}")
    masks = parcel.tensors.get("masks")
    if masks is not None and (
        tuple(masks.shape) != (count, *shape[1:]) or masks.dtype != torch.uint8 or masks.max() > 1
    ):
        raise ParcelRejected("synthetic-images: masks are not of 0 and 1 for each sample")
