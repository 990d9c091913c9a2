"""Attacks on latents, activations and codes of latents: by a search with the encoder that the site was sent, and with a
decoder that the attacker trains on images of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.decoders import LearnedDecoder, SurrogateDecoder, encode_images
from polyclinic.attacks.latent_inversion import LatentInversion, read_latents
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Seen, not_granted
from polyclinic.audits.recovery import Recovery, pick_out, recovery
from polyclinic.audits.truth import FEWEST_OWN, AttackerImages, Truth, attacker_images, truth_of_held_out
from polyclinic.audits.verdicts import count_of
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.replay_space import public_limits
from polyclinic.models import split
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.audits.attack import Tools
    from polyclinic.generators import CodedModel
    from polyclinic.generators.base import Codes
    from polyclinic.training.loop import Trainer


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


NOISE = 1.0  #: of the weakest planted latents, in deviations of the latents
POOL = 500  #: images that the right one is picked out of, at most
CHANCE = 0.001


class LearnedDecoderAttack(Attack):
    """Decodes latents or activations with a decoder that was trained on other people's images and the known encoder."""

    kinds: ClassVar[tuple[str, ...]] = ("activations", "latents")
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        name = LearnedDecoder().name
        if seen.tools.assembly.study.cut is None or not seen.received("weights"):
            return [NotTried(name, "the encoder that the site computed with is not known")]
        return [decode_latents(seen, truth, read_latents(seen.parcel))]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """Latents of held-out images by the same encoder, with noise as large as their own deviation."""
        cut = seen.tools.assembly.study.cut
        if cut is None or not seen.received("weights"):
            return []
        count = len(read_latents(seen.parcel))
        other = truth_of_held_out(truth, count)
        if other is None:
            return []
        front, together = _front(seen, cut), _together(seen, cut, count)
        images = other.images(torch.arange(len(other.data.train)))
        clean = encode_images(front, images, together=min(together, len(images)), device=seen.tools.device)
        noise = torch.randn(clean.shape, generator=torch_rng(seen.tools.seed, "audit", "planted latents"))
        noisy = clean + NOISE * clean.std(0, keepdim=True) * noise
        parcel = Parcel(seen.kind, {seen.kind: noisy}, dict(seen.parcel.metadata))
        words = f"latents of {len(clean)} held-out images, with noise as large as their own deviation"
        return [Planted("noisy latents", words, replace(seen, parcel=parcel, together=(parcel,)), other)]


def decode_latents(seen: Seen, truth: Truth, latents: Tensor) -> Finding | NotTried:
    """Train a decoder and score what it makes of latents [N, ...], which keep the order of the site's images."""
    tools, cut = seen.tools, seen.tools.assembly.study.cut
    assert cut is not None, "latents are those of a cut"
    settings = LearnedDecoder(steps=tools.effort.latent_steps, width=_width(latents))
    if refused := not_granted(settings, seen):
        return refused
    own = attacker_images(tools, seen.site, truth)
    if len(own.images) < FEWEST_OWN:
        return NotTried(settings.name, f"the attacker has {len(own.images)} images of its own; {FEWEST_OWN} are needed")
    together = _together(seen, cut, len(latents))
    rows = torch.arange(min(len(latents), max(tools.effort.candidates, together)))
    try:
        found = settings.decode(
            latents[rows], _front(seen, cut), own.images, together=together, seed=tools.seed, device=tools.device
        )
    except BadInput as error:
        return NotTried(settings.name, str(error))
    result = score_in_order(seen, truth, found.images, own)
    return Finding(
        settings.name, found.threat_model, verdict_of(result, own, tools.level), [f"the attacker's own: {own.words}"],
        result.draw,
    )  # fmt: skip


def score_in_order(seen: Seen, truth: Truth, images: Tensor, own: AttackerImages) -> Recovery:
    used = truth.batches[0] if seen.kind == "activations" else truth.used
    count = min(len(images), len(used))
    tools = seen.tools
    return recovery(
        images[:count],
        truth.images(used[:count]),
        own.held_out,
        in_order=True,
        augmentation=tools.assembly.study.optimizer.augment if seen.kind == "activations" else (),
        distance=tools.distance,
        device=tools.device,
        where=f"{seen.where}, {LearnedDecoder().name}",
    )


def verdict_of(result: Recovery, own: AttackerImages, level: float = CHANCE) -> Verdict:
    """What is recovered, and how often the right image is picked out of many: more than chance does, it is a leak."""
    picked = pick_out(result.found, result.truth, own.held_out[: max(0, POOL - len(result.truth))])
    verdict = result.verdict(level)
    figures = {"picked": picked.share, "picked_among": picked.among, "picked_by_chance": picked.chance}
    leak = verdict.leak or picked.chance <= level
    return Verdict(leak, f"{verdict.because}; {picked}", {**verdict.evidence, **figures})


def _width(latents: Tensor) -> int:
    """Channels of the decoder: fewer where the maps are larger, so that a step costs as much at every cut."""
    side = latents.shape[-1] if latents.dim() == 4 else 1
    return max(16, min(128, 1024 // side // 8 * 8))


def _front(seen: Seen, cut: str) -> nn.Module:
    return split(seen.network, cut)[0]


def _together(seen: Seen, cut: str, count: int) -> int:
    """The mini-batch whose statistics batch norm used; 0 where it used running ones."""
    mixes = any(isinstance(layer, _BatchNorm) for layer in _front(seen, cut).modules())
    return count if seen.kind == "activations" and mixes else 0


#: why a generator of latents is not attacked by itself
NO_IMAGES = "the generator makes latents and no images; what comes back from its codes is tested"


def invert_codes(seen: Seen, truth: Truth, model: CodedModel, codes: Codes) -> list[Finding | NotTried]:
    """Search for images whose latents are the decoded ones. The frozen layers are public: the attacker has them."""
    tools = seen.tools
    limits = public_limits(public_trainer(tools), tools.image_shape)
    count = 4 * tools.effort.images
    few = {level: values[:count] for level, values in codes.items()}
    latents = limits.to_latents(model.decode(few).float() / 255)
    return [*invert(seen, truth, latents), decode_latents(seen, truth, latents)]


def shape_of_latents(tools: Tools) -> tuple[int, ...]:
    """The shape [C, H, W] of what the study's generator learns."""
    return tuple(public_trainer(tools).latents(np.zeros((1, *tools.image_shape), np.uint8)).shape[1:])


def public_trainer(tools: Tools) -> Trainer:
    """A trainer whose network begins with the public weights, as the study's does."""
    trainer = tools.assembly.trainer()
    trainer.load(tools.assembly.initial_weights())
    return trainer
