"""Attacks on generators, codes and synthetic images: decoding, copies and near copies, membership and projection."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.copies import FEWEST, CopySearch
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
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_features import attack_features, planted_features
from polyclinic.audits.attack_latents import NO_IMAGES, invert_codes, shape_of_latents
from polyclinic.audits.planting import Project, planted_codes, planted_leaning, planted_within_reach
from polyclinic.audits.plots import Pairs, histograms
from polyclinic.audits.recovery import score_in_order
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel, Codes, GeneratorModel
from polyclinic.generators.base import even_labels
from polyclinic.generators.replay_stream import from_groups
from polyclinic.metrics.images import ORIENTATIONS
from polyclinic.randomness import torch_rng

#: patients of members and of held-out images, where they are known
Cases = tuple[np.ndarray, np.ndarray] | None
NEAR = "near-copies"
SHOWN = 8  #: pairs of a picture
VALUES = 8  # labels to choose from, where they are values and none is known
OTHER_SIZE = NotTried("copies", "the parcel holds no images of the study's size", "copies")


class CopiesAttack(Attack):
    """Looks for copies of training images among synthetic ones, and tells members by the nearest synthetic image."""

    kinds: ClassVar[tuple[str, ...]] = ("synthetic-images",)
    questions: ClassVar[tuple[str, ...]] = ("copies", "membership")
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if seen.tools.assembly.study.in_latents:
            return attack_features(seen, truth)
        images = sent_images(seen)
        return [OTHER_SIZE] if images is None else attack_images(seen, truth, images)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        if seen.tools.assembly.study.in_latents:
            return planted_features(seen, truth)
        sent = sent_images(seen)
        return (
            [] if sent is None else planted_leaning(seen, truth_of_held_out(truth, seen.tools.effort.candidates), sent)
        )


class GeneratorAttack(CopiesAttack):
    """Samples the generator that was sent and looks for copies and members, also by search in its latent space."""

    kinds: ClassVar[tuple[str, ...]] = ("generator",)
    tests: ClassVar[int] = 3

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if seen.kind == "synthetic-images":  # what was planted in place of samples
            return super().attack(seen, truth)
        model = load_generator(seen, seen.parcel.tensors)
        if isinstance(model, NotTried):
            return [model]
        if seen.tools.assembly.study.in_latents:
            return [NotTried("copies", NO_IMAGES, "copies")]
        made = sample(seen, model, "copies", "samples", seen.parcel.digest)
        found: Results = [made] if isinstance(made, NotTried) else attack_images(seen, truth, made)
        return [*found, attack_by_projection(seen, truth, model)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        model = load_generator(seen, seen.parcel.tensors)
        if isinstance(model, NotTried) or seen.tools.assembly.study.in_latents:
            return []
        made = sample(seen, model, "copies", "samples", seen.parcel.digest)
        leaning = (
            []
            if isinstance(made, NotTried)
            else planted_leaning(seen, truth_of_held_out(truth, seen.tools.effort.candidates), made)
        )
        search = search_in_reach(seen, model)
        return leaning if isinstance(search, NotTried) else [*leaning, *planted_within_reach(seen, truth, search[1])]


class DecodingAttack(Attack):
    """Decodes codes of real images with the decoder that was sent, and looks for copies and members."""

    kinds: ClassVar[tuple[str, ...]] = ("codes",)
    questions: ClassVar[tuple[str, ...]] = ("images", "copies", "membership")
    tests: ClassVar[int] = 3

    def attack(self, seen: Seen, truth: Truth) -> Results:
        coded = own_codes(seen)
        if isinstance(coded, NotTried):
            return [coded]
        model, codes = coded
        if seen.tools.assembly.study.in_latents:
            return invert_codes(seen, truth, model, codes)
        decoded = model.decode(codes)
        return [score_decoded(decoded, seen, truth), *attack_images(seen, truth, decoded)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        model = model_of_codes(seen)
        return [] if isinstance(model, NotTried) else planted_codes(seen, truth, model)


# --- what the receiver can look at ----------------------------------------------------------------------


def sent_images(seen: Seen) -> Tensor | None:
    """uint8 images of the study's size in a parcel."""
    shape = seen.tools.image_shape
    sent = [t for t in seen.parcel.tensors.values() if t.dim() == 4 and tuple(t.shape[1:]) == shape]
    if not sent:
        return None
    images = torch.cat(sent)
    return images if images.dtype == torch.uint8 else to_uint8(images)


def own_codes(seen: Seen) -> tuple[CodedModel, Codes] | NotTried:
    """The codes that were sent of the site's own images, with the generator that decodes them."""
    model, labels = model_of_codes(seen), seen.companion("labels")
    if isinstance(model, NotTried):
        return model
    if labels is None:
        return NotTried("decoding", "codes came without their labels")
    if refused := not_granted("decoding", frozenset({Capability.GENERATOR}), seen):
        return refused
    own = {site: of_site for site, of_site in labels.tensors.items() if site == seen.site}  # others' may go along
    share = from_groups({"codes": seen.parcel.tensors, "labels": own}, model).get(seen.site)
    return (model, share.codes) if share else NotTried("decoding", "the codes are of other sites' images")


