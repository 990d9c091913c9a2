"""Street View House Numbers, cropped digits."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.archives import Chain
from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_arrays
from polyclinic.errors import BadInput


class Svhn(FileSource):
    """House numbers cropped to one digit, 32 px, with the official test set (DLG configurations)."""

    source: Literal["svhn"] = "svhn"
    size: int = Field(32, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(3, description="1 for grey, 3 for colour")

    where: ClassVar[str] = (
        "The Street View House Numbers page of Stanford (Netzer et al. 2011), format 2, cropped digits; "
        "non-commercial use only."
    )
    layout: ClassVar[str] = """
        path/train_32x32.mat, path/test_32x32.mat"""

    def listing(self) -> Listing:
        parts = [read_digits(self.location / f"{name}_32x32.mat") for name in ("train", "test")]
        images = Chain([pixels for pixels, _ in parts])
        return listing_of_arrays(
            images,
            str(self.location),
            labels=np.concatenate([labels for _, labels in parts]),
            classes=tuple(str(digit) for digit in range(10)),
            split=np.repeat(["train", "test"], images.lengths),
        )


def read_digits(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N]; the file calls zero 10."""
    from scipy.io import loadmat  # here: every process of a run would pay for it
    from scipy.io.matlab import MatReadError

    if not file.is_file():
        raise BadInput(f"{file}: is missing; see `polyclinic data show svhn`")
    try:
        content = loadmat(file, variable_names=["X", "y"])
        pixels, labels = content["X"], content["y"]
    except (OSError, ValueError, KeyError, NotImplementedError, MatReadError) as error:
        raise BadInput(f"{file}: cannot be read as cropped digits ({error}); get it again") from None
    return pixels.transpose(3, 0, 1, 2), labels.reshape(-1).astype(np.int64) % 10
