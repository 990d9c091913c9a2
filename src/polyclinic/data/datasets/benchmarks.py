"""Benchmarks of machine learning: MNIST and CIFAR-10, as FELICIA has them."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.listing import Listing, listing_of_parts
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput

# --- MNIST ----------------------------------------------------------------------------------------------------


PARTS = {"train": "train", "t10k": "test"}
DIGITS = tuple(str(digit) for digit in range(10))


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
        parts = [
            (split, read_idx(self._file(part, "images-idx3")), read_idx(self._file(part, "labels-idx1")))
            for part, split in PARTS.items()
        ]
        return listing_of_parts(str(self.location), parts, DIGITS)

    def _file(self, part: str, what: str) -> Path:
        name = f"{part}-{what}-ubyte"
        for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
            if (self.location / candidate).is_file():
                return self.location / candidate
        raise BadInput(f"data.path: '{self.location}' has no {name}.gz; see `polyclinic data show mnist`")


#: bytes of an idx file once it is unpacked; MNIST's largest has 47 MB
LARGEST_IDX = 2**27


def read_idx(file: Path) -> np.ndarray:
    """The uint8 array of an idx file, packed with gzip or not."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            raw = stream.read(LARGEST_IDX + 1)
        if len(raw) > LARGEST_IDX:
            raise ValueError(f"it unpacks to more than {LARGEST_IDX} bytes")
        zero, kind, dimensions = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
        values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dimensions)
        if (zero, kind) != (0, 8):
            raise ValueError("it is not an idx file of bytes")
        return values.reshape(shape)
    except (OSError, EOFError, struct.error, zlib.error, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as idx ({error}); get it again") from None


# --- CIFAR, binary versions (the Python versions are pickles, which are never opened) -------------------------


PIXELS = 3 * 32 * 32
ANIMALS = (3, 5, 4, 7)  # cat, dog, deer, horse (FELICIA, section 5.2)


class Cifar10(FileSource):
    """Small photographs of ten kinds of things, 32 px, with the official test set (FELICIA)."""

    source: Literal["cifar10"] = "cifar10"
    size: int = Field(32, ge=16, le=1024, description="side of the square images, in pixels")
    labels: Literal["things", "animals"] = Field(
        "things", description="ten kinds of things; or cat or dog against deer or horse, with the animals as sub-groups"
    )

    where: ClassVar[str] = (
        "CIFAR-10 binary version (cifar-10-binary.tar.gz) from the CIFAR page of the University of Toronto (Krizhevsky "
        "2009): no licence stated, cite the report."
    )
    layout: ClassVar[str] = """
        path/data_batch_1.bin ... path/data_batch_5.bin, path/test_batch.bin, path/batches.meta.txt"""

    def listing(self) -> Listing:
        train = [read_records(self.location / f"data_batch_{n}.bin") for n in range(1, 6)]
        test = read_records(self.location / "test_batch.bin")
        classes = read_names(self.location / "batches.meta.txt")
        if self.labels == "animals":
            train, test = [part[np.isin(part[:, 0], ANIMALS)] for part in train], test[np.isin(test[:, 0], ANIMALS)]
        listing = _listing(self.location, [*train, test], classes)
        if self.labels == "things":
            return listing
        animals = np.array(classes)[listing.labels]
        second = np.isin(listing.labels, ANIMALS[2:]).astype(np.int64)
        return replace(listing, labels=second, classes=("cat or dog", "deer or horse"), subgroup=animals)


def read_records(file: Path) -> np.ndarray:
    """uint8 [N, 3073], memory-mapped: a label, then red, green and blue row by row."""
    if not file.is_file() or file.stat().st_size == 0 or file.stat().st_size % (1 + PIXELS):
        raise BadInput(f"{file}: is missing or not of the binary version (records of {1 + PIXELS} bytes)")
    return np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, 1 + PIXELS)


def read_names(file: Path) -> tuple[str, ...]:
    """The names of the ten classes, one per line."""
    names = tuple(file.read_text(encoding="utf-8").split()) if file.is_file() else ()
    if len(names) != 10:
        raise BadInput(f"{file}: is missing, or names {len(names)} classes instead of 10")
    return names


def _listing(path: Path, parts: list[np.ndarray], classes: tuple[str, ...]) -> Listing:
    """The last part is the official test set."""
    images = [part[:, -PIXELS:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts]
    splits = ["train"] * (len(parts) - 1) + ["test"]
    labels = [part[:, 0] for part in parts]
    return listing_of_parts(str(path), list(zip(splits, images, labels, strict=True)), classes)
