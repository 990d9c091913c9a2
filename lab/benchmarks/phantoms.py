"""How hard the phantoms are: a small network against a linear model and against guessing.

    python lab/benchmarks/phantoms.py [--quick] [--json FILE] [--only NAME,...] [--size PX]

For each phantom, trains on 1,500 images at 32 px for 20 epochs and tests on 1,000 others. A phantom is worth
ranking methods on where the network is far better than guessing and than a linear model, and far from perfect.
The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.data.datasets.phantoms.phantom import Phantom
from polyclinic.data.datasets.phantoms.skin import SkinPhantom
from polyclinic.models import build, initial_weights
from polyclinic.randomness import torch_rng

#: what is measured: a phantom with its settings, and the task by its metric
TASKS: dict[str, tuple[type[Phantom], dict, str]] = {
    "fundus": (FundusPhantom, {}, "accuracy"),
    "fundus-grades": (FundusPhantom, {"grades": 5}, "accuracy"),
    "hand": (HandPhantom, {}, "mae"),
    "chest": (ChestPhantom, {}, "accuracy"),
    "skin": (SkinPhantom, {}, "accuracy"),
    "brain-classes": (BrainPhantom, {}, "accuracy"),
    "brain": (BrainPhantom, {}, "dice"),
}
BATCH = 32
MONTHS = 50.0  # regression targets are centred and divided by this


@dataclass(frozen=True)
class Kind:
    """A task: the backbone that suits it, its loss, the metric of raw outputs, and the metric of guessing."""

    metric: str
    backbone: str
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    guess: Callable[[Tensor, Tensor], float]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).float().mean().item()


def months_off(outputs: Tensor, targets: Tensor) -> float:
    return (outputs[:, 0] - targets).abs().mean().item() * MONTHS


def dice(logits: Tensor, masks: Tensor) -> float:
    """Over all pixels of all test slices together."""
    found = logits[:, 0] > 0
    return (2 * (found & (masks > 0)).sum() / (found.sum() + masks.sum()).clamp(min=1)).item()


def mask_loss(logits: Tensor, masks: Tensor) -> Tensor:
    chance = torch.sigmoid(logits[:, 0])
    overlap = 1 - (2 * (chance * masks).sum() + 1) / (chance.sum() + masks.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits[:, 0], masks) + overlap


KINDS = {
    "accuracy": Kind(
        "accuracy",
        "small-cnn",
        F.cross_entropy,
        accuracy,
        lambda train, test: (test == train.mode().values).float().mean().item(),
    ),
    "mae": Kind(
        "mean absolute error, months",
        "small-cnn",
        lambda outputs, targets: F.l1_loss(outputs[:, 0], targets),
        months_off,
        lambda train, test: (test - train.median()).abs().mean().item() * MONTHS,
    ),
    "dice": Kind(
        "Dice",
        "unet",
        mask_loss,
        dice,
        lambda train, test: dice(torch.ones_like(test)[:, None], test),
    ),
}


def tensors(data: Dataset, task: str) -> tuple[Tensor, Tensor]:
    """Images float32 [N, C, H, W], and targets as the task wants them."""
    images = (torch.from_numpy(data.images).float() / 255 - 0.5) / 0.25
    labels = torch.from_numpy(data.labels)
    return images, {
        "accuracy": lambda: labels,
        "mae": lambda: (labels - 120) / MONTHS,
        "dice": lambda: torch.from_numpy(data.masks).float(),
    }[task]()


def linear(channels: int, size: int, outputs: int, task: str) -> nn.Module:
    """A linear model: of all pixels, or of the pixel itself where an answer is wanted for each."""
    if task == "dice":
        return nn.Conv2d(channels, 1, 1)
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, outputs))


def train(model: nn.Module, images: Tensor, targets: Tensor, kind: Kind, epochs: int, decay: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=decay)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch_rng(0, "benchmark", "order")
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            if len(batch) < BATCH:
                continue
            optimizer.zero_grad()
            kind.loss(model(images[batch]), targets[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def test(model: nn.Module, images: Tensor, targets: Tensor, kind: Kind) -> float:
    model.eval()
    return kind.score(torch.cat([model(part) for part in images.split(256)]), targets)


def measure(name: str, size: int, train_images: int, test_images: int, epochs: int) -> dict:
    """One row of the result; test images come from the end, so patients of the two sides differ."""
    phantom, settings, task = TASKS[name]
    start = time.perf_counter()
    data = phantom(samples=train_images + test_images, size=size, **settings).load()
    drawn = time.perf_counter() - start
    kind, (images, targets) = KINDS[task], tensors(data, task)
    seen, unseen = slice(0, train_images), slice(train_images, None)
    shape = {"channels": images.shape[1], "size": size, "outputs": len(data.classes) if task == "accuracy" else 1}
    models = {
        "linear": (lambda: linear(**shape, task=task), 1e-1),
        "network": (lambda: build(kind.backbone, **shape), 1e-2),
    }
    row = {"metric": kind.metric, "guess": kind.guess(targets[seen], targets[unseen])}
    for label, (make, decay) in models.items():
        model = make()
        model.load_state_dict(initial_weights(make, seed=0))
        train(model, images[seen], targets[seen], kind, epochs, decay)
        row[label] = test(model, images[unseen], targets[unseen], kind)
    row |= {"seconds_per_1000_images_drawn": drawn / len(data) * 1000, "seconds": time.perf_counter() - start}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images and epochs: a few minutes")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    parser.add_argument("--only", default=",".join(TASKS), help="tasks, separated by commas")
    parser.add_argument("--size", type=int, default=32, help="side of the images, in pixels")
    options = parser.parse_args()
    train_images, test_images, epochs = (1000, 500, 8) if options.quick else (1500, 1000, 20)
    result = {"size": options.size, "train_images": train_images, "test_images": test_images, "epochs": epochs}
    result["tasks"] = {}
    for name in options.only.split(","):
        row = measure(name, options.size, train_images, test_images, epochs)
        result["tasks"][name] = row
        print(
            f"{name:13} {row['metric']:28} guess {row['guess']:7.3f}  linear {row['linear']:7.3f}  "
            f"network {row['network']:7.3f}  ({row['seconds']:.0f} s)",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
