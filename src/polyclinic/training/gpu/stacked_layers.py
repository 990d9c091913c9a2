"""Convolutions of many stacked networks as matrix products.

On a GPU `torch.func.vmap` makes one grouped convolution of a stack's convolutions, for which there are no fast kernels
when groups are small. A batch of products of patches (im2col) has them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: a layer of all networks of a stack: images [M, B, C, H, W], weights and whatever else it has, [M, ...]
OfStack = Callable[..., Tensor]
Pair = tuple[int, int]
#: matrix products are slow on a GPU where a row of numbers does not begin at a multiple of 16 bytes
ALIGNED = 8


class AllAtOnce(torch.autograd.Function):
    """Under `vmap`: `compute(*tensors)` of all networks at once, with its own gradients. A tensor has an axis for the
    networks in front, [M, ...]; None stays None."""

    @staticmethod
    def forward(compute: OfStack, *tensors: Tensor | None) -> Tensor:
        raise RuntimeError("a layer of stacked networks is computed for all of them at once, under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, compute: OfStack, *tensors: Tensor | None) -> Any:
        in_front = [
            one if one is None else one.expand(info.batch_size, *one.shape) if axis is None else one.movedim(axis, 0)
            for one, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        return compute(*in_front), 0


def in_autocast(*tensors: Tensor) -> list[Tensor]:
    """Tensors in the precision that autocast wants, before anything is moved in memory."""
    kind = tensors[0].device.type
    return [x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x for x in tensors]


def convolve_stacked(images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`F.conv2d(images, weight, bias, stride, padding)` of each network of a stack."""
    found = _Convolution.apply(images, weight, stride, padding)
    return found if bias is None else found + bias.to(found.dtype)[:, None, :, None, None]


class _Convolution(torch.autograd.Function):
    """Images [M, B, C, H, W] and weights [M, O, C, k, k] to [M, B, O, H', W']."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        rows = _patches(images, weight.shape[-2:], stride, (padding[0], padding[0], padding[1], padding[1]))
        rows = _aligned(rows, 2)
        ctx.save_for_backward(rows, weight)
        ctx.shapes = (images.shape, stride, padding)
        high, wide = (
            (side + 2 * pad - kernel) // step + 1
            for side, pad, kernel, step in zip(images.shape[-2:], padding, weight.shape[-2:], stride, strict=True)
        )
        kernel = _aligned(weight.permute(0, 3, 4, 2, 1).flatten(1, 3), 1)  # [M, k k C, O]
        return _as_images(torch.bmm(rows, kernel), images.shape[1], high, wide)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows, weight = ctx.saved_tensors
        shape, stride, padding = ctx.shapes
        back = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)  # [M, B H' W', O]
        kernel = (*weight.shape[-2:], weight.shape[2], weight.shape[1])
        seen = math.prod(kernel[:3])
        for_weight = torch.bmm(rows.mT, back)[:, :seen].unflatten(1, kernel[:3]).permute(0, 4, 3, 1, 2)
        if not ctx.needs_input_grad[0]:
            return None, for_weight, None, None
        return _to_images(gradient, weight, shape, stride, padding), for_weight, None, None


def _to_images(gradient: Tensor, weight: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """The gradient w.r.t. images of this shape: a convolution of the outputs' gradient, with zeros between its pixels,
    by the kernel turned by half a circle."""
    many, count, outputs = gradient.shape[:3]
    kernel, sides = weight.shape[-2:], shape[-2:]
    if stride != (1, 1):
        high, wide = ((n - 1) * step + 1 for n, step in zip(gradient.shape[-2:], stride, strict=True))
        spread = gradient.new_zeros(many, count, high, wide, outputs)
        spread[:, :, :: stride[0], :: stride[1]] = gradient.permute(0, 1, 3, 4, 2)
        gradient = spread.permute(0, 1, 4, 2, 3)
    before = [size - 1 - pad for size, pad in zip(kernel, padding, strict=True)]
    axes = zip(sides, kernel, before, gradient.shape[-2:], strict=True)
    after = [side + size - 1 - first - n for side, size, first, n in axes]
    rows = _patches(gradient, kernel, (1, 1), (before[0], after[0], before[1], after[1]))
    turned = weight.flip(-2, -1).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [M, k k O, C]
    return _as_images(torch.bmm(rows, turned), count, *sides)


def _patches(images: Tensor, kernel: torch.Size | Pair, stride: Pair, frame: tuple[int, int, int, int]) -> Tensor:
    """What the kernel sees at each place: [M, B, C, H, W] to [M, B H' W', k k C]; `frame`: zeros above, below, left
    and right of an image (a negative number cuts off)."""
    above, below, left, right = frame
    framed = F.pad(images.permute(0, 1, 3, 4, 2), (0, 0, left, right, above, below))
    views = framed.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # [M, B, H', W', C, k, k]
    return views.permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)


def _aligned(one: Tensor, axis: int) -> Tensor:
    """[M, ., .] with zeros at the end of an axis on a GPU: its matrix units take numbers in groups of ALIGNED."""
    missing = -one.shape[axis] % ALIGNED if one.is_cuda else 0
    return F.pad(one, (0, 0) * (2 - axis) + (0, missing)) if missing else one


def _as_images(rows: Tensor, count: int, high: int, wide: int) -> Tensor:
    """[M, B H W, O] to [M, B, O, H, W]."""
    return rows.unflatten(1, (count, high, wide)).permute(0, 1, 4, 2, 3)


@contextmanager
def all_at_once(network: nn.Module) -> Iterator[None]:
    """A while in which the plain convolutions of `network` are computed as matrix products, and its batch norms for all
    networks of the stack at once; under `vmap` only."""
    found = {layer: _forward(layer) for layer in network.modules()}
    layers = {layer: forward for layer, forward in found.items() if forward is not None}
    for layer, forward in layers.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """The pass of a layer in a stack; None where it is the layer's own."""
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return _convolution(layer) if plain and not isinstance(layer.padding, str) else None
    if type(layer) is nn.BatchNorm2d and layer.track_running_stats and layer.affine and layer.momentum is not None:
        return _batch_norm(layer)
    return None


