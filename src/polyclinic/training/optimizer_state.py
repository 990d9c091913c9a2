"""An optimiser's state as tensors, kept from round to round where the study says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from polyclinic.federation.federation import Federation, State
from polyclinic.federation.site import Site


def start_optimizer(site: Site, model: nn.Module, group: str = "optimizer") -> torch.optim.Optimizer:
    """A fresh optimiser for the site's round, with the state of its last one where that is kept.

    `group` is the name it is kept under: a site that trains two models has two.
    """
    trainer = site.trainer
    own = model is trainer.model and trainer.privacy is None and group == "optimizer"
    parameters = trainer.parameters() if own else model.parameters()
    optimizer = trainer.optimizer.make(parameters, site.round, trainer.kept if own else None)
    if site.trainer.optimizer.keep_state:
        restore_optimizer(optimizer, site.state.group(group))
    return optimizer


def keep_optimizer(site: Site, optimizer: torch.optim.Optimizer, group: str = "optimizer") -> None:
    if site.trainer.optimizer.keep_state:
        site.state.put(group, optimizer_tensors(optimizer))


def coordinator_optimizer(
    federation: Federation, state: State, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same for a coordinator that trains; its optimiser's state is kept in the method's."""
    optimizer = federation.trainer.optimizer.make(iter(parameters), federation.round)
    if federation.trainer.optimizer.keep_state:
        restore_optimizer(optimizer, getattr(state, "optimizer", {}))
    return optimizer


def keep_coordinator_optimizer(federation: Federation, state: State, optimizer: torch.optim.Optimizer) -> None:
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
