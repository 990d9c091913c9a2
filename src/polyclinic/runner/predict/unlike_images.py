"""Images that are unlike those of the study: three figures of validation images, kept in the model's card.

By them `predict` finds a photograph among radiographs, or a black picture. They do not find a hand among chests.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np
from pydantic import Field

from polyclinic.data.volumes.volume import are_volumes
from polyclinic.settings import Settings

#: images without which their range says little
LEAST_IMAGES = 10
#: images of a site that are looked at, and sites
MOST_IMAGES, MOST_SITES = 100, 64
#: grey levels by which an image may lie outside of the range, beside half of its width
MARGIN = 8.0
Range = tuple[int, int]


class Looks(Settings):
    """The lowest and highest figure of all images, in grey levels from 0 to 255."""

    images: int = Field(ge=1, description="validation images that were looked at")
    brightness: Range = Field(description="mean of the pixels")
    contrast: Range = Field(description="standard deviation of the pixels")
    colour: Range = Field(description="mean difference between the strongest and the weakest channel of a pixel")

    def unlike(self, image: np.ndarray, pixels: np.ndarray) -> str:
        """How an image differs, in words; nothing where it does not. `image` is prepared, uint8 [C, H, W]; `pixels` are
        those of the file, [H, W] or [H, W, 3], as preparation takes colours away."""
        found = figures(image)
        of_file = figures(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        found["colour"] = max(found["colour"], of_file["colour"])
        odd = []
        for name, value in found.items():
            low, high = getattr(self, name)
            room = MARGIN + (high - low) / 2
            if not low - room <= value <= high + room:
                odd.append(f"{name} {value:.0f}, and {low} to {high} there")
        return "; ".join(odd)


def figures(image: np.ndarray) -> dict[str, float]:
    """The figures of an image, uint8 [C, H, W]."""
    numbers = np.asarray(image, np.float32)
    spread = numbers.max(0) - numbers.min(0)
    return {"brightness": float(numbers.mean()), "contrast": float(numbers.std()), "colour": float(spread.mean())}


def looks_of(sets: Iterable[np.ndarray]) -> Looks | None:
    """The looks of the images of several sites, uint8 [N, C, H, W] each; None where there are too few, or
    they are volumes."""
    images = (one for one in itertools.islice(sets, MOST_SITES) if not are_volumes(one))
    some = (image for one in images for image in one[:MOST_IMAGES])
    found = [figures(image) for image in some]
    if len(found) < LEAST_IMAGES:
        return None
    # whole numbers: the last bits differ between machines, and tell about single images
    columns = {name: [one[name] for one in found] for name in found[0]}
    ranges = {name: (math.floor(min(some)), math.ceil(max(some))) for name, some in columns.items()}
    return Looks(images=len(found), **ranges)
