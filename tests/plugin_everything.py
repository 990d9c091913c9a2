"""A plug-in file of a third party with one of each; a study names it in `plugins`."""

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

from polyclinic import (
    Attack,
    Backbone,
    Classification,
    Dataset,
    Encoder,
    FedAvg,
    Finding,
    Kind,
    Parcel,
    Plan,
    Sites,
    Source,
    Verdict,
    generators,
    operation,
)


class Prototypes(Kind):
    """The mean image of each class."""


class FedPrototypes(FedAvg):
    """FedAvg whose sites also send the mean image of each class."""

    name: Literal["fed-prototypes"] = "fed-prototypes"

    def run(self, federation):
        federation.once("prototypes", lambda: collect(federation))
        return super().run(federation)

    @operation("prototypes")
    def prototypes(self, site):
        images, labels = np.array(site.data.train.images), np.array(site.data.train.labels)
        means = {f"class-{k}": images[labels == k].mean(0).astype(np.float32) for k in np.unique(labels)}
        return Parcel("prototypes", {name: torch.from_numpy(mean) for name, mean in means.items()})


def collect(federation):
    replies = federation.ask_all("prototypes")
    return {f"{reply.site} {name}": t for reply in replies if reply for name, t in reply.parcels[0].tensors.items()}


class Squares(Source):
    """Bright squares on the left or on the right."""

    source: Literal["squares"] = "squares"
    samples: int = 60

    def load(self) -> Dataset:
        images = np.random.default_rng(self.seed).integers(0, 60, (self.samples, 1, self.size, self.size))
        labels = np.arange(self.samples) % 2
        for image, label in zip(images, labels, strict=True):
            image[0, 4:10, 2 + 7 * label : 8 + 7 * label] = 250
        return Dataset(images=images.astype(np.uint8), labels=labels, classes=("left", "right"))


class EveryOther(Sites):
    """Images in turn: the first to the first site, the second to the second, and so on."""

    partition: Literal["in-turn"] = "in-turn"

    def plan(self, dataset: Dataset, train: np.ndarray, address: tuple) -> Plan:
        return InTurn(self.site_names())


class InTurn:
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def assign(self, dataset: Dataset, index: np.ndarray, address: tuple) -> dict[str, np.ndarray]:
        return {name: np.sort(index[k :: len(self.names)]) for k, name in enumerate(self.names)}


class Smoothed(Classification):
    """Classification with smoothed labels."""

    name: Literal["smoothed"] = "smoothed"

    def losses(self, output, targets, target):
        return nn.functional.cross_entropy(output, targets, reduction="none", label_smoothing=0.1)


class OneLayer(Backbone):
    """A linear layer."""

    name: ClassVar[str] = "one-layer"
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"head": ("flatten", "linear")}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels * size * size, outputs)


class SmallGAN(generators.DCGAN):
    """A DCGAN of two channels."""

    name: Literal["small-gan"] = "small-gan"
    width: int = 2


class Means(Encoder):
    """The mean of each channel."""

    width: ClassVar[int] = 3

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


class LooksAtPrototypes(Attack):
    """Looks at mean images, which are there to be seen."""

    kinds: ClassVar[tuple[str, ...]] = ("prototypes", "weights")

    def attack(self, seen, truth):
        count = len(seen.parcel.tensors)
        return [Finding("looking", "the attacker has the parcel", Verdict(True, "one can see it", {"tensors": count}))]


METHODS = {"fed-prototypes": FedPrototypes}
SOURCES = {"squares": Squares}
PARTITIONS = {"in-turn": EveryOther}
TASKS = {"smoothed": Smoothed}
BACKBONES = {"one-layer": OneLayer}
GENERATORS = {"small-gan": SmallGAN}
ENCODERS = {"means": Means}
ATTACKS = {"looking": LooksAtPrototypes}
KINDS = {"prototypes": Prototypes}
