"""Whether an exported model says what the released one says, on sample images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polyclinic.errors import WorkFailed
from polyclinic.randomness import numpy_rng
from polyclinic.runner.export.formats import Predict
from polyclinic.runner.model_file import Card

#: how far a probability may differ; of a value, in the network's own scale, where the range of labels is -1 to 1
TOLERANCE = 1e-5
DRAWN = 12


@dataclass(frozen=True)
class Agreement:
    """The largest difference on `images`, in the network's scale; `each_alone`: of images given one at a time."""

    images: int
    what: str
    tolerance: float
    largest_difference: float
    each_alone: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def drawn_images(card: Card) -> np.ndarray:
    """Images of many kinds, the same every time: black, white, smooth shades, and noise; uint8 [12, C, size, size]."""
    rng = numpy_rng("sample images of an export")
    size, channels = card.size, card.channels
    across = np.linspace(0, 1, size)
    images = [np.zeros((channels, size, size)), np.ones((channels, size, size))]
    for number in range(DRAWN - 2):
        angle, waves = rng.uniform(0, np.pi), rng.uniform(0.5, 4, (channels, 1, 1))
        along = np.cos(angle) * across[:, None] + np.sin(angle) * across[None, :]
        smooth = 0.5 + 0.5 * np.sin(2 * np.pi * waves * along[None])
        noise = rng.uniform(0, 1, (channels, size, size))
        share = number / (DRAWN - 3)
        images.append((1 - share) * smooth + share * noise)
    return np.stack([(image * 255 + 0.5).astype(np.uint8) for image in images])


def check_agreement(ours: Predict, theirs: Predict, images: np.ndarray, what: str, card: Card) -> Agreement:
    """The differences between two models; WorkFailed if they are larger than the tolerance.

    All images at once and each alone: an exporter that fixed the number of images is found, too.
    """
    scale = _scale(card)
    expected = ours(images)
    found = Agreement(
        len(images),
        what,
        TOLERANCE,
        _largest(theirs(images), expected) / scale,
        max(_largest(theirs(images[i : i + 1]), expected[i : i + 1]) for i in range(len(images))) / scale,
    )
    worst = max(found.largest_difference, found.each_alone)
    if not worst <= TOLERANCE:  # NaN is not
        raise WorkFailed(
            f"the exported model differs from the released one by {worst:.2g} on {what}, and {TOLERANCE:g} is the most "
            "that counts as the same; nothing was written: try another format"
        )
    return found


def _scale(card: Card) -> float:
    """Half the range of labels where the model gives values; 1 for probabilities."""
    low, high = card.label_range or (-1.0, 1.0)
    return (high - low) / 2 if card.built_task().like == "regression" else 1.0


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise WorkFailed(
            f"the exported model gives {a.shape} where the released one gives {b.shape}; try another format"
        )
    return float(np.abs(a.astype(np.float64) - b).max())
