"""Attacks on latents, activations and codes of latents: by a search with the encoder that the site was sent, and with a
decoder that the attacker trains on images of its own."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.decoders import LearnedDecoder, SurrogateDecoder
from polyclinic.attacks.latent_inversion import LatentInversion, read_latents
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, Tools, not_granted
from polyclinic.audits.recovery import Recovery, pick_out, score_in_order
from polyclinic.audits.truth import FEWEST_OWN, AttackerImages, Truth, attacker_images, truth_of_held_out, with_others
from polyclinic.audits.verdicts import count_of
from polyclinic.data.parts import SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel
from polyclinic.generators.base import Codes
from polyclinic.methods.shared.replay_space import public_limits
from polyclinic.models import split
from polyclinic.randomness import torch_rng
from polyclinic.training.loop import Trainer

UNKNOWN = "the encoder that the site computed with is not known"
#: why a generator of latents is not attacked by itself
NO_IMAGES = "the generator makes latents and no images; what comes back from its codes is tested"
NOISE = 1.0  #: of the weakest planted latents, in deviations of the latents
POOL = 500  #: images that the right one is picked out of, at most
CHANCE = 0.001


def encoder_is_known(seen: Seen) -> bool:
    return seen.tools.assembly.study.cut is not None and bool(seen.received("weights"))


def front_of(seen: Seen) -> tuple[nn.Module, bool]:
    """The network up to the study's cut, and whether its batch norm used the statistics of the batch that was sent."""
    cut = seen.tools.assembly.study.cut
    assert cut is not None, "latents are those of a cut"
    front, _ = split(seen.network, cut)
    return front, seen.kind == "activations" and any(isinstance(layer, _BatchNorm) for layer in front.modules())


