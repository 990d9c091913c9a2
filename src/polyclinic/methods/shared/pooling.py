"""Real images as parcels and back, for the two methods that share them: Centralized and FedAvg+Share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Reply
from polyclinic.federation.leaving.parcel import Parcel


def release(part: ImageSet, index: np.ndarray | slice = slice(None)) -> tuple[Parcel, ...]:
    """The chosen images, labels and (where there are any) masks of a part, as parcels."""
    parcels = [
        Parcel("real-images", {"images": torch.from_numpy(np.array(part.images[index]))}),
        Parcel("labels", {"labels": torch.from_numpy(np.array(part.labels[index]))}),
    ]
    if part.masks is not None:
        parcels.append(Parcel("masks", {"masks": torch.from_numpy(np.array(part.masks[index]))}))
    return tuple(parcels)


def pool(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """What several sites released, one after the other: `images`, `labels`, perhaps `masks`; metrics are left out."""
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
    return ImageSet(**{name: tensor.numpy() for name, tensor in pooled.items()})


def union(a: ImageSet, b: ImageSet) -> ImageSet:
    """The images of both parts, those of `a` first."""
    names = [n for n in ("images", "labels", "masks") if getattr(a, n) is not None]
    return ImageSet(**{name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in names})
