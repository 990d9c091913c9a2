"""Planted leaks of generators: images that lean towards some held-out images, and images within a generator's reach.

Held-out images take the place of training images, so that no private image is copied. The leaks are as weak as the
verdict claims to exclude: the attack's own score tells the planted images from others with an area of `LEANING`
(nearest synthetic image) or of `REACHED` (projection, which compares fewer images).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.copies import FEWEST
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.attacks.projection import Projected
from polyclinic.audits.planted_truth import truth_of_held_out
from polyclinic.audits.views import Planted, Seen, Truth
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import auc

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
    changed = replace(seen, parcel=parcel, together=(parcel,))
    return [Planted("leaning images", words, changed, other, question="membership")]


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
    moved = moved_towards(other, inside, count, share)
    words = f"held-out images, moved by {share:.0%} to what the generator can make, which gives AUC {area:.2f}"
    return [Planted("images within reach", words, replace(seen, together=()), moved, question="membership")]


def moved_towards(truth: Truth, projected: Projected, count: int, share: float) -> Truth:
    """The same truth with its first `count` members moved by a share of the way to their projections."""
    train = truth.data.train
    images = torch.from_numpy(np.array(train.images[:count])).float() / 255
    mixed = to_uint8((1 - share) * images + share * projected.images[: len(images)].cpu())
    data = replace(truth.data, train=replace(train, images=mixed.numpy()))
    return Truth([torch.arange(len(mixed))], data, truth.seed)
