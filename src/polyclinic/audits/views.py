"""The attacker's view of a parcel (`Seen`), ground truth for scoring (`Truth`), and results (`Finding`, `NotTried`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capability, ThreatModel, Verdict
from polyclinic.data.parts import ImageSet, SiteData, open_site
from polyclinic.federation.ledger.archive import Release
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.perceptual import Distance
from polyclinic.models import Backbone
from polyclinic.randomness import numpy_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study.audit_settings import Effort


class PoolScores(NamedTuple):
    """What reference models [S] say of the images of a pool [S, N], which of them saw each, bool [S, N], and the place
    of each image by its pixels."""

    scores: Tensor
    inside: Tensor
    place: dict[str, int]


#: what a part has beside its images
What = Literal["labels", "masks"]


@dataclass(frozen=True)
class Tools:
    """What all attacks of one audit share: the study's public side, the threat model, the budget, the device."""

    assembly: Assembly
    threat: ThreatModel
    effort: Effort
    distance: Distance
    seed: int
    device: str
    trajectory: tuple[int, ...] = ()  #: steps of a search at which images and losses are kept
    level: float = 0.001  #: p at or below which a test counts: the audit's 1 %, divided by its number of tests
    planted: dict[tuple[str, ...], list[Planted]] = field(default_factory=dict, compare=False, repr=False)
    #: leaks that several attacks look for, by name, site and digest of the parcel: planted once
    references: dict[tuple[str, ...], PoolScores] = field(default_factory=dict, compare=False, repr=False)
    #: what reference generators said of a pool of images, by site and round: trained once for a parcel and its plants

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.assembly.image_shape

    @property
    def what(self) -> What:
        """What the study's network learns to tell of an image."""
        return "masks" if self.assembly.study.task.dense else "labels"

    def site_data(self, site: str) -> SiteData:
        """A site's own images: for scoring alone."""
        return (
            self.assembly.open_data(site) if self.assembly.open_data else open_site(self.assembly.prepared.folder, site)
        )


