"""Hand radiographs with bone age: carpal bones appear and growth plates close as a child grows up."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.phantom import Canvas, Phantom

N = TypeVar("N", float, np.ndarray)

YOUNGEST, OLDEST = 1.0, 228.0

#: fingers from index to little: base x, base y, angle from upright, and lengths of metacarpal and phalanges
FINGERS = (
    (-0.15, 0.14, -0.24, (0.40, 0.24, 0.15, 0.11)),
    (-0.05, 0.11, -0.06, (0.40, 0.27, 0.18, 0.12)),
    (0.05, 0.12, 0.11, (0.36, 0.25, 0.17, 0.12)),
    (0.14, 0.15, 0.29, (0.33, 0.19, 0.12, 0.11)),
)
THUMB = (-0.20, 0.22, -0.85, (0.26, 0.19, 0.14))
#: months at which the growth plates close: metacarpals, then proximal, middle and distal phalanges
CLOSING = (192.0, 190.0, 192.0, 180.0)

#: carpal bones: x, y, final radius, and the months at which each starts to ossify
CARPALS = (
    (-0.01, 0.24, 0.062, 3.0),  # capitate
    (0.08, 0.25, 0.056, 4.0),  # hamate
    (0.12, 0.34, 0.044, 30.0),  # triquetrum
    (0.03, 0.36, 0.050, 42.0),  # lunate
    (-0.09, 0.34, 0.056, 66.0),  # scaphoid
    (-0.09, 0.23, 0.042, 68.0),  # trapezoid
    (-0.16, 0.27, 0.046, 64.0),  # trapezium
    (0.15, 0.30, 0.028, 130.0),  # pisiform
)
#: forearm: x, half width at the wrist, and the months at which its plate appears and closes
FOREARM = ((-0.08, 0.075, 12.0, 212.0), (0.09, 0.050, 75.0, 208.0))


def ramp(age: float, start: float, end: float) -> float:
    """0 before `start`, 1 after `end`, smooth in between."""
    t = float(np.clip((age - start) / (end - start), 0, 1))
    return t * t * (3 - 2 * t)


@dataclass(frozen=True)
class Pose:
    """The place of the hand on the film."""

    x: float
    y: float
    scale: float
    angle: float

    def place(self, x: N, y: N) -> tuple[N, N]:
        """From the hand's own coordinates, with the palm in the middle, to the film's."""
        cos, sin = np.cos(self.angle) * self.scale, np.sin(self.angle) * self.scale
        return self.x + x * cos - y * sin, self.y + x * sin + y * cos


class Skeleton:
    """Collects bones as bars in hand coordinates, to be drawn in one go."""

    def __init__(self) -> None:
        self.bars: list[tuple[float, ...]] = []  # from x, from y, to x, to y, radius, waist

    def bar(self, start: np.ndarray, end: np.ndarray, radius: float, waist: float = 0.0) -> None:
        """A bar between two points, thinner in the middle by the share `waist`."""
        self.bars.append((*start, *end, radius, waist))

    def long_bone(
        self, start: np.ndarray, end: np.ndarray, radius: float, gap: float, plate: float, at_end: bool
    ) -> None:
        """A shaft with its growth plate: a gap, and beyond it an epiphysis `plate` times as wide as the shaft."""
        if at_end:
            start, end = end, start
        along = (end - start) / np.linalg.norm(end - start)
        across = np.array([-along[1], along[0]])
        cap = 0.35 * radius
        self.bar(start + along * (radius + cap + gap), end - along * radius * 0.6, radius, waist=0.35)
        if plate > 0.05:
            half = across * max(radius * plate - cap, 0.2 * cap)
            self.bar(start + along * cap - half, start + along * cap + half, cap)
        if gap < 0.25 * radius:  # fused: one bone
            self.bar(start + along * cap, start + along * 2 * radius, radius)

    def draw(self, canvas: Canvas, pose: Pose, grow: float = 1.0) -> np.ndarray:
        """Density of bone, 0 to 1, or of the flesh around it where bars `grow` wider."""
        table = np.array(self.bars)
        length = np.hypot(table[:, 2] - table[:, 0], table[:, 3] - table[:, 1]) * pose.scale
        step = np.maximum(0.7 * canvas.pixel, 0.3 * table[:, 4] * pose.scale * grow)
        points = np.ceil(length / step).astype(int) + 1
        which = np.repeat(np.arange(len(table)), points)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(points) - points, points)
        along = nth / np.maximum(points - 1, 1)[which]
        from_x, from_y, to_x, to_y, radius, waist = table[which].T
        x, y = pose.place(from_x + (to_x - from_x) * along, from_y + (to_y - from_y) * along)
        width = radius * (1 - waist * np.sin(np.pi * along)) * pose.scale * grow
        return canvas.strokes(x, y, width, 1.0)


class HandPhantom(Phantom):
    """Hand radiographs; the label is the bone age in months."""

    source: Literal["hand-phantom"] = "hand-phantom"
    reader_error: float = Field(9.0, ge=0, le=60, description="standard deviation of looks from bone age, in months")

    tasks: ClassVar[tuple[str, ...]] = ("regression",)

    def load(self) -> Dataset:
        ages = np.array([self._draw_age(self.rng(i, "label")) for i in range(self.samples)], dtype=np.float32)
        return Dataset(images=self.draw_all(ages), labels=ages, unit="months", label_range=(0.0, OLDEST))

    @staticmethod
    def _draw_age(rng: np.random.Generator) -> float:
        """Ages as in a clinic: around ten and a half years, seldom very young."""
        while not YOUNGEST <= (age := rng.normal(127, 46)) <= OLDEST:
            pass
        return float(np.rint(age))

    def draw(self, canvas: Canvas, case: float, rng: np.random.Generator) -> np.ndarray:
        age = float(np.clip(case + rng.normal(0, self.reader_error), YOUNGEST, OLDEST + 12))
        pose = Pose(
            x=rng.normal(0, 0.1),
            y=rng.normal(0.1, 0.08),
            scale=rng.uniform(0.9, 1.25),  # films are enlarged to fit: size says nothing about age
            angle=rng.normal(0, 0.2),
        )
        bones = self._bones(age, rng)
        flesh = bones.draw(canvas, pose, grow=3.0)
        dense = bones.draw(canvas, pose)
        carpals = self._carpals(canvas, pose, age, rng)
        palm = canvas.ellipse(*pose.place(0.0, -0.02), 0.27 * pose.scale, 0.33 * pose.scale, soft=0.15)
        image = 0.17 * np.maximum(flesh, palm) * (1 + 0.1 * canvas.texture(rng, 4))
        image = image + rng.uniform(0.4, 0.55) * np.maximum(dense * (0.85 + 0.1 * canvas.texture(rng, 30)), carpals)
        return self._expose(canvas, image, rng)[None]

    @staticmethod
    def _bones(age: float, rng: np.random.Generator) -> Skeleton:
        """Phalanges, metacarpals and the forearm."""
        bones = Skeleton()
        stout = 0.030 + 0.008 * ramp(age, 0, 200)
        spread, bend = rng.normal(1, 0.15), rng.normal(0, 0.04)
        for x, y, angle, lengths in (*FINGERS, THUMB):
            at, heading = np.array([x, y]), angle * spread + rng.normal(0, 0.03)
            thumb = len(lengths) == 3
            for k, length in enumerate(lengths):
                along = np.array([np.sin(heading), -np.cos(heading)])
                end = at + along * length * rng.normal(1, 0.02)
                level = k + (thumb and k > 0)
                width = stout * (1.15, 1.0, 0.85, 0.7)[level]
                closing = CLOSING[level] + rng.normal(0, 4)
                plate = 1.25 * ramp(age, 12 + 6 * level, 150)
                gap = width * 1.1 * (1 - ramp(age, 40, closing)) + (0.3 * width if age < closing - 12 else 0)
                bones.long_bone(at, end - along * 0.012, width, gap, plate, at_end=k == 0 and not thumb)
                at, heading = end, heading + bend
        for x, width, appears, closes in FOREARM:
            plate, gap = 1.2 * ramp(age, appears, appears + 110), 0.05 * (1 - ramp(age, 60, closes))
            gap += 0.02 if age < closes - 10 else 0
            wrist, elbow = np.array([x, 0.44]), np.array([x * 1.1, 1.6])
            bones.long_bone(wrist, elbow, width, gap, plate, at_end=False)
        return bones

    @staticmethod
    def _carpals(canvas: Canvas, pose: Pose, age: float, rng: np.random.Generator) -> np.ndarray:
        """The small bones of the wrist that have appeared by now, each as large as its age allows."""
        table = np.array(CARPALS)
        onset = table[:, 3] + rng.normal(0, 3 + 0.06 * table[:, 3])
        grown = np.array([np.sqrt(ramp(age, start, start + 110)) for start in onset])
        x, y = pose.place(*(table[:, :2].T + rng.normal(0, 0.008, (2, len(table)))))
        there = grown > 0.02
        return canvas.spots(x[there], y[there], (table[:, 2] * grown * pose.scale)[there], 0.95)

    @staticmethod
    def _expose(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Film and tube: background fog, uneven field, exposure, and the side marker."""
        image = image * rng.uniform(0.75, 1.25) + rng.uniform(0.02, 0.12)
        image = image * (1 + rng.normal(0, 0.15) * canvas.x + rng.normal(0, 0.15) * canvas.y)
        corner = rng.choice((-1, 1)) * rng.uniform(0.75, 0.9), rng.uniform(-0.9, 0.6)
        marker = canvas.ellipse(*corner, 0.05, 0.08, soft=0.02)
        return image + (0.85 - image) * marker * (rng.random() < 0.6)
