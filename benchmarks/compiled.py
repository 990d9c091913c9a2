"""torch.compile on a CPU: forward and backward pass of a small network as it is and compiled, in one thread.

    python benchmarks/compiled.py [--quick] [--backbone small-cnn] [--size 32] [--batch 32] [--json FILE]

Both take turns of steps in one process; CPU seconds count, as other work on the machine hardly changes their ratio. The
seconds of compilation are those of the first two compiled steps: the compiler's own processes are in the wall time, and
not in this process's CPU seconds. `steps to pay` says how many steps a run must take before compiling has paid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clock import now
from torch.nn import functional as F

from polyclinic.models import build


def make_step(model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> Callable:
    def step() -> None:
        F.cross_entropy(model(images), labels).backward()

    return step


def gradients(model: torch.nn.Module, step: Callable[[], None]) -> torch.Tensor:
    model.zero_grad()
    step()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def cpu_seconds(step: Callable[[], None], count: int) -> float:
    """CPU seconds of a step."""
    started = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - started) / count


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(options.batch, 3, options.size, options.size, generator=rng)
    labels = torch.randint(2, (options.batch,), generator=rng)
    model = build(options.backbone, channels=3, outputs=2, size=options.size, norm="batch").train()
    plain = make_step(model, images, labels)
    compiled = make_step(torch.compile(model, backend=options.backend), images, labels)
    began = now()
    for _ in range(2):
        compiled()
    seconds = now() - began
    wanted, found = gradients(model, plain), gradients(model, compiled)
    taken = [(cpu_seconds(plain, options.steps), cpu_seconds(compiled, options.steps)) for _ in range(options.turns)]
    eager, fast = (statistics.median(turn[way] for turn in taken) for way in (0, 1))
    return {
        "backbone": options.backbone,
        "size": options.size,
        "batch": options.batch,
        "milliseconds of a step": {"as it is": round(1000 * eager, 2), "compiled": round(1000 * fast, 2)},
        "times as fast": round(eager / fast, 3),
        "seconds of compilation": round(seconds, 1),
        "relative difference of gradients": float((found - wanted).norm() / wanted.norm()),
        "steps to pay": round(seconds / (eager - fast)) if fast < eager else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without code generation: only for a try")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--backbone", default="small-cnn")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    options = parser.parse_args()
    options.backend = "eager" if options.quick else "inductor"
    if options.quick:
        options.turns, options.steps, options.batch = 2, 2, 2
    torch.set_num_threads(1)
    figures = {"benchmark": "compiled", "torch": torch.__version__, "threads": 1, "rows": [measure(options)]}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
