"""torch.compile (`engine.compiled`): both passes of a network as they are and compiled.

    python benchmarks/compiled.py [--quick] [--device cuda] [--rows small-cnn,32,32 ...] [--json FILE]

On a CPU: fp32 in one thread; CPU seconds count, as other work on the machine hardly changes their ratio. On a GPU:
bf16, channels last, both ways recorded as a CUDA graph, as the trainer records them; seconds of the clock count. Both
ways take turns of steps in one process. Every row has two processes of its own: the first finds nothing in the
compiler's cache, the second what the first has left there. Seconds of compilation are those of the first compiled step,
with the import of the compiler and, on a CPU, with the processes that it starts. `steps to pay` says how many steps a
run must take before compiling has paid.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clock import now
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.models import build
from polyclinic.training.compiling import Compilation, CompiledNetwork, Network
from polyclinic.training.graphs import WARM_UP, GraphedGradients
from polyclinic.training.inductor import TORCH_CACHE

#: backbone, side, images in a batch
ROWS = {
    "cpu": ("small-cnn,32,32", "lenet5,32,8", "resnet18,64,32"),
    "cuda": ("resnet18,64,32", "resnet18,224,32", "resnet34,256,32", "unet,64,16"),
}


class Case:
    """A network and a batch. `learn(network)` is a step of one way, which leaves gradients in `model`."""

    def __init__(self, row: str, device: str) -> None:
        self.backbone, size, batch = row.split(",")
        self.size, self.batch, self.device = int(size), int(batch), torch.device(device)
        torch.manual_seed(0)
        outputs = 1 if self.backbone.startswith("unet") else 2
        model: nn.Module = build(self.backbone, channels=3, outputs=outputs, size=self.size, norm="batch")
        layout = torch.channels_last if self.on_gpu else torch.contiguous_format
        self.model = model.to(self.device, memory_format=layout).train()  # type: ignore[call-overload]
        images = torch.rand(self.batch, 3, self.size, self.size).to(self.device)
        self.images = images.contiguous(memory_format=layout)
        self.labels = torch.randint(2, (self.batch,)).to(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def learn(self, network: Network) -> Callable[[], Any]:
        if self.on_gpu:
            recorded = GraphedGradients(self.model, lambda x, y: self.loss(network, x, y), half=True)
            return lambda: recorded(self.images, self.labels)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            self.loss(network, self.images, self.labels).backward()

        return step

    def loss(self, network: Network, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if self.on_gpu else contextlib.nullcontext():
            output = network(images)
        return self.task_loss(output.float(), labels)

    @staticmethod
    def task_loss(output: Tensor, labels: Tensor) -> Tensor:
        masks = output.dim() == 4
        return (output.mean((1, 2, 3)) - labels).square().mean() if masks else F.cross_entropy(output, labels)

    def gradients(self, step: Callable[[], Any]) -> Tensor:
        step()
        return torch.cat([one.grad.flatten() for one in self.model.parameters() if one.grad is not None])

    def exact_gradients(self) -> Tensor:
        """In float64, which says how much of a difference is rounding of either way."""
        exact = copy.deepcopy(self.model).double()
        self.task_loss(exact(self.images.double()), self.labels).backward()
        return torch.cat([one.grad.flatten() for one in exact.parameters() if one.grad is not None])

    def seconds(self, step: Callable[[], Any], count: int = 1) -> float:
        """Seconds of a step: of the clock on a GPU, of the CPU on a CPU."""
        clock = now if self.on_gpu else cpu_seconds
        started = clock()
        for _ in range(count):
            step()
        return (clock() - started) / count


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def cpu_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row, in this process."""
    torch.set_num_threads(1)
    case = Case(row, options.device)
    network = CompiledNetwork(case.model, Compilation(case.batch, backend="eager" if options.quick else "inductor"))
    plain, compiled = case.learn(case.model), case.learn(network)
    seconds = case.seconds(compiled)
    for step in (plain, compiled):
        for _ in range(WARM_UP + 1):  # on a GPU these record
            step()
    wanted, found, exact = case.gradients(plain).clone(), case.gradients(compiled).clone(), case.exact_gradients()
    turns = [(case.seconds(plain, options.steps), case.seconds(compiled, options.steps)) for _ in range(options.turns)]
    eager, fast = (statistics.median(turn[way] for turn in turns) for way in (0, 1))
    return {
        "backbone": case.backbone,
        "size": case.size,
        "batch": case.batch,
        "milliseconds of a step": {"as it is": round(1000 * eager, 3), "compiled": round(1000 * fast, 3)},
        "times as fast": round(eager / fast, 3),
        "seconds of compilation": round(seconds, 1),
        "relative difference of gradients": distance(found, wanted),
        "relative error of gradients": {"as it is": distance(wanted, exact), "compiled": distance(found, exact)},
        "steps to pay": round(seconds / (eager - fast)) if fast < eager else None,
    }


def in_processes(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process that finds no cache; the seconds of another one that finds its cache."""
    command = [sys.executable, __file__, "--device", options.device, "--row", row, "--steps", str(options.steps)]
    command += ["--quick"] * options.quick
    with tempfile.TemporaryDirectory() as cache:
        found = [
            subprocess.run(
                [*command, "--turns", str(turns)],
                env={**os.environ, TORCH_CACHE: cache},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout.splitlines()[-1]
            for turns in (options.turns, 1)
        ]
    first, second = (json.loads(line) for line in found)
    return {**first, "seconds from the cache": second["seconds of compilation"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row without code generation: only for a try")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--device", choices=list(ROWS), default="cpu")
    parser.add_argument("--rows", nargs="+", help="backbone,side,images in a batch")
    parser.add_argument("--row", help="measure this one in this process, and print it alone")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("compiled: there is no CUDA device here; run it on a machine with a GPU\n")
        raise SystemExit(2)
    if options.quick:
        options.turns, options.steps = min(options.turns, 2), 2
    if options.row:
        print(json.dumps(measure(options.row, options)))
        return
    rows = options.rows or (["lenet5,28,2"] if options.quick else ROWS[options.device])
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    figures = {"benchmark": "compiled", "torch": torch.__version__, "threads": 1, "device": device}
    figures["rows"] = [in_processes(row, options) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
