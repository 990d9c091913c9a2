"""A probe: a small classifier (cross-validated) of real against replayed images, and of the site they come from.

What it finds, a classifier can find too: where labels differ between sites, "this image was replayed" or "this one
went through the generator of site B" gives the label away, and training follows the artefact instead of the anatomy.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.generators.base import initial_networks
from polyclinic.tasks import Classification, Target
from polyclinic.training.generator_loop import Objective, Schedule, descend

FOLDS = 3
PER_GROUP = 500  # images taken of each group; enough to see what matters, and quick
BATCH = 64
STEPS = 100  # optimiser steps in each fold


class ProbeNetwork(nn.Module):
    """Images [B, C, H, W] in [0, 1] to logits [B, groups].

    It is shown each image beside what a blur takes from it, since artefacts lie in the fine detail.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2 * channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, groups),
        )

    def forward(self, images: Tensor) -> Tensor:
        blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
        return self.body(torch.cat([images - 0.5, 8 * (images - blurred)], 1))


def tell_apart(
    groups: Mapping[str, Tensor], rng: torch.Generator, *, paired: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """Cross-validated `accuracy`, `balanced_accuracy` and `auc` (mean over groups) of a probe, and `chance`, which is
    the accuracy of always naming the largest group. An AUC of 0.5 means that nothing tells them apart.

    Groups are uint8 [N, C, H, W] of one shape. Each image is judged once, by a probe that has not seen it. `paired`:
    the i-th image of each group is made of the i-th of the others, and all of them stay on one side of a fold. Sites
    differ in what they show, too: only what replayed images give away *more* than real ones is an artefact.
    """
    if len(groups) < 2 or any(len(images) < FOLDS for images in groups.values()):
        raise BadInput(f"probe: it needs two groups or more of at least {FOLDS} images each")
    if paired and len(sizes := {len(images) for images in groups.values()}) > 1:
        raise BadInput(f"probe: {' and '.join(map(str, sorted(sizes)))} images cannot be pairs")
    images, labels, folds = gather(groups, rng, paired)
    images, labels = images.to(device), labels.to(device)
    logits = torch.zeros(len(images), len(groups))
    for fold in range(FOLDS):
        held_out = (folds == fold).to(device)
        net = train_probe(images[~held_out], labels[~held_out], len(groups), rng)
        with torch.no_grad():
            parts = [net(some.float().div(255)) for some in images[held_out].split(256)]
            logits[held_out.cpu()] = torch.cat(parts).cpu()
    labels, task, target = labels.cpu(), Classification(), Target(classes=tuple(groups))
    found = task.finish(task.sums(task.observe(logits, labels, target), labels, None, target))
    chance = float(labels.bincount().max()) / len(labels)
    return {name: found[name] for name in ("accuracy", "balanced_accuracy", "auc")} | {"chance": chance}


def gather(groups: Mapping[str, Tensor], rng: torch.Generator, paired: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Some images of each group (those of the same places in each, where they are paired), their group, their fold."""
    images, labels, folds = [], [], []
    order = torch.randperm(len(next(iter(groups.values()))), generator=rng)
    for number, members in enumerate(groups.values()):
        if not paired:
            order = torch.randperm(len(members), generator=rng)
        chosen = order[:PER_GROUP]
        images.append(members[chosen])
        labels.append(torch.full((len(chosen),), number))
        folds.append(torch.arange(len(chosen)) % FOLDS)
    return torch.cat(images), torch.cat(labels), torch.cat(folds)


def train_probe(images: Tensor, labels: Tensor, groups: int, rng: torch.Generator) -> nn.Module:
    seed = int(torch.randint(2**62, (), generator=rng))
    made = initial_networks(lambda: {"probe": ProbeNetwork(images.shape[1], groups)}, seed)
    net = made["probe"].to(images.device).train()
    steps_in_pass = max(1, len(images) // BATCH)
    schedule = Schedule(epochs=-(-STEPS // steps_in_pass), batch_size=BATCH, lr=3e-3)

    def loss_of(some: Tensor, theirs: Tensor) -> tuple[Tensor, None]:
        return F.cross_entropy(net(some.float().div(255)), theirs), None

    objective = Objective(net.parameters(), lambda index: (images[index], labels[index]), loss_of)
    descend(objective, len(images), schedule, rng)
    return net.eval()
