"""Training with patches of volumes, and scoring of whole volumes by a sliding window.

Every patch is drawn from a seed of its own, which comes from the address of the batch: bits do not depend on the order
in which sites work. Volumes stay on disk; of each, only the patch is read.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.preparation import IMAGE, MASK
from polyclinic.data.volumes.volume import Volume
from polyclinic.federation.collaborators import Batch
from polyclinic.models import Backbone
from polyclinic.tasks import VolumeSegmentation
from polyclinic.training.augmentation import Draws
from polyclinic.training.loop import Trainer, TrainerSpec

#: voxels of a case that may become the middle of a patch, of structures and of the rest each
MOST_MIDDLES = 50_000
#: cases whose places of middles stay in memory, less than a megabyte each
MOST_KEPT = 100


class VolumeTrainer(Trainer):
    """A trainer whose examples are patches of `spec.patch` voxels, and whose cases are scored whole."""

    task: VolumeSegmentation

    def __init__(self, model: Backbone, spec: TrainerSpec) -> None:
        super().__init__(model, spec)
        self.patch = spec.patch
        self._middles: weakref.WeakKeyDictionary[Volume, tuple[np.ndarray, np.ndarray]] = weakref.WeakKeyDictionary()

    def steps_in(self, part: ImageSet) -> int:
        return max(1, len(part) * self.task.patches // self.optimizer.batch_size)

    def batches(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        size, waiting = self.optimizer.batch_size, torch.empty(0, dtype=torch.int64)
        while True:
            while len(waiting) < size:
                cases = torch.randperm(len(part) * self.task.patches, generator=rng) // self.task.patches
                waiting = torch.cat([waiting, cases])
            yield self.batch(part, waiting[:size], rng)
            waiting = waiting[size:]

    def batch(self, part: ImageSet, index: Tensor, draws: Draws) -> Batch:
        """A patch of each of the cases at `index`, changed, with its targets, on the device."""
        if self._noted is not None:
            self._noted.append(index)
        seeds = draws if isinstance(draws, Tensor) else torch.randint(2**62, (len(index),), generator=draws)
        pairs = [self.patch_of(part.images[i], seed) for i, seed in zip(index.tolist(), seeds.tolist(), strict=True)]
        images, masks = (torch.stack([pair[key] for pair in pairs]).to(self.device) for key in (IMAGE, MASK))
        return images, self.task.targets(torch.zeros(len(images)), masks[:, 0])

    def examples(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        cases = torch.arange(len(part)).repeat_interleave(self.task.patches)
        return (self.batch(part, some, rng) for some in cases.split(self.optimizer.batch_size))

    def patch_of(self, volume: Volume, seed: int) -> dict[str, Tensor]:
        """A patch, float32 [C, X, Y, Z], and its mask, uint8 [1, X, Y, Z]; zeros where the volume ends."""
        crop, change = patch_transforms(self.patch, self.task.foreground, self.optimizer.augment)
        rng = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
        image, mask = volume.image, volume.mask
        crop.set_random_state(state=rng)
        crop.randomize(mask[None], *self._middles_of(volume))
        where = _slices(crop.centers[0], self.patch, mask.shape)
        found = {IMAGE: torch.from_numpy(image[(slice(None), *where)].astype(np.float32))}
        found[MASK] = torch.from_numpy(np.array(mask[where])[None])
        changed: dict[str, Tensor] = change.set_random_state(state=rng)(found)
        return {name: torch.as_tensor(tensor) for name, tensor in changed.items()}

    def _middles_of(self, volume: Volume) -> tuple[np.ndarray, np.ndarray]:
        """Places of structures and of the rest, as indices into the flat mask, thinned out evenly; where there are none
        of one, the others stand for them."""
        if volume not in self._middles:
            flat = np.asarray(volume.mask).reshape(-1) > 0
            both = (np.flatnonzero(flat), np.flatnonzero(~flat))
            inside, outside = (one[:: len(one) // MOST_MIDDLES + 1].astype(np.int32) for one in both)  # no view of all
            if len(self._middles) >= MOST_KEPT:
                self._middles.popitem()
            self._middles[volume] = inside if len(inside) else outside, outside if len(outside) else inside
        return self._middles[volume]

    def learn(self, images: Tensor, targets: Tensor, objective: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """As for images, with as many patches at once as `task.accumulate` parts of a batch have."""
        total, parts = torch.zeros((), device=self.device), min(self.task.accumulate, len(images))
        for some, theirs in zip(images.tensor_split(parts), targets.tensor_split(parts), strict=True):
            loss = objective(some, theirs) * (len(some) / len(images))
            loss.backward()
            total += loss.detach()
        return total

    # --- evaluation -------------------------------------------------------------------------------

    def in_order(self, part: ImageSet) -> Iterator[Batch]:
        """All cases once, whole, one after the other."""
        for volume in part.images:
            image = torch.from_numpy(np.asarray(volume.image, dtype=np.float32))[None]
            mask = torch.from_numpy(np.array(volume.mask))[None]
            yield image.to(self.device), self.task.targets(torch.zeros(1), mask.to(self.device))

    def _answer(self, images: Tensor) -> Tensor:
        found: Tensor = window(self.patch, self.task.overlap)(images, self.forward)
        return found.float()

    @torch.no_grad()
    def observations(self, part: ImageSet) -> Tensor:
        """What the task's metrics need of every case of a part, float64 [N, d]."""
        found = []
        for (output, target), volume in zip(self.outputs(part), part.images, strict=True):
            found.append(self.task.observe_case(output, target, self.target, volume.spacing))
        return torch.cat(found)

    def evaluate_parts(self, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]:
        found = []
        for part in parts:
            cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
            seen = self.within_bounds(self.observations(part), torch.zeros(len(part)))
            found.append(self.task.sums(seen, torch.zeros(len(part)), cases, self.target))
        return found


