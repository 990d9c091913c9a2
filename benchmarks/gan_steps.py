"""How fast a small GAN trains at a site: steps a second, recorded as a CUDA graph and one kernel after the other.

    python benchmarks/gan_steps.py [--quick] [--json FILE]

FedER's sites train a generator before the first round. Images are noise; both ways take turns in one process. On a
machine without a GPU nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from polyclinic.generators import GENERATORS
from polyclinic.generators.gan import model as gan_model
from polyclinic.generators.gan.batches import RealBatches
from polyclinic.tasks import Target
from polyclinic.training.graphs import WARM_UP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def begin(name: str, size: int, *, recorded: bool) -> gan_model.GANSteps:
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    settings = GENERATORS[name]()
    model: Any = settings.build(
        channels=3, size=size, target=Target(("a", "b")), seed=0, device=DEVICE, precision=precision
    )
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8, generator=rng)
    batches = RealBatches(model, images, torch.arange(256) % 2, rng)
    may = gan_model.steps_are_recorded(list(model.networks.parameters())) and recorded
    with mock.patch.object(gan_model, "steps_are_recorded", return_value=may):
        return gan_model.GANSteps(model, batches, rng)


def measure(name: str, size: int, steps: int, turns: int) -> dict[str, Any]:
    ways = {"recorded": begin(name, size, recorded=True), "kernel by kernel": begin(name, size, recorded=False)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(turns + 1):
        for way, one in ways.items():
            started = _now()
            for _ in range(steps if number else WARM_UP + 1):
                one.step()
            if number:
                found[way].append(steps / (_now() - started))
    rates = {way: round(statistics.median(rate), 1) for way, rate in found.items()}
    return {"generator": name, "size": size, "steps a second": rates}


def _now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small GAN, few steps")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    cases = [("dcgan", 32)] if options.quick else [("dcgan", 32), ("dcgan", 64), ("gan", 64)]
    rows = [measure(name, size, 1 if options.quick else 100, 1 if options.quick else 3) for name, size in cases]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    figures = json.dumps({"benchmark": "gan_steps", "device": device, "rows": rows})
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
