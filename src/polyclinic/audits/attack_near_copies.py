"""Attack on generators and synthetic images: single near copies of training images, with the power of the search."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from polyclinic.attacks.copies import CopySearch
from polyclinic.attacks.near_copies import (
    FEWEST,
    FOUND,
    PLANTED,
    WEAKEST_WORDS,
    CopyIndex,
    NearCopies,
    search_power,
    weakest_copies,
)
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_synthetic import load_generator
from polyclinic.audits.plots import Pairs, histograms
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth, not_granted
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators.base import even_labels
from polyclinic.metrics.images import ORIENTATIONS
from polyclinic.randomness import torch_rng

NAME, QUESTION = "near-copies", "copies"
SHOWN = 8  #: pairs of a picture


class NearCopiesAttack(Attack):
    """Looks for single near copies of training images: shifted, turned, brighter, blurred, noisy, or a patch of one."""

    kinds: ClassVar[tuple[str, ...]] = ("generator", "synthetic-images")

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        if refused := not_granted(CopySearch(), seen, QUESTION):
            return [replace(refused, attack=NAME)]
        made = made_images(seen)
        return [made] if isinstance(made, NotTried) else [search_near_copies(seen, truth, made)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The same images, one of which is a changed training image."""
        made = made_images(seen)
        if isinstance(made, NotTried) or not len(truth.data.train):
            return []
        spoiled = made.clone()
        spoiled[0] = weakest_copies(truth.members(1)[0].float() / 255, seen.tools.seed)[0]
        parcel = Parcel("synthetic-images", {"images": spoiled}, {"samples": len(spoiled)})
        changed = replace(seen, parcel=parcel, together=(parcel,))
        return [Planted("near copy", f"{WEAKEST_WORDS}, among {len(made)} images", changed, truth)]


def made_images(seen: Seen) -> Tensor | NotTried:
    """Images uint8 that were sent, or that the receiver samples from the generator that was sent."""
    tools = seen.tools
    rng = torch_rng(tools.seed, "audit", "near copies", seen.site, seen.round)
    if seen.kind == "synthetic-images":
        sent = [t for t in seen.parcel.tensors.values() if t.dim() == 4 and tuple(t.shape[1:]) == tools.image_shape]
        if not sent:
            return NotTried(NAME, "the parcel holds no images of the study's size", QUESTION)
        images = torch.cat(sent)
        return images if images.dtype == torch.uint8 else to_uint8(images)
    if tools.assembly.study.in_latents:
        return NotTried(NAME, "the generator makes latents and no images", QUESTION, excluded=True)
    model = load_generator(seen, seen.parcel.tensors)
    if isinstance(model, NotTried):
        return model
    try:
        return model.sample(even_labels(tools.effort.candidates, model.target), rng)
    except BadInput:
        return NotTried(NAME, "the generator was sent without what draws samples", QUESTION)


def search_near_copies(seen: Seen, truth: Truth, made: Tensor) -> Finding | NotTried:
    """All made images and all training images count; what is compared with may be a part of the held-out images."""
    tools = seen.tools
    training = truth.members(len(truth.data.train))[0]
    held_out = truth.held_out(max(tools.effort.candidates, FEWEST))[0]
    if min(len(training), len(held_out)) < FEWEST:
        why = f"{len(training)} training and {len(held_out)} held-out images are fewer than {FEWEST}"
        return NotTried(NAME, why, QUESTION)
    index = CopyIndex(training, held_out, device=tools.device)
    found = index.search(made, level=tools.level)
    planted = min(PLANTED, max(2, tools.effort.candidates // 10))
    return finding_of(index, found, made, tools.seed, str(CopySearch()), planted, f"{seen.where}, {NAME}\n")


def finding_of(
    index: CopyIndex, found: NearCopies, made: Tensor, seed: int, threat: str, planted: int = PLANTED, where: str = ""
) -> Finding:
    """The finding; where no copy was found, with the level at which the search stops finding planted ones."""
    verdict, doubt = found.verdict(), ""
    if not verdict.leak:
        power = search_power(index, len(made), seed=seed, level=found.level, planted=planted)
        figures = {f"found_{name}": -1.0 if top is None else top for name, top in power.reach.items()}
        evidence = {**verdict.evidence, **figures, "found_weakest": power.weakest}
        verdict = replace(verdict, because=f"{verdict.because}; planted here, {power}", evidence=evidence)
        if power.weakest < FOUND:
            doubt = f"only {power.weakest:.0%} of planted copies are found ({WEAKEST_WORDS}); hold out more images"
    beyond, shown = int(found.is_copy.sum()), min(SHOWN, len(made))
    title = f"{where}Near copies: {beyond} of {len(made)} made images are beyond the limit. Below: the nearest {shown}"
    draw = histograms(
        "gap between training and held-out images, as a share of the limit",
        {"made images": found.strength},
        limit=1.0,
        pairs=strongest_pairs(made, index.training, found),
        title=title,
    )
    return Finding(NAME, threat, verdict, draw=draw, question=QUESTION, doubt=doubt)


def strongest_pairs(made: Tensor, training: Tensor, found: NearCopies, shown: int = SHOWN) -> Pairs:
    """The made images with the largest gaps, as they were made, each above its training image."""
    which = found.strength.argsort(descending=True)[:shown]
    turns = [int(turn) for turn in found.orientation[which]]
    how = [ORIENTATIONS[turn].replace(" by", "").replace(" degrees", "°") if turn else "" for turn in turns]
    captions = [f"{strength:.2f}\n{words}" for strength, words in zip(found.strength[which].tolist(), how, strict=True)]
    return Pairs({"made": made[which], "training": to_uint8(training[found.index[which]])}, captions)
