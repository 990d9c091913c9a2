"""PSNR and SSIM: how much images resemble others, pair by pair.

Every function takes two tensors [N, C, H, W] and says which range of values it takes: `data_range` is 1 for images in
[0, 1] and 255 for uint8. It is the range that images may have, not the one they happen to have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

#: dB, where a finite figure is needed: the PSNR of equal images is infinite
MOST_DECIBELS = 120.0


def mean_squared_error(a: Tensor, b: Tensor) -> Tensor:
    """[N] of images [N, C, H, W], in float64."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> Tensor:
    """Peak signal-to-noise ratio in dB, [N] of images [N, C, H, W]; infinite where they are equal."""
    return psnr_from_error(mean_squared_error(a, b), data_range=data_range)


def pooled_psnr(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> float:
    """PSNR in dB of two whole sets, from the mean squared error over all their pixels; at most 120."""
    difference = a.float() - b.float() if a.dtype == torch.uint8 else a.double() - b.double()
    error = difference.square().mean(dtype=torch.float64)
    return float(psnr_from_error(error, data_range=data_range, most=MOST_DECIBELS))


def psnr_from_error(error: Tensor, *, data_range: float = 1.0, most: float = math.inf) -> Tensor:
    """PSNR in dB of mean squared errors of any shape; what is higher than `most` becomes `most`."""
    return -10 * torch.log10((error / data_range**2).clamp(min=10 ** (-most / 10)))


def ssim(a: Tensor, b: Tensor, *, window: int = 7, data_range: float = 1.0) -> Tensor:
    """Structural similarity, [N] of images [N, C, H, W]: mean over channels and all windows inside the image.

    Window 7 is scikit-image's default (flat, sample covariance), 11 is MONAI's (Gaussian of deviation 1.5).
    """
    if window not in (7, 11):
        raise ValueError("SSIM has a flat window of 7 or a Gaussian window of 11 pixels")
    down, across = (_window_matrix(side, window).to(a.device) for side in a.shape[-2:])
    correction = window**2 / (window**2 - 1) if window == 7 else 1.0
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2

    def smooth(images: Tensor) -> Tensor:
        return down @ images @ across.T  # a matrix product: ten times as fast as a convolution in float64

    a, b = a.double(), b.double()
    mean_a, mean_b = smooth(a), smooth(b)
    var_a = correction * (smooth(a * a) - mean_a**2)
    var_b = correction * (smooth(b * b) - mean_b**2)
    covariance = correction * (smooth(a * b) - mean_a * mean_b)
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return (luminance * (2 * covariance + c2) / (var_a + var_b + c2)).flatten(1).mean(1)


def _window_matrix(side: int, window: int) -> Tensor:
    """Takes the weighted mean over every window inside a line of `side` pixels: [side - window + 1, side]."""
    line = torch.ones(7, dtype=torch.float64)
    if window == 11:
        line = torch.exp(-0.5 * (torch.arange(11, dtype=torch.float64) - 5).square() / 1.5**2)
    places = range(side - window + 1)
    return torch.stack([F.pad(line / line.sum(), (place, side - window - place)) for place in places])
