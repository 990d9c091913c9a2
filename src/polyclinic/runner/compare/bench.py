"""How fast this machine is with Polyclinic, in about two minutes: rounds, engines, generators, attacks, encoders.

Every measurement is a few seconds of real work on images of noise, once to warm up and then timed. A GPU gets more
work, because its first steps are slow: they are recorded. The command is there to compare machines and settings;
figures for papers come from `lab/benchmarks/`.
"""

import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD

from polyclinic import __version__
from polyclinic.attacks.gradient_inversion.networks import LeNet, prepare_for_attack, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective, Simulation, cross_entropy
from polyclinic.attacks.solvers.optimizers import LBFGS
from polyclinic.attacks.solvers.search import search
from polyclinic.errors import BadInput, Notice
from polyclinic.generators import GENERATORS
from polyclinic.json_types import JsonObject
from polyclinic.models import build
from polyclinic.models.encoders import ENCODERS
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.display import Display
from polyclinic.runner.run.machine import device_of
from polyclinic.runner.run.run import run, threads
from polyclinic.study import parse_study
from polyclinic.tasks import Target

SITES, STEPS, BATCH, SIDE = 4, 8, 16, 32
MORE = 50  #: times as much work for a GPU
TWO = Target(("dark", "bright"))


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    name: str
    what: str
    value: float
    unit: str

    @property
    def command(self) -> str:
        return f"polyclinic bench --only {self.name.split(',')[0]}"


