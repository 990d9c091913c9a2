"""Strides and kernels of a U-Net by nnU-Net's rules (Isensee et al. 2021), from the spacing and the patch."""

from collections.abc import Sequence
from dataclasses import dataclass

#: a side of the smallest feature map is not below it
SMALLEST_MAP = 4
#: axes whose spacing is so many times that of the finest are not halved yet
ANISOTROPIC = 2.0
#: filters of the first stage, and the most of any
FIRST_FILTERS, MOST_FILTERS = 32, 320
MOST_STAGES = 6


@dataclass(frozen=True)
class Topology:
    """Kernels, strides and filters of the stages of an encoder; its decoder mirrors it. The first stride is 1."""

    kernels: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    filters: tuple[int, ...]

    @property
    def divisor(self) -> tuple[int, ...]:
        """What the sides of a patch must be multiples of."""
        found = [1] * len(self.strides[0])
        for stride in self.strides:
            found = [side * by for side, by in zip(found, stride, strict=True)]
        return tuple(found)


def topology(size: Sequence[int], spacing: Sequence[float] | None = None) -> Topology:
    """The stages for patches of `size` voxels; without a spacing, voxels are cubes.

    An axis is halved while at least twice the smallest map is left and its spacing is below twice the finest; its
    kernel is 1 until the spacing is near to the finest.
    """
    sides, apart = list(size), list(spacing or [1.0] * len(size))
    strides, kernels, kernel = [(1,) * len(sides)], [], [1] * len(sides)
    while axes := _halved(sides, apart):
        kernel = [3 if far < ANISOTROPIC * min(apart) else side for far, side in zip(apart, kernel, strict=True)]
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in axes else 1 for axis in range(len(sides))))
        for axis in axes:
            sides[axis], apart[axis] = -(-sides[axis] // 2), apart[axis] * 2
    kernels.append((3,) * len(sides))
    strides, kernels = strides[:MOST_STAGES], kernels[:MOST_STAGES]
    filters = tuple(min(FIRST_FILTERS * 2**stage, MOST_FILTERS) for stage in range(len(strides)))
    return Topology(tuple(kernels), tuple(strides), filters)


def _halved(sides: Sequence[int], apart: Sequence[float]) -> list[int]:
    """The axes that the next stage halves."""
    large = [axis for axis, side in enumerate(sides) if side >= 2 * SMALLEST_MAP]
    finest = min((apart[axis] for axis in large), default=0.0)
    axes = [axis for axis in large if apart[axis] < ANISOTROPIC * finest]
    return [] if len(axes) == 1 and sides[axes[0]] < 3 * SMALLEST_MAP else axes
