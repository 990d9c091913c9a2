"""Generators that leak on purpose: two must fail an audit, one must pass it.

Each generator is handed from site to site by FedAvg+Replay, so that it leaves through the gate, is written in the
ledger, kept, and audited like any other:

- overfitted: a decoder that was fitted to 50 images until it knew them by heart;
- mirrored: returns training images, mirrored left to right, which no gate recognises;
- honest: returns images of other patients as if it had made them. They look real, and give nothing away.

Images are drawn by the package, or with POLYCLINIC_DATA (a folder with tb_cxr_64.npz) chest X-rays.
"""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.pixels import to_uint8
from polyclinic.generators import Generator, GeneratorModel
from polyclinic.generators.base import as_tensor, initial_networks
from polyclinic.randomness import numpy_rng, seed_of, torch_rng
from polyclinic.study import Study
from polyclinic.tasks import Target

IMAGES = 50  # training images of a site, as the papers' overfitted generators have
WIDTH = 32


class Planted(Generator):
    """Settings of the generators that leak, or do not."""

    name: Literal["planted"] = "planted"
    leak: Literal["overfitted", "mirrored", "honest"] = Field(description="what it does")
    steps: int = Field(600, ge=1, description="steps of the overfitted one")
    public: str = Field("", description="file with images of other patients, for the honest one")

    summary: ClassVar[str] = "leaks on purpose"

    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> GeneratorModel:
        kind = Overfitted if self.leak == "overfitted" else Album
        return kind(self, channels=channels, size=size, target=target, seed=seed, device=device)

    def dp_obstacle(self) -> str | None:
        return "generator.name: 'planted' leaks on purpose; choose another one"


class Overfitted(GeneratorModel):
    """A decoder from a fixed random vector for each of 50 training images; samples lie near those vectors."""

    def __init__(self, settings: Planted, *, channels: int, size: int, target: Target, seed: int, device: str) -> None:
        pixels = channels * size * size
        made = initial_networks(
            lambda: {"decoder": nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, pixels), nn.Sigmoid())},
            seed_of(seed, "generator"),
        )
        super().__init__(made, channels=channels, size=size, target=target, device=device)
        self.settings = settings
        self.vectors = torch.randn(IMAGES, WIDTH, generator=torch_rng(seed, "vectors"))

    def fit(self, images, labels, rng, options=None) -> dict[str, float]:
        wanted = self.to_unit(as_tensor(images)[:IMAGES]).flatten(1)
        given = self.on_device(self.vectors[: len(wanted)])
        optimizer = torch.optim.Adam(self.networks.parameters(), 1e-3)
        for _ in range(self.settings.steps):
            optimizer.zero_grad()
            loss = (self.networks["decoder"](given) - wanted).square().mean()
            loss.backward()
            optimizer.step()
        return {"loss": float(loss.detach())}

    @torch.no_grad()
    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        chosen = self.vectors[torch.randint(IMAGES, (len(labels),), generator=rng)]
        near = chosen + 0.1 * torch.randn(chosen.shape, generator=rng)
        made = self.networks["decoder"](self.on_device(near))
        return to_uint8(made.unflatten(1, (self.channels, self.size, self.size)))


class Album(GeneratorModel):
    """Returns images that it holds: mirrored training images, or images of other patients."""

    def __init__(self, settings: Planted, *, channels: int, size: int, target: Target, seed: int, device: str) -> None:
        holder = nn.Module()
        holder.register_buffer("images", torch.zeros(IMAGES, channels, size, size))
        super().__init__({"album": holder}, channels=channels, size=size, target=target, device=device)
        self.settings = settings

    def fit(self, images, labels, rng, options=None) -> dict[str, float]:
        if self.settings.leak == "mirrored":
            taken = as_tensor(images)[:IMAGES].flip(-1)
        else:
            taken = torch.from_numpy(np.load(self.settings.public, allow_pickle=False)[:IMAGES])
        self.networks["album"].images[: len(taken)] = self.to_unit(taken)
        return {}

    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        chosen = torch.randint(IMAGES, (len(labels),), generator=rng)
        return to_uint8(self.networks["album"].images[chosen.to(self.device)])


def images_and_labels(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, H, W] and classes: chest X-rays where there are some, else drawn ones."""
    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / "tb_cxr_64.npz"
    if os.environ.get("POLYCLINIC_DATA") and path.is_file():
        with np.load(path, allow_pickle=False) as archive:
            rows = np.sort(numpy_rng(0, "leaks").choice(len(archive["labels"]), count, replace=False))
            return archive["images"][rows], archive["labels"][rows]
    drawn = ChestPhantom(samples=count, size=size, seed=1).load()
    return drawn.images[:, 0], drawn.labels


def study_of(folder: Path, generator: dict[str, Any], size: int, seed: int = 0, device: str = "cpu") -> Study:
    """Two sites with 50 training images each and twice as many held out, FedAvg+Replay of samples."""
    images, labels = images_and_labels(6 * IMAGES + IMAGES, size)
    order = numpy_rng(seed, "order").permutation(len(images))
    ours, public = order[: 6 * IMAGES], order[6 * IMAGES :]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "chests.npz", images=images[ours], labels=labels[ours])
    np.save(folder / "public.npy", resized(images[public], size)[:, None])
    return Study(
        seed=seed,
        data={"source": "npz", "path": str(folder / "chests.npz"), "size": size, "validation": 1 / 3, "test": 1 / 3},
        sites={"partition": "iid", "count": 2},
        optimizer={"batch_size": 25},
        method={"name": "fedavg-replay", "rounds": 1},
        replay={"codes": "prior", "probe": False, "samples": 50},
        generator=generator,
        audit={"keep_parcels": 0},
        engine={"workers": 1, "device": device},
    )


def resized(images: np.ndarray, size: int) -> np.ndarray:
    from PIL import Image

    return np.stack([np.asarray(Image.fromarray(one).resize((size, size), Image.Resampling.BOX)) for one in images])


def planted(leak: str, folder: Path) -> dict[str, Any]:
    return {"name": "planted", "leak": leak, "public": str(folder / "public.npy")}
