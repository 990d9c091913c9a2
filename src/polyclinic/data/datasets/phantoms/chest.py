"""Chest radiographs from two scanners: lungs, ribs, heart, and the opacities of tuberculosis."""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.phantom import Canvas, Phantom


@dataclass(frozen=True)
class Scanner:
    """The films of a department: exposure, contrast, sharpness of ribs, black borders, and who comes."""

    name: str
    exposure: float
    contrast: float
    ribs: float
    border: float
    prevalence: float


N = TypeVar("N", float, np.ndarray)

SCANNERS = (
    Scanner("scanner-a", exposure=0.00, contrast=1.15, ribs=1.0, border=0.10, prevalence=0.45),
    Scanner("scanner-b", exposure=0.10, contrast=0.85, ribs=0.6, border=0.0, prevalence=0.55),
)

RIBS = 9


@dataclass(frozen=True)
class Thorax:
    """The places of the two lungs: middle, half width, half height, by side (-1 left of the film, 1 right)."""

    x: float
    y: float
    gap: float
    width: float
    height: float

    def lung(self, canvas: Canvas, side: int) -> np.ndarray:
        """1 in the lung: narrow at the apex, wide at the base, cut by the dome of the diaphragm."""
        x, y = self.centre(side)
        slope = 0.28 * side * (canvas.y - y) / self.height * self.width
        u = (canvas.x - x - slope) / (self.width * (1 + 0.18 * (canvas.y - y) / self.height))
        v = (canvas.y - y) / self.height
        inside = np.clip((1 - np.sqrt(np.abs(u) ** 2.6 + np.abs(v) ** 2.6)) * self.width / 0.07 + 0.5, 0, 1)
        dome = y + 0.62 * self.height + 0.35 * ((canvas.x - x) / self.width) ** 2 * self.height
        return inside * np.clip((dome - canvas.y) / 0.08 + 0.5, 0, 1)

    def centre(self, side: int) -> tuple[float, float]:
        return self.x + side * (self.gap + self.width), self.y - 0.025 * side

    def within(self, side: int, across: N, down: N) -> tuple[N, N]:
        """A place in a lung; across and down run from -1 to 1."""
        x, y = self.centre(side)
        return x + across * 0.75 * self.width, y + down * 0.75 * self.height


