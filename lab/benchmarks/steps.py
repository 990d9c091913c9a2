"""Training steps on a GPU: eager, recorded as a CUDA graph, and with the networks of many sites stacked.

The yardstick is a frozen plain loop: bfloat16, channels-last, fused Adam, images on the device, one network after the
other. Each row has milliseconds of one step of all its networks, medians of interleaved repeats. These rows are what
`engine.graphs = "auto"` and `engine.stacked = "auto"` were chosen by.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, GPU, finish, flags, keep, machine, medians
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import polyclinic
from polyclinic.models import build
from polyclinic.study import parse_study
from polyclinic.training.gpu.graphs import GraphedGradients
from polyclinic.training.gpu.stacking import StackedGradients, StackedModel

#: (backbone, side, images in a batch) of one network
ALONE = (
    ("small-cnn", 32, 32),
    ("lenet5", 32, 8),
    ("resnet18", 64, 32),
    ("resnet18", 224, 32),
    ("resnet34", 256, 32),
    ("resnet50", 224, 32),
    ("unet", 64, 16),
)
#: (backbone, side, images in a batch, networks)
STACKED = (
    ("small-cnn", 32, 32, 4),
    ("small-cnn", 32, 32, 16),
    ("small-cnn", 32, 32, 64),
    ("lenet5", 32, 8, 16),
    ("lenet5", 32, 8, 64),
    ("resnet18", 64, 32, 4),
    ("resnet18", 64, 32, 16),
)
Way = Callable[[], Any]


def network(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build(name, channels=1, outputs=1 if name == "unet" else 3, size=size).to(DEVICE).train()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch(size: int, *shape: int) -> tuple[Tensor, Tensor]:
    images = torch.rand(*shape, 1, size, size, device=DEVICE)
    return images, torch.arange(images[..., 0, 0, 0].numel(), device=DEVICE).view(shape) % 3


def autocast() -> contextlib.AbstractContextManager:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    if output.dim() == 4:
        return (output.mean((1, 2, 3)) - targets).square().mean()
    return F.cross_entropy(output, targets)


def adam(parameters: Any, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters), 1e-4, fused=fused)


def eager_step(name: str, size: int, rows: int) -> Way:
    """One step of the frozen plain loop."""
    model = network(name, size)
    optimizer = adam(model.parameters(), fused=GPU)
    images, targets = batch(size, rows)
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            output = model(images)
        loss(output.float(), targets).backward()
        optimizer.step()

    return step


def recorded_step(name: str, size: int, rows: int, *, fused: bool) -> Way:
    model = network(name, size)

    def of_batch(images: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            output = model(images)
        return loss(output.float(), targets)

    learn, optimizer = GraphedGradients(model, of_batch), adam(model.parameters(), fused=fused)
    images, targets = batch(size, rows)
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        learn(images, targets)
        optimizer.step()

    return step


def stacked_step(name: str, size: int, rows: int, members: int, *, graphs: bool) -> Way:
    model = StackedModel(network(name, size), members)

    def of_batches(images: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            output = model(images)
        return torch.func.vmap(loss)(output.float(), targets)

    learn = StackedGradients(model, of_batches, graphs=graphs)
    optimizer = adam(model.parameters.values(), fused=GPU)
    images, targets = batch(size, members, rows)

    def step() -> None:
        learn(images, targets)
        optimizer.step()

    return step


def in_turn(step: Way, members: int) -> Way:
    """The plain loop over the networks of all sites: the same step again, as they all have the same shape."""

    def steps() -> None:
        for _ in range(members):
            step()

    return steps


def measure_alone(name: str, size: int, rows: int, repeats: int) -> dict[str, Any]:
    ways = {"eager": eager_step(name, size, rows)}
    if GPU:
        ways["graph"] = recorded_step(name, size, rows, fused=False)
        ways["graph, fused optimiser"] = recorded_step(name, size, rows, fused=True)
    return {"backbone": name, "size": size, "batch": rows, "networks": 1, "milliseconds": medians(ways, repeats)}


def measure_stacked(name: str, size: int, rows: int, members: int, repeats: int) -> dict[str, Any]:
    ways = {"eager": in_turn(eager_step(name, size, rows), members)}
    ways["stacked"] = stacked_step(name, size, rows, members, graphs=False)
    if GPU:
        ways["graph"] = in_turn(recorded_step(name, size, rows, fused=True), members)
        ways["stacked, graph"] = stacked_step(name, size, rows, members, graphs=True)
    return {"backbone": name, "size": size, "batch": rows, "networks": members, "milliseconds": medians(ways, repeats)}


def check_engine(graphs: bool) -> dict[str, Any]:
    """Weights of a run whose sites train as a stack, beside those of sites one by one, in float32."""

    def weights(stacked: str, seed: int = 0) -> Tensor:
        tables: dict[str, Any] = {
            "seed": seed,
            "data": {"source": "skin-phantom", "size": 32, "samples": 400},
            "sites": {"partition": "dirichlet", "count": 6, "alpha": 1.0, "min_size": 20},
            "model": {"backbone": "small-cnn"},
            "optimizer": {"lr": 0.01, "batch_size": 16},
            "method": {"name": "fedavg", "rounds": 3, "local_epochs": 2},
            "evaluation": {"every": 0, "select": "last", "final": "none"},
            "engine": {"workers": 1, "precision": "fp32", "stacked": stacked, "graphs": graphs},
        }
        with tempfile.TemporaryDirectory() as folder:
            result = polyclinic.run(parse_study(tables), Path(folder) / "run")
            found = load_file(result.folder / "model.safetensors")
        return torch.cat([one.double().flatten() for one in found.values()])

    alone = weights("never")
    stacked, again, other = weights("always"), weights("never"), weights("never", 1)
    figures = {"stacked": stacked, "one by one, again": again, "another seed": other}
    away = {name: float((one - alone).norm() / alone.norm()) for name, one in figures.items()}
    return {"check": "relative distance of the weights from those of sites one by one", "graphs": graphs, **away}


def main() -> None:
    parser = flags(__doc__, "the small networks only, and two repeats")
    parser.add_argument("--stacked", action="store_true", help="the rows with several networks only")
    options = parser.parse_args()
    repeats = 2 if options.quick else 5
    cases: list[tuple[Any, ...]] = [*STACKED, *(() if options.stacked else ALONE)]
    if options.quick:
        cases = [*ALONE[:2], STACKED[0]]
    figures: dict[str, Any] = {"benchmark": "steps", **machine(), "rows": [check_engine(graphs=GPU)]}
    for case in cases:
        print(figures["rows"][-1], flush=True)
        try:
            row = measure_stacked(*case, repeats) if len(case) == 4 else measure_alone(*case, repeats)
        except RuntimeError as error:  # no memory, or no kernel: the other rows are worth having
            row = {"case": list(case), "failed": str(error)[:200]}
        figures["rows"].append(row)
        keep(figures, options)
    finish(figures, options)


if __name__ == "__main__":
    main()
