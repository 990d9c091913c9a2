"""Images of an audit: the site's own, which are the truth for scoring; those of a planted leak; and the attacker's.

The attacker's own images are what the threat model grants as `similar-images`: who they belong to is a setting. Of a
simulated run they are other sites' held-out images. A deployed site has no other site's: then half of its own held-out
images stand for them. Phantoms, drawn by Polyclinic, or any source of data can take their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.data.datasets import SOURCES
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.volumes.volume import Volume
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.study.tables import Audit

if TYPE_CHECKING:
    from polyclinic.audits.attack import Tools

#: what a part has beside its images
What = Literal["labels", "masks"]


class Truth:
    """The site's images, for scoring: those that a release was made of, and those that were held out."""

    def __init__(self, used: Sequence[Tensor], data: SiteData, seed: int, own: int | None = None) -> None:
        """`used`: indices of training images by mini-batch; none if the operation took no batches, but all images.

        `own`: how many of the training images, from the first, are the site's where several sites' are joined. An
        image that is also among the training images was not held out, and is left out there."""
        self._given, self.seed = data, seed
        self.own = len(data.train) if own is None else own
        self._used = list(used)

    @cached_property
    def data(self) -> SiteData:
        """The site's images; looked through for repeats where they are needed, which takes a while."""
        return without_repeats(self._given)

    @cached_property
    def batches(self) -> list[Tensor]:
        """Indices of the site's own images by mini-batch, as used; others' images (FedAvg+Share) are left out."""
        count = len(self._given.train)
        used = self._used or [torch.arange(count)]
        return [index[index < count] for index in used]

    @cached_property
    def used(self) -> Tensor:
        """Every image that was used, once, in the order of first use."""
        return torch.tensor(list(dict.fromkeys(torch.cat(self.batches).tolist())), dtype=torch.int64)

    @cached_property
    def outside(self) -> ImageSet:
        """Validation and test images, which no training saw."""
        return join(self.data.validation, self.data.test)

    def images(self, index: Tensor) -> Tensor:
        """float [N, C, H, W] in [0, 1] of training images."""
        return torch.from_numpy(self.data.train.take(index.numpy()).images).float() / 255

    def labels(self, index: Tensor, what: What = "labels") -> Tensor:
        return torch.from_numpy(getattr(self.data.train.take(index.numpy()), what))

    def members(self, count: int, what: What = "labels") -> tuple[Tensor, Tensor]:
        """Up to `count` training images uint8, drawn at random, and their labels (or masks)."""
        part = self.part_of_members(count)
        return torch.from_numpy(part.images), torch.from_numpy(getattr(part, what))

    def part_of_members(self, count: int) -> ImageSet:
        return self.data.train.take(self._subset(self.data.train, count, "members"))

    def held_out(self, count: int, what: What = "labels") -> tuple[Tensor, Tensor]:
        """Up to `count` of the site's validation and test images uint8, and their labels (or masks)."""
        part = self.part_held_out(count)
        return torch.from_numpy(part.images), torch.from_numpy(getattr(part, what))

    def part_held_out(self, count: int) -> ImageSet:
        return self.outside.take(self.rows_held_out(count))

    def rows_held_out(self, count: int) -> np.ndarray:
        """Places in `outside` of the images that `held_out` draws."""
        return self._subset(self.outside, count, "held out")

    def cases(self, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The patients of up to `count` members, and of held-out images, as `members` and `held_out` draw them; None
        where it is not known which images are of one patient."""
        own, other = self.data.train.cases, self.outside.cases
        if own is None or other is None:
            return None
        return own[self._subset(self.data.train, count, "members")], other[self.rows_held_out(count)]

    def _subset(self, part: ImageSet, count: int, what: str) -> np.ndarray:
        return np.sort(numpy_rng(self.seed, self.data.name, "audit", what).permutation(len(part))[:count])


def without_repeats(data: SiteData) -> SiteData:
    """A site without those validation and test images that are, pixel for pixel, training images as well."""
    inside = {hash(content_of(image)) for image in data.train.images}
    kept = {
        split: np.array([hash(content_of(image)) not in inside for image in getattr(data, split).images], bool)
        for split in ("validation", "test")
    }
    if all(rows.all() for rows in kept.values()):
        return data
    parts = {split: getattr(data, split).take(np.flatnonzero(rows)) for split, rows in kept.items()}
    return replace(data, validation=parts["validation"], test=parts["test"])


def content_of(example: np.ndarray | Volume) -> bytes | str:
    return example.digest() if isinstance(example, Volume) else example.tobytes()


LEAST_PLANTED = 8  #: held-out images, half of which are planted


def truth_of_held_out(truth: Truth, count: int) -> Truth | None:
    """A site whose training images are up to `count`, and at most half, of this site's held-out images; None where
    there are too few."""
    order = numpy_rng(truth.seed, truth.data.name, "audit", "planted").permutation(len(truth.outside))
    count = min(count, len(order) // 2)
    return None if len(order) < LEAST_PLANTED else truth_of(truth, truth.outside, order[:count], order[count:])


def truth_of_asked(truth: Truth, count: int) -> Truth | None:
    """A site whose training images are every second one of the held-out images that an attack with so many candidates
    asks about; None where there are too few."""
    chosen = truth.rows_held_out(count)
    return None if len(chosen) < 2 * LEAST_PLANTED else truth_of(truth, truth.outside, chosen[::2], chosen[1::2])


def truth_of_images(
    truth: Truth, images: Tensor, answers: Tensor, members: int, what: What = "labels", used: Sequence[Tensor] = ()
) -> Truth:
    """A site whose training images are the first `members` of these, and whose held-out ones are the rest."""
    labels = answers.numpy() if what == "labels" else np.zeros(len(images), np.int64)
    every = ImageSet(images.numpy(), labels, None if what == "labels" else answers.numpy())
    rows = np.arange(len(images))
    return truth_of(truth, every, rows[:members], rows[members:], used)


def truth_of(
    truth: Truth, every: ImageSet, members: np.ndarray, others: np.ndarray, used: Sequence[Tensor] = ()
) -> Truth:
    """A site in place of this one, with some of the images as its training images and others held out."""
    data = SiteData(truth.data.name, every.take(members), every.take(others), every.take(others[:0]))
    return Truth(used, data, truth.seed)


def with_others(train: ImageSet, places: Sequence[tuple[int, int]], others: ImageSet) -> ImageSet:
    """Training images, at some places with others of the same form; patients stay as they are."""
    rows, taken = [list(some) for some in zip(*places, strict=True)] if places else ([], [])
    changed = {}
    for name in ("images", "labels", "masks"):
        if (array := getattr(train, name)) is not None:
            changed[name] = np.array(array)
            changed[name][rows] = getattr(others, name)[taken]
    return replace(train, **changed)


def join(first: ImageSet, second: ImageSet) -> ImageSet:
    """The images of two parts, with all that the first has of each."""
    names = [name for name, array in vars(first).items() if array is not None]
    return ImageSet(**{name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names})


PHANTOMS = ("chest-phantom", "hand-phantom", "brain-phantom")
FEWEST_OWN = 8  #: with fewer images nobody trains a decoder
TIMES = 4  #: as many images as this times the budget's candidates
APART = 0.05  #: deviation of the noise that makes images to start from differ


@dataclass(frozen=True)
class AttackerImages:
    """Images [M, C, H, W] in [0, 1], whose they are in words, and held-out images of the site that are left to compare
    with."""

    images: Tensor
    words: str
    held_out: Tensor


def attacker_images(tools: "Tools", site: str, truth: Truth) -> AttackerImages:
    """What the study's `audit.own_images` names; no images where there are none."""
    wanted = (tools.assembly.study.audit or Audit()).own_images
    held_out = truth.held_out(tools.effort.candidates)[0].float() / 255
    most = TIMES * tools.effort.candidates
    if wanted in ("auto", "other-sites"):
        others = _other_sites(tools, site, most)
        if wanted == "other-sites" or len(others) >= FEWEST_OWN:
            return AttackerImages(others, "held-out images of the other sites", held_out)
    if wanted in ("auto", "held-out"):
        words = "half of the site's own held-out images, which stand for images of another hospital"
        return AttackerImages(held_out[::2], words, held_out[1::2])
    names = PHANTOMS if wanted == "phantoms" else (wanted,)
    return AttackerImages(_of_sources(tools, names, most), f"images of {', '.join(names)}", held_out)


def start_near(own: Tensor, count: int, seed: int) -> Tensor:
    """`count` images near the mean of the attacker's own [M, C, H, W], a little different from each other."""
    noise = torch.randn(count, *own.shape[1:], generator=torch_rng(seed, "audit", "images to start from"))
    return (own.mean(0) + APART * noise).clamp(0, 1)


def _other_sites(tools: "Tools", site: str, most: int) -> Tensor:
    if tools.assembly.open_data is not None:  # a deployed site has its own images alone
        return torch.zeros(0, *tools.image_shape)
    others = [tools.site_data(name) for name in tools.assembly.prepared.names if name != site]
    parts = [part.images for data in others for part in (data.validation, data.test) if len(part)]
    if not parts:
        return torch.zeros(0, *tools.image_shape)
    images = torch.from_numpy(np.concatenate(parts))
    chosen = torch.randperm(len(images), generator=torch_rng(tools.seed, "audit", "attacker's images"))[:most]
    return images[chosen].float() / 255


def _of_sources(tools: "Tools", names: tuple[str, ...], most: int) -> Tensor:
    channels, *size = tools.image_shape
    found = [_load(name, most // len(names), size[0], tools.seed) for name in names]
    resized = [F.interpolate(images, size=size, mode="bilinear", antialias=True) for images in found]
    whole = (-1, channels, -1, -1)
    in_channels = [x if x.shape[1] == channels else x.mean(1, keepdim=True).expand(whole) for x in resized]
    return torch.cat(in_channels)


def _load(name: str, count: int, size: int, seed: int) -> Tensor:
    if name not in SOURCES:
        hint = did_you_mean(name, list(SOURCES))
        raise BadInput(
            f"audit.own_images: no such choice: '{name}'{hint}; write auto, other-sites, held-out, phantoms, none or a "
            "source of `polyclinic data list`"
        )
    drawn = {"samples": count, "seed": seed + 1, "size": size}
    source = SOURCES[name]
    settings = {field: value for field, value in drawn.items() if field in source.model_fields}
    images = torch.from_numpy(np.array(source.model_validate({"source": name, **settings}).load().images[:count]))
    return images.float() / 255
