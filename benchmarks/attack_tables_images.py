"""The images that `attack_tables.py` attacks, all of 32 px, from the folder that POLYCLINIC_DATA names."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.randomness import numpy_rng

SIZE = 32
#: by the name of the data: its file, and the names of its images and labels there
FILES = {
    "chest": ("tb_cxr_64.npz", "images", "labels"),
    "nih": ("covid_cxr_64.npz", "images", "labels"),
    "cifar": ("cifar10_subset_jpeg.npz", "jpeg", "labels"),
    "mnist": ("mnist.npz", "test_images", "test_labels"),
    "omniglot": ("omniglot_small_28.npz", "images", "labels"),
    "svhn": ("svhn.npz", "images", "labels"),
}
IN_COLOUR = ("chest", "nih")  # grey images that the authors' code opens as RGB


def data_file(data: str) -> Path:
    return Path(os.environ.get("POLYCLINIC_DATA", "")) / FILES[data][0]


def load_images(data: str, count: int, seed: int = 0, *, chest_channels: int = 3) -> tuple[Tensor, Tensor]:
    """`count` images [N, C, 32, 32] in [0, 1], drawn at random, and their labels [N].

    Chest X-rays have three equal channels (or one), as the authors' code converts them to RGB.
    """
    path, (_, images_name, labels_name) = data_file(data), FILES[data]
    if not os.environ.get("POLYCLINIC_DATA") or not path.is_file():
        raise SystemExit(f"POLYCLINIC_DATA: no {path.name} in '{path.parent}'; set it to the folder with the images")
    with np.load(path, allow_pickle=False) as archive:
        labels = archive[labels_name].reshape(-1)
        places = np.arange(len(labels))
        if data == "nih":  # the file holds other sources, too
            names = [str(name) for name in archive["site_names"]]
            places = np.flatnonzero(archive["site"] == names.index("NIH_ChestXray8"))
        rows = np.sort(numpy_rng(seed, "targets", data).choice(places, count, replace=False))
        pixels = packed(archive, rows) if images_name == "jpeg" else archive[images_name][rows]
    images = torch.from_numpy(pixels).float() / 255
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    if data in IN_COLOUR and chest_channels == 3:
        images = images.expand(-1, 3, -1, -1)
    return _resize(images).contiguous(), torch.from_numpy(labels[rows].astype(np.int64))


def _resize(images: Tensor) -> Tensor:
    side = images.shape[-1]
    if side % SIZE == 0:
        return F.avg_pool2d(images, side // SIZE) if side > SIZE else images
    return F.interpolate(images, SIZE, mode="bilinear", align_corners=False)


def packed(archive: Any, rows: np.ndarray) -> np.ndarray:
    """Some images of an archive of JPEGs, [N, 32, 32, 3] uint8."""
    from PIL import Image

    data, offsets = archive["jpeg"], archive["jpeg_off"]
    pictures = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in rows]
    return np.stack([np.asarray(picture) for picture in pictures])
