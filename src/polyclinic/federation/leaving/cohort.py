"""Cohorts: how many patients are behind what a site releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.operation import signature_of
from polyclinic.json_types import JsonMapping
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet, SiteData
    from polyclinic.federation.call import Call
    from polyclinic.federation.operation import Operation

#: kinds that a generator makes, or is
GENERATED = ("generator", "synthetic-images")


def cohort(data: SiteData, split: str) -> int:
    """Patients in a split of a site's images, or images where nobody knows whose they are."""
    part = getattr(data, split)
    return len(part) if part.cases is None else len(set(part.cases.tolist()))


def patients_in(images: ImageSet, batches: Sequence[Tensor]) -> int:
    """Patients whose images were in these batches of indices."""
    index = torch.cat([batch.flatten().cpu() for batch in batches]).unique()
    index = index[index < len(images)]  # what comes after a site's own images is not its patients'
    return len(index) if images.cases is None else len(set(images.cases[index.numpy()].tolist()))


def fewest_patients(images: ImageSet, batch: int) -> int:
    """The fewest patients that a batch of so many images can come from; tells nothing about which ones it has."""
    if images.cases is None:
        return min(batch, len(images))
    counts = np.sort(np.unique(images.cases, return_counts=True)[1])[::-1]
    return min(int(np.searchsorted(np.cumsum(counts), batch)) + 1, len(counts))


def images_in_private_step(record: JsonMapping, images: int) -> int:
    """How many of a site's images a step on record takes on average, in the smallest of its steps."""
    rates = [one["sampling_rate"] for one in record["mechanisms"] if one["steps"]] if "mechanisms" in record else [0.0]
    return round(min(rates, default=1.0) * images)


def images_in_generator_step(generator: Settings | None) -> int:
    """Real images in the smallest mini-batch that the study's generator learns from."""
    sizes = [getattr(generator, name, None) for name in ("batch_size", "prior_batch_size")]
    return min((size for size in sizes if size is not None), default=0)


def scored_splits(call: Call, declared: Operation, work: Callable[..., Any]) -> tuple[str, ...]:
    """The splits of a site's images that an operation's release is computed from."""
    asked = signature_of(work).parameters.get("split")
    if asked is not None:
        return (str(call.arguments.get("split", asked.default)),)
    return declared.scores or ("train",)
