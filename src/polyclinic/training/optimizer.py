"""The `[optimizer]` table: optimiser, learning rate and its decay; and an optimiser's state from round to round."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from polyclinic.settings import Settings
from polyclinic.training.augmentation import Augmentation

if TYPE_CHECKING:
    from polyclinic.federation.federation import Federation, State
    from polyclinic.federation.site import Site


class Optimizer(Settings):
    """The `[optimizer]` table: how a site takes its steps."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="sgd, adam or adamw")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    batch_size: int = Field(32, ge=1, description="images in a mini-batch")
    batch_sizes: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="images in a mini-batch at sites that have another number: { north = 8 }"
    )
    schedule: Literal["step", "cosine"] = Field(
        "step", description="how lr falls: in steps (decay, decay_every), or along a cosine from lr to nearly 0"
    )
    warmup: int = Field(0, ge=0, description="rounds at the beginning in which lr rises evenly to its full value")
    decay_every: int = Field(35, ge=0, description="rounds after which lr is multiplied by decay; 0 for never")
    decay: float = Field(0.1, gt=0, le=1, description="factor of the step decay")
    keep_state: bool = Field(False, description="keep momentum (or Adam's moments) at a site from round to round")
    augment: tuple[Augmentation, ...] = Field(
        (),
        description="random augmentation of training images: flip (left-right), turn (by 90 degrees), crop (a window, "
        "enlarged), rotate (up to 15 degrees), brightness, contrast, noise, mixup (of two images and their labels)",
    )
    balanced_batches: bool = Field(False, description="draw a site's classes equally often, by its own counts")

    _rounds: int = PrivateAttr(0)
    _fused: bool = PrivateAttr(True)

    def over(self, rounds: int, *, fused: bool = True) -> Self:
        """The same settings for a run of so many rounds, which a cosine must know.

        `fused`: on a GPU, steps may be computed by one kernel for all parameters, which rounds differently.
        """
        known = self.model_copy()
        known._rounds, known._fused = rounds, fused
        return known

    def at_site(self, site: str) -> Self:
        """The same settings with the site's own batch size as `batch_size`."""
        size = self.batch_sizes.get(site, self.batch_size)
        return self if size == self.batch_size else self.model_copy(update={"batch_size": size})

    def make(self, parameters: Iterable[nn.Parameter], round: int) -> torch.optim.Optimizer:
        """A fresh optimiser, its learning rate decayed for `round` (rounds count from 1)."""
        given, lr = list(parameters), self.lr_in(round)
        on_gpu = bool(given) and all(one.is_cuda for one in given)
        # a fused step wants its state to lie in memory as the parameters do, and a kept one does not
        fused = (on_gpu and self._fused and not self.keep_state) or None
        if self.name == "sgd":
            return SGD(given, lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=fused)
        return (Adam if self.name == "adam" else AdamW)(given, lr, weight_decay=self.weight_decay, fused=fused)

    def lr_in(self, round: int) -> float:
        """The learning rate of a round (rounds count from 1): warming up first, then falling."""
        done = max(round, 1) - 1
        if done < self.warmup:
            return self.lr * (done + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            share = (done - self.warmup) / max(self._rounds - self.warmup, 1)
            return self.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.lr * self.decay ** (done // self.decay_every if self.decay_every else 0)


# --- state from round to round, as tensors --------------------------------------------------------


def start_optimizer(site: "Site", model: nn.Module, group: str = "optimizer") -> torch.optim.Optimizer:
    """A fresh optimiser for the site's round, with the state of its last one where that is kept.

    `group` is the name it is kept under: a site that trains two models has two.
    """
    optimizer = site.trainer.optimizer.make(model.parameters(), site.round)
    if site.trainer.optimizer.keep_state:
        restore_optimizer(optimizer, site.state.group(group))
    return optimizer


def keep_optimizer(site: "Site", optimizer: torch.optim.Optimizer, group: str = "optimizer") -> None:
    if site.trainer.optimizer.keep_state:
        site.state.put(group, optimizer_tensors(optimizer))


def coordinator_optimizer(
    federation: "Federation", state: "State", parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same for a coordinator that trains; its optimiser's state is kept in the method's."""
    optimizer = federation.trainer.optimizer.make(iter(parameters), federation.round)
    if federation.trainer.optimizer.keep_state:
        restore_optimizer(optimizer, getattr(state, "optimizer", {}))
    return optimizer


def keep_coordinator_optimizer(federation: "Federation", state: "State", optimizer: torch.optim.Optimizer) -> None:
    if federation.trainer.optimizer.keep_state:
        state.optimizer = optimizer_tensors(optimizer)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as named tensors (`3/momentum_buffer`)."""
    state = optimizer.state_dict()["state"]
    kept = {f"{index}/{key}": value for index, values in state.items() for key, value in values.items()}
    return {name: value.detach().cpu().clone() for name, value in kept.items() if isinstance(value, Tensor)}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; the learning rate stays as it is now."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = value.clone()
    if state:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
