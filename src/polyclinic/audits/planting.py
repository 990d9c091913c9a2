"""Planted leaks, which show the power of an attack: updates, images of generators, and codes.

Held-out images take the place of training images, so that no private image is copied. The leaks are as weak as the
verdict claims to exclude; no defence is applied. Updates and latents are planted through the method's own operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.copies import FEWEST
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.attacks.projection import Projected
from polyclinic.audits.attack import Planted, Seen, Tools
from polyclinic.audits.attack_latents import public_trainer
from polyclinic.audits.truth import Truth, truth_of_held_out, with_others
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel
from polyclinic.generators.base import as_tensor
from polyclinic.generators.replay_stream import SiteCodes, to_groups
from polyclinic.methods.shared.replay_space import as_maps, numbers_of, public_limits
from polyclinic.metrics.roc import auc
from polyclinic.randomness import torch_rng


class Dominated:
    """Puts held-out images, with their labels, in the place of those that an operation took: the first image in half of
    each batch, the others once each. Sites come one after the other, as their batches do."""

    def __init__(self, batches: Sequence[Tensor], others: ImageSet) -> None:
        self.others, self.seen = others, 0
        self.places: dict[int, int] = {}
        self.needed = 1
        for batch in batches:
            for number, place in enumerate(batch.tolist()):
                if place not in self.places:
                    first = number < (len(batch) + 1) // 2
                    self.places[place] = 0 if first else self.needed
                    self.needed += not first

    def __call__(self, data: SiteData) -> SiteData:
        begin, self.seen = self.seen, self.seen + len(data.train)
        own = [(place - begin, other) for place, other in self.places.items() if begin <= place < self.seen]
        return replace(data, train=with_others(data.train, own, self.others))


def planted_update(seen: Seen, truth: Truth) -> list[Planted]:
    """The same operation on held-out images, of which the first is half of each batch.

    Nothing without held-out images: some must be left to compare with.
    """
    others = truth.outside.take(truth.rows_held_out(seen.tools.effort.candidates))
    planted, made = Dominated(truth.batches, others), []
    if len(others) >= 2 * planted.needed:
        made = list(seen.again(planted))
    found = next((one for one in made if one.kind == seen.kind), None)
    if found is None:
        return []
    every = with_others(truth.data.train, list(planted.places.items()), others)
    rest, none = others.take(np.arange(planted.needed, len(others))), others.take(np.arange(0))
    other = Truth(truth.batches, SiteData(truth.data.name, every, rest, none), truth.seed, truth.own)
    size, count = max(len(batch) for batch in truth.batches), len(truth.batches)
    share = "it is the only one" if size == 1 else f"it is half of each batch of {size}"
    words = f"the operation carried out again on held-out images, one of them in {count} steps: {share}"
    return [seen.planted("dominant image", words, other, found, *(one for one in made if one is not found))]


LEANING, REACHED = 0.7, 0.85  #: areas under the curve of the two leaks
HALVINGS = 5  #: of the share by which images lean
STEPS = 20  #: shares of the way into the generator's reach that are tried
#: images uint8 and their labels to the closest that the generator can make
Project = Callable[[Tensor, Tensor], Projected]


def planted_leaning(seen: Seen, other: Truth | None, made: Tensor) -> list[Planted]:
    """The images that were made, each mixed with an image that is to be remembered (a training image of `other`), as
    little as gives the goal."""
    tools = seen.tools
    count = tools.effort.candidates
    if other is None or not len(made):
        return []
    members, others = other.members(count)[0], other.held_out(count)[0]
    if min(len(members), len(others)) < FEWEST:
        return []
    made = made[:count]
    towards = members[torch.arange(len(made)) % len(members)].float() / 255

    def leaning(share: float) -> Tensor:
        return to_uint8((1 - share) * made.float() / 255 + share * towards)

    def area(share: float) -> float:
        attack = NearestSynthetic()
        return attack.run(leaning(share), members, others, tools.distance, device=tools.device).separation.auc

    share, reached = least_share(area)
    words = f"images that were made, mixed with {share:.0%} of held-out ones, which tells these with AUC {reached:.2f}"
    parcel = Parcel("synthetic-images", {"images": leaning(share)}, {"samples": len(made)})
    return [seen.planted("leaning images", words, other, parcel, question="membership")]


def least_share(area: Callable[[float], float]) -> tuple[float, float]:
    """The smallest share that reaches the goal, by halving, and the area that it has."""
    low, high, reached = 0.0, 1.0, area(1.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = area(middle)
        low, high, reached = (low, middle, found) if found >= LEANING else (middle, high, reached)
    return high, reached


def planted_within_reach(seen: Seen, truth: Truth, project: Project) -> list[Planted]:
    """Held-out images, moved towards the closest ones that the generator can make, as little as gives the goal."""
    count = seen.tools.effort.projected
    other = truth_of_held_out(truth, count)
    if other is None:
        return []
    inside, outside = project(*other.members(count)), project(*other.held_out(count))
    shares = [step / STEPS for step in range(STEPS + 1)]
    areas = [auc(-inside.distances * (1 - share) ** 2, -outside.distances) for share in shares]
    share, area = next(((s, a) for s, a in zip(shares, areas, strict=True) if a >= REACHED), (1.0, areas[-1]))
    train = other.data.train
    own = torch.from_numpy(np.array(train.images[:count])).float() / 255
    mixed = to_uint8((1 - share) * own + share * inside.images[: len(own)].cpu())
    moved = Truth([], replace(other.data, train=replace(train, images=mixed.numpy())), other.seed)
    words = f"held-out images, moved by {share:.0%} to what the generator can make, which gives AUC {area:.2f}"
    return [seen.planted("images within reach", words, moved, question="membership")]


EXCHANGED = 0.5  #: the share of an image's codes that are other images'


def planted_codes(seen: Seen, truth: Truth, model: CodedModel) -> list[Planted]:
    """Codes of as many held-out images as the budget asks about, half of each drawn anew."""
    other = truth_of_held_out(truth, seen.tools.effort.candidates)
    if other is None:
        return []
    part = other.data.train
    codes = model.encode(learned_images(seen.tools, as_tensor(part.images)))
    rng = torch_rng(seen.tools.seed, "audit", "planted codes")
    mixed = {level: exchange(values, EXCHANGED, rng) for level, values in codes.items()}
    groups = to_groups({seen.site: SiteCodes(mixed, as_tensor(part.labels))}, model)
    parcels = {kind: Parcel(kind, tensors) for kind, tensors in groups.items()}
    rest = tuple(one for one in seen.together if one.kind not in parcels)
    words = f"codes of {len(part)} held-out images, of which {EXCHANGED:.0%} are other images' codes"
    return [seen.planted("mixed codes", words, other, parcels.pop("codes"), *parcels.values(), *rest)]


def learned_images(tools: Tools, images: Tensor) -> Tensor:
    """What the study's generator learns of images uint8: themselves, or their latents rounded to bytes."""
    if not tools.assembly.study.in_latents:
        return images
    trainer = public_trainer(tools)
    numbers = numbers_of(tools.assembly.study.method)
    limits = public_limits(trainer, tools.image_shape, numbers)
    return limits.to_bytes(as_maps(trainer.latents(images.numpy()), numbers))


def exchange(codes: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Codes [N, h, w] in which a share of the places of each image have another image's code of the same place."""
    flat = codes.flatten(1)
    other = torch.rand(flat.shape, generator=rng).argsort(0)
    taken = torch.rand(flat.shape, generator=rng) < share
    return torch.where(taken, flat.gather(0, other), flat).reshape(codes.shape)
