"""The space of replay (`replay.space`), which a generator learns: images, or latents of the network's frozen layers.

Generators take images of 256 values. Latents are rounded to 256 steps, channel by channel, between limits that phantoms
give: they are about no patient, and the same at all sites. The frozen layers are public, so latents can be decoded:
they are no more private than images. How good replayed images are: PSNR, codes in use, a probe that tells them from
real ones, a contact sheet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.pixels import to_uint8
from polyclinic.data.plots import coloured, contact_sheet, label_words
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.generators import CodedModel, GeneratorModel, probe
from polyclinic.generators.replay_stream import ReplaySource
from polyclinic.methods.shared.method import Federation, Parcel, Site
from polyclinic.methods.shared.one_round import project, projection
from polyclinic.methods.shared.public_basis import PHANTOMS, pictures
from polyclinic.methods.shared.site_generator import figures_parcel
from polyclinic.metrics.images import pooled_psnr

#: the group of a site's state that has the frozen layers' weights; where its cache has latents and their limits
FRONT, LATENTS, LIMITS = "replay front", "replay latents", "replay limits"
#: phantoms of each kind that give the limits, which lie so many standard deviations from a channel's mean
EACH, DEVIATIONS = 16, 6.0
#: of the median deviation of all channels: a channel that phantoms hardly stir may be a busy one in real images
LEAST_DEVIATION = 0.1
PIECE = 256  # images whose latents are rounded at once


@dataclass(frozen=True)
class Limits:
    """The values of each channel, float32 [C, 1, 1], that become 0 and 255."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, latents: Tensor) -> "Limits":
        """Limits around latents [N, C, h, w]."""
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        reach = DEVIATIONS * torch.maximum(deviation, LEAST_DEVIATION * deviation.median()).clamp(min=1e-6)
        return cls((mean - reach)[:, None, None], (mean + reach)[:, None, None])

    def to_bytes(self, latents: np.ndarray) -> Tensor:
        """Latents float [N, C, h, w] as uint8."""
        pieces = (torch.from_numpy(np.array(latents[at : at + PIECE])) for at in range(0, len(latents), PIECE))
        return torch.cat([to_uint8((piece - self.low) / (self.high - self.low)) for piece in pieces])

    def to_latents(self, unit: Tensor) -> Tensor:
        """Latents, up to rounding, from its bytes over 255."""
        low, high = self.low.to(unit.device), self.high.to(unit.device)
        return low + unit * (high - low)


def learned(site: Site) -> np.ndarray | Tensor:
    """The site's training images as the generator learns them, uint8 [N, C, H, W]."""
    if not in_latents(site):
        return site.data.train.images
    if LATENTS not in site.cache:
        site.cache[LATENTS] = latent_bytes(site, site.data.train.images)
    return site.cache[LATENTS]


def latent_bytes(site: Site, images: np.ndarray) -> Tensor:
    """What the public layers give for images uint8, as bytes [N, C, h, w]."""
    limits = limits_of(site)
    site.trainer.load(site.state.group(FRONT))
    return limits.to_bytes(as_maps(site.trainer.latents(images), numbers_of(site.study.method)))


def limits_of(site: Site) -> Limits:
    if LIMITS not in site.cache:
        site.trainer.load(site.state.group(FRONT))
        shape = tuple(site.data.train.images.shape[1:])
        site.cache[LIMITS] = public_limits(site.trainer, shape, numbers_of(site.study.method))
    return site.cache[LIMITS]


def public_limits(trainer: TrainerLike, image_shape: tuple[int, ...], numbers: int | None = None) -> Limits:
    """The limits that phantoms of a shape [C, H, W] give, through the frozen layers in the trainer's network."""
    channels, size, _ = image_shape
    grey = [pictures(name, EACH, size).mean(1, keepdims=True).astype(np.uint8) for name in PHANTOMS]
    images = np.repeat(np.concatenate(grey), channels, axis=1)
    return Limits.of(torch.from_numpy(np.array(as_maps(trainer.latents(images), numbers))))


def as_maps(latents: np.ndarray, numbers: int | None) -> np.ndarray:
    """Latents as maps [N, C, h, w]; vectors of an encoder, projected to so many numbers, are maps of one place."""
    if latents.ndim > 2:
        return latents
    signs = projection(latents.shape[1], numbers)
    return (np.asarray(latents) if signs is None else project(latents, signs))[:, :, None, None]


def numbers_of(method: object) -> int | None:
    """To how many numbers the method projects features."""
    return getattr(method, "numbers", None)


def in_latents(site: Site) -> bool:
    """Whether the site's generator learns latents: as [replay] or, of fedsamples, as [generator] says."""
    of_method = getattr(site.study.method, "learns_features", False)
    replays = getattr(site.replay_settings, "space", "images") == "latents"
    return replays or (of_method and getattr(site.generator, "space", None) == "features")


def hand_out_front(federation: Federation) -> Mapping[str, Tensor]:
    """Give every site the frozen layers, where latents are replayed: it needs them before the network comes."""
    trainer = federation.trainer
    front = trainer.weights(trainer.split(trainer.load(federation.initial_weights()))[0])
    federation.ask_all("take_front", weights=front)
    return front


# --- quality of replayed images -----------------------------------------------------------------------

#: columns of the contact sheet
SHOWN = 10
#: replayed images of each site that the probe looks at
PROBED = 400


def measure(site: Site, model: GeneratorModel, *, sampled: bool) -> Parcel:
    """The share of codes in use and the PSNR of the site's images; draws the contact sheet into the site's folder.

    Of samples nothing is measured: what real images look like to the generator would tell about them.
    """
    images, replayed = real_and_replayed(site, model, sampled=sampled)
    if not in_latents(site):  # which nobody can look at
        draw(site, model, images[:SHOWN], replayed[:SHOWN] if sampled else None)
    if sampled or not isinstance(model, CodedModel):
        return figures_parcel({})
    in_use = model.usage(model.encode(images))
    return figures_parcel(
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
    """Scores of a probe that tells real from replayed images, and which site (of `by_site`) a replayed one is of."""
    rng, device = site.rng("probe"), str(site.trainer.device)
    pair = dict(zip(("real", "replayed"), real_and_replayed(site, model, sampled=sampled), strict=True))
    found = probe.tell_apart(pair, rng, paired=not sampled, device=device)
    scores = {"real_or_replayed_auc": found["auc"]}
    if len(by_site) >= 2 and min(len(source.labels) for source in by_site.values()) >= probe.FOLDS:
        groups = {}
        for name, source in by_site.items():
            chosen = torch.randperm(len(source.labels), generator=rng)[:PROBED]
            groups[name] = source.images(chosen, rng)
        found = probe.tell_apart(groups, rng, device=device)
        scores |= {"which_site_accuracy": found["accuracy"], "which_site_chance": found["chance"]}
    return figures_parcel(scores)


def real_and_replayed(site: Site, model: GeneratorModel, *, sampled: bool) -> tuple[Tensor, Tensor]:
    """Some of the site's images, and the same through the codes (or samples with the same labels)."""
    part, some = site.data.train, slice(0, PROBED)
    found = learned(site)[some]
    images = found if isinstance(found, Tensor) else torch.from_numpy(found.copy())
    if sampled or not isinstance(model, CodedModel):
        return images, model.sample(part.labels[some].copy(), site.rng("samples"))
    return images, model.decode(model.encode(images))
