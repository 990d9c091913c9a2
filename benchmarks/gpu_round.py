"""What a round of FedAvg costs on a GPU beside a bare loop: bf16, channels last, fused Adam, images on the GPU.

Both take the same number of steps on batches of the same shape, in blocks of rounds in turns; evaluation and
checkpoints are off; gate, ledger and digests are on, and complete at the end of each block. `by bytes` is the way of
engines with several processes: weights leave the GPU, are encoded and digested at once, and batches are copied from
the CPU. By reference, a GPU records whole steps; `passes recorded` is by reference without the optimiser's step in the
CUDA graph. On a machine without a GPU the same runs in fp32 on the CPU, for a try.

`--check` runs a small study both ways with deterministic kernels: ledgers and weights must be the same, byte for byte.
`--profile` also lists what takes longest in a round.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import itertools
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --check

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyclinic.federation.host import SiteHost
from polyclinic.federation.leaving import gate
from polyclinic.federation.ledger import parcel
from polyclinic.federation.ledger.background import BACKGROUND
from polyclinic.models import build
from polyclinic.runner.assembly import Assembly
from polyclinic.runner.recorder import Display
from polyclinic.runner.run import run
from polyclinic.study import parse_study
from polyclinic.training import device_images
from polyclinic.training.loop import Trainer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LR = 1e-3


@dataclass(frozen=True)
class Case:
    """One setting in which the loops are timed. `block`: rounds between two turns."""

    case: str
    backbone: str
    size: int
    sites: int
    steps: int
    batch_size: int = 32
    block: int = 3
    turns: int = 4
    tuned: bool = False  #: the bare loop's steps are recorded as a CUDA graph, too

    @property
    def images_per_site(self) -> int:
        return self.steps * self.batch_size


CASES = (
    Case("ResNet-18, 64 px, 4 sites x 15 steps", "resnet18", 64, sites=4, steps=15),
    Case("ResNet-18, 224 px, 4 sites x 4 steps", "resnet18", 224, sites=4, steps=4),
    Case("small CNN, 32 px, 64 sites x 4 steps", "small-cnn", 32, sites=64, steps=4),
    Case("ResNet-34, 256 px, 4 sites x 30 steps, tuned loop", "resnet34", 256, sites=4, steps=30, block=2, tuned=True),
    Case("ResNet-34, 256 px, 4 sites x 15 steps, tuned loop", "resnet34", 256, sites=4, steps=15, block=3, tuned=True),
)
QUICK = (
    Case("ResNet-18, 32 px, 2 sites x 1 step", "resnet18", 32, sites=2, steps=1, batch_size=4, block=1, turns=2),
    Case("small CNN, 32 px, 8 sites x 2 steps", "small-cnn", 32, sites=8, steps=2, batch_size=8, block=2, turns=2),
)


def tables(case: Case, folder: Path, rounds: int, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The study of a case; its images are noise, written once."""
    archive = folder / f"{case.backbone}-{case.size}-{case.sites}.npz"
    held_out = 2 * case.sites  # a study has test images, if nobody tests
    count = case.sites * case.images_per_site + held_out
    if not archive.exists():
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (count, case.size, case.size, 3), dtype=np.uint8)
        np.savez(archive, images=images, labels=np.arange(count) % 2)
    return {
        "data": {"source": "npz", "path": str(archive), "size": case.size, "validation": 0.0, "test": held_out / count},
        "sites": {"partition": "iid", "count": case.sites},
        "model": {"backbone": case.backbone},
        "optimizer": {"name": "adam", "lr": LR, "batch_size": case.batch_size, "decay_every": 0},
        "method": {"name": "fedavg", "rounds": rounds, "local_steps": case.steps},
        "evaluation": {"every": 0, "select": "last", "final": "none"},
        "engine": {"checkpoint_every": 0, "workers": 1, **engine},
    }


# --- the bare loop ------------------------------------------------------------------------------------


def bare_round(case: Case) -> Callable[[], None]:
    """One round of FedAvg in plain PyTorch: fresh Adam at each site, the mean of the weights on the device."""
    model = build(case.backbone, channels=3, outputs=2, size=case.size, norm="batch").to(DEVICE)
    model = model.to(memory_format=torch.channels_last).train()
    images = torch.randint(0, 256, (case.sites, case.images_per_site, case.size, case.size, 3), dtype=torch.uint8)
    images, labels = images.to(DEVICE), torch.arange(case.images_per_site, device=DEVICE) % 2
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU)

    def learn(batch: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer) -> None:
        batch = batch.permute(0, 3, 1, 2).float().div_(255)
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            output = model(batch)
        functional.cross_entropy(output.float(), targets).backward()
        optimizer.step()

    step = RecordedStep(case, model, learn) if case.tuned and GPU else None

    def train(own: Tensor) -> list[Tensor]:
        optimizer = step.restart() if step else torch.optim.Adam(model.parameters(), LR, fused=GPU)
        for index in torch.randperm(len(own)).to(DEVICE).split(case.batch_size):
            (step or learn)(own[index], labels[index], optimizer)
        return [tensor.clone() for tensor in model.state_dict().values()]

    def one_round() -> None:
        before = [tensor.clone() for tensor in model.state_dict().values()]
        sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in before]
        for own in images:
            for tensor, value in zip(model.state_dict().values(), before, strict=True):
                tensor.copy_(value)
            for total, tensor in zip(sums, train(own), strict=True):
                total.add_(tensor.double())
        for tensor, total in zip(model.state_dict().values(), sums, strict=True):
            tensor.copy_(total / case.sites)

    return one_round


