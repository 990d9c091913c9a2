"""Checks that several methods make of sites' replies (`Method.check_reply`); each raises ParcelRejected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.federation.layers.replies import LARGEST_GROWTH, SMALL
from polyclinic.federation.ledger.parcel import Expected, ParcelRejected

if TYPE_CHECKING:
    from polyclinic.federation.call import Call, Reply
    from polyclinic.federation.federation import Federation

#: times its own size that a step may move a tensor: honest steps are far below, whatever the learning rate
LARGEST_STEP = 100.0


def check_shared_weights(federation: Federation, reply: Reply) -> None:
    """The weights name all that the method shares of the network: a mean of different names is not defined."""
    trainer = federation.trainer
    whole = set(trainer.state())
    _check_names(reply, "weights", whole - trainer.local_names or whole)


def check_front_weights(federation: Federation, reply: Reply) -> None:
    """The weights are those of the network up to the cut, and training can have made them of the first ones."""
    trainer = federation.trainer
    _check_names(reply, "weights", set(trainer.split(trainer.model)[0].state_dict()))
    first = federation.initial_weights()
    for name, tensor in reply.parcel("weights").tensors.items():
        if name in first and tensor.is_floating_point():
            limit = LARGEST_GROWTH * (_norm(first[name]) + SMALL * math.sqrt(tensor.numel()))
            if not _norm(tensor) <= limit:
                raise ParcelRejected(f"weights: the norm of tensor '{name}' is beyond all that training does")


def check_samples(reply: Reply) -> None:
    """The reply says of how many images it is: the mean over the sites is weighted by that."""
    if "samples" not in reply.metadata:
        raise ParcelRejected("the reply does not say of how many images it is ('samples')")


def check_like(reply: Reply, kind: str, tensors: Mapping[str, Tensor], *, partial: bool = False) -> None:
    """The parcel of a kind has these names, dtypes and shapes."""
    Expected.like(kind, tensors, partial=partial).check(reply.parcel(kind))


def check_step(call: Call, reply: Reply, rate: float) -> None:
    """A step of this rate along the gradients does not move a tensor by many times its size: that was not computed."""
    weights = call.parcels["weights"].tensors
    for name, gradient in reply.parcel("gradients").tensors.items():
        moved, size = rate * _norm(gradient), _norm(weights[name]) + SMALL * math.sqrt(gradient.numel())
        if not moved <= LARGEST_STEP * size:
            raise ParcelRejected(
                f"gradients: a step would move tensor '{name}' by {moved:.3g}, more than {LARGEST_STEP:g} times its "
                f"size ({size:.3g})"
            )


def check_rows(federation: Federation, reply: Reply, kind: str, *names: str) -> None:
    """Activations or latents, [N, ...] of the network's shape at the cut, come with N targets."""
    tensors, targets = reply.parcel(kind).tensors, _targets(reply)
    shape = _shape_at_the_cut(federation)
    for name in names:
        if name not in tensors or tuple(tensors[name].shape) != (len(targets), *shape):
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise ParcelRejected(f"{kind}: '{name}' is {found}, expected {(len(targets), *shape)}")


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _check_names(reply: Reply, kind: str, wanted: set[str]) -> None:
    came = reply.parcel(kind).tensors.keys()
    if came != wanted:
        differ = sorted(came ^ wanted)
        raise ParcelRejected(f"{kind}: the names are not those that the method shares; they differ in {differ[:3]}")


def _targets(reply: Reply) -> Tensor:
    found = [parcel.tensors.get("targets") for parcel in reply.parcels if parcel.kind in ("labels", "masks")]
    if len(found) != 1 or found[0] is None or found[0].dim() < 1 or len(found[0]) == 0:
        raise ParcelRejected("labels: one tensor 'targets' must come, with an entry for each image")
    return found[0]


@torch.no_grad()
def _shape_at_the_cut(federation: Federation) -> tuple[int, ...]:
    """The shape of one image's activations at the cut; worked out once."""
    trainer = federation.trainer
    if "shape at the cut" not in trainer.kept:
        front = trainer.split(trainer.model)[0]
        was_training = front.training
        image = torch.zeros(1, *federation.image_shape, device=trainer.device)
        trainer.kept["shape at the cut"] = tuple(front.eval()(image).shape[1:])
        front.train(was_training)
    return trainer.kept["shape at the cut"]
