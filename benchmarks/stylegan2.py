"""How fast StyleGAN2 trains: images a second, all regularisers and augmentation included.

In fp32 and bf16, each kernel started by Python, or steps recorded and replayed (a GPU only), or compiled besides. Each
case is warmed up first, which is timed apart, and then measured over whole cycles of the regularisers (16 steps).
Images are noise: their content does not change the work.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.stylegan2.training import R1_EVERY, Steps
from polyclinic.tasks import Target
from polyclinic.training.graphs import WARM_UP

#: precision, whether steps are recorded, whether networks are compiled
CASES = {
    "fp32": ("fp32", False, False),
    "bf16": ("bf16", False, False),
    "fp32, recorded": ("fp32", True, False),
    "bf16, recorded": ("bf16", True, False),
    "bf16, recorded, compiled": ("bf16", True, True),
}


def measure(case: str, size: int, options: argparse.Namespace) -> dict[str, float]:
    precision, graphs, compiled = CASES[case]
    settings = StyleGAN2(
        width=options.width, latent=options.latent, batch_size=options.batch, graphs=graphs, compile=compiled
    )
    model = settings.build(
        channels=3, size=size, target=Target(("a", "b")), seed=0, device=options.device, precision=precision
    )
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4 * options.batch, 3, size, size), dtype=torch.uint8, generator=rng)
    steps = model.begin(images, torch.arange(len(images)) % 2, rng)
    steps.p.fill_(0.3)  # augmentation as it is in the middle of a training
    started = time.perf_counter()
    for _ in range((WARM_UP if graphs else 0) * R1_EVERY + 1):  # R1, the rarest, must have been recorded
        steps.step()
    _finish(options.device)
    first = time.perf_counter() - started
    started, cycles = time.perf_counter(), 0
    while cycles == 0 or time.perf_counter() - started < options.seconds:
        for _ in range(R1_EVERY):
            steps.step()
        _finish(options.device)
        cycles += 1
    spent = time.perf_counter() - started
    if options.profile:
        _profile(steps, Path(options.profile), f"{size} px, {case}")
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.device.startswith("cuda") else 0.0
    del steps, model
    if memory:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {
        "images per second": cycles * R1_EVERY * options.batch / spent,
        "steps per second": cycles * R1_EVERY / spent,
        "warm-up, seconds": first,
        "peak GiB": memory,
    }


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
        for case in options.cases:
            found["cases"][f"{size} px, {case}"] = measure(case, size, options)
            print(f"{size} px, {case}: {found['cases'][f'{size} px, {case}']}", flush=True)
            if options.json:  # as they come: a compilation that takes too long costs only itself
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
    parser.add_argument("--seconds", type=float, default=5.0, help="measured at least so long")
    parser.add_argument("--profile", help="append the kernels that take longest to this file (a GPU only)")
    parser.add_argument("--search", action="store_true", help="let cuDNN try its algorithms first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.search
    if options.quick:
        options.sizes, options.cases, options.width, options.latent = [32], ["fp32"], 4, 8
        options.batch, options.seconds, options.device = 4, 0.0, "cpu"
    return options


if __name__ == "__main__":
    main()
