"""Average pooling with a derivative that copies numbers; on a GPU torch's own kernel for it is slower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.solvers.columns import vmapped_first


class _OverTiles(torch.autograd.Function):
    """What the two operations share. Both are linear, and each is the other's transpose."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.side = inputs[1]

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, None], images: Tensor, side: int) -> tuple[Tensor, int]:
        return cls.apply(vmapped_first(images, in_dims[0], info.batch_size), side), 0


class _Average(_OverTiles):
    """Images [..., H, W] to the means of tiles of `side` x `side` pixels."""

    @staticmethod
    def forward(images: Tensor, side: int) -> Tensor:
        found = F.avg_pool2d(images.flatten(0, -4), side)
        return found.view(*images.shape[:-2], *found.shape[-2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(gradients[0], ctx.side), None


class _Spread(_OverTiles):
    """Each number spread evenly over a tile of `side` x `side` pixels."""

    @staticmethod
    def forward(means: Tensor, side: int) -> Tensor:
        *front, high, wide = means.shape
        tiles = (means / side**2)[..., :, None, :, None].expand(*front, high, side, wide, side)
        return tiles.reshape(*front, high * side, wide * side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Average.apply(gradients[0], ctx.side), None


class ManyTargetsAvgPool2d(nn.AvgPool2d):
    """An AvgPool2d with square tiles side by side, for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self.kernel_size, int)
        if input.dim() == 3 or input.shape[-2] % self.kernel_size or input.shape[-1] % self.kernel_size:
            return super().forward(input)
        return _Average.apply(input, self.kernel_size)

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        return (
            type(layer) is nn.AvgPool2d
            and isinstance(layer.kernel_size, int)
            and layer.stride == layer.kernel_size
            and layer.padding == 0
            and not layer.divisor_override
        )
