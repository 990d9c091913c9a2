"""When `torch.compile` pays on a CPU: seconds of a training step with and without it, and what compiling costs.

    python benchmarks/compile_cpu.py [--quick] [--json FILE]

CPU seconds of this process and its children, so that other work on the machine counts little. Steps of both kinds are
taken in turns. Polyclinic does not compile on a CPU by itself: this says from how many steps on it would pay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyclinic.models import build

#: network, side of the images, images in a batch
CASES = [("small-cnn", 32, 32), ("resnet18", 64, 32)]


def cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def timed(work: Callable[[], object], times: int = 1) -> float:
    began = cpu_seconds()
    for _ in range(times):
        work()
    return cpu_seconds() - began


def stepper(model: torch.nn.Module, forward: Callable, images: torch.Tensor, labels: torch.Tensor) -> Callable:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(forward(images), labels).backward()
        optimizer.step()

    return step


def measure(backbone: str, size: int, batch: int, *, turns: int, steps: int) -> dict[str, Any]:
    images, labels = torch.rand(batch, 3, size, size), torch.randint(2, (batch,))
    plain, other = (build(backbone, channels=3, outputs=2, size=size) for _ in range(2))
    eager = stepper(plain, plain, images, labels)
    compiled = stepper(other, torch.compile(other), images, labels)
    eager()
    began = time.perf_counter()
    to_compile = timed(compiled)
    wall = time.perf_counter() - began
    pairs = [[timed(eager, steps) / steps, timed(compiled, steps) / steps] for _ in range(turns)]
    without, with_it = (statistics.median(column) for column in zip(*pairs, strict=True))
    saved = without - with_it
    return {
        "case": f"{backbone}, {size} px, batches of {batch}",
        "eager_ms": round(1000 * without, 1),
        "compiled_ms": round(1000 * with_it, 1),
        "compile_cpu_seconds": round(to_compile, 1),
        "compile_wall_seconds": round(wall, 1),
        "pays_after_steps": round(to_compile / saved) if saved > 0.01 * without else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small network only, few steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns, steps = (3, 5) if options.quick else (5, 10)
    rows = [measure(*case, turns=turns, steps=steps) for case in CASES[: 1 if options.quick else None]]
    figures = json.dumps(
        {"benchmark": "compile_cpu", "torch": torch.__version__, "quick": options.quick, "cases": rows}
    )
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
