"""MedMNIST v2: any of its sets, at 28, 64, 128 or 224 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.archives import Archive, Chain
from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing
from polyclinic.errors import BadInput
from polyclinic.settings import nearest

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
        images = Chain([_middle_slices(archive[f"{name}_images"]) for name in SPLITS])
        labels = np.concatenate([archive[f"{name}_labels"] for name in SPLITS])
        labels, classes = self._classes(labels.astype(np.int64))
        return Listing(
            picture=lambda i: images[i],
            name=lambda i: f"{self.subset} image {i}",
            labels=labels,
            classes=classes,
            split=np.repeat(list(SPLITS.values()), images.lengths),
        )

    def _file(self) -> Path:
        if self.subset not in CLASSES:
            hint = nearest(self.subset, list(CLASSES))
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

    def _classes(self, labels: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        classes = CLASSES[self.subset]
        if self.subset != "chestmnist":
            return labels.reshape(-1), classes
        if self.finding not in classes:
            raise BadInput(f"data.finding: there is no '{self.finding}'; choose one of {', '.join(classes)}")
        return labels[:, classes.index(self.finding)], ("other", self.finding)


def _middle_slices(images: np.ndarray) -> np.ndarray:
    """[N, H, W] or [N, H, W, 3] as they are; of volumes [N, D, H, W] the middle slices."""
    volumes = images.ndim == 4 and images.shape[3] != 3
    return images[:, images.shape[1] // 2] if volumes else images
