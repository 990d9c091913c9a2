"""How good replayed images are: PSNR, codes in use, a probe that tells them from real ones, a contact sheet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.data.plots import coloured, contact_sheet, label_words
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.generators import CodedModel, GeneratorModel, probe
from polyclinic.generators.replay_stream import ReplaySource
from polyclinic.methods.shared import replay_space
from polyclinic.metrics.images import pooled_psnr

#: columns of the contact sheet
SHOWN = 10
#: replayed images of each site that the probe looks at
PROBED = 400


def measure(site: Site, model: GeneratorModel, *, sampled: bool) -> Parcel:
    """The share of codes in use and the PSNR of the site's images; draws the contact sheet into the site's folder.

    Of samples nothing is measured: what real images look like to the generator would tell about them.
    """
    images, replayed = real_and_replayed(site, model, sampled=sampled)
    if not replay_space.in_latents(site):  # which nobody can look at
        draw(site, model, images[:SHOWN], replayed[:SHOWN] if sampled else None)
    if sampled or not isinstance(model, CodedModel):
        return _metrics({})
    in_use = model.usage(model.encode(images))
    return _metrics(
        {"psnr": pooled_psnr(images, replayed, data_range=255)}
        | {f"code_usage_{level}": fraction for level, fraction in in_use.items()}
    )


def draw(site: Site, model: GeneratorModel, images: Tensor, samples: Tensor | None) -> None:
    """The contact sheet: images, what comes back from their codes, and perhaps samples."""
    rows = {"real": images}
    if isinstance(model, CodedModel):
        codes = model.encode(images)
        rows["reconstructed"] = model.decode(codes)
        for level, values in codes.items():
            rows[f"{level} codes"] = coloured(values, model.codebook_sizes[level], images.shape[-1])
    if samples is not None:
        rows["sampled"] = samples
    target, labels = site.trainer.target, site.data.train.labels[: len(images)]
    title = f"{site.name}: the first {len(labels)} of {len(site.data.train)} training images, and what replays them"
    contact_sheet(rows, site.folder / "replay.png", label_words(labels, target.classes, target.unit), title)


def probe_images(site: Site, model: GeneratorModel, by_site: Mapping[str, ReplaySource], *, sampled: bool) -> Parcel:
    """How well a probe tells real from replayed images, and which site (of `by_site`) a replayed one comes from."""
    rng, device = site.rng("probe"), str(site.trainer.device)
    pair = real_and_replayed(site, model, sampled=sampled)
    found = probe.real_or_replayed(*pair, rng, paired=not sampled, device=device)
    scores = {"real_or_replayed_auc": found["auc"]}
    if len(by_site) >= 2 and min(len(source.labels) for source in by_site.values()) >= probe.FOLDS:
        groups = {}
        for name, source in by_site.items():
            chosen = torch.randperm(len(source.labels), generator=rng)[:PROBED]
            groups[name] = source.images(chosen, rng)
        found = probe.which_site(groups, rng, device=device)
        scores |= {"which_site_accuracy": found["accuracy"], "which_site_chance": found["chance"]}
    return _metrics(scores)


def real_and_replayed(site: Site, model: GeneratorModel, *, sampled: bool) -> tuple[Tensor, Tensor]:
    """Some of the site's images, and the same through the codes (or samples with the same labels)."""
    part, some = site.data.train, slice(0, PROBED)
    learned = replay_space.learned(site)[some]
    images = learned if isinstance(learned, Tensor) else torch.from_numpy(learned.copy())
    if sampled or not isinstance(model, CodedModel):
        return images, model.sample(part.labels[some].copy(), site.rng("samples"))
    return images, model.decode(model.encode(images))


def _metrics(values: Mapping[str, float]) -> Parcel:
    return Parcel("metrics", {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})
