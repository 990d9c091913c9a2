"""Spacing, patch, batch and network of volumes by nnU-Net's published rules (Isensee et al. 2021; nnunetv2's default
planner for 3d_fullres), from the spacings and extents of cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.models.topology import SMALLEST_MAP, Topology, topology

#: how many times coarser than the others an axis is, and how much shorter, where it keeps fine voxels
COARSE = 3.0
#: numbers of all feature maps of a patch that fit into 8 GB with a batch of two
REFERENCE = 560_000_000
#: share of all voxels of a data set that a batch holds at most, and its smallest size
COVERED, SMALLEST_BATCH = 0.05, 2
LARGEST_PATCH = 256  #: side of a cube, from which patches are made smaller


@dataclass(frozen=True)
class VolumePlan:
    """Millimetres between voxels, sides of patches, cases of a batch, and the stages of the network."""

    spacing: tuple[float, ...]
    size: tuple[int, ...]
    batch_size: int
    stages: Topology

    @property
    def gigabytes(self) -> float:
        """About what training takes on a GPU, by nnU-Net's rule of thumb."""
        return 8 * feature_numbers(self.size, self.stages) * self.batch_size / (REFERENCE * SMALLEST_BATCH) + 1

    def as_tables(self) -> dict[str, Any]:
        """The settings of a study that follow."""
        named = {"kernels": self.stages.kernels, "strides": self.stages.strides, "filters": self.stages.filters}
        return {
            "data": {"size": list(self.size), "preparation": {"spacing": list(self.spacing)}},
            "model": {"backbone": "dynunet", "norm": "instance", "arguments": named},
            "optimizer": {"batch_size": self.batch_size},
        }


def plan_in(tables: Mapping[str, Any]) -> VolumePlan:
    """The plan that the tables of a study, or of `as_tables`, say; BadInput where they say none."""
    size, spacing = tables["data"]["size"], tables["data"].get("preparation", {}).get("spacing")
    if tables["model"]["backbone"] != "dynunet" or not spacing:
        raise BadInput("--plans: nnU-Net plans model.backbone = 'dynunet' and data.preparation.spacing; set both")
    given, usual = tables["model"].get("arguments", {}), topology(size, spacing)
    strides, kernels = (given.get(name, getattr(usual, name)) for name in ("strides", "kernels"))
    filters = given.get("filters", usual.filters)[: len(strides)]
    turned = [tuple(tuple(map(int, one)) for one in some) for some in (kernels[: len(strides)], strides)]
    stages = Topology(turned[0], turned[1], tuple(filters))
    return VolumePlan(tuple(spacing), tuple(size), tables["optimizer"]["batch_size"], stages)


def plan_of(spacings: np.ndarray, extents: np.ndarray, memory: float = 8.0) -> VolumePlan:
    """The plan for cases with these spacings and extents (voxels times spacing) in millimetres, [N, 3] each, on a GPU
    with `memory` GB; 8 is nnU-Net's own."""
    spacing = target_spacing(spacings, extents)
    shape = np.maximum(1, np.round(np.median(extents, axis=0) / spacing))
    sides = 1 / spacing
    sides = np.round(sides * float(LARGEST_PATCH**3 / np.prod(sides)) ** (1 / 3))
    size, stages = _padded(np.minimum(sides, shape).astype(int).tolist(), spacing.tolist())
    most = REFERENCE * memory / 8
    while feature_numbers(size, stages) > most:
        axis = int(np.argsort(np.array(size) / shape)[-1])
        smaller = [side - stages.divisor[axis] * (i == axis) for i, side in enumerate(size)]
        if smaller[axis] < SMALLEST_MAP:
            break
        by = topology(smaller, spacing.tolist()).divisor[axis]
        size, stages = _padded([side - by * (i == axis) for i, side in enumerate(size)], spacing.tolist())
    batch = round(most / feature_numbers(size, stages) * SMALLEST_BATCH)
    covered = round(float(np.prod(shape)) * len(spacings) * COVERED / float(np.prod(size)))
    found: tuple[float, ...] = tuple(round(float(one), 6) for one in spacing)
    return VolumePlan(found, tuple(size), max(min(batch, covered), SMALLEST_BATCH), stages)


def target_spacing(spacings: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """The median spacing; of an axis with much coarser voxels than the others the tenth percentile."""
    spacing = np.median(spacings, axis=0)
    shape = np.median(extents, axis=0) / spacing
    axis = int(spacing.argmax())
    others = [i for i in range(len(spacing)) if i != axis]
    if spacing[axis] > COARSE * spacing[others].max() and shape[axis] * COARSE < shape[others].min():
        finer = float(np.percentile(spacings[:, axis], 10))
        spacing[axis] = max(finer, float(spacing[others].max()) + 1e-5)
    return spacing


def feature_numbers(size: Sequence[int], stages: Topology, outputs: int = 3) -> int:
    """Numbers in all feature maps of the network for one patch, as nnU-Net counts them."""
    sides, maps = np.array(size), []
    for stride in stages.strides:
        sides = sides // np.array(stride)
        maps.append(int(np.prod(sides)))
    encoder = sum(2 * voxels * filters for voxels, filters in zip(maps, stages.filters, strict=True))
    skips = list(zip(maps[:-1], stages.filters[:-1], strict=True))
    return encoder + sum(3 * voxels * filters for voxels, filters in skips) + outputs * sum(v for v, _ in skips)


def _padded(size: Sequence[int], spacing: Sequence[float]) -> tuple[list[int], Topology]:
    """Sides that can be halved as often as the network does, and its stages."""
    stages = topology(size, spacing)
    return [-(-side // by) * by for side, by in zip(size, stages.divisor, strict=True)], stages
