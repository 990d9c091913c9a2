"""The layers that StyleGAN2's networks are made of, written from the papers (Karras et al. 2018, 2020).

Weights are stored with unit variance and scaled when used, so that all of them learn at one speed. Images are filtered
with [1, 3, 3, 1] wherever their size changes. At small sizes a GPU waits for whoever starts its kernels, so layers are
made of few: scales go into weights, and on a GPU the filter is a product of matrices.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLOPE = 0.2
#: keeps the variance that a leaky ReLU takes away
GAIN = math.sqrt(2)
EPS = 1e-8
#: a GPU's tensor cores take channels in groups of so many; with three, or 513, convolutions go elsewhere and crawl
GROUPED = 8


def activate(x: Tensor) -> Tensor:
    """Of an input that has been scaled by GAIN already: leaky ReLU lets factors pass."""
    return F.leaky_relu(x, SLOPE)


def unit(vectors: Tensor) -> Tensor:
    """Vectors [B, D] with a mean square of one."""
    return vectors * (vectors.square().mean(1, keepdim=True) + EPS).rsqrt()


def uses_gpu_kernels(x: Tensor) -> bool:
    """Whether to compute in the way that suits a GPU; the result is the same."""
    return x.is_cuda


# --- filters ------------------------------------------------------------------------------------------


def blur(x: Tensor, before: int, after: int) -> Tensor:
    """Filtered with [1, 3, 3, 1] / 8 along both sides, after padding with zeros; a side grows by before + after - 3.

    Sums of shifted copies, which have second derivatives on any device.
    """
    if uses_gpu_kernels(x):
        return swept(x, x.shape[-1] + before + after - 3, before)
    x = F.pad(x, (before, after, before, after))
    x = (x[..., :-3, :] + x[..., 3:, :] + 3 * (x[..., 1:-2, :] + x[..., 2:-1, :])) / 8
    return (x[..., :-3] + x[..., 3:] + 3 * (x[..., 1:-2] + x[..., 2:-1])) / 8


def swept(x: Tensor, side: int, before: int, stride: int = 1) -> Tensor:
    """The same as two products with a band, which take a GPU one pass each; of every `stride`-th pixel."""
    batch, channels, height, width = x.shape
    across, along = (band(size, side, before, stride, x.device, x.dtype) for size in (width, height))
    rows = x.permute(0, 2, 3, 1).reshape(batch * height, width, channels)  # no copy where channels are last
    rows = torch.bmm(across.expand(len(rows), -1, -1), rows).reshape(batch, height, side * channels)
    made = torch.bmm(along.expand(batch, -1, -1), rows)
    return made.reshape(batch, side, side, channels).permute(0, 3, 1, 2)


@functools.cache
def band(inputs: int, outputs: int, before: int, stride: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What each of `outputs` pixels takes of each of `inputs` [outputs, inputs]. Kept, as recorded steps need it.

    Products are fast where rows in memory begin at a multiple of 16 bytes, so the side that is even lies along them.
    """
    places = torch.arange(outputs, device=device)[:, None] * stride - before
    reach = torch.arange(inputs, device=device)[None] - places
    weights = (0.5 - 0.25 * (reach - 1.5).abs()).clamp(min=0).to(dtype)
    weights = weights if outputs % 2 else weights.T.contiguous().T
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # others use it from other streams
    return weights


def doubled(x: Tensor) -> Tensor:
    """Images of twice the side, filtered: between two pixels three quarters of the nearer and one of the farther."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int = 1, padding: int = 0) -> Tensor:
    """A convolution of images [B, I, H, W] with weights [O, I, k, k]."""
    if not uses_gpu_kernels(x):
        return F.conv2d(x, weight, bias, stride=stride, padding=padding)
    outputs, inputs = weight.shape[:2]
    more, others = -inputs % GROUPED, -outputs % GROUPED
    x = F.pad(x, (0, 0, 0, 0, 0, more)) if more else x
    weight = F.pad(weight, (0, 0, 0, 0, 0, more, 0, others)) if more or others else weight
    y = F.conv2d(x, weight, stride=stride, padding=padding)[:, :outputs]
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


# --- layers with weights ------------------------------------------------------------------------------


class Linear(nn.Module):
    """Rows [B, inputs] to [B, outputs]; `speed` below 1 slows the layer's learning, `gain` scales what it gives."""

    def __init__(self, inputs: int, outputs: int, *, bias: float = 0.0, speed: float = 1.0, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / speed)
        self.bias = nn.Parameter(torch.full((outputs,), bias / speed))
        self.scale, self.offset = gain * speed / math.sqrt(inputs), gain * speed

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.offset == 1 else self.bias * self.offset
        return F.linear(x, self.weight * self.scale, bias)


