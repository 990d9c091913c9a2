"""The loop in which the networks of a generator learn: shuffled passes, Adam, a learning rate that falls in steps."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from polyclinic.randomness import seeded
from polyclinic.training.gpu.graphs import GraphedFunction


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

    def batches(self, images: int, rng: torch.Generator, device: torch.device | str = "cpu") -> Iterable[Tensor]:
        """Indices of one shuffled pass, floor(images / batch_size) batches of nearly the same size, at least one.

        They are sent to the device together: a GPU would wait for each copy.
        """
        order = torch.randperm(images, generator=rng).to(device)
        return order.tensor_split(max(1, images // self.batch_size))


#: rows of one batch: the images at some indices, and what replay joins to them
Rows = tuple[Tensor, ...]
#: learns with differential privacy, from the network, the loss of each row, the batch of some indices (and of seeds for
#: the draws of each of these images), the schedule, and how many rows replay joins to a batch
LearnPrivately = Callable[[nn.Module, Callable[..., Tensor], Callable[[Tensor, Tensor], Rows], Schedule, int], None]


@dataclass(frozen=True)
class Objective:
    """What `descend` lowers.

    `batch_of(index)` gives the rows of a batch, by indices that lie where the parameters are, and `loss_of(*rows)` its
    loss with whatever `after` wants to see once the step is taken. On a GPU a step is recorded as a CUDA graph, so
    `loss_of` must ask it for no number there; `draws` are the GPU's generators that it draws from.
    """

    parameters: Iterable[nn.Parameter]
    batch_of: Callable[[Tensor], Rows]
    loss_of: Callable[..., tuple[Tensor, Any]]
    after: Callable[[Any], None] = lambda _: None
    draws: Sequence[torch.Generator] = ()


def descend(
    objective: Objective,
    images: int,
    schedule: Schedule,
    rng: torch.Generator,
    report: Callable[[int, int, float], None] = lambda *_: None,
) -> float:
    """Lower the mean loss of batches with Adam; the last epoch's mean loss.

    `report(epochs done, epochs in all, mean loss)` is called after every epoch.
    """
    learned = [one for one in objective.parameters if one.requires_grad]
    optimizer, recorded = adam(learned, schedule.lr), steps_are_recorded(learned)

    def step(*rows: Tensor) -> tuple[Tensor, Any]:
        optimizer.zero_grad(set_to_none=True)
        loss, more = objective.loss_of(*rows)
        loss.backward()
        optimizer.step()
        return loss.detach(), more

    take = GraphedFunction(step, "a step of a generator", rngs=objective.draws) if recorded else step
    mean = float("nan")
    for epoch in range(schedule.epochs):
        group, lr = optimizer.param_groups[0], schedule.lr_in(epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        losses = []
        for index in schedule.batches(images, rng, learned[0].device):
            loss, more = take(*objective.batch_of(index))
            objective.after(more)
            losses.append(loss.clone())  # the next replay writes into the same tensor
        mean = float(torch.stack(losses).mean())
        report(epoch + 1, schedule.epochs, mean)
    return mean


def steps_are_recorded(parameters: Sequence[Tensor]) -> bool:
    """On a GPU, unless `engine.reproducible` forbids what rounds differently."""
    return bool(parameters) and parameters[0].is_cuda and not torch.are_deterministic_algorithms_enabled()


def adam(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Adam:
    """Adam; where steps are recorded, with a rate that lies on the GPU and can change between them."""
    if not steps_are_recorded(parameters):
        return Adam(parameters, lr)
    rate = torch.tensor(lr, device=parameters[0].device)
    return Adam(parameters, rate, fused=True, capturable=True)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Of passes, where the study computes in bf16."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def own_dropout(device: torch.device, rng: torch.Generator) -> Iterator[None]:
    """A while in which dropout, which can draw from torch's global generators only, draws what `rng` says.

    The global state is put back afterwards.
    """
    seed = int(torch.randint(2**62, (), generator=rng))
    gpus = [device] if device.type == "cuda" else []
    with seeded(seed, gpus=gpus):
        yield
