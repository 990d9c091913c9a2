"""What all benchmarks share: their flags, the last line of output, clocks, and medians of ways that take turns."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
#: ordinary calls before a step is recorded as a CUDA graph, and one that records it, with some to spare
WARM_UP = 5


def flags(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with the two flags of every benchmark; `quick` says what is left out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def keep(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write the figures to the file of --json; after every row, nothing is lost where a long run is stopped."""
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def finish(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """The figures in their file and as the last line of output."""
    keep(figures, options)
    print(json.dumps(figures), flush=True)


def machine(device: str | None = None) -> dict[str, str]:
    """The device that was measured on, and the version of torch."""
    on_gpu = GPU and not (device or "cuda").startswith("cpu")
    return {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}


def now() -> float:
    """Seconds, when all work that a GPU was asked for is done; as `time.perf_counter` where there is none."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Wall and CPU seconds spent between `start` and `stop`, added up."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = now(), time.process_time()

    def stop(self) -> None:
        self.wall += now() - self._wall
        self.cpu += time.process_time() - self._cpu


def seconds_of(work: Callable[[], Any], count: int = 1) -> float:
    started = now()
    for _ in range(count):
        work()
    return now() - started


def medians(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of a call by way: the ways take turns, after a warm-up of each, some 50 ms at a time."""
    counts = {}
    for way, work in ways.items():
        seconds_of(work, WARM_UP if GPU else 2)
        counts[way] = max(1, min(20, int(0.05 / max(seconds_of(work), 1e-6))))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, work in ways.items():
            taken[way].append(seconds_of(work, counts[way]) / counts[way] * 1000)
    return {way: round(statistics.median(some), 3) for way, some in taken.items()}


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def noise_images(folder: Path, count: int, size: int) -> dict[str, Any]:
    """`[data]` of a study with images without content, in two classes; their content does not change the work.

    A thousand are drawn, and taken again and again: to draw many takes long.
    """
    file = folder / f"noise-{count}-{size}.npz"
    if not file.exists():
        drawn = np.random.default_rng(0).integers(0, 256, (min(count, 1000), size, size, 3), dtype=np.uint8)
        np.savez(file, images=np.resize(drawn, (count, size, size, 3)), labels=np.arange(count) % 2)
    return {"source": "npz", "path": str(file), "size": size}


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Inside it, products of float32 may be rounded as TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
