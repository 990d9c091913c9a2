"""Draws the pictures of docs/phantoms.md: python docs/images/phantoms.py

Rows of real images (DeepDRiD, CC BY-SA 4.0; PneumoniaMNIST, CC BY 4.0) are added where the environment variable
POLYCLINIC_DATA names a folder with dr_multisite_128_jpeg.npz and pneumoniamnist.npz.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from polyclinic.data.acquisition import apply_styles
from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.data.datasets.phantoms.skin import LESIONS, SkinPhantom
from polyclinic.data.partitions import PARTITIONS, assign_to_sites
from polyclinic.data.plots import INK, draw, mosaic

HERE = Path(__file__).parent
REAL = Path(os.environ.get("POLYCLINIC_DATA", "")) if os.environ.get("POLYCLINIC_DATA") else None
ACROSS = 10


def panel(name: str, rows: dict[str, np.ndarray], dpi: int = 110) -> None:
    """A sheet of images with a name per row."""
    sheet = mosaic(list(rows.values()), gap=3)
    height = 9.2 * sheet.shape[0] / sheet.shape[1]
    figure = Figure(figsize=(10.6, height + 0.1), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(sheet, interpolation="antialiased")
    step = sheet.shape[0] / len(rows)
    axes.set_yticks([(k + 0.5) * step for k in range(len(rows))], list(rows), color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(HERE / f"phantom_{name}.jpg", dpi=dpi, bbox_inches="tight", pil_kwargs={"quality": 88})


def where(data: Dataset, **wanted) -> np.ndarray:
    """The first images for which every array has the wanted value."""
    chosen = np.ones(len(data), dtype=bool)
    for array, value in wanted.items():
        chosen &= getattr(data, array) == value
    return data.images[chosen][:ACROSS]


def real_fundus(size: int) -> dict[str, np.ndarray]:
    """Some photographs of DeepDRiD, by grade, uint8 [k, 3, size, size]."""
    if REAL is None:
        return {}
    packed = np.load(REAL / "dr_multisite_128_jpeg.npz")
    jpeg, offset, rng = packed["jpeg"], packed["jpeg_off"], np.random.default_rng(7)
    rows = {}
    for title, grades in (("real: grade 0", [0]), ("real: grades 2 to 4", [2, 3, 4])):
        there = np.flatnonzero(np.isin(packed["labels"], grades) & (packed["site"] < 4))
        images = [jpeg[offset[i] : offset[i + 1]].tobytes() for i in rng.choice(there, ACROSS, replace=False)]
        opened = [Image.open(io.BytesIO(image)).convert("RGB").resize((size, size)) for image in images]
        rows[title] = np.stack([np.asarray(image).transpose(2, 0, 1) for image in opened])
    return rows


def real_chest() -> dict[str, np.ndarray]:
    """Some radiographs of PneumoniaMNIST, uint8 [k, 1, 28, 28]."""
    if REAL is None:
        return {}
    arrays = np.load(REAL / "pneumoniamnist.npz")
    names = {0: "real: normal", 1: "real: pneumonia"}
    return {name: arrays["test_images"][arrays["test_labels"] == c][:ACROSS, None] for c, name in names.items()}


def fundus() -> None:
    data = FundusPhantom(samples=150, size=96, grades=5).load()
    rows = {f"phantom: grade {grade}": where(data, labels=grade) for grade in range(5)}
    panel("fundus", rows | real_fundus(96))


def chest() -> None:
    data = ChestPhantom(samples=120, size=96).load()
    rows = {
        f"{name}\n{scanner}": where(data, labels=c, site=scanner)
        for c, name in enumerate(data.classes)
        for scanner in ("scanner-a", "scanner-b")
    }
    panel("chest", rows)
    small = ChestPhantom(samples=120, size=28).load()
    rows = {f"phantom: {name}": where(small, labels=c) for c, name in enumerate(small.classes)}
    panel("chest_28", rows | real_chest())


def hand() -> None:
    data = HandPhantom(samples=400, size=96).load()
    rows = {}
    for low, high in ((1, 48), (48, 96), (96, 144), (144, 192), (192, 229)):
        there = np.flatnonzero((data.labels >= low) & (data.labels < high))[:ACROSS]
        rows[f"{low} to {high - 1} months"] = data.images[there[np.argsort(data.labels[there])]]
    panel("hand", rows)


def brain() -> None:
    data = BrainPhantom(samples=40, size=96, slices=10).load()
    rows = {}
    for patient in (0, 1, 3):
        chosen = data.patient == patient
        images = np.repeat(data.images[chosen], 3, axis=1)
        masks = data.masks[chosen].astype(bool)
        inside = (
            masks[:, 1:-1, 1:-1] & masks[:, :-2, 1:-1] & masks[:, 2:, 1:-1] & masks[:, 1:-1, :-2] & masks[:, 1:-1, 2:]
        )
        edge = masks.copy()
        edge[:, 1:-1, 1:-1] &= ~inside
        outlined = np.where(edge[:, None], np.array([255, 150, 60], np.uint8)[None, :, None, None], images)
        rows[f"patient {patient}\n{data.site[chosen][0]}"] = outlined
    panel("brain", rows)


def skin() -> None:
    data = SkinPhantom(samples=120, size=96).load()
    panel("skin", {lesion: where(data, subgroup=lesion) for lesion in LESIONS})


def sizes() -> None:
    """The same ten images at several sizes."""
    rows = {}
    for size in (28, 64, 256):
        both = [FundusPhantom(samples=10, size=size).load().images[:5]]
        both.append(np.repeat(HandPhantom(samples=10, size=size).load().images[:5], 3, axis=1))
        block = 256 // size if size != 28 else 9
        images = np.repeat(np.repeat(np.concatenate(both), block, axis=2), block, axis=3)
        rows[f"{size} px"] = images[:, :, :252, :252]
    panel("sizes", rows)


def sites() -> None:
    """What `polyclinic data inspect` draws, with cameras that differ by site."""
    data = FundusPhantom(samples=1200, size=64).load()
    names = ("Ulm", "Graz", "Bern", "Lyon")
    parts = assign_to_sites(
        PARTITIONS["label-skew"](names=names, target_ks=0.4), data, {"train": np.arange(1200)}, seed=0
    )
    shown = {
        site: (data.labels[part["train"]], apply_styles(data.images[part["train"][:12]], (0, "style", site), 0.8))
        for site, part in parts.items()
    }
    title = "Fundus phantom: label skew 0.40, cameras that differ by 0.8"
    draw(shown, classes=data.classes, title=title).savefig(
        HERE / "phantom_sites.jpg", dpi=90, pil_kwargs={"quality": 88}
    )


if __name__ == "__main__":
    for picture in (fundus, chest, hand, brain, skin, sizes, sites):
        picture()
