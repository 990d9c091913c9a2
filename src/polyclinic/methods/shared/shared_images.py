"""Real images as parcels and back, for the two methods that share them: Centralized and FedAvg+Share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.volume import Volume, are_volumes, rows_of
from polyclinic.federation.federation import Federation
from polyclinic.methods.shared.method import Parcel, ParcelRejected, Reply

#: the tensors of pooled volumes
POOLED = ("images", "masks", "shapes", "spacings")


def release(part: ImageSet, index: np.ndarray | slice = slice(None)) -> tuple[Parcel, ...]:
    """The chosen images, labels and (where there are any) masks of a part, as parcels."""
    if are_volumes(part.images):
        return _release_volumes(part.take(np.arange(len(part))[index]))
    parcels = [
        Parcel("real-images", {"images": torch.from_numpy(np.array(part.images[index]))}),
        Parcel("labels", {"labels": torch.from_numpy(np.array(part.labels[index]))}),
    ]
    if part.masks is not None:
        parcels.append(Parcel("masks", {"masks": torch.from_numpy(np.array(part.masks[index]))}))
    return tuple(parcels)


def _release_volumes(part: ImageSet) -> tuple[Parcel, ...]:
    """Volumes of any shapes, one after the other in flat tensors, with their shapes and spacings."""
    images, masks = [volume.image for volume in part.images], [volume.mask for volume in part.images]
    numbers = {
        "images": np.concatenate([image.reshape(-1) for image in images]),
        "shapes": np.array([image.shape for image in images], np.int64),
        "spacings": np.array([volume.spacing for volume in part.images], np.float64),
    }
    return (
        Parcel("real-images", {name: torch.from_numpy(array) for name, array in numbers.items()}),
        Parcel("labels", {"labels": torch.from_numpy(np.array(part.labels))}),
        Parcel("masks", {"masks": torch.from_numpy(np.concatenate([mask.reshape(-1) for mask in masks]))}),
    )


def _pooled_volumes(images: np.ndarray, masks: np.ndarray, shapes: np.ndarray, spacings: np.ndarray) -> np.ndarray:
    """The volumes that `_release_volumes` of several sites laid one after the other."""
    voxels = shapes[:, 1:].prod(1)
    ends = (voxels * shapes[:, 0]).cumsum()[:-1]
    parts = zip(np.split(images, ends), np.split(masks, voxels.cumsum()[:-1]), strict=True)
    known = zip(parts, shapes.tolist(), spacings.tolist(), strict=True)
    return rows_of([Volume(i.reshape(shape), m.reshape(shape[1:]), tuple(apart)) for (i, m), shape, apart in known])


def check_shared(federation: Federation, reply: Reply) -> None:
    """ParcelRejected unless the reply has images of the study's shape, and as many labels and, where needed, masks."""
    images, labels = reply.parcel("real-images").tensors, reply.parcel("labels").tensors
    count = len(images["images"]) if "images" in images else 0
    found = {name: (t.dtype, tuple(t.shape)) for name, t in images.items()}
    if not count or found != {"images": (torch.uint8, (count, *federation.image_shape))} or labels.keys() != {"labels"}:
        raise ParcelRejected("real-images: they are not images of the study's shape, with labels")
    if any(len(one) != count for parcel in reply.parcels for one in parcel.tensors.values()):
        raise ParcelRejected("real-images: there are not as many labels or masks")
    if federation.trainer.task.dense and "masks" not in reply.parcel("masks").tensors:
        raise ParcelRejected("real-images: the masks are missing")


def pool(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """Tensors that several sites released, one after the other: `images`, `labels`, perhaps `masks`; no metrics."""
    sent = [
        {name: t for parcel in reply.parcels if parcel.kind != "metrics" for name, t in parcel.tensors.items()}
        for reply in replies
    ]
    return {name: torch.cat([tensors[name] for tensors in sent]) for name in sent[0]}


def parcels_of(pooled: Mapping[str, Tensor]) -> dict[str, Any]:
    """Pooled tensors as the keywords of an `ask`: real_images, labels, masks."""
    keywords = {"images": "real_images", "labels": "labels", "masks": "masks"}
    return {keywords[name]: {name: tensor} for name, tensor in pooled.items()}


def pooled_images(pooled: Mapping[str, Tensor]) -> ImageSet:
    """Pooled tensors as a part that a trainer can train on."""
    arrays = {name: tensor.numpy() for name, tensor in pooled.items()}
    if "shapes" in arrays:
        return ImageSet(_pooled_volumes(*(arrays[name] for name in POOLED)), arrays["labels"])
    return ImageSet(**arrays)


def union(a: ImageSet, b: ImageSet) -> ImageSet:
    """The images of both parts, those of `a` first."""
    names = [n for n in ("images", "labels", "masks") if getattr(a, n) is not None]
    return ImageSet(**{name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in names})