class Conv(nn.Module):
    """A convolution [B, inputs, H, W] to [B, outputs, H, W], or of half the side with `down`."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, down: bool = False, bias: bool = True, gain: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.scale, self.gain = gain / math.sqrt(inputs * kernel**2), gain
        self.down, self.kernel = down, kernel

    def active(self, x: Tensor) -> Tensor:
        """The same, activated."""
        return activate(self(x))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bias is None or self.gain == 1 else self.bias * self.gain
        weight = self.weight * self.scale
        if not self.down:
            return convolved(x, weight, bias, padding=self.kernel // 2)
        padding = 1 + self.kernel // 2
        if uses_gpu_kernels(x) and self.kernel == 1:  # only the pixels that are wanted
            return convolved(swept(x, x.shape[-1] // 2, padding, stride=2), weight, bias)
        return convolved(blur(x, padding, padding), weight, bias, stride=2)


def weighted(x: Tensor, factors: Tensor) -> Tensor:
    """Feature maps x [B, C, H, W] times factors [B, C]."""
    return x * factors.to(x.dtype)[:, :, None, None]


class StyledConv(nn.Module):
    """A convolution whose input channels are weighted by a style, its weights brought back to unit length.

    Weighting the channels of the image instead of the weights is the same, and lets a batch share one convolution.
    With `up` sides are doubled.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, style: int, *, up: bool = False, demodulate: bool = True
    ) -> None:
        super().__init__()
        self.style = Linear(style, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.scale, self.kernel = 1 / math.sqrt(inputs * kernel**2), kernel
        self.up, self.demodulate = up, demodulate

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, inputs, H, W] and styles w [B, style] to images, and factors [B, outputs, 1, 1] still to be
        applied to them: whoever adds a bias can do both at once."""
        with torch.autocast(x.device.type, enabled=False):  # bf16 would round away what demodulation restores
            style = self.style(w.to(self.weight.dtype)) * self.scale
            length = style.square() @ self.weight.square().sum((2, 3)).T if self.demodulate else None
        by_image = uses_gpu_kernels(x) and self.kernel == 1
        y = self._weighed(x, style) if by_image else self._convolved(weighted(x, style))
        if length is None:
            return y, y.new_ones(1)
        return y, (length + EPS).rsqrt().to(y.dtype)[:, :, None, None]

    def _weighed(self, x: Tensor, style: Tensor) -> Tensor:
        """Of a kernel of one pixel: a product of each image with weights of its own, which saves two passes over it."""
        batch, channels, height, width = x.shape
        weights = F.pad(self.weight[:, :, 0, 0] * style[:, None], (0, 0, 0, -len(self.weight) % GROUPED))
        rows = x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)  # no copy where channels are last
        made = torch.bmm(rows, weights.mT)[..., : len(self.weight)]
        return made.mT.reshape(batch, -1, height, width)

    def _convolved(self, x: Tensor) -> Tensor:
        if not self.up:
            return convolved(x, self.weight, padding=self.kernel // 2)
        # four pixels out of each: the filter's sum is brought back from one to four
        return blur(F.conv_transpose2d(x, (self.weight * 4).transpose(0, 1), stride=2), 1, 1)


class Finish(nn.Module):
    """What follows a styled convolution: factors, bias, noise by an amount that is learned, activation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.amount = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, factors: Tensor, noise: Tensor) -> Tensor:
        """Images [B, C, H, W], factors that broadcast to them, noise [B, 1, H, W]."""
        x = torch.addcmul((self.bias * GAIN).to(x.dtype), x, factors * GAIN)
        return activate(torch.addcmul(x, noise.to(x.dtype), (self.amount * GAIN).to(x.dtype)))
