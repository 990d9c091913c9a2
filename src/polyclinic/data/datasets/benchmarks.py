"""Benchmarks of machine learning: MNIST, CIFAR-10, MedMNIST v2."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.archives import Archive
from polyclinic.data.listing import Listing, listing_of_parts
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput, did_you_mean

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


# --- MedMNIST v2: any of its sets, at 28, 64, 128 or 224 pixels -----------------------------------------------


SIZES = (28, 64, 128, 224)
SPLITS = {"train": "train", "val": "validation", "test": "test"}
_ORGANS = "bladder|femur-left|femur-right|heart|kidney-left|kidney-right|liver|lung-left|lung-right|pancreas|spleen"
_NAMES = {
    "pathmnist": "adipose|background|debris|lymphocytes|mucus|smooth muscle|normal colon mucosa|"
    "cancer-associated stroma|colorectal adenocarcinoma epithelium",
    "chestmnist": "atelectasis|cardiomegaly|effusion|infiltration|mass|nodule|pneumonia|pneumothorax|consolidation|"
    "edema|emphysema|fibrosis|pleural|hernia",
    "dermamnist": "actinic keratoses|basal cell carcinoma|benign keratosis|dermatofibroma|melanoma|melanocytic nevi|"
    "vascular lesions",
    "octmnist": "choroidal neovascularization|diabetic macular edema|drusen|normal",
    "pneumoniamnist": "normal|pneumonia",
    "retinamnist": "0|1|2|3|4",
    "breastmnist": "malignant|normal or benign",
    "bloodmnist": "basophil|eosinophil|erythroblast|immature granulocytes|lymphocyte|monocyte|neutrophil|platelet",
    "tissuemnist": "collecting duct|distal convoluted tubule|glomerular endothelial|interstitial endothelial|"
    "leukocytes|podocytes|proximal tubule|thick ascending limb",
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
    "organmnist3d": "liver|kidney-right|kidney-left|femur-right|femur-left|bladder|heart|lung-right|lung-left|spleen|"
    "pancreas",
    "nodulemnist3d": "benign|malignant",
    "adrenalmnist3d": "normal|hyperplasia",
    "fracturemnist3d": "buckle|nondisplaced|displaced",
    "vesselmnist3d": "vessel|aneurysm",
    "synapsemnist3d": "inhibitory|excitatory",
}
#: every set with the names of its classes, in the order of its labels
CLASSES = {name: tuple(text.split("|")) for name, text in _NAMES.items()}


class MedMnist(FileSource):
    """MedMNIST v2: any of its sets with the official splits; of the 3D sets the middle slices."""

    source: Literal["medmnist"] = "medmnist"
    size: int = Field(28, ge=16, le=224, description="side of the square images; the nearest larger file is read")
    subset: str = Field("pneumoniamnist", description="the set, e.g. pathmnist, bloodmnist, organmnist3d")
    finding: str = Field("effusion", description="which of chestmnist's findings is the label; other sets ignore it")

    where: ClassVar[str] = (
        "MedMNIST v2 (Yang et al. 2023) at Zenodo, one .npz per set and size; CC BY 4.0 (dermamnist: CC BY-NC 4.0)."
    )
    layout: ClassVar[str] = """
        path/pneumoniamnist.npz          28 px
        path/pneumoniamnist_64.npz       also _128 and _224
    each with train_images, train_labels, val_images, val_labels, test_images, test_labels. `path` may be the file."""

    def files(self) -> Sequence[Path]:
        return [self._file()]

    def listing(self) -> Listing:
        archive = Archive(self._file())
        classes, finding = CLASSES[self.subset], None
        if self.subset == "chestmnist":
            if self.finding not in classes:
                raise BadInput(f"data.finding: there is no '{self.finding}'; choose one of {', '.join(classes)}")
            classes, finding = ("other", self.finding), classes.index(self.finding)
        parts = []
        for name, split in SPLITS.items():
            labels = archive[f"{name}_labels"]
            labels = labels.reshape(-1) if finding is None else labels[:, finding]
            images = archive[f"{name}_images"]
            is_volume = images.ndim == 4 and images.shape[3] != 3  # [N, D, H, W]: its middle slices
            parts.append((split, images[:, images.shape[1] // 2] if is_volume else images, labels))
        return listing_of_parts(self.subset, parts, classes)

    def _file(self) -> Path:
        if self.subset not in CLASSES:
            hint = did_you_mean(self.subset, list(CLASSES))
            raise BadInput(f"data.subset: there is no '{self.subset}'{hint}; choose one of {', '.join(CLASSES)}")
        if self.location.is_file():
            return self.location
        larger = [size for size in SIZES if size >= self.size]
        smaller = [size for size in reversed(SIZES) if size < self.size]
        for size in (*larger, *smaller):
            file = self.location / (f"{self.subset}.npz" if size == 28 else f"{self.subset}_{size}.npz")
            if file.is_file():
                return file
        raise BadInput(f"data.path: '{self.location}' has no {self.subset}.npz (nor one of _64, _128, _224)")
