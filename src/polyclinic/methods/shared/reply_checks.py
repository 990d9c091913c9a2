"""Checks that several methods make of sites' replies (`Method.check_reply`); each raises ParcelRejected."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.federation.call import Call, Expected, Reply
from polyclinic.federation.federation import Federation
from polyclinic.federation.layers.replies import LARGEST_GROWTH, SMALL
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.aggregation import check_names
from polyclinic.randomness import torch_rng

#: times its own size that a step may move a tensor: honest steps are far below, whatever the learning rate
LARGEST_STEP = 100.0


def check_front_weights(federation: Federation, reply: Reply) -> None:
    """The weights are those of the network up to the cut, and training can have made them of the first ones."""
    trainer = federation.trainer
    check_names(reply, set(trainer.split(trainer.model)[0].state_dict()))
    check_growth(reply.parcel("weights"), federation.initial_weights())


def check_growth(came: Parcel, before: Mapping[str, Tensor]) -> None:
    """Training can have made these tensors of those before."""
    for name, tensor in came.tensors.items():
        if name in before and tensor.is_floating_point():
            limit = LARGEST_GROWTH * (_norm(before[name]) + SMALL * math.sqrt(tensor.numel()))
            if not _norm(tensor) <= limit:
                raise ParcelRejected(f"{came.kind}: the norm of tensor '{name}' is beyond all that training does")


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


# --- latents ------------------------------------------------------------------------------------------

#: latents of images may be so many times as large as the largest of the trial images
LARGEST_FACTOR = 20.0
#: latents up to this size are always believed: an encoder that gives nothing but zeros has no range
SMALL_LATENT = 1.0


def check_latents(federation: Federation, encoder: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """ParcelRejected for latents, as `wire.shrink` packs them, that the encoder gives for no image: a site that
    multiplies its latents by a million would rule the training on all. The coordinator tries images of its own."""
    most = LARGEST_FACTOR * _largest_of_trials(federation, encoder) + SMALL_LATENT
    for name in (name for name in sent if name.endswith("latents")):
        found = _largest(sent, name.removesuffix("latents"))
        if not found <= most:
            raise ParcelRejected(
                f"latents: '{name}' holds numbers up to {found:.3g}, and the encoder gives no more than {most:.3g}"
            )


def _largest(sent: Mapping[str, Tensor], prefix: str) -> float:
    """The largest absolute value, without restoring the latents: they may fill the memory."""
    latents = sent[f"{prefix}latents"]
    if latents.dtype != torch.int8:
        low, high = latents.aminmax()
        return max(abs(float(low)), abs(float(high)))
    low, step = sent[f"{prefix}low"], sent[f"{prefix}step"]
    return float(torch.maximum(low.abs(), (low + 255 * step).abs()).max())


@torch.no_grad()
def _largest_of_trials(federation: Federation, encoder: Mapping[str, Tensor]) -> float:
    """The largest absolute latent of black, grey, white, striped and random images; worked out once an encoder."""
    trainer = federation.trainer
    known = trainer.kept.get("latent range")
    if known is None or known[0] is not encoder:
        front = trainer.split(trainer.load(encoder))[0]
        was_training = front.training
        images = _trial_images(federation.image_shape).to(trainer.device)
        found = float(trainer.forward(images, front.eval()).float().abs().max())
        front.train(was_training)
        known = trainer.kept["latent range"] = (encoder, found)
    return known[1]


def _trial_images(shape: tuple[int, ...]) -> Tensor:
    """Images in [0, 1], float32 [8, C, H, W]."""
    rng = torch_rng("coordinator", "trial images")
    plain = [torch.full(shape, value) for value in (0.0, 0.5, 1.0)]
    rows = (torch.arange(shape[-2]) // 2 % 2).float()[:, None].expand(shape)
    columns = (torch.arange(shape[-1]) // 4 % 2).float().expand(shape)
    return torch.stack([*plain, rows, columns, *torch.rand(3, *shape, generator=rng)])
