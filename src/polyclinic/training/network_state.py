"""A network's weights and buffers by name, and its mode: to walk through all layers at every call takes a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NetworkState:
    """What `network.state_dict()` gives. A layer that took the place of another is noticed at the next call, and
    `changed` is called: what was made for the former layers, such as a recorded step, is of no use any more."""

    def __init__(self, network: nn.Module, changed: Callable[[], object] = lambda: None) -> None:
        self._network, self._changed = network, changed
        self._modes: list[bool] = []  # whether each layer is in training mode
        self._find_layers()
        self._find()

    def __call__(self) -> dict[str, Tensor]:
        """By name; nobody may change the dictionary. Found anew if a tensor or a layer of the network was put in
        another's place meanwhile."""
        self._follow_layers()
        for held, name, place in self._places:
            found = held.get(name)
            # a known tensor holds on to its memory, so that another one cannot lie at the same place
            if found is None or found.data_ptr() != place:
                self._find()
                break
        return self._state

    def parameters(self) -> list[nn.Parameter]:
        """Of the network, in its order."""
        self()
        return self._parameters

    def train(self) -> nn.Module:
        """The network in training mode, as `network.train()` gives it."""
        self._follow_layers()
        if [layer.training for layer in self._layers] != self._modes:
            self._network.train()
            self._modes = [layer.training for layer in self._layers]
        return self._network

    def _follow_layers(self) -> None:
        if any(tuple(inside.values()) != known for inside, known in self._inside):
            self._find_layers()
            self._find()
            self._changed()

    def _find_layers(self) -> None:
        self._layers = list(self._network.modules())
        self._modes = []
        self._inside = [(one._modules, tuple(one._modules.values())) for one in self._layers if one._modules]

    def _find(self) -> None:
        self._state: dict[str, Tensor] = dict(self._network.state_dict())
        self._parameters = list(self._network.parameters())
        self._places = [(*_place(self._network, name), one.data_ptr()) for name, one in self._state.items()]


def hooks_of(network: nn.Module) -> set[int]:
    """The numbers of the hooks of all layers; torch gives each hook a number of its own."""
    found: set[int] = set()
    for layer in network.modules():
        found.update(layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return found


def _place(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary of a layer that holds a tensor, and its name there."""
    layer, _, own = name.rpartition(".")
    found = network.get_submodule(layer)
    return (found._parameters if own in found._parameters else found._buffers), own


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value to its target. Those that lie in memory as their targets do take a GPU one kernel together; where
    one does not, as weights with channels last, torch would copy all of them one by one."""
    pairs = list(zip(targets, values, strict=True))
    on_gpu = any(target.is_cuda for target in targets)  # a CPU copies one by one in any case
    alike = [not on_gpu or _lie_alike(*pair) for pair in pairs]
    for wanted in (True, False):
        some = [pair for pair, one in zip(pairs, alike, strict=True) if one == wanted]
        if some:
            torch._foreach_copy_([target for target, _ in some], [value for _, value in some])


def _lie_alike(target: Tensor, value: Tensor) -> bool:
    same = target.stride() == value.stride() and target.dtype == value.dtype == torch.float32
    return same and target.device == value.device
