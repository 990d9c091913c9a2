"""Brain slices (FLAIR-like) with tumour masks: several slices of each patient, several institutions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.phantom import Canvas, Phantom
from polyclinic.randomness import numpy_rng


@dataclass(frozen=True)
class Institution:
    """A place of scanning: share of all patients, brightness of tissue and scalp, contrast, field of view."""

    name: str
    share: float
    brightness: float
    scalp: float
    contrast: float
    zoom: float


INSTITUTIONS = (
    Institution("institution-1", 0.40, brightness=0.40, scalp=0.75, contrast=1.0, zoom=1.0),
    Institution("institution-2", 0.28, brightness=0.28, scalp=0.50, contrast=1.2, zoom=0.85),
    Institution("institution-3", 0.20, brightness=0.50, scalp=0.30, contrast=0.8, zoom=1.1),
    Institution("institution-4", 0.12, brightness=0.34, scalp=0.95, contrast=0.9, zoom=0.95),
)
VISIBLE = 0.45  # a slice shows the tumour where its cross-section is at least this share of the widest


@dataclass(frozen=True)
class Patient:
    """The facts that the slices of one patient share; lengths in units of half the image, heights from -1 to 1."""

    institution: Institution
    x: float
    y: float
    tilt: float
    width: float
    length: float
    ventricles: float
    tumour: tuple[float, float, float]  # across, along, height
    extent: tuple[float, float, float]  # half axes in these directions
    lobes: np.ndarray  # [2, 4]: how much the outline bulges, cosine and sine of 2 to 5 times the angle
    contrast: float
    necrosis: float

    def head(self, height: float) -> float:
        """Size of the head at this height, as a share of the largest."""
        return float(np.sqrt(1 - 0.6 * height**2))

    def tumour_section(self, height: float) -> float:
        """Size of the tumour's cross-section, as a share of the widest; 0 where it is not seen."""
        section = np.sqrt(max(0.0, 1 - ((height - self.tumour[2]) / self.extent[2]) ** 2))
        return float(section) if section >= VISIBLE else 0.0

    def tumour_distance(self, canvas: Canvas, height: float) -> np.ndarray:
        """Depth of each pixel in the tumour, in units of half the image; negative outside."""
        section, head = self.tumour_section(height), self.head(height)
        if section == 0:
            return np.full((canvas.size, canvas.size), -1.0, dtype=np.float32)
        dx = canvas.x - self.x - self.tumour[0] * self.width * head
        dy = canvas.y - self.y - self.tumour[1] * self.length * head
        angle, order = np.arctan2(dy, dx), np.arange(2, 6)[:, None, None]
        turn = order * angle
        bulge = np.tensordot(self.lobes[0], np.cos(turn), 1) + np.tensordot(self.lobes[1], np.sin(turn), 1)
        reach = np.sqrt((dx / self.extent[0]) ** 2 + (dy / self.extent[1]) ** 2) / section
        return ((1 + bulge - reach) * min(self.extent[:2]) * section).astype(np.float32)


