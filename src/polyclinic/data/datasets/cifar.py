"""CIFAR-10 and CIFAR-100 from their binary versions (the Python versions are pickles, which are never opened)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.archives import Chain
from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_arrays
from polyclinic.errors import BadInput

PIXELS = 3 * 32 * 32
_WHERE = "from the CIFAR page of the University of Toronto (Krizhevsky 2009): no licence stated, cite the report."


class Cifar10(FileSource):
    """Small photographs of ten kinds of things, 32 px, with the official test set (FELICIA)."""

    source: Literal["cifar10"] = "cifar10"
    size: int = Field(32, ge=16, le=1024, description="side of the square images, in pixels")

    where: ClassVar[str] = "CIFAR-10 binary version (cifar-10-binary.tar.gz) " + _WHERE
    layout: ClassVar[str] = """
        path/data_batch_1.bin ... path/data_batch_5.bin, path/test_batch.bin, path/batches.meta.txt"""

    def listing(self) -> Listing:
        train = [read_records(self.location / f"data_batch_{n}.bin", labels=1) for n in range(1, 6)]
        test = read_records(self.location / "test_batch.bin", labels=1)
        classes = read_names(self.location / "batches.meta.txt", 10)
        return _listing(self.location, [*train, test], column=0, classes=classes)


class Cifar100(FileSource):
    """Small photographs of a hundred kinds of things, 32 px, with the official test set (DLG configurations)."""

    source: Literal["cifar100"] = "cifar100"
    size: int = Field(32, ge=16, le=1024, description="side of the square images, in pixels")
    labels: Literal["fine", "coarse"] = Field("fine", description="100 fine or 20 coarse classes")

    where: ClassVar[str] = "CIFAR-100 binary version (cifar-100-binary.tar.gz) " + _WHERE
    layout: ClassVar[str] = """
        path/train.bin, path/test.bin, path/fine_label_names.txt, path/coarse_label_names.txt"""

    def listing(self) -> Listing:
        parts = [read_records(self.location / f"{name}.bin", labels=2) for name in ("train", "test")]
        fine = self.labels == "fine"
        classes = read_names(self.location / f"{self.labels}_label_names.txt", 100 if fine else 20)
        return _listing(self.location, parts, column=1 if fine else 0, classes=classes)


def read_records(file: Path, labels: int) -> np.ndarray:
    """uint8 [N, labels + 3072], memory-mapped: so many label bytes, then red, green and blue row by row."""
    record = labels + PIXELS
    if not file.is_file() or file.stat().st_size == 0 or file.stat().st_size % record:
        raise BadInput(f"{file}: is missing or not of the binary version (records of {record} bytes)")
    return np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, record)


def read_names(file: Path, count: int) -> tuple[str, ...]:
    """The names of the classes, one per line."""
    if not file.is_file():
        raise BadInput(f"{file}: is missing; it names the classes")
    names = tuple(file.read_text(encoding="utf-8").split())
    if len(names) != count:
        raise BadInput(f"{file}: names {len(names)} classes instead of {count}")
    return names


def _listing(path: Path, parts: list[np.ndarray], column: int, classes: tuple[str, ...]) -> Listing:
    """The last part is the official test set."""
    images = Chain([part[:, -PIXELS:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts])
    splits = ["train"] * (len(parts) - 1) + ["test"]
    return listing_of_arrays(
        images,
        str(path),
        labels=np.concatenate([part[:, column] for part in parts]).astype(np.int64),
        classes=classes,
        split=np.repeat(splits, images.lengths),
    )
