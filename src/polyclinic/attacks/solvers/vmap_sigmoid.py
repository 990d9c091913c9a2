"""Sigmoid whose second derivative is one pass over memory on a GPU, where autograd's own takes five."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.solvers.columns import vmapped_first
from polyclinic.attacks.solvers.half_products import in_half, is_fused


class _Sigmoid(torch.autograd.Function):
    """x -> y = sigmoid(x)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SigmoidBackward.apply(gradients[0], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int]:
        return _Sigmoid.apply(vmapped_first(x, in_dims[0], info.batch_size)), 0


class _SigmoidBackward(torch.autograd.Function):
    """g, y -> g · y · (1 - y); can be differentiated once."""

    @staticmethod
    def forward(g: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid_backward(g, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        v, (g, y) = gradients[0], ctx.saved_tensors
        if in_half(v) and all(is_fused(one) for one in (v, g, y)):
            from polyclinic.attacks.solvers import triton_rows

            return triton_rows.sigmoid_twice(v, g, y)
        return torch.ops.aten.sigmoid_backward(v, y), v * g * (1 - 2 * y)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], g: Tensor, y: Tensor) -> tuple[Tensor, int]:
        first = [vmapped_first(one, dim, info.batch_size) for one, dim in zip((g, y), in_dims, strict=True)]
        return _SigmoidBackward.apply(*first), 0


class ManyTargetsSigmoid(nn.Sigmoid):
    """A sigmoid for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return _Sigmoid.apply(input)
