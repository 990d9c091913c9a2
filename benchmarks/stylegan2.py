"""How fast StyleGAN2 trains: images a second, all regularisers and augmentation included.

    python benchmarks/stylegan2.py [--quick] [--json FILE] [--check]

In fp32 and bf16, each kernel started by Python, or steps recorded and replayed (a GPU only), or compiled besides, or
with the plain layers instead of the kernels of `generators/stylegan2/kernels.py`. Each case is warmed up first, which
is timed apart. Then the cases of a size take turns of whole cycles of the regularisers (16 steps); the figure is the
median of the turns. Images are noise: their content does not change the work.

`--check` compares steps with those kernels and steps of plain layers instead, in fp32: the gradients of each kind of
step at the same weights, and how far weights lie apart after some whole steps, as a share of what training moved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from polyclinic.generators.stylegan2 import kernels, training
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.stylegan2.training import R1_EVERY, Steps
from polyclinic.tasks import Target
from polyclinic.training.graphs import WARM_UP

#: precision, whether steps are recorded, whether networks are compiled, whether layers may use our kernels
CASES = {
    "fp32": ("fp32", False, False, True),
    "bf16": ("bf16", False, False, True),
    "fp32, recorded": ("fp32", True, False, True),
    "bf16, recorded": ("bf16", True, False, True),
    "bf16, recorded, plain layers": ("bf16", True, False, False),
    "bf16, recorded, compiled": ("bf16", True, True, True),
}
KINDS = ("_learn", "_tell_apart", "_even_out", "_flatten")


@contextlib.contextmanager
def layers(*, fused: bool) -> Iterator[None]:
    """A while in which layers may use our kernels, or may not."""
    with contextlib.nullcontext() if fused else mock.patch.object(kernels, "filters_are_usable", return_value=False):
        yield


def begin(size: int, options: argparse.Namespace, **settings: Any) -> Steps:
    """A network in the middle of a training, on images of noise."""
    precision = settings.pop("precision", "fp32")
    chosen = StyleGAN2(width=options.width, latent=options.latent, batch_size=options.batch, **settings)
    target = Target(("a", "b"))
    model = chosen.build(channels=3, size=size, target=target, seed=0, device=options.device, precision=precision)
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4 * options.batch, 3, size, size), dtype=torch.uint8, generator=rng)
    steps = model.begin(images, torch.arange(len(images)) % 2, rng)
    steps.p.fill_(0.3)
    return steps


class Running:
    """One case, warmed up; `turn` measures it for a while."""

    def __init__(self, case: str, size: int, options: argparse.Namespace) -> None:
        precision, graphs, compiled, self.fused = CASES[case]
        self.options, self.found = options, []
        started = time.perf_counter()
        with layers(fused=self.fused):
            self.steps = begin(size, options, precision=precision, graphs=graphs, compile=compiled)
            for _ in range((WARM_UP if graphs else 0) * R1_EVERY + 1):  # R1, the rarest, must have been recorded
                self.steps.step()
        _finish(options.device)
        self.first = time.perf_counter() - started

    def turn(self) -> None:
        started, cycles = time.perf_counter(), 0
        with layers(fused=self.fused):
            while cycles == 0 or time.perf_counter() - started < self.options.seconds:
                for _ in range(R1_EVERY):
                    self.steps.step()
                _finish(self.options.device)
                cycles += 1
        self.found.append(cycles * R1_EVERY / (time.perf_counter() - started))

    def figures(self) -> dict[str, Any]:
        rate = statistics.median(self.found)
        return {
            "images per second": rate * self.options.batch,
            "steps per second": rate,
            "turns": [round(one * self.options.batch, 1) for one in self.found],
            "warm-up, seconds": self.first,
            "milliseconds of each kind of step": self.kinds(),
        }

    def kinds(self, times: int = 4) -> dict[str, float]:
        """Of one call; the discriminator's and the generator's own steps, path length and R1."""
        real, labels = next(self.steps.batches)
        calls = {"_learn": (self.steps._learners[None], (real, labels)), "_even_out": (self.steps._even_out, (labels,))}
        calls |= {name: (getattr(self.steps, name), (real, labels)) for name in ("_tell_apart", "_flatten")}
        spent = {}
        with layers(fused=self.fused):
            for name, (function, inputs) in calls.items():
                _finish(self.options.device)
                started = time.perf_counter()
                for _ in range(times):
                    function(*inputs)
                _finish(self.options.device)
                spent[name.strip("_")] = round(1000 * (time.perf_counter() - started) / times, 3)
        return spent


def measure(size: int, options: argparse.Namespace) -> dict[str, Any]:
    running = {case: Running(case, size, options) for case in options.cases}
    for _ in range(options.turns):
        for one in running.values():
            one.turn()
    found = {f"{size} px, {case}": one.figures() for case, one in running.items()}
    if options.profile:
        print(json.dumps(found), flush=True)  # a profile may take its time
        for case, one in running.items():
            with layers(fused=one.fused):
                _profile(one.steps, Path(options.profile), f"{size} px, {case}")
    return found


# --- the same steps both ways -------------------------------------------------------------------------


def check(size: int, options: argparse.Namespace) -> dict[str, float]:
    """Relative distances of gradients and of weights, our kernels against plain layers, in fp32 without TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found = {f"gradients, {kind.strip('_')}": _gradients_apart(kind, size, options) for kind in KINDS}
    for count in (1, 4):
        found[f"weights after {count} steps"] = _weights_apart(size, options, count, (True, False))
        # Adam's first steps follow signs: how far apart come plain steps that differ in nothing but rounding?
        rounded = _weights_apart(size, options, count, (False, False), moved=True)
        found[f"weights after {count} steps, plain layers, first weights changed in the last bit"] = rounded
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _gradients_apart(kind: str, size: int, options: argparse.Namespace) -> float:
    rows: list[Tensor] = []

    def noted(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        weights = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        rows.append(torch.cat([one.flatten() for one in gradients if one is not None]))

    for fused in (True, False):
        steps = begin(size, options, graphs=False)
        real, labels = next(steps.batches)
        with layers(fused=fused), mock.patch.object(training, "_descend", noted):
            getattr(steps, kind)(*((labels,) if kind == "_even_out" else (real, labels)))
    return float((rows[0] - rows[1]).norm() / rows[1].norm())


def _weights_apart(
    size: int, options: argparse.Namespace, count: int, ways: tuple[bool, bool], *, moved: bool = False
) -> float:
    """`moved`: the second way begins with weights that differ in the last bits of float32."""
    ends, starts = [], []
    for place, fused in enumerate(ways):
        steps = begin(size, options, graphs=False)
        starts.append(_row(steps))
        if moved and place:
            for one in steps.networks.parameters():
                one.data.mul_(1 + 2**-23)
        with layers(fused=fused):
            for _ in range(count):
                steps.step()
        ends.append(_row(steps))
    return float((ends[0] - ends[1]).norm() / (ends[1] - starts[1]).norm())


def _row(steps: Steps) -> Tensor:
    return torch.cat([one.detach().flatten().double() for one in steps.networks.parameters()])


def _profile(steps: Steps, file: Path, title: str) -> None:
    """Append the kernels that one cycle spent most time in."""
    with torch.profiler.profile() as found:
        for _ in range(R1_EVERY):
            steps.step()
        torch.cuda.synchronize()
    table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=110)
    with file.open("a") as lines:
        lines.write(f"{title}\n{table}\n")


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    options = _options()
    found: dict[str, Any] = {
        "benchmark": "stylegan2",
        "quick": options.quick,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "width": options.width,
        "batch": options.batch,
        "search": options.search,
        "cases": {},
    }
    for size in options.sizes:
        if options.check:
            found["cases"][f"{size} px, our kernels against plain layers"] = check(size, options)
        else:
            found["cases"] |= measure(size, options)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cycle of a tiny network on the CPU: does it run?")
    parser.add_argument("--json", help="write the figures into this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--width", type=int, default=64, help="64 at 256 px is the size of the paper's network")
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0, help="a turn takes at least so long")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare our kernels with plain layers instead")
    parser.add_argument("--profile", help="append the kernels that take longest to this file (a GPU only)")
    parser.add_argument("--search", action="store_true", help="let cuDNN try its algorithms first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.search
    if options.quick:
        options.sizes, options.cases, options.width, options.latent = [32], ["fp32"], 4, 8
        options.batch, options.seconds, options.turns, options.device = 4, 0.0, 1, "cpu"
    return options


if __name__ == "__main__":
    main()
