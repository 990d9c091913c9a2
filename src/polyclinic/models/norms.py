"""Normalisation layers: which one a study asks for, and which entries of a state dict belong to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = ("batch", "group", "frozen")
GROUPS = 16  # at most; a layer whose channels 16 does not divide gets the largest common divisor


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with the mean, variance, factor and offset that came with public weights; nobody trains it.

    Its tensors have the names of `nn.BatchNorm2d`, so that published weights load. It mixes no patients.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        buffers = dict(self.named_buffers())
        mean, variance = buffers["running_mean"], buffers["running_var"]
        return F.batch_norm(x, mean, variance, buffers["weight"], buffers["bias"], eps=self.eps)


def norm_layer(norm: str, channels: int, eps: float = 1e-5) -> nn.Module:
    """Batch, frozen batch, or group norm. Only the first mixes patients, which differential privacy does not allow."""
    if norm == "frozen":
        return FrozenBatchNorm2d(channels, eps)
    if norm == "batch":
        return nn.BatchNorm2d(channels, eps)
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def norm_names(model: nn.Module) -> set[str]:
    """State-dict names of every parameter and buffer of batch-norm layers (FedBN keeps these local)."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name in layer.state_dict()}


def statistics_names(model: nn.Module) -> set[str]:
    """State-dict names of what batch norm learns about images without gradients: means, variances, counts."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name, _ in layer.named_buffers()}


def _batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return [(f"{path}." if path else "", layer) for path, layer in layers]


def with_norm(network: nn.Module, norm: str) -> nn.Module:
    """The network with this norm in the place of every batch-norm layer."""
    if norm == "batch":
        return network
    if isinstance(network, _BatchNorm):
        return norm_layer(norm, network.num_features, network.eps)
    for name, child in network.named_children():
        setattr(network, name, with_norm(child, norm))
    return network
