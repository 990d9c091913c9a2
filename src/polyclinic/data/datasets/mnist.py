"""MNIST from its original idx files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.archives import Chain
from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_arrays
from polyclinic.errors import BadInput

PARTS = {"train": "train", "t10k": "test"}


class Mnist(FileSource):
    """Handwritten digits, 28 px, with the official test set (MNIST; FELICIA and DLG configurations)."""

    source: Literal["mnist"] = "mnist"
    size: int = Field(28, ge=16, le=1024, description="side of the square images, in pixels")

    where: ClassVar[str] = (
        "The MNIST database (LeCun, Cortes, Burges), four idx files, mirrored in many places; CC BY-SA 3.0. "
        "Fashion-MNIST, KMNIST and EMNIST digits in the same layout work as well."
    )
    layout: ClassVar[str] = """
        path/train-images-idx3-ubyte.gz, path/train-labels-idx1-ubyte.gz
        path/t10k-images-idx3-ubyte.gz, path/t10k-labels-idx1-ubyte.gz       (unpacked is fine)"""

    def listing(self) -> Listing:
        images = Chain([read_idx(self._file(part, "images-idx3")) for part in PARTS])
        labels = np.concatenate([read_idx(self._file(part, "labels-idx1")) for part in PARTS])
        return listing_of_arrays(
            images,
            str(self.location),
            labels=labels.astype(np.int64),
            classes=tuple(str(digit) for digit in range(10)),
            split=np.repeat(list(PARTS.values()), images.lengths),
        )

    def _file(self, part: str, what: str) -> Path:
        name = f"{part}-{what}-ubyte"
        for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
            if (self.location / candidate).is_file():
                return self.location / candidate
        raise BadInput(f"data.path: '{self.location}' has no {name}.gz; see `polyclinic data show mnist`")


def read_idx(file: Path) -> np.ndarray:
    """The uint8 array of an idx file, packed with gzip or not."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        zero, kind, dimensions = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
        values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dimensions)
        if (zero, kind) != (0, 8):
            raise ValueError("it is not an idx file of bytes")
        return values.reshape(shape)
    except (OSError, EOFError, struct.error, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as idx ({error}); get it again") from None
