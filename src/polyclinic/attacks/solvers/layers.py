"""Convolution and batch norm for many targets under `vmap`: torch's numbers, each target with images of its own.

Under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow on a GPU. Here
what each output pixel sees is laid out as columns (im2col), and they are one batched matrix product. Where all targets
share the weights, outputs and the gradients of images are one large convolution. The second derivative of torch's batch
norm under `vmap` is wrong (by 1e-3 of its size, torch 2.13); written out, it also takes a third of autograd's passes.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


class Window(NamedTuple):
    """Kernel, stride and padding of a convolution, each down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


# --- columns -----------------------------------------------------------------------------------------


def by_channel(images: Tensor) -> Tensor:
    """[N, B, O, H, W] to [N, O, B·H·W]; a view of single images."""
    return images.transpose(1, 2).flatten(2)


def by_image(rows: Tensor, shape: Size) -> Tensor:
    """[N, O, B·H·W] to [N, B, O, H, W], which is `shape`."""
    return rows.unflatten(2, (shape[1], *shape[3:])).transpose(1, 2)


def columns_of(images: Tensor, window: Window) -> Tensor:
    """The pixels that each output pixel sees: [N, B, C, H, W] to [N, C·k·k, B·H'·W']."""
    count, batch = images.shape[:2]
    every = images.flatten(0, 2)[None]  # all as channels of one image: torch would start a kernel per image
    seen = F.unfold(every, window.kernel, 1, window.padding, window.stride)
    return seen.view(count, batch, -1, seen.shape[-1]).transpose(1, 2).flatten(2)


