"""Attacks on latents, activations and codes of latents with a decoder that the attacker trains on images of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.decoders import LearnedDecoder, encode_images, pick_out
from polyclinic.attacks.latent_inversion import read_latents
from polyclinic.audits.attack import Attack
from polyclinic.audits.attacker_images import FEWEST, AttackerImages, attacker_images
from polyclinic.audits.planted_truth import truth_of_held_out
from polyclinic.audits.recovery import Recovery, recovery
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth, not_granted
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.models import split
from polyclinic.randomness import torch_rng

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
    if len(own.images) < FEWEST:
        return NotTried(settings.name, f"the attacker has {len(own.images)} images of its own; {FEWEST} are needed")
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
    by_chance = _chance(picked.right, picked.images, picked.among)
    figures = {"picked": picked.share, "picked_among": picked.among, "picked_by_chance": by_chance}
    leak = verdict.leak or by_chance <= level
    return Verdict(leak, f"{verdict.because}; {picked}", {**verdict.evidence, **figures})


def _chance(right: int, images: int, among: int) -> float:
    from scipy.stats import binom

    return float(binom.sf(right - 1, images, 1 / max(among, 1)))


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
