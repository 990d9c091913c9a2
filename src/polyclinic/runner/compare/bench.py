"""How fast this machine is with Polyclinic, in about a minute: rounds beside a plain loop, and in worker processes.

Every measurement is a few seconds of real work on images of noise, once to warm up and then timed. The command is there
to compare machines; figures for papers come from `lab/benchmarks/`.
"""

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD

from polyclinic import __version__
from polyclinic.json_types import JsonObject
from polyclinic.models import build
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.machine import device_of
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run, threads
from polyclinic.study import parse_study

SITES, STEPS, BATCH, SIDE = 4, 8, 16, 32


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    name: str
    what: str
    value: float
    unit: str


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
        np.savez(archive, images=noise(count).numpy().transpose(0, 2, 3, 1), labels=np.arange(count) % 2)
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
    images, labels = noise(BATCH).to(device), (torch.arange(BATCH) % 2).to(device)

    def one_round() -> None:
        for _ in range(SITES):
            optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
            for _ in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(images.float().div_(255)), labels).backward()
                optimizer.step()

    return timed(one_round, device=device)


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


def measure(tell: Callable[[Measured], None] = lambda row: None) -> JsonObject:
    """Measure; `tell` is called with every row. The figures as JSON."""
    device, rows = device_of("auto"), []
    with tempfile.TemporaryDirectory() as folder, threads(1):  # as a site computes
        for part in (overhead, engines):
            for row in part(Path(folder), device):
                tell(row)
                rows.append(vars(row))
    return {
        "polyclinic": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "rows": rows,
    }


def timed(work: Callable[[], object], *, device: str) -> float:
    """The median seconds of some work, done three times after it was done once to warm up."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def noise(count: int) -> Tensor:
    """Images uint8 [N, 3, H, W]."""
    return torch.randint(256, (count, 3, SIDE, SIDE), generator=torch_rng("bench", "noise"), dtype=torch.uint8)
