"""What a site checks of a call before it opens an image: whom the answer is for, and whether the operation takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyclinic.data.splits import SPLITS
from polyclinic.federation.call import COORDINATOR, Call
from polyclinic.federation.leaving.cohort import scored_splits
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.federation.operation import Operation, signature_of


def check_call(call: Call, declared: Operation, work: Callable[..., Any], *, deployed: bool) -> None:
    """ParcelRejected for a call that the operation does not take, GateRefused for one that no deployed site answers.

    No image was looked at, so that the answer tells nothing about any.
    """
    if deployed and declared.simulation_only:
        raise GateRefused(f"'{call.operation}': this exists in simulation only")
    if declared.for_sites_only and call.to == COORDINATOR:
        raise ParcelRejected(f"'{call.operation}' releases to another site only, sealed, and the coordinator asked")
    signature, scored = signature_of(work), scored_splits(call, declared, work)
    unknown = set(scored) - set(SPLITS)
    if unknown:
        raise ParcelRejected(f"'{call.operation}': there is no split '{unknown.pop()}'; use {', '.join(SPLITS)}")
    if deployed and "split" in signature.parameters and "train" in scored:
        raise GateRefused("scores of training images never leave a deployed site")
    try:
        signature.bind(None, **{**call.parcels, **call.arguments})
    except TypeError as error:
        raise ParcelRejected(f"'{call.operation}' does not take what came with it: {error}") from None