class RoundEnds(Display):
    """The times at which rounds end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round_done(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def round_seconds(folder: Path, device: str, workers: int = 1) -> float:
    """A round of FedAvg through gate, ledger and digests, without evaluation and checkpoints."""
    archive = folder / "images.npz"
    held_out = 2 * SITES
    count = SITES * STEPS * BATCH + held_out
    if not archive.exists():
        np.savez(archive, images=noise(count, 3).numpy().transpose(0, 2, 3, 1), labels=np.arange(count) % 2)
    tables = {
        "data": {"source": "npz", "path": str(archive), "size": SIDE, "validation": 0.0, "test": held_out / count},
        "sites": {"partition": "iid", "count": SITES},
        "model": {"backbone": "small-cnn"},
        "optimizer": {"batch_size": BATCH},
        "method": {"name": "fedavg", "rounds": 4, "local_steps": STEPS},
        "evaluation": {"every": 0, "select": "last", "final": "none"},
        "engine": {"checkpoint_every": 0, "workers": workers, "device": device},
    }
    ends = RoundEnds()
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run(parse_study(tables), out, display=ends, cache=folder / "cache")
    return float(np.median(np.diff(ends.times)))  # without the first round, which warms up


def bare_seconds(device: str) -> float:
    """The same number of steps in a plain loop of PyTorch."""
    model = build("small-cnn", channels=3, outputs=2, size=SIDE, norm="batch").to(device).train()
    images, labels = noise(BATCH, 3).to(device), (torch.arange(BATCH) % 2).to(device)

    def one_round() -> None:
        for _ in range(SITES):
            optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
            for _ in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(images.float().div_(255)), labels).backward()
                optimizer.step()

    return timed(one_round, repeats=3, device=device)


def overhead(folder: Path, device: str) -> list[Measured]:
    ours, bare = round_seconds(folder, device), bare_seconds(device)
    what = f"FedAvg, small CNN, {SITES} sites x {STEPS} steps of {BATCH}"
    return [
        Measured("overhead", f"{what}: a round", round(ours, 4), "s"),
        Measured("overhead, ratio", "the same beside a plain loop", round(ours / bare, 3), "x"),
    ]


def engines(folder: Path, device: str) -> list[Measured]:
    one, two = round_seconds(folder, device), round_seconds(folder, device, workers=2)
    return [
        Measured("engines", "the same round, sites in one process", round(one, 4), "s"),
        Measured("engines, 2 workers", "in two worker processes", round(two, 4), "s"),
    ]


def generators(folder: Path, device: str) -> list[Measured]:
    count, rows = 64 * more(device), []
    chosen: dict[str, JsonObject] = {
        "dcgan": {"steps": count // BATCH, "batch_size": BATCH},
        "vqvae2": {"epochs": 1, "batch_size": BATCH, "prior_epochs": 0},
    }
    for name, settings in chosen.items():
        generator = GENERATORS[name].model_validate({"name": name, **settings})
        model = generator.build(channels=1, size=SIDE, target=TWO, seed=0, device=device)
        fit = partial(model.fit, noise(count, 1), torch.arange(count) % 2)
        seconds = timed(lambda: fit(torch_rng("bench", "generator")), repeats=1, device=device)  # noqa: B023
        what = f"{name}, {SIDE} px, training"
        rows.append(Measured(f"generators, {name}", what, round(count / seconds), "images/s"))
    return rows


def attacks(folder: Path, device: str) -> list[Measured]:
    targets, steps = 16, 5 * more(device)
    model = with_random_weights(LeNet(channels=1, classes=5, size=16), torch_rng("bench", "weights"))
    truth = torch.rand(targets, 1, 1, 16, 16, generator=torch_rng("bench", "images"))
    names, parameters = zip(*model.named_parameters(), strict=True)
    losses = [cross_entropy(model(images), torch.eye(5)[[row % 5]]) for row, images in enumerate(truth)]
    sent = zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True)
    simulation = Simulation(prepare_for_attack(model, device=device))
    observed = {name: torch.stack(own).to(device) for name, own in zip(names, sent, strict=True)}
    objective = Objective(simulation, observed, FreeLabels((5,)), image_shape=(1, 1, 16, 16))
    start = torch.rand(targets, 256 + 5, generator=torch_rng("bench", "start")).to(device)
    seconds = timed(lambda: search(objective, LBFGS(start.clone(), lr=1.0, steps=steps)), repeats=1, device=device)
    what = f"gradient inversion, LeNet, {targets} images at once, L-BFGS steps of an image"
    return [Measured("attacks", what, round(targets * steps / seconds), "steps/s")]


def encoders(folder: Path, device: str) -> list[Measured]:
    name, count = "efficientnet-lite0-1280", 64 * more(device)
    encoder = ENCODERS[name](device, side=112)
    seconds = timed(lambda: encoder.features(noise(count, 3)), repeats=1, device=device)
    return [Measured("encoders", f"{name}, 112 px", round(count / seconds), "images/s")]


PARTS: dict[str, Callable[[Path, str], list[Measured]]] = {
    part.__name__: part for part in (overhead, engines, generators, attacks, encoders)
}


def measure(only: tuple[str, ...] = (), tell: Callable[[Measured], None] = lambda row: None) -> JsonObject:
    """Measure all parts, or those named; `tell` is called with every row. The figures as JSON.

    A part whose package is missing is left out with a notice, unless it was asked for.
    """
    device, rows = device_of("auto"), []
    with tempfile.TemporaryDirectory() as folder, threads(1):  # as a site computes
        for name in only or PARTS:
            try:
                found = PARTS[name](Path(folder), device)
            except BadInput as error:
                if only:
                    raise
                warnings.warn(f"{name} are left out: {error}", Notice, stacklevel=2)
                continue
            for row in found:
                tell(row)
                rows.append(vars(row) | {"command": row.command})
    return {
        "polyclinic": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "rows": rows,
    }


def more(device: str) -> int:
    """How many times as much work a device gets as a CPU."""
    return MORE if device.startswith("cuda") else 1


def timed(work: Callable[[], object], *, repeats: int, device: str) -> float:
    """The median seconds of some work, after it was done once to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def noise(count: int, channels: int) -> Tensor:
    """Images uint8 [N, C, H, W]."""
    return torch.randint(256, (count, channels, SIDE, SIDE), generator=torch_rng("bench", "noise"), dtype=torch.uint8)
