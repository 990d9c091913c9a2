"""What a round of FedAvg costs on a GPU beside a bare loop: bf16, channels last, fused Adam, images on the GPU.

Both take the same number of steps on batches of the same shape, in blocks of rounds in turns; evaluation and
checkpoints are off; gate, ledger and digests are on, and complete at the end of each block. A `tuned` loop is recorded
as a CUDA graph, too. On a machine without a GPU the same runs in fp32 on the CPU, for a try.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, GPU, finish, flags, keep, machine, noise_images, now
from torch import Tensor
from torch.nn import functional

from polyclinic.federation.ledger.digest_threads import BACKGROUND
from polyclinic.models import build
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study

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

    def study(self, folder: Path) -> Study:
        held_out = 2 * self.sites  # a study has test images, if nobody tests
        count = self.sites * self.images_per_site + held_out
        tables: dict[str, Any] = {
            "data": {**noise_images(folder, count, self.size), "validation": 0.0, "test": held_out / count},
            "sites": {"partition": "iid", "count": self.sites},
            "model": {"backbone": self.backbone},
            "optimizer": {"name": "adam", "lr": LR, "batch_size": self.batch_size, "decay_every": 0},
            "method": {"name": "fedavg", "rounds": self.block * (self.turns + 1), "local_steps": self.steps},
            "evaluation": {"every": 0, "select": "last", "final": "none"},
            "engine": {"checkpoint_every": 0, "workers": 1},
        }
        return parse_study(tables)


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
        BACKGROUND.settle()  # the threads of digests
        self.seconds[whose].append((now() - self._begun) / self.case.block)
        self._begun = time.perf_counter()

    def medians(self) -> dict[str, float]:
        """Seconds of a round, without the first block, which warms up."""
        return {whose: statistics.median(found[1:]) for whose, found in self.seconds.items()}


def measure(case: Case, scratch: Path) -> dict[str, Any]:
    """Seconds of a round, and beside the bare loop."""
    blocks = Blocks(case, bare_round(case))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run(case.study(scratch), folder, display=blocks, cache=scratch / "cache")
    found = blocks.medians()
    row = {"bare_seconds": round(found["bare"], 4), "seconds": round(found["ours"], 4)}
    row["ratio"] = round(found["ours"] / found["bare"], 3)
    print(f"{case.case:<40} {row}", file=sys.stderr, flush=True)
    return {**asdict(case), **row}


def main() -> None:
    parser = flags(__doc__, "two tiny cases")
    parser.add_argument("--cases", default="", help="numbers of the cases, such as 1,3; all if not given")
    parser.add_argument("--turns", type=int, help="blocks of rounds that the medians are taken of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = QUICK if options.quick else CASES
    cases = tuple(cases[int(number) - 1] for number in options.cases.split(",") if number) or cases
    figures: dict[str, Any] = {"benchmark": "gpu_round", **machine(), "quick": options.quick, "cases": []}
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            figures["cases"].append(measure(replace(case, turns=options.turns or case.turns), Path(scratch)))
            keep(figures, options)
    finish(figures, options)


if __name__ == "__main__":
    main()