class ChestPhantom(Phantom):
    """Chest radiographs, normal against tuberculosis, with the scanner as natural site."""

    source: Literal["chest-phantom"] = "chest-phantom"
    scanner_b: float = Field(0.5, ge=0, le=1, description="share of the images that come from scanner-b")

    def load(self) -> Dataset:
        cases = []
        for i in range(self.samples):
            rng = self.rng(i, "label")
            scanner = SCANNERS[int(rng.random() < self.scanner_b)]
            cases.append((bool(rng.random() < scanner.prevalence), scanner))
        return Dataset(
            images=self.draw_all(cases),
            labels=np.array([sick for sick, _ in cases], dtype=np.int64),
            classes=("normal", "tuberculosis"),
            site=np.array([scanner.name for _, scanner in cases]),
        )

    def draw(self, canvas: Canvas, case: tuple[bool, Scanner], rng: np.random.Generator) -> np.ndarray:
        sick, scanner = case
        thorax = Thorax(
            x=rng.normal(0, 0.04),
            y=rng.normal(-0.08, 0.04),
            gap=rng.uniform(0.10, 0.15),
            width=rng.uniform(0.27, 0.34),
            height=rng.uniform(0.62, 0.75),
        )
        lungs = {side: thorax.lung(canvas, side) for side in (-1, 1)}
        air = lungs[-1] + lungs[1]
        image = self._body(canvas, thorax, rng) - rng.uniform(0.42, 0.55) * air
        image = image + self._markings(canvas, thorax, scanner, rng) * (0.35 + 0.65 * air)
        image = np.maximum(image, self._mediastinum(canvas, thorax, rng))
        image = image + air * self._look_alikes(canvas, thorax, rng)
        shadow = self._opacities(canvas, thorax, rng)  # drawn for all, so that health changes nothing else
        image = image + sick * air * shadow
        return self._expose(canvas, image, scanner, rng)[None]

    @staticmethod
    def _body(canvas: Canvas, thorax: Thorax, rng: np.random.Generator) -> np.ndarray:
        """Soft tissue: trunk, shoulders, neck, denser towards the abdomen."""
        trunk = canvas.ellipse(thorax.x, 0.5, rng.uniform(0.88, 1.05), 1.5, soft=0.15)
        neck = canvas.ellipse(thorax.x, -1.0, 0.3, 0.4, soft=0.1)
        density = 0.62 + 0.10 * canvas.y + 0.03 * canvas.texture(rng, 3)
        return np.maximum(trunk, neck) * density

    @staticmethod
    def _markings(canvas: Canvas, thorax: Thorax, scanner: Scanner, rng: np.random.Generator) -> np.ndarray:
        """Ribs and clavicles, and the vessels that branch from the hila."""
        along = np.linspace(0, 1, int(1.2 / canvas.pixel))
        tilt, spacing = rng.uniform(0.15, 0.3), rng.uniform(0.155, 0.185)
        side = np.repeat((-1, 1), RIBS)[:, None]
        out = thorax.gap + 2 * thorax.width - 0.02  # from the spine outwards, up and over, then down
        over = tilt * along**2 - 0.12 * np.sin(0.8 * np.pi * along)
        x = thorax.x + side * (0.06 + along * out)
        y = thorax.y - 0.85 + np.tile(np.arange(RIBS), 2)[:, None] * spacing + over
        ribs = canvas.strokes(x, y, 0.024, 0.11)
        x, y = thorax.x + np.array(((-1,), (1,))) * (0.08 + 0.7 * along), thorax.y - 0.62 - 0.14 * along
        clavicles = canvas.strokes(x, y, 0.035, 0.16)
        return scanner.ribs * np.maximum(ribs, clavicles) + 0.5 * _vessels(canvas, thorax, rng)

    @staticmethod
    def _mediastinum(canvas: Canvas, thorax: Thorax, rng: np.random.Generator) -> np.ndarray:
        """Spine, hila and the heart, which lies more to the film's right."""
        spine = canvas.ellipse(thorax.x, 0.2, 0.09, 1.6, soft=0.08)
        size = rng.uniform(0.24, 0.33)
        heart = canvas.ellipse(thorax.x + 0.12, thorax.y + 0.32, size, size * 0.95, angle=0.5, soft=0.08)
        hila = sum(canvas.glow(thorax.x + side * 0.2, thorax.y - 0.02, 0.07, 0.12) for side in (-1, 1))
        return np.maximum(0.7 * np.maximum(spine, 0.9 * heart), 0.4 * hila) + 0.08 * spine * heart

    @staticmethod
    def _look_alikes(canvas: Canvas, thorax: Thorax, rng: np.random.Generator) -> np.ndarray:
        """Shadows that healthy lungs may show, too: breast shadow, uneven air, an old scar."""
        shade = 0.05 * canvas.texture(rng, 5)
        fold = rng.uniform(0, 0.12)
        for side in (-1, 1):
            shade = shade + fold * canvas.glow(*thorax.within(side, 0.0, 0.7), 0.22, 0.16)
        if rng.random() < 0.35:
            place = thorax.within(int(rng.choice((-1, 1))), rng.uniform(-0.8, 0.8), rng.uniform(-0.8, 0.8))
            strength, sides = rng.uniform(0.05, 0.2), (rng.uniform(0.02, 0.06), rng.uniform(0.02, 0.06))
            shade = shade + strength * canvas.glow(*place, *sides)
        return shade

    @staticmethod
    def _opacities(canvas: Canvas, thorax: Thorax, rng: np.random.Generator) -> np.ndarray:
        """Patchy infiltrates, mostly in the upper zones, some with a cavity, some with scattered nodules."""
        cloud = 0.8 + 0.35 * canvas.texture(rng, 14)
        contrast = rng.uniform(0.12, 0.34)
        shadow = np.zeros_like(cloud)
        for _ in range(1 + rng.poisson(1.0)):
            side, across = int(rng.choice((-1, 1))), rng.uniform(-0.6, 0.6)
            place = thorax.within(side, across, np.clip(rng.normal(-0.45, 0.35), -0.9, 0.7))
            rx, ry = rng.uniform(0.07, 0.17, 2)
            shadow = np.maximum(shadow, canvas.glow(*place, rx, ry, rng.uniform(0, np.pi)))
            if rng.random() < 0.3:
                hole = rng.uniform(0.03, 0.06)
                shadow = shadow - 1.0 * canvas.ellipse(*place, hole, hole, soft=0.03)
        shadow = shadow * cloud
        nodules = rng.poisson(9, 2) if rng.random() < 0.4 else (0, 0)
        for side, n in zip((-1, 1), nodules, strict=True):
            x, y = thorax.within(side, rng.uniform(-1, 1, n), rng.uniform(-1, 0.5, n))
            shadow = np.maximum(shadow, canvas.spots(x, y, rng.uniform(0.012, 0.028, n), 0.8))
        return contrast * shadow

    @staticmethod
    def _expose(canvas: Canvas, image: np.ndarray, scanner: Scanner, rng: np.random.Generator) -> np.ndarray:
        image = (image - 0.45) * scanner.contrast * rng.uniform(0.85, 1.15) + 0.45
        image = image + scanner.exposure + rng.normal(0, 0.04)
        image = image * (1 + rng.normal(0, 0.06) * canvas.x)
        if scanner.border and rng.random() < 0.6:
            edge = 1 - scanner.border * rng.uniform(0.5, 1)
            image = image * (np.abs(canvas.x) < edge)
        return image


def _vessels(canvas: Canvas, thorax: Thorax, rng: np.random.Generator) -> np.ndarray:
    """Lung vessels: lines that fan out from each hilum and taper."""
    along = np.linspace(0, 1, int(0.6 / canvas.pixel))[None, :]
    n = 14
    side = np.repeat((-1, 1), n // 2)[:, None]
    angle = rng.uniform(-1.2, 1.2, (n, 1)) + 0.5 * rng.normal(0, 1, (n, 1)) * along
    reach = rng.uniform(0.25, 0.5, (n, 1)) * along
    x = thorax.x + side * (0.2 + reach * np.cos(angle))
    y = thorax.y + reach * np.sin(angle) * 1.3
    return canvas.strokes(x, y, 0.018 * (1 - 0.8 * along), 0.35 * (1 - 0.5 * along))
