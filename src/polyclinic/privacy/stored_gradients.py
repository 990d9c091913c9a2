"""Sums of clipped gradients from the stored gradient of every image, by Opacus: for networks that ghost clipping cannot
follow, and to check ghost clipping against."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from torch import Tensor, nn

from polyclinic.errors import WorkFailed
from polyclinic.privacy.ghost_clipping import TINY, as_weight, outer_products


class StoredGradients:
    """Gives sums of clipped gradients of `module`, while its passes are followed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        hooked = GradSampleModule(self.module, loss_reduction="sum")
        hooked.GRAD_SAMPLERS = {**hooked.GRAD_SAMPLERS, nn.Conv2d: _convolution}
        hooked.forbid_grad_accumulation()
        try:
            with warnings.catch_warnings():
                # the first layer's input is an image, which needs no gradient
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            hooked.to_standard_module()
            for parameter in self.module.parameters():
                parameter.grad = None

    def clipped_sums(self, losses: Callable[[], Tensor], clip: float, parameters: list[Any]) -> list[Tensor]:
        """For each of the parameters, the sum over rows of their gradients, each row's clipped to `clip`.

        `losses()` runs the network and gives the loss of each row, [B].
        """
        for parameter in self.module.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        found = losses()
        found.sum().backward()
        rows = [_rows(one, len(found)) for one in parameters]
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]
        _drop_non_finite(rows)
        lengths = torch.stack([one.reshape(len(one), -1).norm(2, dim=-1) for one in rows], dim=1).norm(2, dim=1)
        factors = (clip / (lengths + TINY)).clamp(max=1.0)
        return [torch.einsum("i,i...", factors.to(one.dtype), one) for one in rows]


def _convolution(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Opacus' gradients per image, where they are right: it takes images to be padded with zeros, and rows of pixels to
    lie next to each other in memory, and gives wrong numbers for others without a word."""
    if layer.padding_mode == "zeros":
        return dict(compute_conv_grad_sample(layer, [one.contiguous() for one in activations], backprops))
    stored = outer_products(layer, activations[0], backprops).stored()
    found = {layer.weight: as_weight(stored.rows, (len(backprops), *layer.weight.shape), stored.kernel)}
    return found if layer.bias is None else {**found, layer.bias: backprops.sum((2, 3))}


def _rows(parameter: Any, count: int) -> Tensor:
    """The gradients of a parameter for each image; zeros where it took no part in the loss."""
    rows = parameter.grad_sample
    if rows is None:
        return parameter.new_zeros(count, *parameter.shape)
    if len(rows) != count:
        raise WorkFailed(
            f"a layer gets {len(rows)} rows for {count} images, so that one image's share cannot be bounded; choose a "
            "network whose layers get one row for each image"
        )
    return rows


def _drop_non_finite(rows: list[Tensor]) -> None:
    """An image whose gradient is not finite counts as one without a gradient: NaN has no length to clip, and a parcel
    that is refused for it would tell that the image is there. Nothing counts such images, for the same reason."""
    finite = torch.stack([one.flatten(1).isfinite().all(1) for one in rows]).all(0)
    if not bool(finite.all()):
        for one in rows:
            one[~finite] = 0.0
