"""Local epochs on a GPU: passes recorded as a CUDA graph, and whole steps recorded.

    python benchmarks/epochs.py [--quick] [--json FILE]

A trainer takes epochs of a site with images on the GPU, in bfloat16, with a fused Adam; both ways take turns. Rows have
milliseconds of a step, medians over epochs, and the seconds that a recording took. Without a GPU nothing is recorded:
only for a try. The kept figures have a third way, a whole epoch as one graph, which did not pay and is gone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from clock import now

from polyclinic.data.parts import ImageSet
from polyclinic.models import build
from polyclinic.randomness import torch_rng
from polyclinic.tasks import TASKS, Target
from polyclinic.training.graphs import Graph, GraphedFunction
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: backbone, side, images in a batch, steps of an epoch
CASES = (
    ("lenet5", 32, 8, 32),
    ("small-cnn", 32, 32, 4),
    ("small-cnn", 32, 32, 32),
    ("resnet18", 64, 32, 15),
    ("resnet18", 224, 32, 4),
)
QUICK = (("small-cnn", 32, 8, 2),)
#: what is recorded: forward and backward pass, or these and the optimiser's step
WAYS = ("passes", "steps")
#: epochs of each way that are not counted
FIRST = 4


class Way:
    """A trainer that computes epochs in one way."""

    def __init__(self, name: str, backbone: str, size: int, rows: int, steps: int) -> None:
        task, target = TASKS["classification"](name="classification"), Target(("a", "b"))
        model = build(backbone, channels=3, outputs=task.outputs(target), size=size, norm="batch")
        optimizer = Optimizer(name="adam", lr=1e-3, batch_size=rows)
        precision = "bf16" if DEVICE == "cuda" else "fp32"
        self.name, self.steps = name, steps
        self.trainer = Trainer(
            model,
            TrainerSpec(task=task, target=target, optimizer=optimizer, device=DEVICE, precision=precision, graphs=True),
        )
        self.trainer.records_steps &= name != "passes"
        images = np.random.default_rng(0).integers(0, 256, (rows * steps, 3, size, size), dtype=np.uint8)
        self.part = ImageSet(images, np.arange(len(images)) % 2)

    def take_epoch(self) -> float:
        """Seconds of an epoch; the optimiser is fresh, as at a site."""
        made = self.trainer.optimizer.make(self.trainer.parameters(), 1, self.trainer.kept)
        batches = self.trainer.batches(self.part, torch_rng("epochs"))
        started = now()
        self.trainer.train(batches, self.steps, made)
        return now() - started


def measure(case: tuple[str, int, int, int], repeats: int) -> dict[str, Any]:
    backbone, size, rows, steps = case
    recordings: dict[str, float] = {}
    ways = [Way(name, *case) for name in WAYS]
    for way in ways:
        with timed_recordings(recordings):
            for _ in range(FIRST):
                way.take_epoch()
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            taken[way.name].append(way.take_epoch() / steps * 1000)
    return {
        "backbone": backbone,
        "size": size,
        "batch": rows,
        "steps": steps,
        "milliseconds of a step": {name: round(statistics.median(some), 4) for name, some in taken.items()},
        "seconds of a recording": {name: round(seconds, 3) for name, seconds in recordings.items()},
    }


def timed_recordings(seconds: dict[str, float]) -> Any:
    """A while in which the seconds of recordings are noted."""

    class Timed(Graph):
        def __init__(self, of: GraphedFunction, inputs: tuple[torch.Tensor, ...]) -> None:
            started = now()
            super().__init__(of, inputs)
            seconds[of.name] = now() - started

    return mock.patch("polyclinic.training.graphs.Graph", Timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small network, two epochs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, after every row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    figures: dict[str, Any] = {"benchmark": "epochs", "device": device, "torch": torch.__version__, "rows": []}
    for case in QUICK if options.quick else CASES:
        figures["rows"].append(measure(case, 2 if options.quick else 15))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