class LatentInversionAttack(Attack):
    """Searches for images with the latents or activations that were sent, with the encoder that the site was sent."""

    kinds: ClassVar[tuple[str, ...]] = ("activations", "latents")
    questions: ClassVar[tuple[str, ...]] = ("images",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        """Latents keep their order, so each has its own true image."""
        if not encoder_is_known(seen):
            return [NotTried(LatentInversion().name, UNKNOWN), *_blind(seen, truth)]
        return invert(seen, truth, read_latents(seen.parcel))


def invert(seen: Seen, truth: Truth, latents: Tensor) -> Results:
    """Search for images with latents [N, ...] that the receiver has, in the order of the site's images."""
    tools, (front, mixed) = seen.tools, front_of(seen)
    settings = LatentInversion(iterations=tools.effort.latent_steps, batch_norm="train" if mixed else "eval")
    if refused := not_granted(settings.name, settings.needs, seen):
        return [refused, *_blind(seen, truth)]
    some = latents if mixed else latents[: 4 * tools.effort.images]  # a whole batch shares its statistics
    try:
        found = settings.run(some, front, tools.image_shape, together=len(some), seed=tools.seed, device=tools.device)
    except BadInput as error:
        return [NotTried(settings.name, str(error))]
    result = score_in_order(seen, truth, found.images, settings.name)
    return [Finding(settings.name, found.threat_model, result.verdict(tools.level), _assumed(seen), result.draw)]


def _assumed(seen: Seen) -> list[str]:
    cut = seen.tools.assembly.study.cut
    if seen.kind == "activations" and seen.step > 0:
        return [f"the encoder (up to {cut}) is the one of the beginning of the turn, {count_of(seen.step, 'step')} ago"]
    return [f"the encoder (up to {cut}) is the one that the site computed with"]


def _blind(seen: Seen, truth: Truth) -> Results:
    """The attack of somebody who does not know the encoder, where the threat model grants images of the same kind.

    The site's held-out images stand for them.
    """
    settings, tools = SurrogateDecoder(steps=seen.tools.effort.latent_steps), seen.tools
    if seen.kind != "latents" or settings.needs - tools.threat.granted:
        return []
    own = truth.held_out(tools.effort.candidates)[0].float() / 255
    if len(own) < 2:
        return [NotTried(settings.name, "the site has no held-out images that could be the attacker's")]
    try:
        found = settings.run(read_latents(seen.parcel), own, seed=tools.seed, device=tools.device)
    except BadInput as error:
        return [NotTried(settings.name, str(error))]
    result = score_in_order(seen, truth, found.images[: 4 * tools.effort.images], settings.name)
    assumed = ["the encoder is not known; held-out images of the site stand for the attacker's own"]
    return [Finding(settings.name, found.threat_model, result.verdict(tools.level), assumed, result.draw)]


class LearnedDecoderAttack(Attack):
    """Decodes latents or activations with a decoder that was trained on other people's images and the known encoder."""

    kinds: ClassVar[tuple[str, ...]] = ("activations", "latents")
    questions: ClassVar[tuple[str, ...]] = ("images",)
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if not encoder_is_known(seen):
            return [NotTried(LearnedDecoder().name, UNKNOWN)]
        return [decode_latents(seen, truth, read_latents(seen.parcel))]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """What the same operation makes of held-out images, with noise as large as its own deviation."""
        if not encoder_is_known(seen):
            return []
        other = truth_of_held_out(truth, len(read_latents(seen.parcel)))
        if other is None:
            return []
        others, mixed = other.data.train, seen.kind == "activations"
        places = list(zip(truth.batches[0].tolist(), range(len(others)), strict=False))

        def change(data: SiteData) -> SiteData:  # a batch keeps its size, as it shares its statistics
            return replace(data, train=with_others(data.train, places, others) if mixed else others)

        made = [one for one in seen.again(change) if one.kind == seen.kind]
        if not made:
            return []
        clean = read_latents(made[0])[: len(others)]
        noise = torch.randn(clean.shape, generator=torch_rng(seen.tools.seed, "audit", "planted latents"))
        noisy = clean + NOISE * clean.std(0, keepdim=True) * noise
        parcel = Parcel(seen.kind, {seen.kind: noisy}, dict(seen.parcel.metadata))
        words = f"latents of {len(clean)} held-out images by the same operation, with noise as large as their deviation"
        return [seen.planted("noisy latents", words, other, parcel)]


def decode_latents(seen: Seen, truth: Truth, latents: Tensor) -> Finding | NotTried:
    """Train a decoder and score what it makes of latents [N, ...], which keep the order of the site's images."""
    tools, (front, mixed) = seen.tools, front_of(seen)
    side = latents.shape[-1] if latents.dim() == 4 else 1
    # fewer channels where the maps are larger, so that a step costs as much at every cut
    width = max(16, min(128, 1024 // side // 8 * 8))
    settings = LearnedDecoder(steps=tools.effort.latent_steps, width=width)
    if refused := not_granted(settings.name, settings.needs, seen):
        return refused
    own = attacker_images(tools, seen.site, truth)
    if len(own.images) < FEWEST_OWN:
        return NotTried(settings.name, f"the attacker has {len(own.images)} images of its own; {FEWEST_OWN} are needed")
    together = len(latents) if mixed else 0
    some = latents[: max(tools.effort.candidates, together)]
    try:
        found = settings.decode(some, front, own.images, together=together, seed=tools.seed, device=tools.device)
    except BadInput as error:
        return NotTried(settings.name, str(error))
    result = score_in_order(seen, truth, found.images, settings.name, held_out=own.held_out)
    verdict, words = verdict_of(result, own, tools.level), f"the attacker's own: {own.words}"
    return Finding(settings.name, found.threat_model, verdict, [words], result.draw)


def verdict_of(result: Recovery, own: AttackerImages, level: float = CHANCE) -> Verdict:
    """What is recovered, and how often the right image is picked out of many: more than chance does, it is a leak."""
    picked = pick_out(result.found, result.truth, own.held_out[: max(0, POOL - len(result.truth))])
    verdict = result.verdict(level)
    figures = {"picked": picked.share, "picked_among": picked.among, "picked_by_chance": picked.chance}
    leak = verdict.leak or picked.chance <= level
    return Verdict(leak, f"{verdict.because}; {picked}", {**verdict.evidence, **figures})


# --- codes of latents (`replay.space = "latents"`): decoded to latents, which are then inverted like any -----


def invert_codes(seen: Seen, truth: Truth, model: CodedModel, codes: Codes) -> Results:
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
