"""Attacks on latents and activations: latent inversion with the encoder that the site was sent, or without it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.decoders import SurrogateDecoder
from polyclinic.attacks.latent_inversion import LatentInversion, read_latents
from polyclinic.audits.attack import Attack
from polyclinic.audits.recovery import Recovery, recovery
from polyclinic.audits.verdicts import count_of
from polyclinic.audits.views import Finding, NotTried, Seen, Truth, not_granted
from polyclinic.errors import BadInput
from polyclinic.models import split


class LatentInversionAttack(Attack):
    """Searches for images with the latents or activations that were sent, with the encoder that the site was sent."""

    kinds: ClassVar[tuple[str, ...]] = ("activations", "latents")

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        return invert_latents(seen, truth)


def invert_latents(seen: Seen, truth: Truth) -> list[Finding | NotTried]:
    """Search for images with the latents that were sent; they keep their order, so each has its own true image."""
    if seen.tools.assembly.study.cut is None or not seen.received("weights"):
        why = "the encoder that the site computed with is not known"
        return [NotTried(LatentInversion().name, why), *_blind(seen, truth)]
    return invert(seen, truth, read_latents(seen.parcel))


def invert(seen: Seen, truth: Truth, latents: Tensor) -> list[Finding | NotTried]:
    """The same for latents [N, ...] that the receiver has, in the order of the site's images."""
    settings = LatentInversion(iterations=seen.tools.effort.latent_steps)
    cut = seen.tools.assembly.study.cut
    assert cut is not None, "latents are those of a cut"
    front, _ = split(seen.network, cut)
    if seen.kind == "activations" and _mixes(front):
        settings = settings.model_copy(update={"batch_norm": "train"})
    if refused := not_granted(settings, seen):
        return [refused, *_blind(seen, truth)]
    rows = rows_to_attack(seen, latents, settings.batch_norm == "train")
    shape, tools = seen.tools.image_shape, seen.tools
    try:
        found = settings.run(latents[rows], front, shape, together=len(rows), seed=tools.seed, device=tools.device)
    except BadInput as error:
        return [NotTried(settings.name, str(error))]
    result = _score(seen, truth, found.images, settings.name)
    return [
        Finding(settings.name, found.threat_model, result.verdict(seen.tools.level), _assumed(seen, cut), result.draw)
    ]


def _blind(seen: Seen, truth: Truth) -> list[Finding | NotTried]:
    """The attack of somebody who does not know the encoder, where the threat model grants images of the same kind.

    The site's held-out images stand for them.
    """
    settings, tools = SurrogateDecoder(steps=seen.tools.effort.latent_steps), seen.tools
    if seen.kind != "latents" or settings.needs - tools.threat.granted:
        return []
    own = truth.held_out(tools.effort.candidates)[0].float() / 255
    if len(own) < 2:
        return [NotTried(settings.name, "the site has no held-out images that could be the attacker's")]
    latents = read_latents(seen.parcel)
    try:
        found = settings.run(latents, own, seed=tools.seed, device=tools.device)
    except BadInput as error:
        return [NotTried(settings.name, str(error))]
    rows = rows_to_attack(seen, latents, together=False)
    result = _score(seen, truth, found.images[rows], settings.name)
    assumed = ["the encoder is not known; held-out images of the site stand for the attacker's own"]
    return [Finding(settings.name, found.threat_model, result.verdict(tools.level), assumed, result.draw)]


def _score(seen: Seen, truth: Truth, images: Tensor, attack: str) -> Recovery:
    """Latents keep the order of the site's images."""
    tools = seen.tools
    own = truth.batches[0] if seen.kind == "activations" else truth.used
    count = min(len(images), len(own))
    return recovery(
        images[:count],
        truth.images(own[:count]),
        truth.held_out(tools.effort.candidates)[0].float() / 255,
        in_order=True,
        augmentation=tools.assembly.study.optimizer.augment if seen.kind == "activations" else (),
        distance=tools.distance,
        device=tools.device,
        where=f"{seen.where}, {attack}",
    )


def rows_to_attack(seen: Seen, latents: Tensor, together: bool) -> Tensor:
    """A whole batch where its images share statistics; else the first few."""
    count = len(latents) if together else min(len(latents), 4 * seen.tools.effort.images)
    return torch.arange(count)


def _mixes(front: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in front.modules())


def _assumed(seen: Seen, cut: str) -> list[str]:
    if seen.kind == "activations" and seen.step > 0:
        return [f"the encoder (up to {cut}) is the one of the beginning of the turn, {count_of(seen.step, 'step')} ago"]
    return [f"the encoder (up to {cut}) is the one that the site computed with"]