class RecordedStep:
    """A training step of plain PyTorch as one CUDA graph, optimiser included."""

    def __init__(self, case: Case, model: torch.nn.Module, learn: Callable[..., None]) -> None:
        self.optimizer = torch.optim.Adam(model.parameters(), LR, fused=True, capturable=True)
        shape = (case.batch_size, case.size, case.size, 3)
        self.images = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        self.targets = torch.zeros(case.batch_size, dtype=torch.int64, device=DEVICE)
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                learn(self.images, self.targets, self.optimizer)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream):
            learn(self.images, self.targets, self.optimizer)

    def restart(self) -> torch.optim.Optimizer:
        """A fresh Adam: its state is zero again."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        return self.optimizer

    def __call__(self, images: Tensor, targets: Tensor, _: torch.optim.Optimizer) -> None:
        self.images.copy_(images)
        self.targets.copy_(targets)
        self.graph.replay()


# --- ours ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_bytes() -> Iterator[None]:
    """Runs inside it hand parcels over as engines with several processes do."""
    handle = SiteHost.handle

    def as_bytes(host: SiteHost, call: Any) -> Any:
        host.by_reference = False
        reply = handle(host, type(call).from_bytes(call.to_bytes()))
        return type(reply).from_bytes(reply.to_bytes())

    with (
        mock.patch.object(Assembly, "weights_device", "cpu"),
        mock.patch.object(SiteHost, "handle", as_bytes),
        mock.patch.object(device_images, "SHARE", 0.0),
    ):
        yield


@contextlib.contextmanager
def all_soon() -> Iterator[None]:
    """Inside it, small parcels are digested beside training like large ones."""
    with mock.patch.object(gate, "PAYS_FROM", 0), mock.patch.object(parcel, "PAYS_FROM", 0):
        yield


@contextlib.contextmanager
def passes_recorded() -> Iterator[None]:
    """Inside it, optimisers take their steps, and batches are chosen, between recorded passes."""
    with mock.patch.object(Trainer, "_recorded_steps", return_value=None):
        yield


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "by bytes": by_bytes,
    "by reference": contextlib.nullcontext,
    "by reference, passes recorded": passes_recorded,
}


def settle() -> None:
    """Until the GPU and the threads of digests have nothing left to do."""
    BACKGROUND.settle()
    if GPU:
        torch.cuda.synchronize()


class Blocks(Display):
    """Watches a run, and lets the bare loop take as many rounds after every block of them."""

    def __init__(self, case: Case, bare: Callable[[], None]) -> None:
        self.case, self.bare = case, bare
        self.seconds: dict[str, list[float]] = {"ours": [], "bare": []}

    def started(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
        if line["round"] % self.case.block:
            return
        self._note("ours")
        for _ in range(self.case.block):
            self.bare()
        self._note("bare")

    def _note(self, whose: str) -> None:
        settle()
        now = time.perf_counter()
        self.seconds[whose].append((now - self._begun) / self.case.block)
        self._begun = time.perf_counter()

    def medians(self) -> dict[str, float]:
        """Seconds of a round, without the first block, which warms up."""
        return {whose: statistics.median(found[1:]) for whose, found in self.seconds.items()}


def measure(case: Case, scratch: Path, engine: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """Seconds of a round each way, and beside the bare loop."""
    rows: dict[str, Any] = {}
    for way, around in ((name, WAYS[name]) for name in ways):
        blocks = Blocks(case, bare_round(case))
        study = parse_study(tables(case, scratch, case.block * (case.turns + 1), engine))
        with around(), tempfile.TemporaryDirectory(dir=scratch) as folder:
            run(study, folder, display=blocks, cache=scratch / "cache")
        medians = blocks.medians()
        rows[way] = {
            "bare_seconds": round(medians["bare"], 4),
            "seconds": round(medians["ours"], 4),
            "ratio": round(medians["ours"] / medians["bare"], 3),
        }
        print(f"{case.case:<40} {way:<13} {rows[way]}", file=sys.stderr, flush=True)
    return {**asdict(case), "ways": rows}


# --- the same bytes both ways ----------------------------------------------------------------------------


def check(scratch: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Ledgers and weights of a small study each way, and twice by reference."""
    case = Case("check", "small-cnn", 32, sites=3, steps=4, batch_size=8)
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    for name, way in (("bytes", "by bytes"), ("reference", "by reference"), ("again", "by reference")):
        with WAYS[way](), all_soon(), tempfile.TemporaryDirectory(dir=scratch) as folder:
            result = run(parse_study(tables(case, scratch, 3, engine)), folder, cache=scratch / "cache")
            ledgers = [path.read_text() for path in sorted(Path(folder, "ledger").iterdir())]
            found[name] = (result["weights_sha256"], result["communication"], ledgers)
    torch.use_deterministic_algorithms(False)
    return {
        "deterministic": found["reference"] == found["again"],
        "same_ledgers": found["bytes"][2] == found["reference"][2],
        "same_communication": found["bytes"][1] == found["reference"][1],
        "same_weights": found["bytes"][0] == found["reference"][0],
    }


