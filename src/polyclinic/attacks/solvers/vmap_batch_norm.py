"""Batch norm for many targets at once: torch's numbers, with derivatives made for `vmap`.

The second derivative of torch's under `vmap` is wrong (by 1e-3 of its size, torch 2.13), and an attack needs exactly
that one. Written out, it also takes a third of the passes over the images that autograd's own would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.solvers.columns import vmapped_first
from polyclinic.attacks.solvers.half_products import in_half, is_fused

#: pixels that a program of Triton's holds at once
LONGEST_ROW = 4096


class _Normalise(torch.autograd.Function):
    """Images [B, C, H, W], weight and bias [C] to weight · n + bias, where n has mean 0 and variance 1 per channel.

    Also returns mean and 1 / standard deviation of the images, [C], for the derivatives.
    """

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        if in_rows(images):
            return triton_rows().normalise(images, weight.contiguous(), bias.contiguous(), eps)
        variance, mean = torch.var_mean(images, (0, 2, 3), correction=0)
        scale = (variance + eps).rsqrt()
        return _combined(bias - weight * scale * mean, (weight * scale, images)), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        images, weight, _, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(images, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_NormaliseBackward.apply(gradients[0], *ctx.saved_tensors), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], images: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        given = _as_channels((images, weight, bias), in_dims, info.batch_size)
        return _apart(_Normalise.apply(*given, eps), info.batch_size)


class _NormaliseBackward(torch.autograd.Function):
    """The derivatives of `_Normalise`: of images [B, C, H, W], of weight [C] and of bias [C].

    With m the mean over a channel, n the normalised images, s = 1 / standard deviation, g the gradient:
    of_images = weight s (g - m(g) - n m(gn)), of_weight = sum(gn), of_bias = sum(g). The operator on g is its own
    transpose, so its derivative takes the same shape; that by the images is a sum of v, g and n with a factor per
    channel each (v being the gradient of of_images).
    """

    @staticmethod
    def forward(g: Tensor, images: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        if in_rows(g, images):
            return triton_rows().normalise_backward(g, images, weight.contiguous(), mean, scale)
        count = images.numel() // images.shape[1]
        total, along = _sums(g, images, mean)
        along = along * scale  # sum(gn)
        slope = -weight * scale * scale * along / count
        constant = -weight * scale * total / count - slope * mean
        return _combined(constant, (weight * scale, g), (slope, images)), along, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v, v_weight, v_bias = gradients
        g, images, weight, mean, s, along, total = ctx.saved_tensors
        if in_rows(v, g, images):
            given = (g, images, weight.contiguous(), mean, s)
            return *triton_rows().normalise_twice((v, v_weight, v_bias), given, (along, total)), None, None
        count = images.numel() // images.shape[1]
        mg, mgn = total / count, along / count
        mv, mvn = (value / count for value in _sums(v, images, mean))
        mvn = mvn * s
        mvg = _sums(v, g, mg)[1] / count  # of g - m(g), so that m(v) m(g) is taken off already
        ws = weight * s
        of_n = v_weight - ws * mvn
        of_g = _combined(v_bias - ws * mv - of_n * s * mean, (ws, v), (of_n * s, images))
        per_v, per_g = -ws * s * mgn, v_weight * s - ws * s * mvn
        per_n = -ws * s * (mvg - 3 * mvn * mgn) - v_weight * s * mgn
        constant = -per_v * mv - per_g * mg
        of_images = _combined(constant - per_n * s * mean, (per_v, v), (per_g, g), (per_n * s, images))
        return of_g, of_images, s * count * (mvg - mvn * mgn), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _apart(_NormaliseBackward.apply(*_as_channels(tensors, in_dims, info.batch_size)), info.batch_size)


def in_rows(*images: Tensor) -> bool:
    """Whether a program of Triton's takes all pixels of a channel at once: those of single images are one row."""
    batch, _, high, wide = images[0].shape
    fits = batch == 1 and high * wide <= LONGEST_ROW
    return fits and in_half(images[0]) and all(is_fused(one) for one in images)


def triton_rows() -> Any:
    from polyclinic.attacks.solvers import triton_rows  # not everybody has Triton

    return triton_rows


def _as_channels(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...], size: int) -> list[Tensor]:
    """N targets side by side as N · C channels: [B, C, H, W] becomes [B, N·C, H, W], and [C] becomes [N·C]."""
    first = [vmapped_first(tensor, dim, size) for tensor, dim in zip(tensors, dims, strict=False)]
    return [t.flatten() if t.dim() == 2 else t.transpose(0, 1).flatten(1, 2) for t in first]


def _apart(tensors: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Channels as targets again, and where `vmap` finds them."""
    dims = tuple(0 if tensor.dim() == 1 else 1 for tensor in tensors)
    return tuple(t.unflatten(dim, (size, -1)) for t, dim in zip(tensors, dims, strict=True)), dims


def _sums(values: Tensor, images: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [C] of values and of values · (images - mean), all [B, C, H, W]."""
    if values.is_cuda:  # one pass for both
        ones = torch.ones_like(mean)
        return torch.batch_norm_backward_reduce(values, images, mean, ones, None, True, False, False)[:2]
    centred = images - mean[:, None, None]
    return values.sum((0, 2, 3)), (values * centred).sum((0, 2, 3))


def _combined(constant: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """constant [C] + factor [C] · images [B, C, H, W] + ..."""
    if in_half(constant) and all(is_fused(images) for _, images in terms):
        from polyclinic.attacks.solvers import triton_kernels

        return triton_kernels.combined(constant, terms)
    (factor, images), *rest = terms
    total = torch.addcmul(constant[:, None, None], factor[:, None, None], images)
    for factor, images in rest:
        total.addcmul_(factor[:, None, None], images)
    return total


class BatchStatistics2d(nn.BatchNorm2d):
    """Batch norm in training mode: normalises by the batch at hand, and leaves its running statistics alone."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[0] * input.shape[2] * input.shape[3] == 1:
            raise ValueError("batch norm in training mode needs more than one value per channel")
        affine = (
            (self.weight, self.bias)
            if self.affine
            else (input.new_ones(input.shape[1]), input.new_zeros(input.shape[1]))
        )
        return _Normalise.apply(input, *affine, self.eps)[0]
