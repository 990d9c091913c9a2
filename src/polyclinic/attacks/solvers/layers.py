"""Batch norm, sigmoid and average pooling of many targets: torch's numbers, with derivatives made for `vmap`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.solvers.convolution import vmapped_first

# --- batch norm --------------------------------------------------------------------------------------
# The second derivative of torch's under `vmap` is wrong (by 1e-3 of its size, torch 2.13), and an attack needs exactly
# that one. Written out, it also takes a third of the passes over the images that autograd's own would.


class _Normalise(torch.autograd.Function):
    """Images [B, C, H, W], weight and bias [C] to weight · n + bias, where n has mean 0 and variance 1 per channel.

    Also returns mean and 1 / standard deviation of the images, [C], for the derivatives.
    """

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
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


# --- sigmoid: its second derivative takes fewer passes over memory than autograd's own ----------------


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
        product = v * g
        return torch.ops.aten.sigmoid_backward(v, y), product.addcmul_(product, y, value=-2)  # v · g · (1 - 2 y)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], g: Tensor, y: Tensor) -> tuple[Tensor, int]:
        first = [vmapped_first(one, dim, info.batch_size) for one, dim in zip((g, y), in_dims, strict=True)]
        return _SigmoidBackward.apply(*first), 0


class ManyTargetsSigmoid(nn.Sigmoid):
    """A sigmoid for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return _Sigmoid.apply(input)


# --- average pooling: a derivative that copies numbers, as torch's own kernel for it is slower on a GPU


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
