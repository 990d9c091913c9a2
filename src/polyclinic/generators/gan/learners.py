"""Many classifiers of one shape that learn at once, each from images of its own: what made images are worth, quickly.

The stacked form of `utility` for experiments with dozens of owners on a GPU; the same question, and the same answer up
to the draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.owners import Images, StackedBatches
from polyclinic.generators.gan.recorded import Recorded
from polyclinic.generators.gan.stack import Stacked
from polyclinic.generators.gan.stacked_convolutions import Down
from polyclinic.generators.gan.trainer import Dice, ManyDice, StackDice, adam
from polyclinic.randomness import device_rng, torch_rng

CHUNK_PIXELS = 2**22  # of all learners' images together that are scored at a time
CHECKS = 5


@dataclass(frozen=True)
class Lesson:
    """What one classifier learns from, the real images it is selected by, and its seed."""

    train: Images
    validation: Images
    seed: int


def teach(
    lessons: Sequence[Lesson],
    builder: Callable[[], nn.Module],
    classes: int,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    device: str,
    flips: bool = True,
    as_products: bool = False,
    recorded: bool = False,
) -> Taught:
    """Train a classifier for each lesson with Adam, and keep each as it was when it did best on validation images;
    `recorded`: have a GPU run a step as one CUDA graph."""
    where = torch.device(device)
    networks = [initial_networks(lambda: {"net": builder()}, lesson.seed)["net"].to(where) for lesson in lessons]
    stacked = Stacked(networks, as_products=as_products)
    batches = StackedBatches([lesson.train for lesson in lessons], batch_size, True, where)
    dice = _dice(lessons, where)
    optimizer = adam(list(stacked.parameters.values()), lr, recordable=recorded)
    best = Best(stacked, len(lessons), where)

    def step(dice: Dice) -> dict[str, Tensor]:
        images, labels = batches.next(dice)
        if flips:
            turned = dice.uniform(batch_size)[..., None, None, None] < 0.5
            images = torch.where(turned, images.flip(-1), images)
        optimizer.zero_grad(set_to_none=True)
        logits = stacked(images)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten().long(), reduction="none")
        losses.reshape(labels.shape).mean(1).sum().backward()
        optimizer.step()
        return {"loss": losses.detach()}

    take = Recorded(step, (dice,)) if recorded else functools.partial(step, dice)
    for number in range(1, steps + 1):
        take()
        if number % max(1, steps // CHECKS) == 0 or number == steps:
            best.keep(validation_scores(stacked, lessons, classes))
    return Taught(stacked, best, classes)


def _dice(lessons: Sequence[Lesson], device: torch.device) -> Dice:
    """Every learner has its own on a CPU; on a GPU all have the same one, for the sake of speed."""
    if device.type == "cpu":
        return ManyDice([torch_rng(lesson.seed) for lesson in lessons], device)
    return StackDice(device_rng(device, lessons[0].seed), len(lessons), device)


class LessonNetwork(nn.Sequential):
    """The classifier of FELICIA's third experiment: convolutions with 64, 128 and 64 filters, a dense layer of 32, the
    head. Kernels and strides, which the paper does not give, are those of the GANs."""

    def __init__(self, channels: int, outputs: int, size: int) -> None:
        if size % 8:
            raise BadInput(f"learners: images of {size} px cannot be halved three times; pad them to a multiple of 8")
        super().__init__(
            *(Down(channels, 64), nn.ReLU(), Down(64, 128), nn.ReLU(), Down(128, 64), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * (size // 8) ** 2, 32), nn.ReLU(), nn.Linear(32, outputs)),
        )


class Best:
    """Each learner's weights at its own best moment, and its score then, [M]."""

    def __init__(self, stacked: Stacked, count: int, device: torch.device) -> None:
        self.stacked = stacked
        self.scores = torch.full((count,), -torch.inf, device=device)
        self.tensors = {name: tensor.detach().clone() for name, tensor in stacked.tensors.items()}

    @torch.no_grad()
    def keep(self, scores: Tensor) -> None:
        better = scores.to(self.scores.device) > self.scores
        self.scores = torch.where(better, scores.to(self.scores.device), self.scores)
        for name, kept in self.tensors.items():
            now = self.stacked.tensors[name]
            kept.copy_(torch.where(better.reshape(-1, *[1] * (kept.dim() - 1)), now, kept))


class Taught:
    """Classifiers at their best; `scores` [M] on validation images."""

    def __init__(self, stacked: Stacked, best: Best, classes: int) -> None:
        self.stacked, self.classes = stacked, classes
        self.scores = best.scores.cpu()
        with torch.no_grad():
            for name, tensor in stacked.tensors.items():
                tensor.copy_(best.tensors[name])

    def logits(self, images: Tensor) -> Tensor:
        """What every classifier says about the same images uint8 [N, C, H, W]: [M, N, classes]."""
        return self.logits_of_each([images] * len(self.scores))

    def logits_of_each(self, sets: list[Tensor]) -> Tensor:
        """What every classifier says about images of its own; all have as many."""
        return _logits(self.stacked, sets)


@torch.no_grad()
def _logits(stacked: Stacked, sets: list[Tensor]) -> Tensor:
    """Each classifier on a set of its own; sets are equally large."""
    stacked.layout.eval()
    size = max(1, CHUNK_PIXELS // sets[0].shape[-1] ** 2 // len(sets))
    device = next(iter(stacked.tensors.values())).device
    found = []
    for start in range(0, len(sets[0]), size):
        rows = torch.stack([one[start : start + size] for one in sets]).to(device)
        found.append(stacked(rows.float().div_(127.5).sub_(1)).float())
    stacked.layout.train()
    return torch.cat(found, 1)


def validation_scores(stacked: Stacked, lessons: Sequence[Lesson], classes: int) -> Tensor:
    """AUC (of two classes) or balanced accuracy of each learner on its own validation images, [M]; ties by the loss."""
    size = max(len(lesson.validation.images) for lesson in lessons)
    sets = [lesson.validation.images[torch.arange(size) % len(lesson.validation.images)] for lesson in lessons]
    logits = _logits(stacked, sets).cpu()
    found = []
    for lesson, of_one in zip(lessons, logits, strict=True):
        labels = lesson.validation.labels
        known = of_one[: len(labels)]
        loss = float(F.cross_entropy(known, labels.long()))
        found.append(quality(known, labels, classes) - 1e-6 * loss)
    return torch.tensor(found)


def quality(logits: Tensor, labels: Tensor, classes: int) -> float:
    """AUC where there are two classes, else balanced accuracy."""
    if classes == 2:
        return auc((logits[:, 1] - logits[:, 0]).numpy(), labels.numpy() == 1)
    right = (logits.argmax(1) == labels).float()
    return float(torch.stack([right[labels == one].mean() for one in labels.unique()]).mean())


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive one scores above a negative one; ties count half."""
    order = np.sort(scores[~positive])
    below = np.searchsorted(order, scores[positive], "left") + np.searchsorted(order, scores[positive], "right")
    return float(below.mean() / 2 / max(1, len(order)))
