"""Convolution and batch norm for many targets at once: the same numbers as torch's, with derivatives made for `vmap`.

Convolution: under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow
on a GPU. Here they are one batched matrix product, while everything that all targets' shared weights allow stays one
large convolution. Batch norm: the second derivative of torch's under `vmap` is wrong (by 1e-3 of its size, torch
2.13), and an attack needs exactly that one; written out, it also takes a quarter of the passes over the images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Window(NamedTuple):
    """Kernel, stride and padding of a convolution, each down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


class _Convolve(torch.autograd.Function):
    """Images [B, C, H, W] and weights [O, C, k, k] to [B, O, H', W']."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, window: Window) -> Tensor:
        return F.conv2d(images, weight, None, window.stride, window.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, ctx.window = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        images, weight = ctx.saved_tensors
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            of_images = _transposed(gradient, weight, images.shape[-2:], ctx.window)
        if ctx.needs_input_grad[1]:
            of_weight = _WeightGradients.apply(gradient[None], images[None], ctx.window)[0][0]
        return of_images, of_weight, None


def _transposed(gradient: Tensor, weight: Tensor, size: torch.Size, window: Window) -> Tensor:
    """The gradient with respect to the images, which are [.., *size]."""
    (_, stride, padding), given, kernel = window, gradient.shape[-2:], window.kernel
    extra = [size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1)]
    return F.conv_transpose2d(gradient, weight, None, stride, padding, extra)


class _WeightGradients(torch.autograd.Function):
    """For N targets: gradients [N, B, O, H', W'] and images [N, B, C, H, W] to weight gradients [N, O, C, k, k].

    Also returns what each output pixel sees, [N, C·k·k, B·H'·W'], which the derivative uses again.
    """

    @staticmethod
    def forward(gradient: Tensor, images: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        columns = _columns(images, window)
        product = _by_channel(gradient) @ columns.mT
        return product.unflatten(2, (images.shape[2], *window.kernel)), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        gradient, images, ctx.window = inputs
        ctx.shape = images.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(gradient, output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, columns = ctx.saved_tensors
        weights = gradients[0].flatten(2)
        of_gradient = of_images = None
        if ctx.needs_input_grad[0]:
            seen = weights @ columns  # [N, O, B·H'·W']
            count, batch, channels, *places = gradient.shape
            of_gradient = seen.view(count, channels, batch, *places).transpose(1, 2)
        if ctx.needs_input_grad[1]:
            of_images = _added_up(weights.mT @ _by_channel(gradient), ctx.window, ctx.shape)
        return of_gradient, of_images, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, images: Tensor, window: Window
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """More targets: they join those that are there."""
        size = info.batch_size
        merged = [_first(t, d, size).flatten(0, 1) for t, d in ((gradient, in_dims[0]), (images, in_dims[1]))]
        product, columns = _WeightGradients.apply(*merged, window)
        return (product.unflatten(0, (size, -1)), columns.unflatten(0, (size, -1))), (0, 0)


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the dimension that `vmap` added in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _by_channel(images: Tensor) -> Tensor:
    """[N, B, O, H, W] to [N, O, B·H·W]; a view of single images."""
    return images.transpose(1, 2).flatten(2)


def _columns(images: Tensor, window: Window) -> Tensor:
    """What each output pixel sees: [N, B, C, H, W] to [N, C·k·k, B·H'·W']."""
    count, batch = images.shape[:2]
    every = images.flatten(0, 2)[None]  # all as channels of one image: torch would start a kernel per image
    seen = F.unfold(every, window.kernel, 1, window.padding, window.stride)
    return seen.view(count, batch, -1, seen.shape[-1]).transpose(1, 2).flatten(2)


def _added_up(columns: Tensor, window: Window, shape: torch.Size) -> Tensor:
    """The transpose of `_columns`: each pixel's share of all that see it, [N, B, C, H, W]."""
    batch = shape[1]
    seen = columns.unflatten(2, (batch, -1)).transpose(1, 2).reshape(1, -1, columns.shape[2] // batch)
    return F.fold(seen, shape[-2:], window.kernel, 1, window.padding, window.stride).view(shape)


class ManyTargetsConv2d(nn.Conv2d):
    """A Conv2d without groups, dilation or unusual padding, for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        window = Window(self.kernel_size, self.stride, self.padding)  # type: ignore[arg-type]
        output = _Convolve.apply(input, self.weight, window)
        return output if self.bias is None else output + self.bias[:, None, None]

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )


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
    first = [_first(tensor, dim, size) for tensor, dim in zip(tensors, dims, strict=False)]
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
