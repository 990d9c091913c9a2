"""Features of a site's images, computed once and kept in a file beside the images.

The file's name is a digest of the encoder's weights, the side of its images, the machine's arithmetic and the images
themselves; a file of other images or other weights is never taken for it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from polyclinic.encoders.base import BATCH, Encoder
from polyclinic.files import atomic_file, digest_of, lock
from polyclinic.progress import tell

PIECE = 1024  # images that lie in memory at once


def kept_features(encoder: Encoder, images: np.ndarray, folder: Path | None = None) -> np.ndarray:
    """Features float32 [N, D] of images uint8 [N, C, H, W]: out of the file, if there is one, else computed and kept.

    Images that are not memory-mapped from a folder need `folder`, or they have no file. Features of encoders without
    `identity` have none.
    """
    file, shape = features_file(encoder, images, folder), (len(images), encoder.width)
    if file is None:
        return _computed(encoder, images)
    kept = _read(file, shape)
    if kept is None:
        with lock(file.with_suffix(".lock")):  # of two runs that want the same features, the second waits for the first
            kept = _read(file, shape)
            return _made(file, encoder, images) if kept is None else kept
    return kept


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The features in a file; None where there is none, or it is damaged."""
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy reads a header as Python does: a damaged one fails in many ways
        return None
    return found if getattr(found, "shape", None) == shape and found.dtype == np.float32 else None


def _made(file: Path, encoder: Encoder, images: np.ndarray) -> np.ndarray:
    features = _computed(encoder, images)
    with atomic_file(file) as scratch, scratch.open("wb") as stream:
        np.save(stream, features, allow_pickle=False)
    return features


def features_file(encoder: Encoder, images: np.ndarray, folder: Path | None = None) -> Path | None:
    """Where the features of these images are kept: in `folder`, or beside them; None where they cannot be."""
    name = getattr(images, "filename", None)
    folder = Path(name).parent if folder is None and name is not None else folder
    if encoder.identity is None or folder is None or not os.access(folder, os.W_OK):
        return None
    key = {
        "encoder": type(encoder).__qualname__,
        "weights": encoder.identity,
        "side": encoder.image_side,
        "device": encoder.device.type,
        "torch": torch.__version__,
        "images": _digest(images),
    }
    if encoder.batch != BATCH:  # other sizes compute other last bits
        key["batch"] = encoder.batch
    return folder / f"features-{digest_of(key)[:24]}.npy"


def _computed(encoder: Encoder, images: np.ndarray) -> np.ndarray:
    pieces = [images[start : start + PIECE] for start in range(0, len(images), PIECE)]
    found = []
    for piece in pieces:
        found.append(encoder.features(torch.from_numpy(np.array(piece))).numpy())
        tell("encoding images", sum(map(len, found)), len(images))
    return np.concatenate(found) if found else np.zeros((0, encoder.width), np.float32)


def _digest(images: np.ndarray) -> str:
    total = hashlib.sha256(f"{images.dtype} {images.shape}".encode())
    for start in range(0, len(images), PIECE):
        total.update(np.ascontiguousarray(images[start : start + PIECE]).data)
    return total.hexdigest()
