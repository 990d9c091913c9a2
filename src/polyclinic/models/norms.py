"""Normalisation layers: which one a study asks for, and which entries of a state dict belong to them."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = ("batch", "group")
GROUPS = 16  # at most; a layer whose channels 16 does not divide gets the largest common divisor


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Batch norm, or group norm: the latter mixes no patients, which differential privacy needs."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def norm_names(model: nn.Module) -> set[str]:
    """State-dict names of every parameter and buffer of batch-norm layers (FedBN keeps these local)."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name in layer.state_dict()}


def statistics_names(model: nn.Module) -> set[str]:
    """State-dict names of what batch norm learns about images without gradients: means, variances, counts."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name, _ in layer.named_buffers()}


def _batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return [(f"{path}." if path else "", layer) for path, layer in layers]


def with_group_norm(network: nn.Module) -> nn.Module:
    """The network with group norm in the place of every batch-norm layer."""
    if isinstance(network, _BatchNorm):
        return norm_layer("group", network.num_features)
    for name, child in network.named_children():
        setattr(network, name, with_group_norm(child))
    return network
