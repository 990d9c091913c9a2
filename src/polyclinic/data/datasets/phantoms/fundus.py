"""Colour fundus photographs: optic disc, macula, branching vessels, and lesions of diabetic retinopathy."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.phantom import Canvas, Phantom, paint, random_walks

RETINA = np.array([0.72, 0.36, 0.16], dtype=np.float32)
BLOOD = np.array([0.30, 0.07, 0.05], dtype=np.float32)
DISC = np.array([0.98, 0.82, 0.48], dtype=np.float32)
EXUDATE = np.array([0.95, 0.86, 0.45], dtype=np.float32)
GLARE = np.array([0.85, 0.70, 0.60], dtype=np.float32)

#: mean number of microaneurysms, haemorrhages and exudates by grade
LESIONS = {0: (0, 0, 0), 1: (4, 0, 0), 2: (6, 2, 3), 3: (8, 6, 6), 4: (8, 9, 12)}


class FundusPhantom(Phantom):
    """Fundus photographs, healthy (grade 0) against diseased (grades 2 to 4), or all five grades."""

    source: Literal["fundus-phantom"] = "fundus-phantom"
    grades: Literal[2, 5] = Field(2, description="2: healthy (grade 0) against diseased (2 to 4); 5: every grade")

    channels: ClassVar[int] = 3

    def load(self) -> Dataset:
        grade = np.array([self._draw_grade(self.rng(i, "label")) for i in range(self.samples)], dtype=np.int64)
        two = self.grades == 2
        return Dataset(
            images=self.draw_all(grade),
            labels=(grade > 0).astype(np.int64) if two else grade,
            classes=("healthy", "diseased") if two else tuple(f"grade-{g}" for g in range(5)),
            subgroup=np.array([f"grade-{g}" for g in grade]),
        )

    def _draw_grade(self, rng: np.random.Generator) -> int:
        if self.grades == 5:
            return int(rng.integers(5))
        return int(rng.integers(2, 5)) if rng.random() < 0.5 else 0

    def draw(self, canvas: Canvas, case: int, rng: np.random.Generator) -> np.ndarray:
        side = -1.0 if rng.random() < 0.5 else 1.0
        disc = (side * rng.uniform(0.45, 0.68), rng.normal(0, 0.06))
        macula = (disc[0] - side * rng.uniform(0.52, 0.62), disc[1] + rng.uniform(0.0, 0.1))
        image = self._retina(canvas, rng)
        image = image * (1 - rng.uniform(0.25, 0.55) * canvas.glow(*macula, 0.16))
        image = paint(image, BLOOD, self._vessels(canvas, disc, side, rng))
        image = self._optic_disc(canvas, image, disc, rng)
        image = self._distractors(canvas, image, rng)
        image = self._lesions(canvas, image, int(case), disc, rng)
        field = canvas.ellipse(0, 0, 0.97, 0.97, soft=0.03)
        return image * field

    @staticmethod
    def _retina(canvas: Canvas, rng: np.random.Generator) -> np.ndarray:
        """The background: pigment, uneven light, cloudiness."""
        pigment = RETINA * np.exp(rng.normal(0, (0.10, 0.16, 0.25))) * rng.uniform(0.7, 1.1)
        light = 1 - rng.uniform(0.1, 0.4) * (canvas.x**2 + canvas.y**2)
        light = light * (1 + 0.12 * canvas.texture(rng, 3) + 0.035 * canvas.texture(rng, 20))
        return pigment.astype(np.float32)[:, None, None] * light

    @staticmethod
    def _vessels(canvas: Canvas, disc: tuple[float, float], side: float, rng: np.random.Generator) -> np.ndarray:
        """Density of blood: four arcades out of the disc, each with branches."""
        step = 0.8 * canvas.pixel
        vertical, inward = np.array((-1, -1, 1, 1)), np.array((1, -1, 1, -1))  # around the macula, or away from it
        heading = np.arctan2(vertical, -side * 0.3 * inward) + rng.normal(0, 0.15, 4)
        bend = vertical * side * inward * np.where(inward > 0, 1.5, 0.5) * rng.uniform(0.7, 1.1, 4)
        origin = np.repeat(np.array(disc)[:, None], 4, axis=1)
        length = np.where(inward > 0, 1.5, 0.7)
        x, y, headings = random_walks(rng, origin, heading, length, bend=bend, wobble=0.3, step=step)
        thick = rng.uniform(0.022, 0.032, (4, 1))
        radius = thick * np.linspace(1, 0.35, x.shape[1])

        parent, along = np.repeat(np.arange(4), 5), rng.uniform(0.15, 0.85, 20)
        at = parent, (along * (x.shape[1] - 1)).astype(int)
        fork = headings[at] + rng.choice((-1, 1), 20) * rng.uniform(0.5, 0.9, 20)
        length = rng.uniform(0.3, 0.7, 20)
        bx, by, _ = random_walks(rng, np.stack([x[at], y[at]]), fork, length, bend=0.0, wobble=0.4, step=step)
        branch = (thick[parent, 0] * (1 - 0.65 * along))[:, None] * np.linspace(0.7, 0.25, bx.shape[1])

        density = rng.uniform(0.55, 0.85)
        return np.maximum(canvas.strokes(x, y, radius, density), canvas.strokes(bx, by, branch, density))

    @staticmethod
    def _optic_disc(
        canvas: Canvas, image: np.ndarray, disc: tuple[float, float], rng: np.random.Generator
    ) -> np.ndarray:
        radius = rng.uniform(0.11, 0.15)
        bright = rng.uniform(0.6, 0.95)
        image = paint(image, DISC, bright * 0.75 * canvas.ellipse(*disc, radius, radius * 1.1, soft=0.05))
        return paint(image, DISC, bright * 0.6 * canvas.ellipse(*disc, radius * 0.5, radius * 0.5, soft=0.06))

    @staticmethod
    def _distractors(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Things that could be taken for disease: glare of the lens, drusen, pigment."""
        for _ in range(2):
            x, y = rng.uniform(-0.8, 0.8, 2)
            image = paint(image, GLARE, rng.uniform(0, 0.25) * canvas.glow(x, y, rng.uniform(0.1, 0.3)))
        pale, dark = rng.poisson(1.5), rng.poisson(1.5)
        x, y = rng.uniform(-0.7, 0.7, (2, pale + dark))
        radius, strength = rng.uniform(0.03, 0.06, pale + dark), rng.uniform(0.1, 0.3, pale + dark)
        image = paint(image, GLARE, canvas.spots(x[:pale], y[:pale], radius[:pale], strength[:pale]))
        return paint(image, BLOOD, canvas.spots(x[pale:], y[pale:], radius[pale:], strength[pale:]))

    @staticmethod
    def _lesions(
        canvas: Canvas, image: np.ndarray, grade: int, disc: tuple[float, float], rng: np.random.Generator
    ) -> np.ndarray:
        """Microaneurysms (small, red), haemorrhages (dark, in blots) and exudates (yellow, in clusters)."""
        small, blots, hard = rng.poisson(LESIONS[grade]) if grade else (0, 0, 0)
        if grade and small + blots + hard == 0:
            small = 1
        contrast = rng.uniform(0.35, 0.9)
        x, y = rng.uniform(-0.75, 0.75, (2, small))
        image = paint(image, BLOOD, canvas.spots(x, y, rng.uniform(0.012, 0.022, small), contrast))
        x, y = rng.uniform(-0.7, 0.7, (2, blots))
        x, y = (np.repeat(a, 3) + rng.normal(0, 0.025, 3 * blots) for a in (x, y))
        image = paint(image, BLOOD, canvas.spots(x, y, rng.uniform(0.02, 0.05, 3 * blots), contrast))
        centre = rng.uniform(-0.5, 0.5, 2)
        x, y = centre[0] + rng.normal(0, 0.2, hard), centre[1] + rng.normal(0, 0.2, hard)
        return paint(image, EXUDATE, canvas.spots(x, y, rng.uniform(0.012, 0.035, hard), contrast))
