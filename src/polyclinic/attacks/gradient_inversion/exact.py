"""Inversions that need no search, because algebra gives the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput


@dataclass(frozen=True)
class ExactInput:
    """`inputs` [N, in] of a linear layer, and `residual` [N]: the share of the gradient that they do not explain.

    A residual near 0 says that one image was behind the gradient. With several it is not, and `inputs` is a mixture.
    """

    inputs: Tensor
    residual: Tensor


def input_of_linear(weight: Tensor, bias: Tensor) -> ExactInput:
    """The input of a linear layer from the gradients of its weight [N, out, in] and bias [N, out].

    The weight's gradient is the outer product of the bias' gradient and the input; this is its least-squares solution
    over all rows, so that noise on single rows averages out. Rows without a signal (a dead unit) do not count.
    """
    power = (bias * bias).sum(-1, keepdim=True)
    inputs = torch.einsum("noi,no->ni", weight, bias) / power.clamp(min=torch.finfo(bias.dtype).tiny)
    unexplained = weight - bias[..., None] * inputs[:, None]
    total = (weight * weight).sum((1, 2)).clamp(min=torch.finfo(weight.dtype).tiny)
    return ExactInput(inputs, (unexplained * unexplained).sum((1, 2)) / total)


def first_linear_input(gradients: Mapping[str, Tensor], model: nn.Module) -> ExactInput:
    """The same for the first layer with weights of `model`, which must be linear and have a bias: the image itself."""
    layers = [(name, layer) for name, layer in model.named_modules() if next(layer.parameters(False), None) is not None]
    if not layers or not isinstance(layers[0][1], nn.Linear) or layers[0][1].bias is None:
        raise BadInput("attack: exact inversion needs a first layer that is linear with a bias; use gradient inversion")
    name = layers[0][0]
    prefix = f"{name}." if name else ""
    return input_of_linear(gradients[f"{prefix}weight"], gradients[f"{prefix}bias"])
