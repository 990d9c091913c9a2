"""Attacks on generators, codes and synthetic images: decoding, copies and near copies, membership and projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.copies import FEWEST, Copies, CopySearch
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.attacks.near_copies import (
    FOUND,
    PLANTED,
    WEAKEST_WORDS,
    CopyIndex,
    NearCopies,
    search_power,
    weakest_copies,
)
from polyclinic.attacks.projection import Projected, Projection
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Seen, Tools, not_granted
from polyclinic.audits.attack_latents import NO_IMAGES, invert_codes, shape_of_latents
from polyclinic.audits.planting import planted_codes, planted_leaning, planted_within_reach
from polyclinic.audits.plots import Pairs, histograms
from polyclinic.audits.recovery import recovery
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel, Codes, GeneratorModel
from polyclinic.generators.base import even_labels
from polyclinic.generators.latent_space import LatentSpace
from polyclinic.generators.replay_stream import from_groups
from polyclinic.metrics.images import ORIENTATIONS
from polyclinic.metrics.perceptual import Distance
from polyclinic.randomness import torch_rng

Results = list[Finding | NotTried]
#: patients of members and of held-out images, where they are known
Cases = tuple[np.ndarray, np.ndarray] | None


class GeneratorAttack(Attack):
    """Samples the generator that was sent and looks for copies and members, also by search in its latent space."""

    kinds: ClassVar[tuple[str, ...]] = ("generator",)
    tests: ClassVar[int] = 3

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_generator(seen, truth)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        model = load_generator(seen, seen.parcel.tensors)
        if isinstance(model, NotTried) or seen.tools.assembly.study.in_latents:
            return []
        made = sample(seen, model)
        leaning = [] if isinstance(made, NotTried) else planted_leaning(seen, asked_of_held_out(seen, truth), made)
        search = search_in_reach(seen, model)
        return leaning if isinstance(search, NotTried) else [*leaning, *planted_within_reach(seen, truth, search.run)]


class DecodingAttack(Attack):
    """Decodes codes of real images with the decoder that was sent, and looks for copies and members."""

    kinds: ClassVar[tuple[str, ...]] = ("codes",)
    tests: ClassVar[int] = 3

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_codes(seen, truth)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        model = model_of_codes(seen)
        return [] if isinstance(model, NotTried) else planted_codes(seen, truth, model)


class CopiesAttack(Attack):
    """Looks for copies of training images among synthetic ones, and tells members by the nearest synthetic image."""

    kinds: ClassVar[tuple[str, ...]] = ("synthetic-images",)
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_synthetic_images(seen, truth)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        sent = sent_images(seen)
        return [] if sent is None else planted_leaning(seen, asked_of_held_out(seen, truth), sent)


def attack_synthetic_images(seen: Seen, truth: Truth) -> Results:
    """Attack synthetic images as they were sent."""
    images = sent_images(seen)
    if images is None:
        return [NotTried("copies", "the parcel holds no images of the study's size", "copies")]
    return attack_images(seen, truth, images)


def sent_images(seen: Seen) -> Tensor | None:
    """uint8 images of the study's size in a parcel."""
    shape = seen.tools.image_shape
    sent = [t for t in seen.parcel.tensors.values() if t.dim() == 4 and tuple(t.shape[1:]) == shape]
    if not sent:
        return None
    images = torch.cat(sent)
    return images if images.dtype == torch.uint8 else to_uint8(images)


def attack_generator(seen: Seen, truth: Truth) -> Results:
    """Attack what the receiver can sample from a generator, and search its latent space for training images."""
    if seen.kind == "synthetic-images":  # what was planted in place of samples
        return attack_synthetic_images(seen, truth)
    model = load_generator(seen, seen.parcel.tensors)
    if isinstance(model, NotTried):
        return [model]
    if seen.tools.assembly.study.in_latents:
        return [NotTried("copies", NO_IMAGES, "copies")]
    return [*attack_samples(seen, truth, model), attack_by_projection(seen, truth, model)]


def attack_codes(seen: Seen, truth: Truth) -> Results:
    """Decode codes of real images with the decoder that was sent, and attack the decoded images."""
    decoded = decode(seen)
    if isinstance(decoded, NotTried):
        return [decoded]
    if isinstance(decoded, Coded):
        return invert_codes(seen, truth, decoded.model, decoded.codes)
    return [score_decoded(decoded, seen, truth), *attack_images(seen, truth, decoded)]


@dataclass(frozen=True)
class Coded:
    """Codes of latents, which no decoder makes images of."""

    model: CodedModel
    codes: Codes


