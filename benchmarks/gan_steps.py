"""How fast a small GAN trains at a site: steps a second, recorded as a CUDA graph and one kernel after the other.

    python benchmarks/gan_steps.py [--quick] [--json FILE]

FedER's sites train a generator before the first round. Images are noise; all ways take turns in one process. On a
machine without a GPU nothing is recorded. With `--members` the generators of so many sites take a step each: one after
the other, each recorded by itself, and as one stack.
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

from polyclinic.generators import GENERATORS
from polyclinic.generators.gan import model as gan_model
from polyclinic.generators.gan.batches import RealBatches
from polyclinic.generators.gan.fit_together import Learner, StackedSteps
from polyclinic.tasks import Target
from polyclinic.training.gpu.graphs import WARM_UP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def learner(name: str, size: int) -> Learner:
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    settings = GENERATORS[name]()
    model: Any = settings.build(
        channels=3, size=size, target=Target(("a", "b")), seed=0, device=DEVICE, precision=precision
    )
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8, generator=rng)
    return Learner(model, images.numpy(), np.arange(256) % 2, rng)


def begin(name: str, size: int, *, recorded: bool) -> gan_model.GANSteps:
    one = learner(name, size)
    batches = RealBatches(one.model, one.images, one.labels, one.rng)
    may = gan_model.steps_are_recorded(list(one.model.networks.parameters())) and recorded
    with mock.patch.object(gan_model, "steps_are_recorded", return_value=may):
        return gan_model.GANSteps(one.model, batches, one.rng)


class InTurn:
    """A step of each of several generators, one after the other."""

    def __init__(self, each: list[gan_model.GANSteps]) -> None:
        self.each = each

    def step(self) -> None:
        for one in self.each:
            one.step()


def measure_stack(name: str, size: int, members: int, steps: int, turns: int) -> dict[str, Any]:
    ways = {
        "one after the other": InTurn([begin(name, size, recorded=True) for _ in range(members)]),
        "stacked": StackedSteps([learner(name, size) for _ in range(members)]),
    }
    return {"generator": name, "size": size, "members": members, "steps a second": rates(ways, steps, turns)}


def measure(name: str, size: int, steps: int, turns: int) -> dict[str, Any]:
    ways = {"recorded": begin(name, size, recorded=True), "kernel by kernel": begin(name, size, recorded=False)}
    return {"generator": name, "size": size, "steps a second": rates(ways, steps, turns)}


def rates(ways: dict[str, Any], steps: int, turns: int) -> dict[str, float]:
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(turns + 1):
        for way, one in ways.items():
            started = now()
            for _ in range(steps if number else WARM_UP + 1):
                one.step()
            if number:
                found[way].append(steps / (now() - started))
    return {way: round(statistics.median(rate), 1) for way, rate in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small GAN, few steps")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--few", action="store_true", help="the first generator only")
    parser.add_argument("--members", type=int, nargs="*", default=[], help="numbers of generators in a stack")
    options = parser.parse_args()
    cases = [("dcgan", 32)] if options.quick else [("dcgan", 32), ("dcgan", 64), ("gan", 64)]
    cases, many = cases[:1] if options.few else cases, (1, 1) if options.quick else (50, 3)
    rows = [] if options.members else [measure(*case, *many) for case in cases]
    rows += [measure_stack(*case, members, *many) for case in cases for members in options.members]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    figures = json.dumps({"benchmark": "gan_steps", "device": device, "rows": rows})
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
