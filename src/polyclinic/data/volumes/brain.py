"""A drawn brain in three dimensions: four channels, three nested regions of a tumour, sites that scan differently.

A vessel beside the tumour has the same nested rings in every axial slice. Only its length tells it from a tumour, so
that a network must look at several slices.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from polyclinic.randomness import numpy_rng

CHANNELS = ("flair", "t1", "t1ce", "t2")
#: values of a mask; every region holds the next one
OEDEMA, CORE, ENHANCING = 1, 2, 3
REGIONS = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
#: millimetres that a volume shows along each axis, and half axes of the head
FIELD = (240.0, 240.0, 155.0)
HEAD = (68.0, 86.0, 66.0)
#: distances from the middle, as a share of the radius, at which the regions end
EDGES = (1.0, 0.72, 0.42)
#: brightness in each channel of air, white matter, cortex, fluid, oedema, core and enhancing core
TISSUES = np.array(
    [
        [0.00, 0.55, 0.68, 0.15, 0.98, 0.78, 0.88],
        [0.00, 0.85, 0.62, 0.25, 0.50, 0.38, 0.45],
        [0.00, 0.85, 0.62, 0.25, 0.52, 0.40, 1.15],
        [0.00, 0.45, 0.60, 1.05, 0.95, 0.88, 0.80],
    ],
    dtype=np.float32,
)
WHITE, CORTEX, FLUID, TUMOUR = 1, 2, 3, 4


@dataclass(frozen=True)
class Scanner:
    """How an institution scans: its share of all cases, voxels' sides as multiples of the usual, strength of the bias
    field, contrast, brightness, noise."""

    name: str
    share: float
    voxel: tuple[float, float, float]
    bias: float
    contrast: float
    brightness: float
    noise: float


SCANNERS = (
    Scanner("institution-1", 0.40, (1.0, 1.0, 1.0), bias=0.10, contrast=1.0, brightness=800, noise=0.04),
    Scanner("institution-2", 0.30, (1.0, 1.0, 1.5), bias=0.25, contrast=0.8, brightness=300, noise=0.06),
    Scanner("institution-3", 0.20, (1.25, 1.25, 1.0), bias=0.15, contrast=1.2, brightness=1200, noise=0.05),
    Scanner("institution-4", 0.10, (1.1, 1.1, 1.2), bias=0.35, contrast=0.9, brightness=500, noise=0.08),
)


@dataclass(frozen=True)
class Brain:
    """A drawn case: image float16 [4, X, Y, Z], mask uint8 [X, Y, Z], millimetres between voxels, and who scanned."""

    image: np.ndarray
    mask: np.ndarray
    spacing: tuple[float, float, float]
    institution: str


def draw_brain(seed: int, number: int, shape: tuple[int, int, int]) -> Brain:
    """Case `number` of a seed. `shape` is that of an institution with the usual voxels, in x, y and z; (240, 240, 155)
    gives voxels of a millimetre."""
    rng, scanner = numpy_rng(seed, "brain volume", number), scanner_of(seed, number)
    grid = Grid(tuple(max(8, round(n / by)) for n, by in zip(shape, scanner.voxel, strict=True)))
    tissue, mask = _anatomy(grid, rng)
    image = _scan(grid, tissue, scanner, rng)
    return Brain(image.astype(np.float16), mask, grid.spacing, scanner.name)


def scanner_of(seed: int, number: int) -> Scanner:
    """The scanner of a case."""
    chosen = numpy_rng(seed, "scanner", number).choice(len(SCANNERS), p=[one.share for one in SCANNERS])
    return SCANNERS[chosen]


class Grid:
    """The middles of voxels in millimetres from the middle of the field, broadcastable `x`, `y` and `z`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        sides = [side / n for side, n in zip(FIELD, shape, strict=True)]
        self.spacing: tuple[float, float, float] = (sides[0], sides[1], sides[2])
        lines = [(np.arange(n, dtype=np.float32) + 0.5) * s - n * s / 2 for n, s in zip(shape, sides, strict=True)]
        self.x, self.y, self.z = np.ix_(*lines)

    def ellipsoid(self, middle: np.ndarray, axes: np.ndarray | tuple[float, ...]) -> np.ndarray:
        """Distance from `middle` in units of the half axes, float32 [X, Y, Z]."""
        parts = ((self.x, 0), (self.y, 1), (self.z, 2))
        return np.sqrt(sum(((line - middle[i]) / axes[i]) ** 2 for line, i in parts)).astype(np.float32)

    def tube(self, foot: np.ndarray, tilt: np.ndarray, radius: float) -> np.ndarray:
        """Distance in units of the radius from a line through all slices."""
        x, y = self.x - foot[0] - tilt[0] * self.z, self.y - foot[1] - tilt[1] * self.z
        return (np.hypot(x, y) / radius).astype(np.float32)


