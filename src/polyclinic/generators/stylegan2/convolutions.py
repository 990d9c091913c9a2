"""Convolution with fast second derivatives (double backward), which R1 and path length regularisation need.

PyTorch takes the second derivative of a convolution by one whose kernel is as large as the image, which GPUs and CPUs
are slow at. All derivatives of a convolution are convolutions, transposed convolutions, or gradients of weights, with
the kernel as small as it is; here each of the three is derived as one of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class ConvolutionPlan(NamedTuple):
    """How a kernel is moved over images; `extra` rows and columns end what a transposed convolution gives."""

    stride: int = 1
    padding: int = 0
    transposed: bool = False
    extra: int = 0

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x, weight, None, *self._arguments())

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` for its shape and layout only."""
        arguments = self._arguments()
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *arguments, [False, True, False])[1]

    def _arguments(self) -> tuple[Any, ...]:
        return [self.stride] * 2, [self.padding] * 2, [1, 1], self.transposed, [self.extra] * 2, 1

    def back(self, side: int, kernel: int) -> ConvolutionPlan:
        """From what it gives back to images of this side: the same kernel the other way round."""
        if self.transposed:
            return ConvolutionPlan(self.stride, self.padding)
        covered = (side + 2 * self.padding - kernel) // self.stride * self.stride + kernel - 2 * self.padding
        return ConvolutionPlan(self.stride, self.padding, transposed=True, extra=side - covered)


def convolve(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0, transposed: bool = False) -> Tensor:
    """Images [B, I, H, H] with weights [O, I, k, k], or [I, O, k, k] where it is transposed."""
    if torch.compiler.is_compiling():  # of first derivatives, which a compiler knows better
        function = F.conv_transpose2d if transposed else F.conv2d
        return function(x, weight, stride=stride, padding=padding)
    return _Convolution.apply(x, weight, ConvolutionPlan(stride, padding, transposed))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: ConvolutionPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        return plan.apply(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _Convolution.apply(gradient, weight, ctx.plan.back(x.shape[-1], weight.shape[-1]))
        if ctx.needs_input_grad[1]:
            of_weight = _WeightGradient.apply(gradient, x, weight, ctx.plan)
        return of_x, of_weight, None


class _WeightGradient(torch.autograd.Function):
    """The gradient of a convolution's weight; it depends on the weight's shape only."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, plan: ConvolutionPlan) -> Tensor:
        ctx.save_for_backward(gradient, x)
        ctx.plan = plan
        return plan.weight_gradient(gradient, x, weight)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """`change`: how much what follows depends on each weight's gradient."""
        gradient, x = ctx.saved_tensors
        of_gradient = of_x = None
        if ctx.needs_input_grad[0]:
            of_gradient = _Convolution.apply(x, change, ctx.plan)
        if ctx.needs_input_grad[1]:
            of_x = _Convolution.apply(gradient, change, ctx.plan.back(x.shape[-1], change.shape[-1]))
        return of_gradient, of_x, None, None
