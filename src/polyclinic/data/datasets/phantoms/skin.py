"""Dermoscopy: two benign and two malignant lesions, as the four largest groups of HAM10000."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.phantom import Canvas, Phantom, paint, random_walks

#: lesions with their class (0 benign, 1 malignant) and their share among the four in HAM10000
LESIONS = {
    "nevus": (0, 0.711),
    "benign-keratosis": (0, 0.117),
    "melanoma": (1, 0.118),
    "basal-cell-carcinoma": (1, 0.054),
}

SKIN = np.array([0.86, 0.66, 0.58], dtype=np.float32)
BROWN = np.array([0.45, 0.25, 0.16], dtype=np.float32)
TAN = np.array([0.64, 0.44, 0.32], dtype=np.float32)
BLACK = np.array([0.16, 0.10, 0.10], dtype=np.float32)
BLUE_GREY = np.array([0.40, 0.40, 0.48], dtype=np.float32)
PINK = np.array([0.85, 0.52, 0.52], dtype=np.float32)
RED = np.array([0.68, 0.22, 0.24], dtype=np.float32)
PALE = np.array([0.93, 0.84, 0.72], dtype=np.float32)


class Outline:
    """A lesion's border: an ellipse whose radius wavers; `depth` is positive inside."""

    def __init__(self, canvas: Canvas, rng: np.random.Generator, irregular: float) -> None:
        self.x, self.y = rng.normal(0, 0.1, 2)
        self.radius = rng.uniform(0.3, 0.6)
        stretch, angle = rng.uniform(0.75, 1.0), rng.uniform(0, np.pi)
        dx, dy = canvas.x - self.x, canvas.y - self.y
        u = dx * np.cos(angle) + dy * np.sin(angle)
        v = (dy * np.cos(angle) - dx * np.sin(angle)) / stretch
        around, order = np.arctan2(v, u), np.arange(2, 8)[:, None, None]
        waves = rng.normal(0, irregular, (2, 6)) / np.sqrt(np.arange(1, 7))
        waver = np.tensordot(waves[0], np.cos(order * around), 1) + np.tensordot(waves[1], np.sin(order * around), 1)
        self.depth = (self.radius * (1 + waver) - np.hypot(u, v)).astype(np.float32)

    def inside(self, canvas: Canvas, soft: float) -> np.ndarray:
        return np.clip(self.depth / max(soft, canvas.pixel) + 0.5, 0, 1)

    def places(self, rng: np.random.Generator, n: int, reach: float = 0.75) -> tuple[np.ndarray, np.ndarray]:
        """x and y of n places inside, [n] each."""
        angle, far = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.uniform(0, 1, n)) * reach * self.radius
        return self.x + far * np.cos(angle), self.y + far * np.sin(angle)

    def patch(self, canvas: Canvas, rng: np.random.Generator) -> np.ndarray:
        """A soft patch somewhere inside, smaller than the lesion."""
        (x,), (y,) = self.places(rng, 1)
        across, along = self.radius * rng.uniform(0.15, 0.5, 2)
        return canvas.glow(x, y, across, along, rng.uniform(0, np.pi))


