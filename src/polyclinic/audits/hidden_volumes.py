"""A search for patches of a site's volumes in a parcel: by correlation, at every place, mirrored along any axis.

Signs, brightness and contrast do not count. A patch was found where it fits a training volume far better than any
held-out one. What was resampled, rotated or mixed is not found.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Verdict
from polyclinic.audits.attack import Finding, Seen
from polyclinic.audits.hidden import CLOSER, FITS, THREAT
from polyclinic.audits.truth import Truth
from polyclinic.data.parts import ImageSet

NAME = "volume-search"
SMALLEST_SIDE = 6  #: of a patch: kernels of a network are smaller
ROWS, CHANNELS = 4, 4  #: patches of a tensor that are looked for, evenly among all, and channels of each
VOLUMES = 24  #: training volumes that are searched, and as many held-out ones
MOST_VOXELS = 2**18  #: larger volumes are averaged down first, patches with them
FLIPS = [[axis for axis in range(3) if number >> axis & 1] for number in range(8)]


def hidden_patches(seen: Seen, truth: Truth) -> list[Finding]:
    """The patch of a training volume that fits best, if one lies in the parcel's numbers."""
    own, others = (part.take(evenly(len(part), VOLUMES)) for part in (truth.data.train, truth.outside))
    known = list(patches_in(seen.parcel.tensors))
    if not known or not len(own) or not len(others):
        return []
    fits, against = (fits_in([patch for _, patch in known], part) for part in (own, others))
    found = [n for n, fit in enumerate(fits) if fit >= FITS and 1 - fit <= CLOSER * (1 - against[n])]
    if not found:
        return []
    best = max(found, key=fits.__getitem__)
    words = (
        f"{len(found)} of {len(fits)} maps in '{known[best][0]}' show a patch of a training volume (correlation "
        f"{fits[best]:.2f}; the best place in a held-out volume has {against[best]:.2f})"
    )
    figures: dict[str, float | int | str] = {"recovered": len(found), "images": len(fits)}
    figures |= {"correlation": fits[best], "held_out": against[best]}
    return [Finding(NAME, THREAT, Verdict(True, words, figures))]


def patches_in(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Some maps float32 [X, Y, Z] of the tensors that may hold some, with their names."""
    for name, tensor in tensors.items():
        if tensor.dim() < 3 or min(tensor.shape[-3:]) < SMALLEST_SIDE:
            continue
        maps = tensor.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0)
        maps = maps.reshape(-1, maps.shape[-4] if maps.dim() > 3 else 1, *maps.shape[-3:])
        for row in maps[evenly(len(maps), ROWS)]:
            chosen = row.flatten(1).var(1).argsort(descending=True)[:CHANNELS]
            yield from ((name, one) for one in row[chosen] if float(one.var()) > 0)


def fits_in(patches: list[Tensor], part: ImageSet) -> list[float]:
    """How well each patch fits the place where it fits best, in any channel of any volume, mirrored or not."""
    best = [0.0] * len(patches)
    for volume in part.images:
        by = max(1, round((np.prod(volume.image.shape[1:]) / MOST_VOXELS) ** (1 / 3)))
        for channel in volume.image:
            voxels = _pooled(torch.from_numpy(np.asarray(channel, np.float32)), by)
            for number, patch in enumerate(patches):
                best[number] = max(best[number], correlation(voxels, _pooled(patch, by)))
    return best


def correlation(voxels: Tensor, patch: Tensor) -> float:
    """The largest absolute correlation of a patch, mirrored or not, with a place of a volume; 0 where it is larger.
    Where the volume ends, a patch has zeros, as in training."""
    more = [max(0, side - whole) for side, whole in zip(patch.shape, voxels.shape, strict=True)]
    voxels = F.pad(voxels, [n for side in reversed(more) for n in (side // 2, side - side // 2)]).double()
    voxels, size, sides = voxels - voxels.mean(), patch.numel(), tuple(voxels.shape)
    counted = torch.zeros(sides, dtype=torch.float64)
    counted[tuple(slice(0, side) for side in patch.shape)] = 1
    spectrum, box = torch.fft.rfftn(voxels), torch.fft.rfftn(counted).conj()
    inside = tuple(slice(0, whole - side + 1) for whole, side in zip(sides, patch.shape, strict=True))

    def along(one: Tensor, other: Tensor) -> Tensor:
        return torch.fft.irfftn(one * other, sides)[inside]

    sums = along(spectrum, box)
    spread = along(torch.fft.rfftn(voxels.square()), box) - sums.square() / size
    spread = spread.clamp(min=1e-3 * float(spread.max().clamp(min=1e-30))).sqrt()
    found = 0.0
    for axes in FLIPS:
        template = torch.zeros(sides, dtype=torch.float64)
        turned = patch.flip(axes).double()
        turned = turned - turned.mean()
        template[tuple(slice(0, side) for side in patch.shape)] = turned / turned.norm().clamp(min=1e-30)
        found = max(found, float((along(spectrum, torch.fft.rfftn(template).conj()) / spread).abs().max()))
    return found


def _pooled(voxels: Tensor, by: int) -> Tensor:
    return F.avg_pool3d(voxels[None, None], by, ceil_mode=True)[0, 0] if by > 1 else voxels


def evenly(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)) if count else np.arange(0)
