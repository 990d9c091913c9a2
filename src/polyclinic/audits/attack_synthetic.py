"""Attacks on generators, codes and synthetic images: decoding, copies, membership and projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.copies import FEWEST, Copies, CopySearch
from polyclinic.attacks.membership.attacks import NearestSynthetic
from polyclinic.attacks.projection import Projection
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_coded_latents import NO_IMAGES, invert_codes, shape_of_latents
from polyclinic.audits.plots import Pairs, histograms
from polyclinic.audits.recovery import recovery
from polyclinic.audits.views import Finding, NotTried, Seen, Truth, not_granted
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.generators import CodedModel, GeneratorModel
from polyclinic.generators.labels import even_labels
from polyclinic.generators.site_codes import from_groups
from polyclinic.metrics.image_sets import ORIENTATIONS
from polyclinic.metrics.perceptual import Distance
from polyclinic.randomness import torch_rng

Results = list[Finding | NotTried]

VALUES = 8  # labels to choose from, where they are values and none is known


class GeneratorAttack(Attack):
    """Samples the generator that was sent and looks for copies and members, also by search in its latent space."""

    kinds: ClassVar[tuple[str, ...]] = ("generator",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_generator(seen, truth)


class DecodingAttack(Attack):
    """Decodes codes of real images with the decoder that was sent, and looks for copies and members."""

    kinds: ClassVar[tuple[str, ...]] = ("codes",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_codes(seen, truth)


class CopiesAttack(Attack):
    """Looks for copies of training images among synthetic ones, and tells members by the nearest synthetic image."""

    kinds: ClassVar[tuple[str, ...]] = ("synthetic-images",)

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return attack_synthetic_images(seen, truth)


def attack_synthetic_images(seen: Seen, truth: Truth) -> Results:
    """Attack synthetic images as they were sent."""
    shape = seen.tools.image_shape
    sent = [t for t in seen.parcel.tensors.values() if t.dim() == 4 and tuple(t.shape[1:]) == shape]
    if not sent:
        return [NotTried("copies", "the parcel holds no images of the study's size", "copies")]
    images = torch.cat(sent)
    return attack_images(seen, truth, images if images.dtype == torch.uint8 else to_uint8(images))


def attack_generator(seen: Seen, truth: Truth) -> Results:
    """Attack what the receiver can sample from a generator, and search its latent space for training images."""
    model = load_generator(seen, seen.parcel.tensors)
    if isinstance(model, NotTried):
        return [model]
    if seen.tools.assembly.study.in_latents:
        return [NotTried("copies", NO_IMAGES, "copies")]
    return [*attack_samples(seen, truth, model), attack_by_projection(seen, truth, model)]


def attack_codes(seen: Seen, truth: Truth) -> Results:
    """Decode codes of real images with the decoder that was sent, and attack the decoded images."""
    sent = seen.companion("generator")
    model = load_generator(seen, sent.tensors if sent else seen.received("generator"))
    labels = seen.companion("labels")
    if isinstance(model, NotTried) or not isinstance(model, CodedModel) or labels is None:
        return [model if isinstance(model, NotTried) else NotTried("decoding", "no decoder of these codes is known")]
    if Capability.GENERATOR not in seen.tools.threat.granted:
        return [NotTried("decoding", "the threat model does not grant generator", excluded=True)]
    share = from_groups({"codes": seen.parcel.tensors, "labels": labels.tensors}, model).get(seen.site)
    if share is None:
        return [NotTried("decoding", "the codes are of other sites' images")]
    if seen.tools.assembly.study.in_latents:
        return invert_codes(seen, truth, model, share.codes)
    decoded = model.decode(share.codes)
    return [score_decoded(decoded, seen, truth), *attack_images(seen, truth, decoded)]


def score_decoded(decoded: Tensor, seen: Seen, truth: Truth) -> Finding:
    """How close decoded images are to the site's own; codes keep the order of the images."""
    tools = seen.tools
    count = min(len(decoded), tools.effort.candidates)
    found, others = decoded[:count].float() / 255, truth.held_out(tools.effort.candidates)[0].float() / 255
    result = recovery(
        found, truth.images(torch.arange(count)), others, in_order=True, distance=tools.distance, device=tools.device
    )
    has = "decoding: the attacker has the codes that a site sent and the generator with its weights; codes keep the "
    return Finding("decoding", f"{has}order of the images.", result.verdict(tools.level), draw=result.draw)