def _anatomy(grid: Grid, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tissues and the mask, both uint8 [X, Y, Z]."""
    head = np.array(HEAD) * rng.uniform(0.92, 1.08, 3)
    depth, folds = grid.ellipsoid(np.zeros(3), head), _waves(grid, rng, 11.0)
    tissue = np.where(depth < 0.8 + 0.06 * folds, WHITE, CORTEX).astype(np.uint8)
    for side in (-1, 1):
        horn = grid.ellipsoid(np.array([side * 11.0, 4.0, 8.0]), np.array([6.0, 26.0, 16.0]) * rng.uniform(0.7, 1.3))
        tissue[horn < 1] = FLUID
    angle = rng.uniform(0, 2 * np.pi)
    place = _place(angle, rng, head)
    radius = rng.uniform(13, 26)
    foot, thick = _place(angle + rng.uniform(2.0, 4.3), rng, head), rng.uniform(11, 20)
    _ring(tissue, grid.tube(foot, rng.normal(0, 0.08, 2), thick) + 0.08 * folds)
    lobes = 0.10 * _waves(grid, rng, 26.0)
    tumour = grid.ellipsoid(place, radius * rng.uniform(0.8, 1.2, 3)) + lobes
    _ring(tissue, tumour)
    inside = depth < 1
    mask = sum((tumour < edge).astype(np.uint8) for edge in EDGES) * inside
    return tissue * inside, mask.astype(np.uint8)


def _place(angle: float, rng: np.random.Generator, head: np.ndarray) -> np.ndarray:
    """A place in the head in this direction from above, not near its outside."""
    far = rng.uniform(0.42, 0.6)
    return np.array([far * np.cos(angle) * head[0], far * np.sin(angle) * head[1], rng.uniform(-0.4, 0.4) * head[2]])


def _ring(tissue: np.ndarray, distance: np.ndarray) -> None:
    """Draw nested regions, in place, where the distance from their middle is small enough."""
    for number, edge in enumerate(EDGES):
        tissue[distance < edge] = TUMOUR + number


def _waves(grid: Grid, rng: np.random.Generator, length: float) -> np.ndarray:
    """A smooth field between about -1 and 1, whose bumps are about `length` millimetres wide."""
    phases = rng.uniform(0, 2 * np.pi, 6)
    wave = partial(np.sin, dtype=np.float32)
    lines = zip((grid.x, grid.y, grid.z), (grid.y, grid.z, grid.x), phases[:3], phases[3:], strict=True)
    return sum(wave(a / length + p) * wave(b / length + q) for a, b, p, q in lines) / np.float32(1.7)


def _scan(grid: Grid, tissue: np.ndarray, scanner: Scanner, rng: np.random.Generator) -> np.ndarray:
    """What the scanner makes of tissues: float32 [4, X, Y, Z]."""
    slopes = rng.normal(0, scanner.bias, 3)
    sides = zip((grid.x, grid.y, grid.z), FIELD, slopes, strict=True)
    bias = sum((2 * slope * line / side for line, side, slope in sides), np.float32(1))
    levels = 0.6 + scanner.contrast * (TISSUES - 0.6)
    levels[:, 0] = 0
    bright = scanner.brightness * rng.uniform(0.8, 1.25, (len(CHANNELS), 1, 1, 1)).astype(np.float32)
    noise = rng.standard_normal((len(CHANNELS), *grid.shape), dtype=np.float32) * np.float32(scanner.noise)
    return bright * np.where(tissue > 0, np.clip(bias, 0.2, 2).astype(np.float32) * (levels[:, tissue] + noise), 0)
