"""How large latents can be: the coordinator has the encoder that made them, and tries it on images of its own.

A site that multiplies its latents by a million would rule the training on all sites' latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.federation.ledger.parcel import ParcelRejected
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.federation import Federation

#: latents of images may be so many times as large as the largest of the trial images
LARGEST_FACTOR = 20.0
#: latents up to this size are always believed: an encoder that gives nothing but zeros has no range
SMALL = 1.0


def check(federation: Federation, encoder: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """ParcelRejected for latents, as `code_packing.shrink` packs them, that the encoder gives for no image."""
    most = LARGEST_FACTOR * _largest_of_trials(federation, encoder) + SMALL
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
