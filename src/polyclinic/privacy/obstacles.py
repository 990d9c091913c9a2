"""Checks that a network can be trained with DP-SGD: one sentence for each obstacle, with the cure.

DP-SGD bounds what one image can do to the sum of gradients. That holds only if an image's gradient depends on no
other image of the batch, and if nothing but the noisy gradient changes what is released.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

#: layers of other packages that drop whole paths
DROPS_BY_PLACE = ("StochasticDepth", "DropPath")
BATCH_NORM = (
    "model.norm: batch norm mixes the images of a batch and keeps statistics of them without noise; "
    "set model.norm = 'group' under differential privacy"
)


def obstacles(network: nn.Module) -> list[str]:
    """A sentence for each kind of layer that stands in the way; none if it can be trained."""
    reasons = (_reason(layer) for layer in network.modules())
    return list(dict.fromkeys(reason for reason in reasons if reason))


def _reason(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm):
        return BATCH_NORM
    if isinstance(layer, _NormBase) and layer.track_running_stats:
        return (
            "model.norm: instance norm with running statistics keeps numbers of real images without noise; "
            "set model.norm = 'group' under differential privacy"
        )
    if getattr(layer, "learning", None) == "ema":
        return (
            "generator.codebook: moving averages put real images into the codebook without clipping or noise; "
            "set generator.codebook = 'gradient' under differential privacy"
        )
    if _has_spectral_norm(layer):
        return (
            "privacy.on: spectral norm divides weights by a number that moves at every pass, outside clipping and "
            "noise; switch it off under differential privacy"
        )
    if getattr(layer, "mixes_samples", False):
        return (
            f"privacy.on: {type(layer).__name__} computes statistics over the images of a batch, so that one image "
            "changes the gradients of all; switch it off under differential privacy"
        )
    if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout) or type(layer).__name__ in DROPS_BY_PLACE:
        return (
            f"privacy.on: {type(layer).__name__} drops by an image's place in the batch, so that one image less "
            "changes the gradients of others; use torch.nn.Dropout under differential privacy"
        )
    if getattr(layer, "inplace", False):
        return (
            f"privacy.on: {type(layer).__name__} works in place, which gradients per image cannot follow; "
            "build it with inplace=False"
        )
    return None


def _has_spectral_norm(layer: nn.Module) -> bool:
    hooks = layer._forward_pre_hooks.values()
    return isinstance(layer, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


@torch.no_grad()
def mixes_samples(network: nn.Module, inputs: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether what comes out for some of `inputs` [B, ...] depends on the others: try it on noise, B of 4 or more.

    Finds minibatch statistics that no list of layers knows. The network's own buffers are left as they were.
    """
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    half = len(inputs) // 2
    together, alone = network(inputs)[:half], network(inputs[:half])
    for name, buffer in network.named_buffers():
        buffer.copy_(before[name])
    return not torch.allclose(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max()))