def _convolution(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    def compute(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        images, weight = in_autocast(images, weight)
        return convolve_stacked(images, weight, bias, layer.stride, layer.padding)  # type: ignore[arg-type]

    def forward(images: Tensor) -> Tensor:
        found = AllAtOnce.apply(compute, images, layer.weight, layer.bias)
        return found if found.is_cuda else found.contiguous()  # a GPU goes on with channels last as well

    return forward


def _batch_norm(layer: nn.BatchNorm2d) -> Callable[[Tensor], Tensor]:
    """The networks' channels side by side are those of one wider batch norm."""

    def compute(images: Tensor, *own: Tensor) -> Tensor:
        side_by_side = images.transpose(0, 1).flatten(1, 2)  # [B, M C, H, W]
        weight, bias, mean, variance = (one.reshape(-1) for one in own)
        found = F.batch_norm(side_by_side, mean, variance, weight, bias, True, layer.momentum or 0.0, layer.eps)
        for kept, now in ((own[2], mean), (own[3], variance)):
            if kept.data_ptr() != now.data_ptr():  # the stack was copied to be laid out in one row
                kept.copy_(now.view_as(kept))
        return found.unflatten(1, images.shape[::2][:2]).transpose(0, 1)

    def forward(images: Tensor) -> Tensor:
        if not layer.training:
            return F.batch_norm(
                images, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps
            )
        layer.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        own = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
        return AllAtOnce.apply(compute, images, *own)

    return forward


# --- layers of GANs: 4x4 pixels, stride 2 ---------------------------------------------------------
# Cutting images into patches and adding up overlapping patches are each other's derivative, and are written so:
# autograd's own would go view by view, and take most of a step's time. They have second derivatives.


def halve_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(images, weight, bias, stride=2, padding=1)` of each network; weights [M, O, C, 4, 4], even sides."""
    images, weight = in_autocast(images, weight)
    many, count, _, rows, columns = images.shape
    kernel = weight.permute(0, 3, 4, 2, 1).reshape(many, -1, weight.shape[1])
    found = torch.bmm(_Patches.apply(images), kernel)
    if bias is not None:
        found = found + bias.to(found.dtype)[:, None]
    return found.reshape(many, count, rows // 2, columns // 2, -1).permute(0, 1, 4, 2, 3)


def double_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)` of each network, for weights [M, C, O, 4, 4]."""
    images, weight = in_autocast(images, weight)
    many, count, channels, rows, columns = images.shape
    kernel = weight.permute(0, 1, 3, 4, 2).reshape(many, channels, -1)
    products = torch.bmm(images.permute(0, 1, 3, 4, 2).reshape(many, -1, channels), kernel)
    found = _Overlaid.apply(products, (count, 2 * rows, 2 * columns))
    return found if bias is None else found + bias.to(found.dtype)[:, None, :, None, None]


class _Patches(torch.autograd.Function):
    """Images [M, B, C, H, W] to the 4x4 pixels that each output of a convolution sees, [M, B H/2 W/2, 16 C]; around an
    image there are zeros. Its derivative is `_Overlaid`."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        many, count, channels, rows, columns = images.shape
        ctx.shape = (count, rows, columns)
        framed = images.new_zeros(many, count, rows + 2, columns + 2, channels)
        framed[:, :, 1:-1, 1:-1] = images.permute(0, 1, 3, 4, 2)
        network, image, row, column, _ = framed.stride()
        shape = (many, count, rows // 2, columns // 2, 4, 4 * channels)
        views = framed.as_strided(shape, (network, image, 2 * row, 2 * column, row, 1))
        return views.reshape(many, -1, 16 * channels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Overlaid.apply(gradient, ctx.shape)


class _Overlaid(torch.autograd.Function):
    """Patches [M, B H/2 W/2, 16 C] added up where they overlap, to images [M, B, C, H, W]: the derivative of
    `_Patches`, whose derivative is this one."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        (count, rows, columns), many, channels = shape, len(patches), patches.shape[-1] // 16
        high, wide = rows // 2, columns // 2
        parts = patches.reshape(many, count, high, wide, 2, 2, 2, 2, channels)
        framed = patches.new_empty(many, count, high + 1, 2, wide + 1, 2, channels)
        framed[:, :, high] = 0
        framed[:, :, :, :, wide] = 0
        for down in (0, 1):
            for right in (0, 1):
                part = parts[:, :, :, :, down, :, right].permute(0, 1, 2, 4, 3, 5, 6)
                place = framed[:, :, down : down + high, :, right : right + wide]
                if down or right:
                    place += part
                else:
                    place.copy_(part)
        return framed.reshape(many, count, rows + 2, columns + 2, channels)[:, :, 1:-1, 1:-1].permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Patches.apply(gradient), None
