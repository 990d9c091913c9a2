"""Defences of gradients before they leave a site: top-k sparsification, pruning, quantisation.

(The secure sum is a defence, too: attack `secure_sum` of what the sites would have sent.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]


def sparsify(gradients: Gradients, *, keep: float) -> dict[str, Tensor]:
    """Only the share `keep` of all entries, the largest over all tensors together (top-k); the rest is 0."""
    sizes = torch.cat([tensor.abs().flatten() for tensor in gradients.values()])
    count = max(1, round(keep * sizes.numel()))
    mask = torch.zeros_like(sizes, dtype=torch.bool)
    mask[sizes.topk(count).indices] = True
    masks = mask.split([tensor.numel() for tensor in gradients.values()])
    pairs = zip(gradients.items(), masks, strict=True)
    return {name: torch.where(kept.view_as(tensor), tensor, 0) for (name, tensor), kept in pairs}


def prune(gradients: Gradients, *, fraction: float) -> dict[str, Tensor]:
    """In each tensor on its own, the share `fraction` of its smallest entries becomes 0."""
    pruned = {}
    for name, tensor in gradients.items():
        flat = tensor.flatten().clone()
        count = min(flat.numel() - 1, round(fraction * flat.numel()))
        flat[flat.abs().topk(count, largest=False).indices] = 0
        pruned[name] = flat.view_as(tensor)
    return pruned


def quantise(gradients: Gradients, *, bits: int = 8) -> dict[str, Tensor]:
    """Each tensor rounded to 2^bits - 1 even levels between plus and minus its largest entry."""
    levels = 2 ** (bits - 1) - 1
    rounded = {}
    for name, tensor in gradients.items():
        step = tensor.abs().amax() / levels
        rounded[name] = torch.where(step > 0, (tensor / step).round() * step, tensor)
    return rounded


def secure_sum(sent: Sequence[Gradients]) -> dict[str, Tensor]:
    """The mean of several sites' gradients: all that an attacker sees when only their sum is revealed.

    It is the gradient over all sites' images together, so attack it with as many images as all sites used.
    """
    return {name: torch.stack([gradients[name] for gradients in sent]).mean(0) for name in sent[0]}
