"""Replay streams: endless mini-batches of synthetic images, made on the fly or once into a fixed buffer.

A source says what can be replayed: images of kept codes, new samples, or a buffer of either. `stream` turns any
source into batches like those of a `Trainer`, treated as real images are (256 grey values, the same augmentation),
so that nothing but the generator's own artefacts tells replayed from real.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.federation.ledger.wire import pack_codes, unpack_codes
from polyclinic.generators.base import CodedModel, Codes, GeneratorModel, count
from polyclinic.tasks import Task
from polyclinic.training.augmentation import augment

SAMPLED_AT_ONCE = 512  # a prior draws many images in little more time than one


class FromCodes:
    """The images of kept codes. `model` may go on learning: they are decoded as it decodes now (the paper's D_old)."""

    at_once = 1

    def __init__(self, model: CodedModel, codes: Codes, labels: Tensor, masks: Tensor | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.codes = codes
        self.labels, self.masks = labels, masks
        images = count(codes)
        if len(labels) != images or (masks is not None and len(masks) != images):
            found = f"{len(labels)} labels" + ("" if masks is None else f" and {len(masks)} masks")
            raise BadInput(f"replay: codes of {images} images came with {found}; give one for each")

    def images(self, index: Tensor, rng: torch.Generator) -> Tensor:
        return self.model.decode({level: codes[index] for level, codes in self.codes.items()})


class FromSamples:
    """New images for the given labels, other ones each time. `model` may go on learning, as with `FromCodes`."""

    at_once = SAMPLED_AT_ONCE

    def __init__(self, model: GeneratorModel, labels: Tensor) -> None:
        self.model = copy.deepcopy(model)
        self.labels = labels
        self.masks: Tensor | None = None

    def images(self, index: Tensor, rng: torch.Generator) -> Tensor:
        return self.model.sample(self.labels[index], rng)


@dataclass(frozen=True)
class Buffer:
    """Images made once, uint8 [N, C, H, W], and the same every time they are replayed."""

    stored: Tensor
    labels: Tensor
    masks: Tensor | None = None
    at_once: int = 1

    def images(self, index: Tensor, rng: torch.Generator) -> Tensor:
        return self.stored[index]


#: images that can be replayed, with labels [N] and perhaps masks uint8 [N, H, W]; `at_once`: how many are best made in
#: one go
ReplaySource = FromCodes | FromSamples | Buffer


def fill(source: ReplaySource, rng: torch.Generator) -> Buffer:
    """Every image of the source once, kept."""
    return Buffer(source.images(torch.arange(len(source.labels)), rng), source.labels, source.masks)


def stream(
    source: ReplaySource,
    batch_size: int,
    rng: torch.Generator,
    *,
    task: Task | None = None,
    augmentation: Sequence[str] = (),
    device: str | torch.device = "cpu",
) -> Iterator[Batch]:
    """Endless batches of exactly `batch_size`: (images [B, C, H, W] in [0, 1], the task's targets), on the device.

    Without a task the targets are the labels themselves, as generators want them. Each label comes once per pass.
    """
    if not len(source.labels):
        raise BadInput("replay: there is nothing to replay; give the source at least one label")

    def endless_order() -> Iterator[int]:
        while True:
            yield from torch.randperm(len(source.labels), generator=rng).tolist()

    order = endless_order()
    together = max(1, source.at_once // batch_size) * batch_size
    while True:
        index = torch.tensor(list(itertools.islice(order, together)))
        made = source.images(index, rng)
        for some, images in zip(index.split(batch_size), made.split(batch_size), strict=True):
            pixels = images.to(device, non_blocking=True).float().div_(255)
            masks = None if source.masks is None else source.masks[some].to(device)
            pixels, masks = augment(pixels, masks, tuple(augmentation), rng)
            labels = source.labels[some].to(device)
            yield pixels, labels if task is None else task.targets(labels, masks)


# --- codes of sites -------------------------------------------------------------------------------


#: tensors by kind of parcel and name
Groups = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SiteCodes:
    """Codes of a site's images by level, int16 [N, h, w], their labels [N] and perhaps masks uint8 [N, H, W]."""

    codes: Mapping[str, Tensor]
    labels: Tensor
    masks: Tensor | None = None

    def __len__(self) -> int:
        return count(self.codes)


def to_groups(by_site: Mapping[str, SiteCodes], model: CodedModel) -> Groups:
    """Codes by site as tensors of the kinds codes, labels and masks; codes at ceil(log2 K) bits each."""
    sizes = model.codebook_sizes
    groups: Groups = {
        "codes": {
            f"{site}/{level}": pack_codes(one.codes[level], sizes[level])
            for site, one in by_site.items()
            for level in sizes
        },
        "labels": {site: one.labels for site, one in by_site.items()},
    }
    masks = {site: one.masks for site, one in by_site.items() if one.masks is not None}
    return groups | ({"masks": masks} if masks else {})


def from_groups(groups: Mapping[str, Mapping[str, Tensor]], model: CodedModel) -> dict[str, SiteCodes]:
    """What `to_groups` was given; BadInput where the bytes are not codes of this model."""
    blank = torch.zeros(1, model.channels, model.size, model.size, dtype=torch.uint8)
    grids = {level: tuple(codes.shape[1:]) for level, codes in model.encode(blank).items()}
    by_site = {}
    for site, labels in sorted(groups["labels"].items()):  # in memory and from a file alike
        codes = {
            level: unpack_codes(groups["codes"][f"{site}/{level}"], size, (len(labels), *grids[level]))
            for level, size in model.codebook_sizes.items()
        }
        by_site[site] = SiteCodes(codes, labels, groups.get("masks", {}).get(site))
    return by_site


def source_of(by_site: Mapping[str, SiteCodes], model: CodedModel) -> FromCodes:
    """The images of all sites' codes, as something that can be replayed."""
    every = list(by_site.values())
    masks = [one.masks for one in every if one.masks is not None]
    return FromCodes(
        model,
        {level: torch.cat([one.codes[level] for one in every]) for level in model.codebook_sizes},
        torch.cat([one.labels for one in every]),
        torch.cat(masks) if masks else None,
    )
