"""Attacks on generators, codes and synthetic images: decoding, copies, membership and projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.attacks.attack import Attack, Capability
from polyclinic.attacks.copies import FEWEST, Copies, CopySearch
from polyclinic.attacks.membership.attacks import NearestSynthetic
from polyclinic.attacks.projection import Projection
from polyclinic.audits.plots import Pairs, histograms
from polyclinic.audits.recovery import recovery
from polyclinic.audits.views import Finding, NotTried, Seen, Truth
from polyclinic.errors import BadInput
from polyclinic.generators import CodedModel, GeneratorModel
from polyclinic.generators.gan.model import GANModel
from polyclinic.generators.labels import even_labels
from polyclinic.generators.latent_space import LatentSpace, gan_space, stylegan2_space, vqvae2_space
from polyclinic.generators.site_codes import from_groups
from polyclinic.generators.stylegan2.model import StyleGAN2Model
from polyclinic.generators.vqvae2.model import VQVAE2Model
from polyclinic.metrics.image_sets import ORIENTATIONS
from polyclinic.metrics.perceptual import Distance
from polyclinic.randomness import torch_rng

Results = list[Finding | NotTried]

VALUES = 8  # labels to choose from, where they are values and none is known


def of_synthetic_images(seen: Seen, truth: Truth) -> Results:
    """Made images as they were sent."""
    shape = seen.tools.image_shape
    made = [t for t in seen.parcel.tensors.values() if t.dim() == 4 and tuple(t.shape[1:]) == shape]
    if not made:
        return [NotTried("copies", "the parcel holds no images of the study's size")]
    return of_made_images(seen, truth, as_bytes(torch.cat(made)))


def as_bytes(images: Tensor) -> Tensor:
    """Images as uint8, whether they were sent so or as numbers in [0, 1]."""
    return images if images.dtype == torch.uint8 else (images.float().clamp(0, 1) * 255).round().to(torch.uint8)


def of_generator(seen: Seen, truth: Truth) -> Results:
    """What a receiver of the generator can make with it, and how near it comes to members and to others."""
    model = model_with(seen, seen.parcel.tensors)
    if isinstance(model, NotTried):
        return [model]
    return [*of_samples(seen, truth, model), projected(seen, truth, model)]


def of_codes(seen: Seen, truth: Truth) -> Results:
    """Codes of real images: whoever has the decoder looks at them."""
    sent = seen.beside("generator")
    model = model_with(seen, sent.tensors if sent else seen.received("generator"))
    labels = seen.beside("labels")
    if isinstance(model, NotTried) or not isinstance(model, CodedModel) or labels is None:
        return [model if isinstance(model, NotTried) else NotTried("decoding", "no decoder of these codes is known")]
    if Capability.GENERATOR not in seen.tools.threat.granted:
        return [NotTried("decoding", "the threat model does not grant generator")]
    share = from_groups({"codes": seen.parcel.tensors, "labels": labels.tensors}, model).get(seen.site)
    if share is None:
        return [NotTried("decoding", "the codes are of other sites' images")]
    decoded = model.decode(share.codes)
    return [shown_by(decoded, seen, truth), *of_made_images(seen, truth, decoded)]


def shown_by(decoded: Tensor, seen: Seen, truth: Truth) -> Finding:
    tools = seen.tools
    count = min(len(decoded), tools.budget.candidates)
    found, others = decoded[:count].float() / 255, truth.held_out(tools.budget.candidates)[0].float() / 255
    result = recovery(
        found, truth.images(torch.arange(count)), others, in_order=True, distance=tools.distance, device=tools.device
    )
    has = "decoding: the attacker has the codes that a site sent and the generator with its weights; codes keep the "
    return Finding("decoding", f"{has}order of the images.", result.verdict(), draw=result.draw)


# --- what is done with made images --------------------------------------------------------------------


def of_samples(seen: Seen, truth: Truth, model: GeneratorModel) -> Results:
    labels = even_labels(seen.tools.budget.candidates, model.target)
    try:
        made = model.sample(labels, torch_rng(seen.tools.seed, "audit", "samples", seen.parcel.digest))
    except BadInput:
        return [NotTried("copies", "the generator was sent without what draws samples")]
    return of_made_images(seen, truth, made)


def of_made_images(seen: Seen, truth: Truth, made: Tensor) -> Results:
    """Copies among made images, and membership by the nearest one."""
    count, distance = seen.tools.budget.candidates, seen.tools.distance
    members, others = truth.members(count)[0], truth.held_out(count)[0]
    if min(len(members), len(others)) < FEWEST:
        why = f"{len(members)} training and {len(others)} held-out images are fewer than {FEWEST}"
        return [NotTried("copies", why), NotTried("nearest-synthetic", why)]
    made = made[torch.randperm(len(made), generator=torch_rng(seen.tools.seed, "audit", "made"))[:count]]
    return [
        copied(seen, made, members, others, CopySearch(), distance),
        nearest(seen, made, members, others, NearestSynthetic(), distance),
    ]


def copied(
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
    draw = histograms(f"{found.features} distance", distances, limit=found.limit, pairs=pairs)
    return Finding(search.name, str(search), found.verdict(), draw=draw)


def closest_pairs(made: Tensor, members: Tensor, found: Copies, shown: int = 8) -> Pairs:
    """The made images that lie closest to a training image, as they were made, each above that image."""
    which = found.training.distance.argsort()[:shown]
    turns = found.training.orientation[which]
    how = [ORIENTATIONS[int(turn)].replace(" by", "").replace(" degrees", "°") if turn else "" for turn in turns]
    distances = [f"{value:.2g}" for value in found.training.distance[which]]
    return Pairs(
        {"made": as_bytes(made[which]), "training": members[found.training.index[which]]},
        [f"{distance}\n{words}" for distance, words in zip(distances, how, strict=True)],
    )


def nearest(
    seen: Seen, made: Tensor, members: Tensor, others: Tensor, attack: NearestSynthetic, distance: Distance
) -> Finding | NotTried:
    if refused := not_granted(attack, seen):
        return refused
    found = attack.run(made, members, others, distance, device=seen.tools.device)
    draw = histograms(
        f"{found.features} distance to the nearest made image",
        {"training images": -found.members, "held-out images": -found.others},
    )
    return Finding(attack.name, found.threat_model, found.verdict(), draw=draw)


def projected(seen: Seen, truth: Truth, model: GeneratorModel) -> Finding | NotTried:
    """The closest images that the generator can make to members and to held-out images."""
    space, budget, tools = space_of(model), seen.tools.budget, seen.tools
    conditional = isinstance(model, GANModel)
    known = conditional and Capability.CANDIDATE_LABELS in tools.threat.granted
    attack = Projection(
        iterations=budget.projection_steps, conditional=conditional, guessed=not known, at_once=budget.projected
    )
    if space is None:
        return NotTried(attack.name, "this generator names no space to search in")
    if refused := not_granted(attack, seen):
        return refused
    members, labels = truth.members(budget.projected)
    others, other_labels = truth.held_out(budget.projected)
    if min(len(members), len(others)) < 2:
        return NotTried(attack.name, "the site has no held-out images to compare with")
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
    )
    return Finding(attack.name, found.threat_model, found.verdict(), draw=draw)


# --- small things -------------------------------------------------------------------------------------


def model_with(seen: Seen, state: Mapping[str, Tensor]) -> GeneratorModel | NotTried:
    """The study's generator in the state that was sent."""
    tools = seen.tools
    channels, size, _ = tools.image_shape
    model = tools.assembly.study.generator.build(
        channels=channels, size=size, target=tools.assembly.target, seed=tools.assembly.study.seed, device=tools.device
    )
    try:
        model.load(state, partial=True)
    except BadInput as error:
        return NotTried("projection", f"the state cannot be loaded: {error}")
    return model


def space_of(model: GeneratorModel) -> LatentSpace | None:
    """What the generator makes images from. One with a space of its own offers it as `latent_space()`."""
    if isinstance(model, VQVAE2Model):
        return vqvae2_space(model)
    if isinstance(model, StyleGAN2Model):
        return stylegan2_space(model)
    if isinstance(model, GANModel):
        return gan_space(model)
    offered = getattr(model, "latent_space", None)
    return offered() if callable(offered) else None


def not_granted(attack: Attack, seen: Seen) -> NotTried | None:
    missing = attack.needs - seen.tools.threat.granted
    return NotTried(attack.name, f"the threat model does not grant {', '.join(sorted(missing))}") if missing else None