@dataclass(frozen=True)
class Seen:
    """A parcel as its receiver has it: with what left together with it, and what the site had been sent before.

    `sites`: the parcel is the mean over so many sites, the only thing that a secure sum reveals.
    """

    site: str
    parcel: Parcel
    together: tuple[Parcel, ...]
    sent_before: Callable[[str], dict[str, Tensor]]
    round: int
    step: int
    tools: Tools
    sites: int = 1
    split: str = ""  #: the images that were scored, where scores are told
    more: Callable[[], tuple[Seen, ...]] = tuple  #: what else the site released by this operation, and the audit has
    peers: Callable[[], tuple[Seen, ...]] = tuple  #: what other sites released at the same time by this operation

    @classmethod
    def of(cls, site: str, release: Release, number: int, tools: Tools) -> Seen:
        """A parcel of a kept release, without what only the site knows."""
        together, split = tuple(release.parcels), release.split
        return cls(site, together[number], together, release.received, release.round, release.step, tools, split=split)

    @property
    def kind(self) -> str:
        return self.parcel.kind

    @property
    def where(self) -> str:
        """Whose parcel it is, for titles of pictures."""
        who = self.site if self.sites == 1 else f"sum of {self.sites} sites"
        return f"{who}, {self.kind}, round {self.round}"

    def companion(self, kind: str) -> Parcel | None:
        """A parcel that left together with this one."""
        return next((parcel for parcel in self.together if parcel.kind == kind), None)

    def received(self, kind: str) -> dict[str, Tensor]:
        """What the coordinator (or another site) had sent for the operation."""
        return self.sent_before(kind)

    @cached_property
    def network(self) -> Backbone:
        """The study's network with the weights that the site was sent before it computed this parcel."""
        assembly = self.tools.assembly
        backbone = assembly.backbones.get(self.site)
        model = assembly.build_model(backbone)
        model.load_state_dict({**assembly.initial_weights(backbone), **self.received("weights")})
        return model


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

    def images(self, index: Tensor) -> Tensor:
        """float [N, C, H, W] in [0, 1] of training images."""
        return torch.from_numpy(np.array(self.data.train.images[index.numpy()])).float() / 255

    def labels(self, index: Tensor, what: What = "labels") -> Tensor:
        return torch.from_numpy(np.array(getattr(self.data.train, what)[index.numpy()]))

    def members(self, count: int, what: What = "labels") -> tuple[Tensor, Tensor]:
        """Up to `count` training images uint8, drawn at random, and their labels (or masks)."""
        chosen = self._subset(len(self.data.train), count, "members")
        images, labels = self.data.train.images[chosen], getattr(self.data.train, what)[chosen]
        return torch.from_numpy(np.array(images)), torch.from_numpy(np.array(labels))

    def held_out(self, count: int, what: What = "labels") -> tuple[Tensor, Tensor]:
        """Up to `count` of the site's validation and test images uint8, which no training saw, and their labels."""
        parts = (self.data.validation, self.data.test)
        images, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", what))
        chosen = self.chosen_of_held_out(count)
        return torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen])

    def chosen_of_held_out(self, count: int) -> np.ndarray:
        """Places, among validation and then test images, of the ones that `held_out` draws."""
        return self._subset(len(self.data.validation) + len(self.data.test), count, "held out")

    @cached_property
    def has_cases(self) -> bool:
        """Whether it is known which images are of one patient."""
        parts = (self.data.train, self.data.validation, self.data.test)
        return all(part.cases is not None for part in parts if len(part))

    def cases(self, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The patients of up to `count` members, and of held-out images, as `members` and `held_out` draw them."""
        if not self.has_cases:
            return None
        outside = [part.cases for part in (self.data.validation, self.data.test) if part.cases is not None]
        inside, others = np.asarray(self.data.train.cases), np.concatenate([*outside, np.zeros(0, np.int64)])
        chosen = (self._subset(len(of), count, who) for of, who in ((inside, "members"), (others, "held out")))
        own, other = (of[index] for of, index in zip((inside, others), chosen, strict=True))
        return own, other

    def _subset(self, available: int, count: int, what: str) -> np.ndarray:
        return np.sort(numpy_rng(self.seed, self.data.name, "audit", what).permutation(available)[:count])


def without_repeats(data: SiteData) -> SiteData:
    """A site without those validation and test images that are, pixel for pixel, training images as well."""
    inside = {hash(image.tobytes()) for image in data.train.images}
    kept = {
        split: np.array([hash(image.tobytes()) not in inside for image in getattr(data, split).images], bool)
        for split in ("validation", "test")
    }
    if all(rows.all() for rows in kept.values()):
        return data
    parts = {split: rows_of(getattr(data, split), np.flatnonzero(rows)) for split, rows in kept.items()}
    return replace(data, validation=parts["validation"], test=parts["test"])


def rows_of(part: ImageSet, index: np.ndarray) -> ImageSet:
    """Some of the images of a part, with all that it has of each."""
    names = [one.name for one in fields(ImageSet) if getattr(part, one.name) is not None]
    return ImageSet(**{name: getattr(part, name)[index] for name in names})


@dataclass(frozen=True)
class SearchSteps:
    """How a search went: loss and distance at the kept steps. `draw(path)` shows the images at these steps."""

    steps: tuple[int, ...]
    loss: list[float]
    distance: list[float]
    draw: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Finding:
    """What one attack found in one parcel. `draw(path)` makes its picture, which stays at the site.

    `question`: what the attack asks, such as "images" (do they come back?) or "membership" (who was trained on?).
    `doubt`: why a longer search might win, where one might; such a finding never counts as withstood.
    """

    attack: str
    threat_model: str
    verdict: Verdict
    assumed: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None
    search: SearchSteps | None = None  #: where the audit was asked to keep steps
    question: str = "images"
    doubt: str = ""


#: the question of an attack that was cut off before it could say what it asks
EVERY_QUESTION = "every"


@dataclass(frozen=True)
class NotTried:
    """An attack that could not be run on a parcel, and why. `excluded`: the threat model does not grant what it needs,
    so that it is no gap in the audit of its question. An attack that was cut off leaves a gap in every question."""

    attack: str
    why: str
    question: str = "images"
    excluded: bool = False


def not_granted(
    settings: AttackSettings, seen: Seen, question: str = "images", has: Iterable[Capability] = ()
) -> NotTried | None:
    """Why an attack is outside the threat model, if it is; `has`: what the attacker has made itself."""
    missing = settings.needs - seen.tools.threat.granted - set(has)
    why = f"the threat model does not grant {', '.join(sorted(missing))}"
    return NotTried(settings.name, why, question, excluded=True) if missing else None


@dataclass(frozen=True)
class Planted:
    """A weak leak in the setting of a parcel: what its receiver would have (`seen`), and what is then true (`truth`).

    `leak` is its name, the same for all attacks that look for the same leak; `words` say what was planted. `question`:
    the only one that it is a leak of, where an attack asks several.
    """

    leak: str
    words: str
    seen: Seen
    truth: Truth
    question: str = ""