@functools.lru_cache(maxsize=8)
def window(patch: tuple[int, ...], overlap: float) -> Any:
    """MONAI's sliding window, whose windows count less towards their edges."""
    from monai.inferers import SlidingWindowInferer

    return SlidingWindowInferer(patch, sw_batch_size=2, overlap=overlap, mode="gaussian")


@functools.lru_cache(maxsize=8)
def patch_transforms(patch: tuple[int, ...], foreground: float, kinds: tuple[str, ...]) -> tuple[Any, Any]:
    """What chooses the middle of a patch, and what fills and changes it afterwards."""
    from monai import transforms as t

    crop = t.RandCropByPosNegLabel(patch, pos=foreground, neg=1 - foreground, allow_smaller=True)
    both = (IMAGE, MASK)
    known: dict[str, list[Any]] = {
        "flip": [t.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(len(patch))],
        "rotate": [t.RandAffined(both, prob=0.2, rotate_range=[0.26] * len(patch), mode=("bilinear", "nearest"))],
        "crop": [t.RandZoomd(both, prob=0.2, min_zoom=0.8, max_zoom=1.3, mode=("trilinear", "nearest"))],
        "brightness": [t.RandScaleIntensityd(IMAGE, factors=0.25, prob=0.15)],
        "contrast": [t.RandAdjustContrastd(IMAGE, prob=0.15, gamma=(0.7, 1.5))],
        "noise": [t.RandGaussianNoised(IMAGE, prob=0.1, std=0.1)],
    }
    return crop, t.Compose([t.SpatialPadd(both, patch), *_flat(known[kind] for kind in kinds)])


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [one for some in lists for one in some]


def _slices(middle: Sequence[Any], patch: tuple[int, ...], shape: Sequence[int]) -> tuple[slice, ...]:
    """The voxels of a patch around its middle; all along an axis that is shorter."""
    axes = zip(middle, patch, shape, strict=True)
    starts = [max(0, min(int(at) - side // 2, whole - side)) for at, side, whole in axes]
    return tuple(slice(start, start + side) for start, side in zip(starts, patch, strict=True))