class BrainPhantom(Phantom):
    """Axial slices with a mask of the tumour; as classes: whether the slice shows one."""

    source: Literal["brain-phantom"] = "brain-phantom"
    slices: int = Field(4, ge=1, le=50, description="slices of each patient")

    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "classification")

    def load(self) -> Dataset:
        who = np.arange(self.samples) // self.slices
        patients = [self._draw_patient(p) for p in range(who[-1] + 1)]
        cases = [(patients[p], 1.4 * ((i % self.slices + 0.5) / self.slices - 0.5)) for i, p in enumerate(who)]
        canvas = Canvas(self.size)
        return Dataset(
            images=self.draw_all(cases),
            labels=np.array([patient.tumour_section(height) > 0 for patient, height in cases], dtype=np.int64),
            classes=("no-tumour", "tumour"),
            masks=np.stack([(p.tumour_distance(canvas, h) > 0).astype(np.uint8) for p, h in cases]),
            patient=who,
            site=np.array([patient.institution.name for patient, _ in cases]),
        )

    def _draw_patient(self, number: int) -> Patient:
        rng = numpy_rng(self.seed, self.source, "patient", number)
        institution = INSTITUTIONS[rng.choice(len(INSTITUTIONS), p=[i.share for i in INSTITUTIONS])]
        size = institution.zoom * rng.uniform(0.66, 0.78)
        return Patient(
            institution=institution,
            x=rng.normal(0, 0.03),
            y=rng.normal(0, 0.03),
            tilt=rng.normal(0, 0.06),
            width=size,
            length=size * rng.uniform(1.15, 1.3),
            ventricles=rng.uniform(0.7, 1.4),
            tumour=(rng.choice((-1, 1)) * rng.uniform(0.2, 0.6), rng.uniform(-0.55, 0.55), rng.uniform(-0.6, 0.6)),
            extent=(*(size * rng.uniform(0.16, 0.42, 2)), rng.uniform(0.35, 0.8)),
            lobes=rng.normal(0, 0.09, (2, 4)),
            contrast=rng.uniform(0.05, 0.25),
            necrosis=rng.uniform(-0.1, 0.7),
        )

    def draw(self, canvas: Canvas, case: tuple[Patient, float], rng: np.random.Generator) -> np.ndarray:
        patient, height = case
        style = patient.institution
        head = patient.head(height)
        rx, ry = patient.width * head, patient.length * head
        tissue = self._tissue(canvas, patient, rx, ry, rng)
        tissue = tissue - 0.75 * self._ventricles(canvas, patient, height, rx, ry)
        tissue = tissue + self._look_alikes(canvas, patient, rx, ry, rng)
        tissue = tissue + self._tumour(canvas, patient, height, rng)
        inside = canvas.ellipse(patient.x, patient.y, rx * 0.9, ry * 0.9, patient.tilt, soft=0.04)
        scalp = canvas.ellipse(patient.x, patient.y, rx * 1.06, ry * 1.06, patient.tilt, soft=0.03)
        skull = canvas.ellipse(patient.x, patient.y, rx, ry, patient.tilt, soft=0.03)
        level = style.brightness * (1 + style.contrast * (tissue - 1))
        image = inside * level + (scalp - skull) * style.scalp * (0.7 + 0.15 * canvas.texture(rng, 6))
        coil = 1 + rng.normal(0, 0.12) * canvas.x + rng.normal(0, 0.12) * canvas.y
        return (image * coil * rng.uniform(0.85, 1.15))[None]

    @staticmethod
    def _tissue(canvas: Canvas, patient: Patient, rx: float, ry: float, rng: np.random.Generator) -> np.ndarray:
        """Grey and white matter, about 1: a folded cortex around a paler inside, halves parted by the falx."""
        inner = canvas.ellipse(patient.x, patient.y, rx * 0.72, ry * 0.74, patient.tilt, soft=0.25)
        folds = np.sin(6 * canvas.texture(rng, 9))
        cortex = 1.1 + 0.13 * folds
        white = 0.9 + 0.03 * canvas.texture(rng, 12)
        falx = np.exp(-(((canvas.x - patient.x + patient.tilt * canvas.y) / 0.025) ** 2))
        return cortex + (white - cortex) * inner - 0.35 * falx * (1 - inner * 0.6)

    @staticmethod
    def _ventricles(canvas: Canvas, patient: Patient, height: float, rx: float, ry: float) -> np.ndarray:
        """Dark fluid in the middle: two horns that open like a butterfly, largest at mid-height."""
        open_at = patient.ventricles * max(0.0, 1 - 2.2 * abs(height + 0.05)) ** 0.5
        if open_at < 0.15:
            return np.zeros((canvas.size, canvas.size), dtype=np.float32)
        horns = np.zeros((canvas.size, canvas.size), dtype=np.float32)
        for side in (-1, 1):
            for along, turn in ((-0.14, -0.35), (0.18, 0.45)):
                x, y = patient.x + side * 0.13 * rx, patient.y + along * ry
                size = 0.065 * rx * open_at, 0.2 * ry * open_at
                horns = np.maximum(horns, canvas.ellipse(x, y, *size, angle=-side * turn, soft=0.03))
        return horns

    @staticmethod
    def _look_alikes(canvas: Canvas, patient: Patient, rx: float, ry: float, rng: np.random.Generator) -> np.ndarray:
        """Bright without being tumour: caps of the ventricles, small spots of age, an artefact of flow."""
        n = rng.poisson(2.0)
        angle, far = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.uniform(0, 0.55, n))
        x, y = patient.x + far * rx * np.cos(angle), patient.y + far * ry * np.sin(angle)
        bright = canvas.spots(x, y, rng.uniform(0.02, 0.06, n), rng.uniform(0.1, 0.4, n))
        caps = sum(canvas.glow(patient.x, patient.y + end * 0.33 * ry, 0.22 * rx, 0.06) for end in (-1, 1))
        cloud = canvas.glow(patient.x + rng.uniform(-0.5, 0.5) * rx, patient.y + rng.uniform(-0.5, 0.5) * ry, 0.2, 0.3)
        return bright + rng.uniform(0, 0.2) * caps + rng.uniform(0, 0.25) * cloud

    @staticmethod
    def _tumour(canvas: Canvas, patient: Patient, height: float, rng: np.random.Generator) -> np.ndarray:
        """Bright oedema with a soft edge, and a darker core where there is necrosis."""
        depth = patient.tumour_distance(canvas, height)
        oedema = np.clip(depth / 0.09 + 0.5, 0, 1) * (1 + 0.2 * canvas.texture(rng, 10))
        core = np.clip((depth - 0.45 * min(patient.extent[:2])) / 0.06 + 0.5, 0, 1)
        bright = patient.contrast / patient.institution.brightness
        return bright * oedema - patient.necrosis * 0.5 * core
