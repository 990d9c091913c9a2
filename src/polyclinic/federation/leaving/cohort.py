"""Cohorts: how many patients are behind what a site releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet, SiteData
    from polyclinic.federation.call import Call
    from polyclinic.federation.operation import Operation


def cohort(data: SiteData, split: str) -> int:
    """Patients in a split of a site's images, or images where nobody knows whose they are."""
    part = getattr(data, split)
    return len(part) if part.cases is None else len(set(part.cases.tolist()))


def patients_in(images: ImageSet, batches: Sequence[Tensor]) -> int:
    """Patients whose images were in these batches of indices."""
    index = torch.cat([batch.flatten().cpu() for batch in batches]).unique()
    index = index[index < len(images)]  # what comes after a site's own images is not its patients'
    return len(index) if images.cases is None else len(set(images.cases[index.numpy()].tolist()))


def scored_splits(call: Call, declared: Operation, work: Callable[..., Any]) -> tuple[str, ...]:
    """The splits of a site's images that an operation's release is computed from."""
    asked = inspect.signature(work).parameters.get("split")
    if asked is not None:
        return (str(call.arguments.get("split", asked.default)),)
    return declared.scores or ("train",)
