"""What a site checks of a call before it opens an image: whom the answer is for, and whether the operation takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyclinic.data.splits import SPLITS
from polyclinic.federation.call import COORDINATOR, Call
from polyclinic.federation.leaving.cohort import scored_splits
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected
from polyclinic.federation.operation import Operation, signature_of

if TYPE_CHECKING:
    from polyclinic.federation.site import Site


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


def check_parcel(site: Site, name: str, parcel: Parcel, declared: Operation, work: Callable[..., Any]) -> None:
    """ParcelRejected unless a deployed site's operation takes this parcel, opened, as the argument `name`.

    What is checked of a parcel follows from its kind, so the kind is the operation's to say, and not the sender's.
    """
    if parcel.kind != declared.kind_of(name):
        raise ParcelRejected(
            f"'{declared.address}' takes {declared.kind_of(name)} as '{name}', and {parcel.kind} came in their place"
        )
    if parcel.kind == "weights":
        taken = signature_of(work).parameters.get(name)
        _check_names(site, parcel, declared, optional=taken is not None and taken.default is None)


def _check_names(site: Site, weights: Parcel, declared: Operation, *, optional: bool) -> None:
    """ParcelRejected unless weights name all that the method shares of a network: a name that is left out would keep
    the value that it has, which may be of the site's own model."""
    came = weights.tensors.keys()
    if optional and not came:
        return
    missing: set[str] = set()
    for trainer in (site.trainer, *site.trainers):
        whole = set(trainer.model.state_dict())
        shared = whole - trainer.local_names or whole
        if declared.front:
            shared = set(trainer.split(trainer.model)[0].state_dict())
        if came in (whole, shared):
            return
        missing = missing or (shared - came)
    left_out = ", ".join(sorted(missing)[:3]) or "nothing"
    raise ParcelRejected(f"weights: the names are not those that the method shares; left out: {left_out}")
