"""The layers that StyleGAN2's networks are made of, written from the papers (Karras et al. 2018, 2020).

Weights are stored with unit variance and scaled when used, so that all of them learn at one speed. Images are filtered
with [1, 3, 3, 1] wherever their size changes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLOPE = 0.2
#: keeps the variance that a leaky ReLU takes away
GAIN = math.sqrt(2)
#: activations beyond this are cut: in bf16 a few large ones would spoil the sums they enter
LARGEST = 256.0
EPS = 1e-8


def activate(x: Tensor, gain: float = GAIN) -> Tensor:
    return (F.leaky_relu(x, SLOPE) * gain).clamp(-LARGEST * gain, LARGEST * gain)


def unit(vectors: Tensor) -> Tensor:
    """Vectors [B, D] with a mean square of one."""
    return vectors * (vectors.square().mean(1, keepdim=True) + EPS).rsqrt()


# --- filters ------------------------------------------------------------------------------------------


def blur(x: Tensor, before: int, after: int) -> Tensor:
    """Filtered with [1, 3, 3, 1] / 8 along both sides, after padding with zeros; a side grows by before + after - 3.

    Sums of shifted copies, which have second derivatives on any device and which a compiler makes one pass of.
    """
    x = F.pad(x, (before, after, before, after))
    x = (x[..., :-3, :] + x[..., 3:, :] + 3 * (x[..., 1:-2, :] + x[..., 2:-1, :])) / 8
    return (x[..., :-3] + x[..., 3:] + 3 * (x[..., 1:-2] + x[..., 2:-1])) / 8


def halved(x: Tensor) -> Tensor:
    """Images of half the side, filtered."""
    return blur(x, 1, 1)[..., ::2, ::2]


def doubled(x: Tensor) -> Tensor:
    """Images of twice the side, filtered: between two pixels three quarters of the nearer and one of the farther."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


# --- layers with weights ------------------------------------------------------------------------------


class Linear(nn.Module):
    """Rows [B, inputs] to [B, outputs]; `speed` below 1 slows the learning of this layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: float = 0.0, speed: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / speed)
        self.bias = nn.Parameter(torch.full((outputs,), bias / speed))
        self.scale, self.speed = speed / math.sqrt(inputs), speed

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias * self.speed)


class Conv(nn.Module):
    """A convolution [B, inputs, H, W] to [B, outputs, H, W], or of half the side with `down`."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, down: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.scale, self.down, self.kernel = 1 / math.sqrt(inputs * kernel**2), down, kernel

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.scale
        if not self.down:
            return F.conv2d(x, weight, self.bias, padding=self.kernel // 2)
        if self.kernel == 1:
            return F.conv2d(halved(x), weight, self.bias)
        return F.conv2d(blur(x, 2, 2), weight, self.bias, stride=2)


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

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Images [B, inputs, H, W] and styles w [B, style]."""
        weight = self.weight * self.scale
        with torch.autocast(x.device.type, enabled=False):  # bf16 would round away what demodulation restores
            style = self.style(w.to(self.weight.dtype))
            length = style.square() @ weight.square().sum((2, 3)).T if self.demodulate else None
        y = x * style.to(x.dtype)[:, :, None, None]
        if self.up:  # four pixels out of each: the filter's sum is brought back from one to four
            y = 4 * blur(F.conv_transpose2d(y, weight.transpose(0, 1), stride=2), 1, 1)
        else:
            y = F.conv2d(y, weight, padding=self.kernel // 2)
        return y if length is None else y * (length + EPS).rsqrt().to(y.dtype)[:, :, None, None]


class Noise(nn.Module):
    """Adds a map of noise, by an amount that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Images [B, C, H, W] and noise [B, 1, H, W]."""
        return x + (self.amount * noise).to(x.dtype)