def model_of_codes(seen: Seen) -> CodedModel | NotTried:
    """The generator that came with the codes, or that the site was sent to make them with."""
    sent = seen.companion("generator")
    model = load_generator(seen, sent.tensors if sent else seen.received("generator"))
    known = isinstance(model, NotTried | CodedModel)
    return model if known else NotTried("decoding", "no decoder of these codes is known")  # type: ignore[return-value]


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


def sample(seen: Seen, model: GeneratorModel, attack: str, *address: str | int) -> Tensor | NotTried:
    """As many uint8 images as the budget asks about, of all labels alike; `address`: of the draw."""
    labels = even_labels(seen.tools.effort.candidates, model.target)
    try:
        return model.sample(labels, torch_rng(seen.tools.seed, "audit", *address))
    except BadInput:
        return NotTried(attack, "the generator was sent without what draws samples", "copies")


# --- attacks on synthetic images ----------------------------------------------------------------------


def score_decoded(decoded: Tensor, seen: Seen, truth: Truth) -> Finding:
    """How close decoded images are to the site's own; codes keep the order of the images."""
    count = min(len(decoded), seen.tools.effort.candidates)
    result = score_in_order(seen, truth, decoded[:count].float() / 255, "decoding", used=torch.arange(count))
    has = "decoding: the attacker has the codes that a site sent and the generator with its weights; codes keep the "
    return Finding("decoding", f"{has}order of the images.", result.verdict(seen.tools.level), draw=result.draw)


def attack_images(seen: Seen, truth: Truth, made: Tensor) -> Results:
    """Search synthetic images for copies, and infer membership from the nearest one."""
    count = seen.tools.effort.candidates
    members, others = truth.members(count)[0], truth.held_out(count)[0]
    if min(len(members), len(others)) < FEWEST:
        why = f"{len(members)} training and {len(others)} held-out images are fewer than {FEWEST}"
        return [NotTried("copies", why, "copies"), NotTried("nearest-synthetic", why, "membership")]
    made = made[torch.randperm(len(made), generator=torch_rng(seen.tools.seed, "audit", "made"))[:count]]
    sets = (made, members, others)
    return [search_copies(seen, sets, truth.cases(count)), nearest_membership(seen, sets, truth.cases(count))]


def search_copies(seen: Seen, sets: tuple[Tensor, Tensor, Tensor], cases: Cases) -> Finding | NotTried:
    """Copies of members among made images; `sets`: made images, members, held-out images."""
    search, tools, (made, members, _) = CopySearch(), seen.tools, sets
    if refused := not_granted(search.name, search.needs, seen):
        return refused
    found = search.run(*sets, tools.distance, cases=cases, seed=tools.seed, device=tools.device)
    near = found.training
    which = near.distance.argsort()[:SHOWN]
    figures = [f"{value:.2g}" for value in near.distance[which]]
    title = "Copies: made images that lie nearer to a training image than the limit"
    draw = histograms(
        f"{found.features} distance",
        {
            "made, to nearest training image": near.distance,
            "held-out, to nearest training image": found.baseline.distance,
        },
        limit=found.limit,
        pairs=beside(made[which], members[near.index[which]], figures, near.orientation[which]),
        title=f"{seen.where}, {search.name}\n{title}",
    )
    return Finding(search.name, str(search), found.verdict(tools.level), draw=draw, question="copies")


def nearest_membership(seen: Seen, sets: tuple[Tensor, Tensor, Tensor], cases: Cases) -> Finding | NotTried:
    """Members told by the nearest made image; sets as above."""
    attack, tools = NearestSynthetic(), seen.tools
    if refused := not_granted(attack.name, attack.needs, seen, "membership"):
        return refused
    found = replace(attack.run(*sets, tools.distance, device=tools.device), cases=cases)
    draw = histograms(
        f"{found.features} distance to the nearest made image",
        {"training images": -found.members, "held-out images": -found.others},
        title=f"{seen.where}, {attack.name}\nMembership: are made images nearer to training images than to others?",
    )
    return Finding(attack.name, found.threat_model, found.verdict(tools.level), draw=draw, question="membership")


def beside(made: Tensor, training: Tensor, figures: list[str], orientation: Tensor) -> Pairs:
    """Made images as they were made, each above its training image, with a figure and how it lies on it."""
    how = [ORIENTATIONS[int(t)].replace(" by", "").replace(" degrees", "°") if t else "" for t in orientation]
    captions = [f"{figure}\n{words}" for figure, words in zip(figures, how, strict=True)]
    return Pairs({"made": made, "training": training}, captions)


# --- projection -----------------------------------------------------------------------------------------


