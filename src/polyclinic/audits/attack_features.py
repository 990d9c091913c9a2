"""Attacks on samples that are features behind a public front: copies and members, by distances of features.

Whoever has the samples can compute the features of any image, as the front is public.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.copies import CLOSE_SHARE, COPY_FACTOR, FEWEST, CopySearch, closer_to_training
from polyclinic.attacks.membership import NearestSynthetic
from polyclinic.audits.attack import Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.planting import learned_images, least_share
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import torch_rng

FEATURES = "by features: the attacker has the samples, the public front, and images that may be training images"


@dataclass(frozen=True)
class Rows:
    """Features of samples, of members and of held-out images, float32 [N, D]; patients of the last two, if known."""

    made: Tensor
    members: Tensor
    others: Tensor
    cases: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def of(cls, seen: Seen, truth: Truth) -> "Rows | None":
        """None where there are too few images to tell."""
        count, tools = seen.tools.effort.candidates, seen.tools
        members, others = truth.members(count)[0], truth.held_out(count)[0]
        if min(len(members), len(others)) < FEWEST:
            return None
        made = seen.parcel.tensors["images"]
        made = made[torch.randperm(len(made), generator=torch_rng(tools.seed, "audit", "made"))[:count]]
        own, outside = (flat(learned_images(tools, images)) for images in (members, others))
        return cls(flat(made), own, outside, truth.cases(count))

    def near(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances from samples to members, and to held-out images."""
        return torch.cdist(made, self.members).square(), torch.cdist(made, self.others).square()


def flat(images: Tensor) -> Tensor:
    return images.flatten(1).float()


def attack_features(seen: Seen, truth: Truth) -> Results:
    """Look for copies of members among samples, and tell members by the nearest sample."""
    copies, membership, rows = CopySearch(), NearestSynthetic(), Rows.of(seen, truth)
    if rows is None:
        why = f"training or held-out images are fewer than {FEWEST}"
        return [NotTried(copies.name, why, "copies"), NotTried(membership.name, why, "membership")]
    tools, (near, far) = seen.tools, rows.near(rows.made)
    usual = torch.cdist(rows.others, rows.members).square().amin(1)
    found = int((near.amin(1) < COPY_FACTOR * usual.quantile(CLOSE_SHARE, interpolation="lower")).sum())
    share, chance, _ = closer_to_training(near, far, tools.seed, rows.cases)
    words = f"{found} of {len(rows.made)} samples are copies, and {share:.0%} lie closer to a training image than to "
    words += f"a held-out one, which chance does in {chance:.2g} of cases"
    verdict = Verdict(
        found > 0 or chance <= tools.level, words, {"copies": found, "closer_share": share, "closer_by_chance": chance}
    )
    own, other = -near.amin(0), -far.amin(0)
    order, area = chance_of_order(own, other, *(rows.cases or (None, None))), auc(own, other)
    told = f"the nearest sample tells training from held-out images with AUC {area:.2f}, by chance in {order:.2g}"
    members = Verdict(order <= tools.level, told, {"auc": area, "p": order, "members": len(own)})
    answers: Results = []
    for attack, one, question in ((copies, verdict, "copies"), (membership, members, "membership")):
        refused = not_granted(attack.name, attack.needs, seen, question)
        answers.append(refused or Finding(attack.name, FEATURES, one, question=question))
    return answers


def planted_features(seen: Seen, truth: Truth) -> list[Planted]:
    """The samples, with a held-out image's features among them; and all of them, leaning towards such features."""
    other = truth_of_held_out(truth, seen.tools.effort.candidates)
    rows = Rows.of(seen, other) if other is not None else None
    if other is None or rows is None:
        return []
    shape = seen.parcel.tensors["images"].shape[1:]
    towards = rows.members[torch.arange(len(rows.made)) % len(rows.members)]

    def leaning(share: float) -> Tensor:
        return ((1 - share) * rows.made + share * towards).round()

    def area(share: float) -> float:
        near, far = rows.near(leaning(share))
        return auc(-near.amin(0), -far.amin(0))

    share, reached = least_share(area)
    spoiled = torch.cat([rows.members[:1], rows.made[1:]])

    def plant(leak: str, words: str, made: Tensor, question: str) -> Planted:
        parcel = Parcel("synthetic-images", {"images": made.byte().reshape(-1, *shape)}, {"samples": len(made)})
        return seen.planted(leak, words, other, parcel, question=question)

    words = f"samples, mixed with {share:.0%} of held-out images' features, which tells these with AUC {reached:.2f}"
    return [
        plant("leaning features", words, leaning(share), "membership"),
        plant("copied features", f"one image's features among {len(spoiled)} samples", spoiled, "copies"),
    ]