def decode(seen: Seen) -> Tensor | Coded | NotTried:
    """The images uint8 that the decoder that was sent makes of codes; codes of latents are returned as they are."""
    model, labels = model_of_codes(seen), seen.companion("labels")
    if isinstance(model, NotTried) or labels is None:
        return model if isinstance(model, NotTried) else NotTried("decoding", "codes came without their labels")
    if Capability.GENERATOR not in seen.tools.threat.granted:
        return NotTried("decoding", "the threat model does not grant generator", excluded=True)
    share = from_groups({"codes": seen.parcel.tensors, "labels": labels.tensors}, model).get(seen.site)
    if share is None:
        return NotTried("decoding", "the codes are of other sites' images")
    return Coded(model, share.codes) if seen.tools.assembly.study.in_latents else model.decode(share.codes)


def model_of_codes(seen: Seen) -> CodedModel | NotTried:
    """The generator that came with the codes, or that the site was sent to make them with."""
    sent = seen.companion("generator")
    model = load_generator(seen, sent.tensors if sent else seen.received("generator"))
    known = isinstance(model, NotTried | CodedModel)
    return model if known else NotTried("decoding", "no decoder of these codes is known")  # type: ignore[return-value]


def asked_of_held_out(seen: Seen, truth: Truth) -> Truth | None:
    """The truth of a plant that is asked about as many images as the budget has."""
    return truth_of_held_out(truth, seen.tools.effort.candidates)


def score_decoded(decoded: Tensor, seen: Seen, truth: Truth) -> Finding:
    """How close decoded images are to the site's own; codes keep the order of the images."""
    tools = seen.tools
    count = min(len(decoded), tools.effort.candidates)
    found, others = decoded[:count].float() / 255, truth.held_out(tools.effort.candidates)[0].float() / 255
    result = recovery(
        found,
        truth.images(torch.arange(count)),
        others,
        in_order=True,
        distance=tools.distance,
        device=tools.device,
        where=f"{seen.where}, decoding",
    )
    has = "decoding: the attacker has the codes that a site sent and the generator with its weights; codes keep the "
    return Finding("decoding", f"{has}order of the images.", result.verdict(tools.level), draw=result.draw)


# --- attacks on synthetic images ----------------------------------------------------------------------


def attack_samples(seen: Seen, truth: Truth, model: GeneratorModel) -> Results:
    """Sample from a generator, and attack the samples."""
    made = sample(seen, model)
    return [made] if isinstance(made, NotTried) else attack_images(seen, truth, made)


def sample(seen: Seen, model: GeneratorModel) -> Tensor | NotTried:
    """As many uint8 images as the budget asks about, of all labels alike."""
    labels = even_labels(seen.tools.effort.candidates, model.target)
    try:
        return model.sample(labels, torch_rng(seen.tools.seed, "audit", "samples", seen.parcel.digest))
    except BadInput:
        return NotTried("copies", "the generator was sent without what draws samples", "copies")


def attack_images(seen: Seen, truth: Truth, made: Tensor) -> Results:
    """Search synthetic images for copies, and infer membership from the nearest one."""
    count, distance = seen.tools.effort.candidates, seen.tools.distance
    members, others, cases = truth.members(count)[0], truth.held_out(count)[0], truth.cases(count)
    if min(len(members), len(others)) < FEWEST:
        why = f"{len(members)} training and {len(others)} held-out images are fewer than {FEWEST}"
        return [NotTried("copies", why, "copies"), NotTried("nearest-synthetic", why, "membership")]
    made = made[torch.randperm(len(made), generator=torch_rng(seen.tools.seed, "audit", "made"))[:count]]
    return [
        search_copies(seen, made, members, others, CopySearch(), distance, cases),
        nearest_membership(seen, made, members, others, NearestSynthetic(), distance, cases),
    ]


def search_copies(
    seen: Seen, made: Tensor, members: Tensor, others: Tensor, search: CopySearch, distance: Distance, cases: Cases
) -> Finding | NotTried:
    if refused := not_granted(search, seen):
        return refused
    found = search.run(made, members, others, distance, cases=cases, seed=seen.tools.seed, device=seen.tools.device)
    distances = {
        "made, to nearest training image": found.training.distance,
        "held-out, to nearest training image": found.baseline.distance,
    }
    pairs = closest_pairs(made, members, found)
    title = f"{seen.where}, {search.name}\nCopies: made images that lie nearer to a training image than the limit"
    draw = histograms(f"{found.features} distance", distances, limit=found.limit, pairs=pairs, title=title)
    return Finding(search.name, str(search), found.verdict(seen.tools.level), draw=draw, question="copies")