def search_in_reach(seen: Seen, model: GeneratorModel) -> tuple[Projection, Project] | NotTried:
    """A search of a generator's latent space, as the budget and the threat model have it: the attack, and what it does
    with images and their labels."""
    space, tools = model.latent_space(), seen.tools
    conditional = space is not None and space.labelled
    known = conditional and Capability.CANDIDATE_LABELS in tools.threat.granted
    steps, at_once = tools.effort.projection_steps, tools.effort.projected
    attack = Projection(iterations=steps, conditional=conditional, guessed=not known, at_once=at_once)
    if space is None:
        return NotTried(attack.name, "this generator names no space to search in", "membership")
    if refused := not_granted(attack.name, attack.needs, seen, "membership"):
        return refused
    choices = even_labels(len(model.target.classes) or VALUES, model.target)
    where: dict[str, Any] = {"choices": choices, "seed": tools.seed, "device": tools.device}

    def closest(images: Tensor, labels: Tensor) -> Projected:
        return attack.run(space, images, tools.distance, labels=labels if known else None, **where)

    return attack, closest


def attack_by_projection(seen: Seen, truth: Truth, model: GeneratorModel) -> Finding | NotTried:
    """The closest images that the generator can make to members and to held-out images."""
    search, count = search_in_reach(seen, model), seen.tools.effort.projected
    if isinstance(search, NotTried):
        return search
    attack, closest = search
    members, others = truth.members(count), truth.held_out(count)
    if min(len(members[0]), len(others[0])) < 2:
        return NotTried(attack.name, "the site has no held-out images to compare with", "membership")
    found = attack.judge(closest(*members), closest(*others), truth.cases(count))
    draw = histograms(
        f"{found.members.features} distance after projection",
        {"training images": found.members.distances, "held-out images": found.held_out.distances},
        title=f"{seen.where}, {attack.name}\nHow near the generator comes to training images, and to others",
    )
    verdict = found.verdict(seen.tools.level)
    return Finding(attack.name, found.threat_model, verdict, draw=draw, question="membership")


# --- near copies ----------------------------------------------------------------------------------------


class NearCopiesAttack(Attack):
    """Looks for single near copies of training images: shifted, turned, brighter, blurred, noisy, or a patch of one."""

    kinds: ClassVar[tuple[str, ...]] = ("generator", "synthetic-images")
    questions: ClassVar[tuple[str, ...]] = ("copies",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if refused := not_granted(NEAR, CopySearch().needs, seen, "copies"):
            return [refused]
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
        return [seen.planted("near copy", f"{WEAKEST_WORDS}, among {len(made)} images", truth, parcel)]


def made_images(seen: Seen) -> Tensor | NotTried:
    """Images uint8 that were sent, or that the receiver samples from the generator that was sent."""
    if seen.tools.assembly.study.in_latents:
        return NotTried(NEAR, "the generator makes latents and no images", "copies", excluded=True)
    if seen.kind == "synthetic-images":
        sent = sent_images(seen)
        return replace(OTHER_SIZE, attack=NEAR) if sent is None else sent
    model = load_generator(seen, seen.parcel.tensors)
    if isinstance(model, NotTried):
        return model
    return sample(seen, model, NEAR, "near copies", seen.site, seen.round)


def search_near_copies(seen: Seen, truth: Truth, made: Tensor) -> Finding | NotTried:
    """All made images and all training images count; what is compared with may be a part of the held-out images."""
    tools = seen.tools
    training = truth.members(len(truth.data.train))[0]
    held_out = truth.held_out(max(tools.effort.candidates, FEWEST))[0]
    if min(len(training), len(held_out)) < FEWEST:
        why = f"{len(training)} training and {len(held_out)} held-out images are fewer than {FEWEST}"
        return NotTried(NEAR, why, "copies")
    index = CopyIndex(training, held_out, device=tools.device)
    found = index.search(made, level=tools.level)
    planted = min(PLANTED, max(2, tools.effort.candidates // 10))
    return near_copy_finding(index, found, made, tools.seed, planted=planted, where=f"{seen.where}, {NEAR}\n")


def near_copy_finding(
    index: CopyIndex, found: NearCopies, made: Tensor, seed: int, *, planted: int = PLANTED, where: str = ""
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
    which = found.strength.argsort(descending=True)[:SHOWN]
    strengths = [f"{strength:.2f}" for strength in found.strength[which].tolist()]
    beyond = f"{int(found.is_copy.sum())} of {len(made)} made images are beyond the limit"
    draw = histograms(
        "gap between training and held-out images, as a share of the limit",
        {"made images": found.strength},
        limit=1.0,
        pairs=beside(made[which], to_uint8(index.training[found.index[which]]), strengths, found.orientation[which]),
        title=f"{where}Near copies: {beyond}. Below: the nearest {len(which)}",
    )
    return Finding(NEAR, str(CopySearch()), verdict, draw=draw, question="copies", doubt=doubt)
