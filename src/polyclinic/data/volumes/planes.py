"""Pictures of volumes: the axial, coronal and sagittal plane that show most of the structures, side by side."""

import numpy as np
from PIL import Image

from polyclinic.data.volumes.volume import Volume, are_volumes

#: sides of the square that holds a plane, in pixels
SIDE = 160


def planes_of(voxels: np.ndarray, mask: np.ndarray, spacing: tuple[float, ...]) -> np.ndarray:
    """Three planes of voxels [X, Y, Z], each in a square [SIDE, SIDE], in true proportions, as radiologists look at
    them (the patient's right on the left): [SIDE, 3 SIDE]. `mask` says which planes."""
    around = [tuple(i for i in range(3) if i != axis) for axis in range(3)]
    shown = [int(sums.argmax()) if sums.any() else len(sums) // 2 for sums in (mask.sum(a) for a in around)]
    longest = max(n * apart for n, apart in zip(voxels.shape, spacing, strict=True))
    found = np.zeros((SIDE, 3 * SIDE), voxels.dtype)
    for place, axis in enumerate((2, 1, 0)):
        across, down = around[axis]
        plane = np.ascontiguousarray(np.take(voxels, shown[axis], axis)[::-1, ::-1].T)
        width, height = (max(1, round(SIDE * voxels.shape[i] * spacing[i] / longest)) for i in (across, down))
        left, top = place * SIDE + (SIDE - width) // 2, (SIDE - height) // 2
        resized = Image.fromarray(plane).resize((width, height), Image.Resampling.NEAREST)
        found[top : top + height, left : left + width] = resized
    return found


def grey_planes(volume: Volume, channel: int = 0) -> np.ndarray:
    """The planes of a volume's channel, uint8 [SIDE, 3 SIDE]; its middle 99 % of intensities fill the greys."""
    voxels = np.asarray(volume.image[channel], np.float32)
    low, high = np.percentile(voxels, (0.5, 99.5))
    grey = np.clip((voxels - low) * (255 / max(high - low, 1e-6)), 0, 255).astype(np.uint8)
    grey[voxels == 0] = 0  # outside the head, where normalising changes nothing
    return planes_of(grey, volume.mask, volume.spacing)


def mask_planes(volume: Volume) -> np.ndarray:
    """The same planes of a volume's mask, uint8 [SIDE, 3 SIDE]."""
    return planes_of(volume.mask, volume.mask, volume.spacing)


def pictures(images: np.ndarray) -> np.ndarray:
    """Images as they are, uint8 [N, C, H, W]; of volumes [N], the planes of their first channel."""
    return np.stack([grey_planes(volume)[None] for volume in images]) if are_volumes(images) else np.asarray(images)
