"""The leaks that audit_power.py plants: small studies whose parcels give something away, each at three strengths.

*Full*, *half* and *quarter* differ by what an attacker has to work with: more images behind an update, fewer rounds, a
deeper cut, a decoder that learned less, fewer copies among the synthetic images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from planted import Album, Overfitted
from pydantic import Field
from torch import Tensor, nn

from polyclinic.attacks.near_copies import add_noise, brighten, shift
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.pixels import to_uint8
from polyclinic.generators import GENERATORS, Generator, GeneratorModel
from polyclinic.generators.base import as_tensor
from polyclinic.models import BACKBONES
from polyclinic.models.backbone import Backbone
from polyclinic.models.encoders import ENCODERS, Encoder
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.tasks import Target

STRENGTHS = ("full", "half", "quarter")
SIDE = 28
BASE: dict[str, Any] = {
    "data": {"source": "fundus-phantom", "samples": 240, "size": SIDE, "test": 0.4},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05, "momentum": 0.0},
    "evaluation": {"select": "last"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},
    "audit": {"keep_parcels": 0},
}
VQVAE2 = {
    "name": "vqvae2", "prior_epochs": 1, "width": 32, "code_width": 8, "top_codes": 64, "bottom_codes": 64, "blocks": 1,
    "batch_size": 16, "prior_width": 8, "prior_layers": 1,
}  # fmt: skip
REPLAY = {
    "method": {"name": "fedavg-replay", "rounds": 1},
    "replay": {"codes": "prior", "probe": False, "samples": 60},
}

SUMMED = {"model": {"backbone": "sketch"}, "optimizer": {"augment": []}}


class Perceptron(Backbone):
    """A network that begins with a linear layer and ReLU."""

    name: ClassVar[str] = "perceptron"
    summary: ClassVar[str] = "two linear layers"
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"hidden": ("flatten", "first", "relu"), "head": ("last",)}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.flatten, self.relu = nn.Flatten(), nn.ReLU()
        self.first, self.last = nn.Linear(channels * size * size, 64), nn.Linear(64, outputs)


class Sketch(Encoder):
    """Numbers of an image by a fixed draw, as many as `audit_power.py` asks for; what is summed are these."""

    width: ClassVar[int] = 144

    def encode(self, images: Tensor) -> Tensor:
        rows = images.flatten(1)
        drawn = torch.randn(rows.shape[1], self.width, generator=torch_rng("sketch"))
        return rows @ drawn.to(rows) / 10


class PowerGenerator(Generator):
    """Settings of a generator that remembers: a decoder that was fitted too long, or an album of near copies."""

    name: Literal["planted-for-power"] = "planted-for-power"
    leak: Literal["overfitted", "near-copies"] = Field(description="what it does")
    steps: int = Field(600, ge=1, description="steps of the overfitted one")
    copies: int = Field(0, ge=0, description="near copies among the images of the album; the others are drawn anew")
    public: int = Field(1, ge=0, description="seed of the images of other patients")

    summary: ClassVar[str] = "leaks on purpose"

    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> GeneratorModel:
        kind = Overfitted if self.leak == "overfitted" else NearAlbum
        return kind(self, channels=channels, size=size, target=target, seed=seed, device=device)

    def dp_obstacle(self) -> str | None:
        return "generator.name: this one leaks on purpose; choose another one"


class NearAlbum(Album):
    """Returns images of other patients, and among them `copies` changed training images, each image once."""

    def fit(self, images, labels, rng, options=None) -> dict[str, float]:
        held = self.networks["album"].images
        others = torch.from_numpy(drawn_images(len(held), 1000 + self.settings.public))
        taken = self.to_unit(others).clone()
        count = min(self.settings.copies, len(images))
        taken[:count] = near_copies(self.to_unit(as_tensor(images)[:count]))
        held[:] = taken
        return {}

    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        held = self.networks["album"].images
        chosen = torch.arange(len(labels)) % len(held)
        return to_uint8(held[chosen.to(self.device)])


def near_copies(images: Tensor) -> Tensor:
    """Training images, shifted by 2 px, 10 % brighter and a little noisy: no search for equal pixels sees them."""
    rng = torch_rng(0, "near copies")
    moved = brighten(shift(images, 2 / SIDE, images, rng), 0.1, images, rng)
    return add_noise(moved, 0.03, images, rng)


def drawn_images(count: int, seed: int) -> np.ndarray:
    return np.array(FundusPhantom(samples=count, size=SIDE, seed=seed).load().images)


def write_noisy_labels(folder: Path, share: float, count: int, seed: int) -> dict[str, Any]:
    """Images of which a share has a label drawn by lot, as `[data]`; whoever fits them must remember them."""
    rng = numpy_rng(seed, "noisy labels")
    images = drawn_images(count, seed)
    labels = np.array(FundusPhantom(samples=count, size=SIDE, seed=seed).load().labels)
    wrong = rng.permutation(count)[: round(share * count)]
    labels[wrong] = rng.integers(0, 2, len(wrong))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "noisy.npz", images=images.transpose(0, 2, 3, 1), labels=labels)
    return {"source": "npz", "path": str(folder / "noisy.npz"), "size": SIDE, "test": 0.4}


def register() -> None:
    GENERATORS["planted-for-power"] = PowerGenerator
    BACKBONES["perceptron"] = Perceptron
    ENCODERS["sketch"] = Sketch


@dataclass(frozen=True)
class Leak:
    """A kind of leak: the parcels to attack, and the study for each strength as changes to the base."""

    name: str
    kind: str
    strengths: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    always: dict[str, Any]


def leaks() -> list[Leak]:
    sgd = {"method": {"name": "fedsgd", "rounds": 1, "batch": "mini"}}
    one, two, four, eight = ({"optimizer": {"batch_size": size}} for size in (1, 2, 4, 8))
    cnn, dense = ({"model": {"backbone": name}} for name in ("small-cnn", "perceptron"))
    cuts = tuple({"model": {"backbone": "resnet18", "cut": cut}} for cut in ("conv1", "layer2", "layer3"))
    coded = tuple({"generator": {**VQVAE2, "epochs": epochs}} for epochs in (120, 30, 8))
    copies = tuple({"generator": _planted(leak="near-copies", copies=count)} for count in (20, 6, 2))
    fitted = tuple({"generator": _planted(leak="overfitted", steps=steps)} for steps in (600, 200, 60))
    shared = tuple({"method": {"name": "fedavg-share", "rounds": 1, "share": part}} for part in (0.2, 0.1, 0.05))
    sums = tuple({"method": {"numbers": count}} for count in (144, 72, 48))  # of about 65 images
    few = tuple({"data": {"samples": 400, "test": part, "validation": 0.005}} for part in (0.985, 0.975, 0.955))
    scored = tuple({"data": {"samples": count}} for count in (160, 480, 1440))
    return [
        Leak("gradient, few images", "gradients", (one, two, four), sgd),
        Leak("gradient, small CNN", "gradients", (one, two, four), {**sgd, **cnn}),
        Leak("gradient, 8 bits", "gradients", (one, two, four), {**sgd, "defence": {"name": "quantise", "bits": 8}}),
        Leak("gradient of a dense layer", "gradients", (one, four, eight), {**sgd, **dense}),
        Leak("weights after one step", "weights", (one, two, four), _fedavg(1, 1)),
        Leak(
            "weights after two steps", "weights", (one, two, four),
            {**_fedavg(1, 2), "optimizer": {"momentum": 0.9}},
        ),
        Leak("sum of two sites", "gradients", (one, two, four), {**sgd, "audit": {"secure_sum": True}}),
        Leak("overfitted weights", "weights", tuple(_fedavg(r, 16) for r in (30, 10, 4)), _remembered()),  # type: ignore
        Leak("latents", "latents", cuts, {"method": {"name": "fedreplay", "rounds": 1}}),  # type: ignore[arg-type]
        Leak("activations", "activations", cuts, {"method": {"name": "splitnn", "rounds": 1}}),  # type: ignore
        Leak("codes", "codes", coded, {"method": {"name": "cwt-replay", "rounds": 1}}),  # type: ignore[arg-type]
        Leak("near copies", "generator", copies, REPLAY),  # type: ignore[arg-type]
        Leak("overfitted generator", "generator", fitted, REPLAY),  # type: ignore[arg-type]
        Leak("sums of features", "statistics", sums, {"method": {"name": "analytic"}, **SUMMED}),  # type: ignore
        Leak("sums of few images", "statistics", few, _summed_few()),  # type: ignore[arg-type]
        Leak("histograms of scores", "metrics", scored, _fedavg(3, 4)),  # type: ignore[arg-type]
        Leak("real images", "real-images", shared, {}),  # type: ignore[arg-type]
    ]  # fmt: skip


def _fedavg(rounds: int, steps: int) -> dict[str, Any]:
    return {"method": {"name": "fedavg", "rounds": rounds, "local_steps": steps}}


def _remembered() -> dict[str, Any]:
    return {"data": {"noisy": 0.5, "samples": 480}, "optimizer": {"name": "adam", "lr": 0.002}}


def _summed_few() -> dict[str, Any]:
    """Two to eight images of a site; the attacker draws phantoms of its own."""
    return {"method": {"name": "analytic", "numbers": 144}, **SUMMED, "audit": {"own_images": "fundus-phantom"}}


def _planted(**settings: Any) -> dict[str, Any]:
    return {"name": "planted-for-power", **settings}


def study_tables(seed: int, folder: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """The base with changes, table by table; `data.noisy`: a share of labels by lot."""
    tables: dict[str, Any] = {name: dict(table) for name, table in BASE.items()}
    for change in changes:
        for name, table in change.items():
            tables[name] = {**tables.get(name, {}), **table}
    noisy = tables["data"].pop("noisy", 0.0)
    if noisy:
        tables["data"] = write_noisy_labels(folder, noisy, tables["data"]["samples"], seed)
    return {"seed": seed, **tables}
