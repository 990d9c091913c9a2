"""The loop in which the networks of a generator learn: shuffled passes, Adam, a learning rate that falls in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyclinic.randomness import seeded


@dataclass(frozen=True)
class Schedule:
    """`decay` multiplies the learning rate after every `decay_every` epochs, 0 for never; `fade` has it fall, besides,
    evenly from epoch to epoch, towards zero."""

    epochs: int
    batch_size: int
    lr: float
    decay: float = 1.0
    decay_every: int = 0
    fade: bool = False

    def lr_in(self, epoch: int) -> float:
        """The learning rate of an epoch; epochs count from 0."""
        left = 1 - epoch / self.epochs if self.fade else 1.0
        return left * self.lr * self.decay ** (epoch // self.decay_every if self.decay_every else 0)

    def batches(self, images: int, rng: torch.Generator) -> Iterable[Tensor]:
        """Indices of one shuffled pass, floor(images / batch_size) batches of nearly the same size, at least one."""
        order = torch.randperm(images, generator=rng)
        return order.tensor_split(max(1, images // self.batch_size))


#: rows of one batch: the images at some indices, and what replay joins to them
Rows = tuple[Tensor, ...]
#: learns with differential privacy, from the network, the loss of each row, the batch of some indices (and of seeds for
#: the draws of each of these images), the schedule, and how many rows replay joins to a batch
LearnPrivately = Callable[[nn.Module, Callable[..., Tensor], Callable[[Tensor, Tensor], Rows], Schedule, int], None]


def descend(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    images: int,
    schedule: Schedule,
    rng: torch.Generator,
    report: Callable[[int, int, float], None],
) -> float:
    """Lower `loss_of(index)`, the mean loss of a batch given as indices, with Adam; the last epoch's mean loss.

    `report(epochs done, epochs in all, mean loss)` is called after every epoch.
    """
    optimizer = torch.optim.Adam([one for one in parameters if one.requires_grad], schedule.lr)
    mean = float("nan")
    for epoch in range(schedule.epochs):
        optimizer.param_groups[0]["lr"] = schedule.lr_in(epoch)
        losses = []
        for index in schedule.batches(images, rng):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(index)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = float(torch.stack(losses).mean())
        report(epoch + 1, schedule.epochs, mean)
    return mean


@contextmanager
def own_dropout(device: torch.device, rng: torch.Generator) -> Iterator[None]:
    """A while in which dropout, which can draw from torch's global generators only, draws what `rng` says.

    The global state is put back afterwards.
    """
    seed = int(torch.randint(2**62, (), generator=rng))
    gpus = [device] if device.type == "cuda" else []
    with seeded(seed, gpus=gpus):
        yield
