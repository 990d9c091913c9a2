"""What FELICIA's experiments share: how much work they do, a study's images, owners as one model, their training."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets import SOURCES
from polyclinic.data.partitions import PARTITIONS, assign_to_sites
from polyclinic.data.parts import load
from polyclinic.data.splits import split
from polyclinic.generators import GENERATORS
from polyclinic.generators.gan.central import CentralTerm
from polyclinic.generators.gan.model import GAN
from polyclinic.generators.gan.owners import Federated, Images, Owners
from polyclinic.tasks import Target

#: keeps what was found so far: whoever stops the work before its end has that
Save = Callable[[dict[str, Any]], None]

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Scale:
    """How much work an experiment does: it trains for `steps`, or for `seconds` if those are over first."""

    steps: int
    seconds: float
    looks: int  #: moments at which what the generators make is judged
    seeds: int  #: how many of them
    weights: tuple[float, ...]  #: lambdas; 0 is the local GAN
    points: tuple[float, ...] = ()  #: alphas in per cent, or shares of the rare sub-group
    learner_steps: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    recorded: bool = True  #: on a GPU: each step as one CUDA graph
    repeats: int = 1  #: classifiers of each diet at each look, whose marks are averaged
    real_repeats: int = 1  #: classifiers from real images alone
    size: int | None = None  #: side of the images, if it is not to be the study's
    small: dict[str, Any] = field(default_factory=dict)  #: settings of the generator other than the study's
    towards: str | None = None  #: what a generator pays the central discriminator, if not what the study says
    first_seed: int = 0  #: settings that were chosen by some seeds are to be judged by others

    def quickly(self) -> dict[str, Any]:
        """How a stack is computed: on a GPU with convolutions as products, and each step as one CUDA graph."""
        fast = self.device.startswith("cuda")
        return {"as_products": fast, "recorded": fast and self.recorded}

    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def looks_at(self, trained: float) -> int:
        """How many looks are due after this share of the training."""
        return int(trained * self.looks + 1e-9)


class Material:
    """A study's images, spread over its sites as often as an experiment wants."""

    def __init__(self, name: str, data: Path, changes: dict[str, Any] | None = None) -> None:
        tables = tomllib.loads((EXAMPLES / f"felicia_{name}.toml").read_text(encoding="utf-8"))
        table = {**tables["data"], **(changes or {}), "path": str(data / Path(tables["data"]["path"]).name)}
        self.tables = tables
        self.source = SOURCES[table["source"]].model_validate({k: v for k, v in table.items() if v is not None})
        self.dataset: Dataset = load(self.source)
        self.target = Target(classes=self.dataset.classes)

    def gan(self, scale: Scale) -> GAN:
        settings = self.tables["generator"] | scale.small
        built = GENERATORS[settings["name"]].model_validate(settings)
        assert isinstance(built, GAN)
        return built

    def term(self, scale: Scale) -> CentralTerm:
        """The study's central term, which each federation weighs by a lambda of its own."""
        known = {name: value for name, value in self.tables["method"].items() if name in CentralTerm.model_fields}
        other = {"towards": scale.towards} if scale.towards else {}
        return CentralTerm.model_validate(known | other | {"weight": 1.0})

    def splits(self, seed: int) -> dict[str, np.ndarray]:
        return split(self.dataset, validation=self.source.validation, test=self.source.test, seed=seed)

    def sites(self, seed: int, **changes: Any) -> dict[str, dict[str, np.ndarray]]:
        """Indices of every site's images: data are split and spread anew for every seed."""
        table = self.tables["sites"] | changes
        return assign_to_sites(
            PARTITIONS[table["partition"]].model_validate(table), self.dataset, self.splits(seed), seed
        )

    def images(self, index: np.ndarray) -> Images:
        labels = torch.from_numpy(self.dataset.labels[index].copy())
        return Images(torch.from_numpy(np.ascontiguousarray(self.dataset.images[index])), labels)


def stacked(
    settings: GAN,
    term: CentralTerm,
    federations: list[Federated],
    target: Target,
    scale: Scale,
    say: Callable[[str], None],
) -> Owners:
    """The owners of all federations, as one model."""
    started = time.perf_counter()
    owners = Owners(
        settings, term, federations, target, device=scale.device, precision=scale.precision, **scale.quickly()
    )
    say(f"{len(owners.names)} owners built in {time.perf_counter() - started:.1f} s")
    return owners


def train(
    owners: Owners, scale: Scale, found: dict[str, Any], look: Callable[[int, int], None], say: Callable[[str], None]
) -> None:
    """Steps until the work or the time, looks included, is over; `look(step, images per owner)` on the way.

    What it took is in `found["training"]` from the first look on.
    """
    started, looked, paused, step = time.perf_counter(), 0, 0.0, 0
    done = 0.0
    while done < 1:
        told = owners.step()
        step += 1
        if step % 10 and step != scale.steps:
            continue
        wait(scale.device)
        spent = time.perf_counter() - started
        done = max(step / scale.steps, spent / scale.seconds)
        if scale.looks_at(min(done, 1.0)) > looked:
            looked = scale.looks_at(min(done, 1.0))
            found["training"] = _pace(owners, step, spent - paused)
            recognised = float(told["recognised"].mean()) if "recognised" in told else float("nan")
            say(f"step {step}, {spent:.0f} s, owners recognised {recognised:.2f}; {found['training']}")
            look(step, step * owners.settings.batch_size)
            paused += time.perf_counter() - started - spent


def _pace(owners: Owners, step: int, seconds: float) -> dict[str, Any]:
    images = step * owners.settings.batch_size
    recorded = owners.recorded is not None and bool(owners.recorded.graphed.graphs)
    return {
        "steps": step,
        "images_per_owner": images,
        "owners": len(owners.names),
        "seconds": round(seconds, 1),
        "steps_per_second": round(step / seconds, 1),
        "images_per_second": round(images * len(owners.names) / seconds),
        "one_graph": recorded,
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0,
    }


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
