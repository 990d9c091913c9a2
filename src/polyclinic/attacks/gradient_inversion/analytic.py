"""Analytic gradient inversion: the image itself from the gradients of a first linear layer, without any search.

The gradient of a linear layer's weight is the outer product of the gradient of its bias and its input (Phong et al.
2018). Where the first layer of a network is linear and has a bias, one image behind a gradient lies open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import AttackSettings, Capability, ThreatModel
from polyclinic.errors import BadInput


@dataclass(frozen=True)
class ExactInput:
    """`inputs` [N, in] of a linear layer, and `residual` [N]: the share of the gradient that they do not explain.

    A residual near 0 says that the gradient has rank one. One image gives that; but so do several whose outputs have
    proportional gradients, as two of one class at a layer that starts from zero: `inputs` is then their weighted mean.
    A gradient of zero explains nothing: its residual is 1.
    """

    inputs: Tensor
    residual: Tensor


class AnalyticInversion(AttackSettings):
    """`AnalyticInversion().run(gradients, model, image_shape)`, gradients [N, ...] by the names of parameters."""

    name: Literal["analytic-inversion"] = "analytic-inversion"
    kind: Literal["gradients", "weights"] = "gradients"

    reads: ClassVar[tuple[str, ...]] = ("gradients", "weights")

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability(self.kind), Capability.ARCHITECTURE})

    @property
    def assumptions(self) -> str:
        return "one image is behind the update, and the network begins with a linear layer with a bias"

    def fits(self, model: nn.Module, image_shape: tuple[int, ...]) -> bool:
        """Whether the first layer of `model` with weights takes all pixels of an image."""
        found = first_layer(model)
        return found is not None and found[1].in_features == math.prod(image_shape)

    def run(
        self,
        gradients: Mapping[str, Tensor],
        model: nn.Module,
        image_shape: tuple[int, ...],
        *,
        threat: ThreatModel | None = None,
    ) -> ExactInput:
        """The image behind each of N gradients. A difference of weights does as well: its length does not matter."""
        if threat is not None:
            self.check(threat)
        if not self.fits(model, image_shape):
            raise BadInput(
                "attack: analytic inversion needs a first layer that is linear with a bias, over all pixels; use "
                "gradient inversion"
            )
        name = first_layer(model)[0]  # type: ignore[index]
        prefix = f"{name}." if name else ""
        return input_of_linear(gradients[f"{prefix}weight"], gradients[f"{prefix}bias"])


def first_layer(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The first layer with weights and its name, if it is linear and has a bias."""
    layers = ((name, one) for name, one in model.named_modules() if next(one.parameters(False), None) is not None)
    name, layer = next(layers, ("", nn.Identity()))
    return (name, layer) if isinstance(layer, nn.Linear) and layer.bias is not None else None


def input_of_linear(weight: Tensor, bias: Tensor) -> ExactInput:
    """The input of a linear layer from the gradients of its weight [N, out, in] and bias [N, out].

    This is the least-squares solution over all rows, so that noise on single rows averages out. Rows without a signal
    (a dead unit) do not count.
    """
    power = (bias * bias).sum(-1, keepdim=True)
    inputs = torch.einsum("noi,no->ni", weight, bias) / power.clamp(min=torch.finfo(bias.dtype).tiny)
    unexplained = weight - bias[..., None] * inputs[:, None]
    total = (weight * weight).sum((1, 2))
    share = (unexplained * unexplained).sum((1, 2)) / total.clamp(min=torch.finfo(weight.dtype).tiny)
    return ExactInput(inputs, torch.where(total > 0, share, 1.0))