def convolve_back(gradient: Tensor, weights: Tensor, window: Window, shape: Size) -> Tensor:
    """The gradient of images, `shape`, that N targets convolve with weights [N, O, C, k, k] of their own.

    Without strides it is a convolution as well, of images rotated by 180°: what that sees is found thrice as fast on a
    GPU as columns are added up.
    """
    around = (window.kernel[0] - 1 - window.padding[0], window.kernel[1] - 1 - window.padding[1])
    if window.stride == (1, 1) and min(around) >= 0:
        columns = columns_of(gradient.flip(3, 4), Window(window.kernel, (1, 1), around))
        return by_image(weights.transpose(1, 2).flatten(2) @ columns, shape).flip(3, 4)
    columns = weights.flatten(2).mT @ by_channel(gradient)
    seen = columns.unflatten(2, (shape[1], -1)).transpose(1, 2).reshape(1, -1, columns.shape[2] // shape[1])
    return F.fold(seen, shape[-2:], window.kernel, 1, window.padding, window.stride).view(shape)


def vmapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the dimension that `vmap` added in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


# --- convolution ---------------------------------------------------------------------------------------
# Images x [N, B, C, H, W], weights w [N, O, C, k, k], outputs or their gradients y [N, B, O, H', W']. Convolution is
# linear in x and in w, so the derivatives of the three operations are these operations again, to any order. Where all
# targets share the weights, N is 1, and the images of further targets are further images.


class _Bilinear(Function):
    """An operation that makes one of x, w, y from the other two. `size`: of the images, (H, W)."""

    takes: ClassVar[str]
    gives: ClassVar[str]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.window, ctx.size = inputs
        ctx.save_for_backward(*tensors)

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        known = {**dict(zip(cls.takes, ctx.saved_tensors, strict=True)), cls.gives: gradients[0]}
        found: list[Tensor | None] = []
        for name, wanted in zip(cls.takes, ctx.needs_input_grad[:2], strict=True):
            other = _OPERATION_OF[name]
            found.append(other.apply(*(known[one] for one in other.takes), ctx.window, ctx.size) if wanted else None)
        return *found, None, None

    @classmethod
    def vmap(
        cls, info: Any, in_dims: tuple[int | None, ...], first: Tensor, second: Tensor, window: Window, size: Size
    ) -> tuple[Tensor, int]:
        """More targets: they join those that are there."""
        count = info.batch_size
        given = [vmapped_first(one, dim, count) for one, dim in zip((first, second), in_dims, strict=False)]
        if in_dims[1] is None and len(second) == 1 and cls.takes[1] == "w":
            images = given[0].transpose(0, 1).flatten(1, 2)
            return cls.apply(images, second, window, size).unflatten(1, (count, -1)), 1
        return cls.apply(*(one.flatten(0, 1) for one in given), window, size).unflatten(0, (count, -1)), 0


class Convolve(_Bilinear):
    """x, w -> y."""

    takes, gives = "xw", "y"

    @staticmethod
    def forward(x: Tensor, w: Tensor, window: Window, size: Size) -> Tensor:
        if len(w) == 1:
            return F.conv2d(x[0], w[0], None, window.stride, window.padding)[None]
        sides = [(size[i] + 2 * window.padding[i] - window.kernel[i]) // window.stride[i] + 1 for i in (0, 1)]
        return by_image(w.flatten(2) @ columns_of(x, window), Size((*x.shape[:2], w.shape[1], *sides)))


class SendBack(_Bilinear):
    """y, w -> x: the transpose of `Convolve` for fixed weights."""

    takes, gives = "yw", "x"

    @staticmethod
    def forward(y: Tensor, w: Tensor, window: Window, size: Size) -> Tensor:
        if len(w) == 1:
            (kernel, stride, padding), given = window, y.shape[-2:]
            unseen = [size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1)]
            return F.conv_transpose2d(y[0], w[0], None, stride, padding, unseen)[None]
        return convolve_back(y, w, window, Size((*y.shape[:2], w.shape[2], *size)))


class Gather(_Bilinear):
    """y, x -> w: the transpose of `Convolve` for fixed images."""

    takes, gives = "yx", "w"

    @staticmethod
    def forward(y: Tensor, x: Tensor, window: Window, size: Size) -> Tensor:
        return (by_channel(y) @ columns_of(x, window).mT).unflatten(2, (x.shape[2], *window.kernel))


_OPERATION_OF: dict[str, type[_Bilinear]] = {one.gives: one for one in (Convolve, SendBack, Gather)}


class ManyTargetsConv2d(nn.Conv2d):
    """A Conv2d without groups, dilation or unusual padding, for many targets on a GPU. Targets share its weights, or
    `vmap` gives each its own."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3:  # an image without a batch
            return super().forward(input)
        window = Window(self.kernel_size, self.stride, self.padding)  # type: ignore[arg-type]
        output = Convolve.apply(input.unsqueeze(0), self.weight.unsqueeze(0), window, input.shape[-2:]).squeeze(0)
        return output if self.bias is None else output + self.bias[:, None, None]

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return False
        return layer.groups == 1 and layer.dilation == (1, 1)


# --- batch norm --------------------------------------------------------------------------------------


class _Normalise(torch.autograd.Function):
    """Images [B, C, H, W], weight and bias [C] to weight · n + bias, where n has mean 0 and variance 1 per channel; and
    mean and 1 / standard deviation of the images, [C], for the derivatives."""

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
        return _split_channels(_Normalise.apply(*given, eps), info.batch_size)


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
        together = _as_channels(tensors, in_dims, info.batch_size)
        return _split_channels(_NormaliseBackward.apply(*together), info.batch_size)


def _as_channels(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...], size: int) -> list[Tensor]:
    """N targets side by side as N · C channels: [B, C, H, W] becomes [B, N·C, H, W], and [C] becomes [N·C]."""
    first = [vmapped_first(tensor, dim, size) for tensor, dim in zip(tensors, dims, strict=False)]
    return [t.flatten() if t.dim() == 2 else t.transpose(0, 1).flatten(1, 2) for t in first]


def _split_channels(tensors: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
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
        affine: tuple[Tensor, Tensor] = self.weight, self.bias
        if not self.affine:
            affine = input.new_ones(input.shape[1]), input.new_zeros(input.shape[1])
        return _Normalise.apply(input, *affine, self.eps)[0]