# --- attacks on synthetic images ----------------------------------------------------------------------


def attack_samples(seen: Seen, truth: Truth, model: GeneratorModel) -> Results:
    """Sample from a generator, and attack the samples."""
    labels = even_labels(seen.tools.effort.candidates, model.target)
    try:
        made = model.sample(labels, torch_rng(seen.tools.seed, "audit", "samples", seen.parcel.digest))
    except BadInput:
        return [NotTried("copies", "the generator was sent without what draws samples", "copies")]
    return attack_images(seen, truth, made)


def attack_images(seen: Seen, truth: Truth, made: Tensor) -> Results:
    """Search synthetic images for copies, and infer membership from the nearest one."""
    count, distance = seen.tools.effort.candidates, seen.tools.distance
    members, others = truth.members(count)[0], truth.held_out(count)[0]
    if min(len(members), len(others)) < FEWEST:
        why = f"{len(members)} training and {len(others)} held-out images are fewer than {FEWEST}"
        return [NotTried("copies", why, "copies"), NotTried("nearest-synthetic", why, "membership")]
    made = made[torch.randperm(len(made), generator=torch_rng(seen.tools.seed, "audit", "made"))[:count]]
    return [
        search_copies(seen, made, members, others, CopySearch(), distance),
        nearest_membership(seen, made, members, others, NearestSynthetic(), distance),
    ]


def search_copies(
    seen: Seen, made: Tensor, members: Tensor, others: Tensor, search: CopySearch, distance: Distance
) -> Finding | NotTried:
    if refused := not_granted(search, seen):
        return refused
    found = search.run(made, members, others, distance, seed=seen.tools.seed, device=seen.tools.device)
    distances = {
        "made, to nearest training image": found.training.distance,
        "held-out, to nearest training image": found.baseline.distance,
    }
    pairs = closest_pairs(made, members, found)
    title = "Copies: made images that lie nearer to a training image than the limit"
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
    seen: Seen, made: Tensor, members: Tensor, others: Tensor, attack: NearestSynthetic, distance: Distance
) -> Finding | NotTried:
    if refused := not_granted(attack, seen, "membership"):
        return refused
    found = attack.run(made, members, others, distance, device=seen.tools.device)
    draw = histograms(
        f"{found.features} distance to the nearest made image",
        {"training images": -found.members, "held-out images": -found.others},
        title="Membership: are made images nearer to training images than to others?",
    )
    verdict = found.verdict(seen.tools.level)
    return Finding(attack.name, found.threat_model, verdict, draw=draw, question="membership")


def attack_by_projection(seen: Seen, truth: Truth, model: GeneratorModel) -> Finding | NotTried:
    """The closest images that the generator can make to members and to held-out images."""
    space, effort, tools = model.latent_space(), seen.tools.effort, seen.tools
    conditional = space is not None and space.labelled
    known = conditional and Capability.CANDIDATE_LABELS in tools.threat.granted
    attack = Projection(
        iterations=effort.projection_steps, conditional=conditional, guessed=not known, at_once=effort.projected
    )
    if space is None:
        return NotTried(attack.name, "this generator names no space to search in", "membership")
    if refused := not_granted(attack, seen, "membership"):
        return refused
    members, labels = truth.members(effort.projected)
    others, other_labels = truth.held_out(effort.projected)
    if min(len(members), len(others)) < 2:
        return NotTried(attack.name, "the site has no held-out images to compare with", "membership")
    found = attack.compare(
        space,
        members,
        others,
        tools.distance,
        member_labels=labels if known else None,
        held_out_labels=other_labels if known else None,
        choices=even_labels(len(model.target.classes) or VALUES, model.target),
        seed=tools.seed,
        device=tools.device,
    )
    draw = histograms(
        f"{found.members.features} distance after projection",
        {"training images": found.members.distances, "held-out images": found.held_out.distances},
        title="Projection: how near the generator comes to training images, and to others",
    )
    verdict = found.verdict(tools.level)
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