class SkinPhantom(Phantom):
    """Dermoscopy, benign against malignant; the lesion is the sub-group."""

    source: Literal["skin-phantom"] = "skin-phantom"
    balanced: bool = Field(True, description="as many of each lesion; false: as frequent as in HAM10000")

    channels: ClassVar[int] = 3

    def load(self) -> Dataset:
        shares = [0.25] * 4 if self.balanced else [share for _, share in LESIONS.values()]
        lesions = [str(self.rng(i, "label").choice(list(LESIONS), p=shares)) for i in range(self.samples)]
        return Dataset(
            images=self.draw_all(lesions),
            labels=np.array([LESIONS[lesion][0] for lesion in lesions], dtype=np.int64),
            classes=("benign", "malignant"),
            subgroup=np.array(lesions),
        )

    def draw(self, canvas: Canvas, case: str, rng: np.random.Generator) -> np.ndarray:
        image = self._skin(canvas, rng)
        draw_lesion = {
            "nevus": self._nevus,
            "benign-keratosis": self._keratosis,
            "melanoma": self._melanoma,
            "basal-cell-carcinoma": self._carcinoma,
        }[case]
        image = draw_lesion(canvas, image, rng)
        image = self._hairs(canvas, image, rng)
        tube = rng.random() < 0.2
        light = 1 - rng.uniform(0, 0.25) * (canvas.x**2 + canvas.y**2)
        return image * light * (canvas.ellipse(0, 0, 1.12, 1.12, soft=0.06) if tube else 1)

    @staticmethod
    def _skin(canvas: Canvas, rng: np.random.Generator) -> np.ndarray:
        tone = SKIN * np.exp(rng.normal(0, (0.05, 0.07, 0.07))) * rng.uniform(0.85, 1.08)
        mottle = 1 + 0.03 * canvas.texture(rng, 4) + 0.025 * canvas.texture(rng, 24)
        image = tone.astype(np.float32)[:, None, None] * mottle
        flush = np.clip(0.5 * canvas.texture(rng, 3), 0, 1) * rng.uniform(0, 0.5)
        image = paint(image, PINK, flush)
        n = rng.poisson(1.0)  # angiomas and freckles, on anybody
        x, y = rng.uniform(-0.8, 0.8, (2, n))
        marks = canvas.spots(x, y, rng.uniform(0.03, 0.08, n), rng.uniform(0.2, 0.6, n))
        return paint(image, RED if rng.random() < 0.5 else BROWN, marks)

    @staticmethod
    def _nevus(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Even border and colour; a fine net of pigment; sometimes a darker middle."""
        outline = Outline(canvas, rng, irregular=rng.uniform(0.01, 0.12))
        body = outline.inside(canvas, rng.uniform(0.08, 0.25))
        colour = BROWN + (TAN - BROWN) * rng.uniform(0, 1)
        image = paint(image, colour.astype(np.float32), rng.uniform(0.55, 0.95) * body)
        net = np.clip(np.sin(9 * canvas.texture(rng, 16)), 0, 1)
        image = paint(image, BROWN, rng.uniform(0.1, 0.45) * net * body)
        shade = (BLACK, RED, PALE)[rng.integers(3)]  # nevi may be uneven, too
        return paint(image, shade, rng.uniform(0, 0.5) * outline.patch(canvas, rng) * body)

    @staticmethod
    def _keratosis(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Sharp border, waxy surface with furrows; pale cysts and dark plugs."""
        outline = Outline(canvas, rng, irregular=rng.uniform(0.03, 0.12))
        body = outline.inside(canvas, rng.uniform(0.02, 0.10))
        colour = TAN + (BROWN - TAN) * rng.uniform(0, 0.9)
        image = paint(image, colour.astype(np.float32), rng.uniform(0.45, 0.9) * body)
        furrows = np.clip(canvas.texture(rng, 8), 0, 1)
        image = paint(image, BROWN, rng.uniform(0.1, 0.4) * furrows * body)
        n, m = rng.poisson((7, 5))
        cysts = canvas.spots(*outline.places(rng, n), rng.uniform(0.02, 0.045, n), rng.uniform(0.4, 0.9, n))
        plugs = canvas.spots(*outline.places(rng, m), rng.uniform(0.02, 0.04, m), rng.uniform(0.4, 0.8, m))
        return paint(paint(image, PALE, cysts * body), BLACK, plugs * body)

    @staticmethod
    def _melanoma(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Uneven border, several colours in an off-centre mix, dots at the edge."""
        outline = Outline(canvas, rng, irregular=rng.uniform(0.03, 0.16))
        body = outline.inside(canvas, rng.uniform(0.04, 0.18))
        colour = BROWN + (TAN - BROWN) * rng.uniform(0, 0.8)
        image = paint(image, colour.astype(np.float32), rng.uniform(0.6, 0.95) * body)
        patchy = rng.uniform(0.15, 0.9)
        for shade in (BLACK, BLUE_GREY, RED, PALE):
            if rng.random() < 0.5:
                strength = patchy * rng.uniform(0.5, 0.95)
                image = paint(image, shade, strength * outline.patch(canvas, rng) * body)
        n = rng.poisson(3)
        dots = canvas.spots(*outline.places(rng, n, 1.0), rng.uniform(0.015, 0.04, n), rng.uniform(0.4, 0.8, n))
        return paint(image, BLACK, dots)

    @staticmethod
    def _carcinoma(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Pearly pink, branching vessels, blue-grey nests, sometimes a crust."""
        outline = Outline(canvas, rng, irregular=rng.uniform(0.03, 0.12))
        body = outline.inside(canvas, rng.uniform(0.1, 0.3))
        colour = PINK + (TAN - PINK) * rng.uniform(0, 1)
        image = paint(image, colour.astype(np.float32), rng.uniform(0.3, 0.85) * body)
        n = rng.poisson(3)
        nests = canvas.spots(*outline.places(rng, n), rng.uniform(0.04, 0.09, n), rng.uniform(0.2, 0.6, n))
        image = paint(image, BLUE_GREY, nests * body)
        image = paint(image, RED, rng.uniform(0.15, 0.7) * _branching_vessels(canvas, outline, rng))
        crust = rng.uniform(0, 0.7) * (rng.random() < 0.4)
        return paint(image, PALE, crust * canvas.glow(outline.x, outline.y, 0.3 * outline.radius))

    @staticmethod
    def _hairs(canvas: Canvas, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        n = rng.poisson(5) if rng.random() < 0.4 else 0
        start, heading = rng.uniform(-1, 1, (2, n)), rng.uniform(0, 2 * np.pi, n)
        length = rng.uniform(0.5, 1.3, n)
        x, y, _ = random_walks(rng, start, heading, length, bend=0.4, wobble=0.3, step=canvas.pixel)
        return paint(image, BLACK, canvas.strokes(x, y, 0.011, rng.uniform(0.5, 0.9)))


def _branching_vessels(canvas: Canvas, outline: Outline, rng: np.random.Generator) -> np.ndarray:
    """Fine red trees of three branches over the lesion, float32 [size, size]."""
    trees = 1 + rng.poisson(2)
    start = np.repeat(np.stack(outline.places(rng, trees)), 3, axis=1)
    heading = np.repeat(rng.uniform(0, 2 * np.pi, trees), 3) + np.tile((0.0, 0.7, -0.7), trees)
    length = outline.radius * rng.uniform(0.4, 0.9, 3 * trees)
    x, y, _ = random_walks(rng, start, heading, length, bend=0.5, wobble=0.5, step=canvas.pixel)
    return canvas.strokes(x, y, 0.016, 0.9)
