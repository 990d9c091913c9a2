"""Benchmarks of machine learning: MNIST, CIFAR-10 and CIFAR-100, SVHN, Omniglot."""

import gzip
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.listing import Listing, listing_of_files, listing_of_parts
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput

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


PIXELS = 3 * 32 * 32
_WHERE = "from the CIFAR page of the University of Toronto (Krizhevsky 2009): no licence stated, cite the report."


ANIMALS = (3, 5, 4, 7)  # cat, dog, deer, horse (FELICIA, section 5.2)


class Cifar10(FileSource):
    """Small photographs of ten kinds of things, 32 px, with the official test set (FELICIA)."""

    source: Literal["cifar10"] = "cifar10"
    size: int = Field(32, ge=16, le=1024, description="side of the square images, in pixels")
    labels: Literal["things", "animals"] = Field(
        "things", description="ten kinds of things; or cat or dog against deer or horse, with the animals as sub-groups"
    )

    where: ClassVar[str] = "CIFAR-10 binary version (cifar-10-binary.tar.gz) " + _WHERE
    layout: ClassVar[str] = """
        path/data_batch_1.bin ... path/data_batch_5.bin, path/test_batch.bin, path/batches.meta.txt"""

    def listing(self) -> Listing:
        train = [read_records(self.location / f"data_batch_{n}.bin", labels=1) for n in range(1, 6)]
        test = read_records(self.location / "test_batch.bin", labels=1)
        classes = read_names(self.location / "batches.meta.txt", 10)
        if self.labels == "animals":
            train, test = [part[np.isin(part[:, 0], ANIMALS)] for part in train], test[np.isin(test[:, 0], ANIMALS)]
        listing = _listing(self.location, [*train, test], column=0, classes=classes)
        if self.labels == "things":
            return listing
        animals = np.array(classes)[listing.labels]
        second = np.isin(listing.labels, ANIMALS[2:]).astype(np.int64)
        return replace(listing, labels=second, classes=("cat or dog", "deer or horse"), subgroup=animals)


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
    images = [part[:, -PIXELS:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts]
    splits = ["train"] * (len(parts) - 1) + ["test"]
    labels = [part[:, column] for part in parts]
    return listing_of_parts(str(path), list(zip(splits, images, labels, strict=True)), classes)


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
        parts = [(name, *read_digits(self.location / f"{name}_32x32.mat")) for name in ("train", "test")]
        return listing_of_parts(str(self.location), parts, DIGITS)


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


SETS = ("images_background", "images_evaluation", "images_background_small1", "images_background_small2")


class Omniglot(FileSource):
    """Handwritten characters of fifty alphabets, each drawn by twenty people; sites are alphabets (DLG)."""

    source: Literal["omniglot"] = "omniglot"
    size: int = Field(28, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")
    labels: Literal["character", "alphabet"] = Field("character", description="what to recognise")

    where: ClassVar[str] = "The repository brendenlake/omniglot (Lake et al. 2015), folder python; MIT."
    layout: ClassVar[str] = """
        path/images_background/Greek/character01/0394_01.png, ...
        path/images_evaluation/Tengwar/character01/1600_01.png, ...
    Any of images_background, images_evaluation, images_background_small1, images_background_small2."""

    def listing(self) -> Listing:
        files = [file for name in SETS for file in sorted((self.location / name).glob("*/character*/*.png"))]
        if not files:
            raise BadInput(f"data.path: '{self.location}' has no images_background/<alphabet>/character*/*.png")
        alphabets = [file.parent.parent.name for file in files]
        characters = [f"{file.parent.parent.name}/{file.parent.name}" for file in files]
        kinds = characters if self.labels == "character" else alphabets
        classes = tuple(sorted(set(kinds)))
        number = {name: i for i, name in enumerate(classes)}
        return listing_of_files(
            files,
            [file.relative_to(self.location).as_posix() for file in files],
            labels=np.array([number[kind] for kind in kinds], dtype=np.int64),
            classes=classes,
            site=safe_names(alphabets),
        )