# --- profiles -----------------------------------------------------------------------------------------


class Profiled(Display):
    """Profiles the rounds after the first two."""

    def __init__(self) -> None:
        self.python = cProfile.Profile()
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * GPU
        self.torch = torch.profiler.profile(activities=kinds)

    def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
        if line["round"] == 2:
            settle()
            self.python.enable()
        if line["round"] == 4:
            self.python.disable()
            self.torch.start()
        if line["round"] == 5:
            settle()
            self.torch.stop()


def profile(case: Case, scratch: Path, engine: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """What takes longest in a round: Python functions by their own seconds (two rounds), kernels and calls of torch
    (one round)."""
    found = {}
    for way, around in ((name, WAYS[name]) for name in ways):
        seen = Profiled()
        with around(), tempfile.TemporaryDirectory(dir=scratch) as folder:
            run(parse_study(tables(case, scratch, 5, engine)), folder, display=seen, cache=scratch / "cache")
        stats = pstats.Stats(seen.python).stats  # type: ignore[attr-defined]
        python = sorted(((value[2] / 2, value[0], place_of(key)) for key, value in stats.items()), reverse=True)
        within = sorted(((value[3] / 2, value[0], place_of(key)) for key, value in stats.items()), reverse=True)
        events = seen.torch.key_averages()
        calls = sorted(events, key=lambda event: -event.self_cpu_time_total)[:15]
        kernels = sorted(events, key=lambda event: -event.self_device_time_total)[:15] if GPU else []
        found[way] = {
            "python_ms": [[round(1000 * own, 2), calls, where] for own, calls, where in python[:25]],
            "python_with_callees_ms": [[round(1000 * all_, 2), calls, where] for all_, calls, where in within[:80]],
            "torch_cpu_ms": [[round(e.self_cpu_time_total / 1000, 2), e.count, e.key] for e in calls],
            "gpu_ms": [[round(e.self_device_time_total / 1000, 2), e.count, e.key[:80]] for e in kernels],
        }
    return {"case": case.case, **found}


def place_of(key: tuple[str, int, str]) -> str:
    file, line, name = key
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


# --- the program --------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if GPU else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or commit.stdout.strip() or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tiny cases")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, after every case")
    parser.add_argument("--check", action="store_true", help="only compare ledgers and weights both ways")
    parser.add_argument("--profile", action="store_true", help="also list what takes longest")
    parser.add_argument("--cases", default="", help="numbers of the cases, such as 1,3; all if not given")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS)[:2], help="the first two if not given"
    )
    parser.add_argument("--turns", type=int, help="blocks of rounds that the medians are taken of")
    parser.add_argument("--set", action="append", default=[], help="a setting of the engine: graphs=true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = QUICK if options.quick else CASES
    cases = tuple(cases[int(number) - 1] for number in options.cases.split(",") if number) or cases
    cases = tuple(replace(case, turns=options.turns or case.turns) for case in cases)
    engine = {name: json.loads(value) for name, value in (one.split("=", 1) for one in options.set)}
    figures: dict[str, Any] = {"benchmark": "gpu_round", **machine(), "engine": engine, "quick": options.quick}
    with tempfile.TemporaryDirectory() as scratch:
        if options.check:
            figures["check"] = check(Path(scratch), engine)
        works = {"cases": measure} | ({"profiles": profile} if options.profile else {})
        for name, case in itertools.product(works, () if options.check else cases):
            figures.setdefault(name, []).append(works[name](case, Path(scratch), engine, options.ways))
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    if options.check and not all(figures["check"].values()):
        raise SystemExit("the two ways did not leave the same bytes")


if __name__ == "__main__":
    main()
