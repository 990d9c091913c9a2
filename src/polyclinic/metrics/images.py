"""Images of metrics and attacks: PSNR and SSIM pair by pair; sets of images checked, scaled, turned; components.

PSNR and SSIM take two tensors [N, C, H, W] and say which range of values they take: `data_range` is 1 for images in
[0, 1] and 255 for uint8. It is the range that images may have, not the one they happen to have.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput

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


# --- sets of images -------------------------------------------------------------------------------------------


Images = Tensor | np.ndarray

#: the eight ways to lay a square picture on itself, and what undoes nothing else than a flip or quarter turns
ORIENTATIONS = (
    "as it is", "turned by 90 degrees", "turned by 180 degrees", "turned by 270 degrees", "mirrored",
    "mirrored and turned by 90 degrees", "mirrored and turned by 180 degrees", "mirrored and turned by 270 degrees",
)  # fmt: skip


def as_unit(images: Images, what: str = "images") -> Tensor:
    """Images [N, C, H, W], C 1 or 3, as float32 in [0, 1]; uint8 is divided by 255. `what` names them in messages."""
    found = torch.as_tensor(np.asarray(images).copy() if isinstance(images, np.ndarray) else images)
    if found.dim() != 4 or found.shape[1] not in (1, 3) or not len(found):
        raise BadInput(f"{what}: have shape {tuple(found.shape)}; give [N, C, H, W] with one or three channels")
    if found.dtype == torch.uint8:
        return found.float() / 255
    if not found.is_floating_point() or not bool(found.isfinite().all()):
        raise BadInput(f"{what}: are {found.dtype}, or not finite; give uint8, or float between 0 and 1")
    return found.float()


def same_shape(first: Tensor, second: Tensor, what: str) -> None:
    """Raise BadInput unless both sets hold images of one shape."""
    if first.shape[1:] != second.shape[1:]:
        raise BadInput(
            f"{what}: have shape {tuple(second.shape[1:])} where {tuple(first.shape[1:])} was expected; resize them"
        )


def turned(images: Tensor, orientation: int) -> Tensor:
    """Images laid down in the orientation ORIENTATIONS[orientation]: mirrored left-right first, then turned."""
    mirrored, quarters = divmod(orientation, 4)
    found = images.flip(-1) if mirrored else images
    return found.rot90(quarters, (-2, -1))


def orientations_of(images: Tensor) -> tuple[int, ...]:
    """The orientations that keep the shape of these images: all eight, or four where they are not square."""
    return tuple(range(8)) if images.shape[-1] == images.shape[-2] else (0, 2, 4, 6)


def digest(image: Tensor) -> str:
    """A name for one image by its pixels, so that what is drawn for it does not depend on its place in a set."""
    return hashlib.sha256(image.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


# --- principal components -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Components:
    """Leading principal components of some images: mean [D], directions [D, P]."""

    mean: Tensor
    directions: Tensor

    def project(self, images: Tensor) -> Tensor:
        """Coordinates [N, P] of uint8 images [N, C, H, W]."""
        return (_pixels(images) - self.mean) @ self.directions


def principal_components(images: Tensor, count: int = 50) -> Components:
    """Up to `count` principal components of uint8 images [N, C, H, W]; each has its largest entry positive."""
    rows = _pixels(images)
    mean = rows.mean(0)
    wanted = min(count, len(rows) - 1, rows.shape[1])
    _, _, found = torch.linalg.svd((rows - mean).double(), full_matrices=False)
    directions = found[:wanted].T
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return Components(mean, (directions * largest.sign()).float())


def _pixels(images: Tensor) -> Tensor:
    """float32 [N, D] in [0, 1]."""
    return images.flatten(1).float() / 255
