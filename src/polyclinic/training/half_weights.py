"""Copies in bf16 of the weights that autocast rounds in each step: rounded all at once, and not one after the other.

Autocast starts a kernel for each weight of a convolution or linear layer, and another one for its gradient. In small
networks, or networks of many layers, that is a part of the step that can be felt. The numbers are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: layers whose weights autocast rounds
ROUNDED = (nn.Conv2d, nn.Linear)


class HalfWeights:
    """The copies of a network's trained weights; `used` puts them in the weights' places for a while."""

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.copies: dict[nn.Parameter, Tensor] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for layer in network.modules():
            for name, weight in layer._parameters.items() if type(layer) in ROUNDED else ():
                if weight is not None and weight.requires_grad and weight.dtype == torch.float32:
                    self.copies.setdefault(weight, torch.empty_like(weight, dtype=dtype).requires_grad_())
                    self._places.append((layer._parameters, name, weight))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Layers compute with copies of the weights as they are now."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), list(self.copies))
        for copy in self.copies.values():
            copy.grad = None
        try:
            for held, name, weight in self._places:
                held[name] = self.copies[weight]
            yield
        finally:
            for held, name, weight in self._places:
                held[name] = weight

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The gradients of parameters, those of copies in the parameters' own precision."""
        rounded = [one for one in parameters if one in self.copies and self.copies[one].grad is not None]
        wide = [torch.empty_like(one) for one in rounded]
        if rounded:
            torch._foreach_copy_(wide, [_known(self.copies[one].grad) for one in rounded])
        found: dict[nn.Parameter, Tensor] = dict(zip(rounded, wide, strict=True))
        return [found.get(one, one.grad) for one in parameters]


def _known(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