def closest_pairs(made: Tensor, members: Tensor, found: Copies, shown: int = 8) -> Pairs:
    """The made images that lie closest to a training image, as they were made, each above that image."""
    which = found.training.distance.argsort()[:shown]
    turns = found.training.orientation[which]
    how = [ORIENTATIONS[int(turn)].replace(" by", "").replace(" degrees", "°") if turn else "" for turn in turns]
    distances = [f"{value:.2g}" for value in found.training.distance[which]]
    return Pairs(
        {"made": made[which], "training": members[found.training.index[which]]},
        [f"{distance}\n{words}" for distance, words in zip(distances, how, strict=True)],
    )


def nearest_membership(
    seen: Seen,
    made: Tensor,
    members: Tensor,
    others: Tensor,
    attack: NearestSynthetic,
    distance: Distance,
    cases: Cases,
) -> Finding | NotTried:
    if refused := not_granted(attack, seen, "membership"):
        return refused
    found = attack.run(made, members, others, distance, device=seen.tools.device)
    draw = histograms(
        f"{found.features} distance to the nearest made image",
        {"training images": -found.members, "held-out images": -found.others},
        title=f"{seen.where}, {attack.name}\nMembership: are made images nearer to training images than to others?",
    )
    verdict = replace(found, cases=cases).verdict(seen.tools.level)
    return Finding(attack.name, found.threat_model, verdict, draw=draw, question="membership")


# --- building blocks ----------------------------------------------------------------------------------


def load_generator(seen: Seen, state: Mapping[str, Tensor]) -> GeneratorModel | NotTried:
    """The study's generator in the state that was sent."""
    tools = seen.tools
    study, target = tools.assembly.study, tools.assembly.target
    shape = shape_of_latents(tools) if study.in_latents else tools.image_shape
    model = study.generator.build_for(shape, target, seed=study.seed, device=tools.device)
    try:
        model.load(state, partial=True)
    except BadInput as error:
        return NotTried("projection", f"the state cannot be loaded: {error}")
    return model


VALUES = 8  # labels to choose from, where they are values and none is known


@dataclass(frozen=True)
class SearchInReach:
    """A search of a generator's latent space, as the budget and the threat model have it."""

    attack: Projection
    space: LatentSpace
    tools: Tools
    choices: Tensor  #: labels to choose from where an image's own is not known

    @property
    def labelled(self) -> bool:
        return self.attack.conditional and not self.attack.guessed

    def run(self, images: Tensor, labels: Tensor) -> Projected:
        """The closest images that the generator can make."""
        return self.attack.run(
            self.space,
            images,
            self.tools.distance,
            labels=labels if self.labelled else None,
            choices=self.choices,
            seed=self.tools.seed,
            device=self.tools.device,
        )


def search_in_reach(seen: Seen, model: GeneratorModel) -> SearchInReach | NotTried:
    space, effort, tools = model.latent_space(), seen.tools.effort, seen.tools
    conditional = space is not None and space.labelled
    known = conditional and Capability.CANDIDATE_LABELS in tools.threat.granted
    attack = Projection(
        iterations=effort.projection_steps, conditional=conditional, guessed=not known, at_once=effort.projected
    )
    if space is None:
        return NotTried(attack.name, "this generator names no space to search in", "membership")
    choices = even_labels(len(model.target.classes) or VALUES, model.target)
    return not_granted(attack, seen, "membership") or SearchInReach(attack, space, tools, choices)


def attack_by_projection(seen: Seen, truth: Truth, model: GeneratorModel) -> Finding | NotTried:
    """The closest images that the generator can make to members and to held-out images."""
    search, count = search_in_reach(seen, model), seen.tools.effort.projected
    if isinstance(search, NotTried):
        return search
    members, others = truth.members(count), truth.held_out(count)
    if min(len(members[0]), len(others[0])) < 2:
        return NotTried(search.attack.name, "the site has no held-out images to compare with", "membership")
    found = search.attack.judge(search.run(*members), search.run(*others), truth.cases(count))
    draw = histograms(
        f"{found.members.features} distance after projection",
        {"training images": found.members.distances, "held-out images": found.held_out.distances},
        title=f"{seen.where}, {search.attack.name}\nHow near the generator comes to training images, and to others",
    )
    verdict = found.verdict(seen.tools.level)
    return Finding(search.attack.name, found.threat_model, verdict, draw=draw, question="membership")


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
