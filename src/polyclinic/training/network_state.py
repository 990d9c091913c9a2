"""A network's weights and buffers by name, found once: `state_dict` walks through all layers at every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class NetworkState:
    """What `network.state_dict()` gives, for a network whose layers stay the same."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._find()

    def __call__(self) -> dict[str, Tensor]:
        """By name; nobody may change the dictionary. Found anew if a tensor of the network was put in another's place
        meanwhile."""
        # a known tensor holds on to its memory, so that another one cannot lie at the same place
        if any(held.get(name) is None or held[name].data_ptr() != place for held, name, place in self._places):
            self._find()
        return self._state

    def _find(self) -> None:
        self._state: dict[str, Tensor] = dict(self._network.state_dict())
        self._places = [(*_place(self._network, name), one.data_ptr()) for name, one in self._state.items()]


def _place(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary of a layer that holds a tensor, and its name there."""
    layer, _, own = name.rpartition(".")
    found = network.get_submodule(layer)
    return (found._parameters if own in found._parameters else found._buffers), own
