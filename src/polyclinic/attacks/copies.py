"""Memorisation: does a generator return copies of its training images, as they are, mirrored, turned or changed?

Made images are compared with the training images *and* with images that were held out, over flips and quarter turns:
being close to a training image means something only if held-out images are not as close.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capabilities, Capability, Verdict
from polyclinic.errors import BadInput
from polyclinic.metrics.images import ORIENTATIONS, Images, as_unit, same_shape
from polyclinic.metrics.perceptual import Distance, Nearest, Pixels, nearest_of, table
from polyclinic.metrics.statistics.significance import chance_of_sum
from polyclinic.randomness import torch_rng

CLOSE_SHARE = 0.01  # of the held-out images are closer to a training image than "close" means
COPY_FACTOR = 0.25  # a copy is closer than a quarter of that
BLIND = 1e-6  # distances below this are rounding
SIGNIFICANT = 0.01
FEWEST = 20


@dataclass(frozen=True)
class Copies:
    """What was found, by made image [M]: its nearest training image (`training`), its nearest held-out image
    (`held_out`), whether it is a copy; and by held-out image [H]: its nearest training image (`baseline`).

    `closer_share`: how many made images lie closer to a training image than to any of as many held-out ones (ties
    half); `chance`: how often a random exchange of training and held-out images gives as large a share.
    `authenticity`: the share of made images that are not closer to their training image than its own nearest
    neighbour in the training set is (Alaa et al. 2022).
    """

    training: Nearest
    held_out: Nearest
    baseline: Nearest
    limit: float
    is_copy: Tensor
    closer_share: float
    chance: float
    authenticity: float
    compared: int  #: training and held-out images, each, that the share was computed with
    features: str

    def verdict(self, level: float = SIGNIFICANT) -> Verdict:
        """In words, with the figures. `level`: the chance at which a share counts."""
        copies = int(self.is_copy.sum())
        figures: dict[str, float | int | str] = {
            "features": self.features, "made": len(self.is_copy), "copies": copies, "copy_limit": self.limit,
            "median_to_training": float(self.training.distance.median()),
            "median_to_held_out": float(self.held_out.distance.median()),
            "median_held_out_to_training": float(self.baseline.distance.median()),
            "median_ratio": float(self.training.ratio.median()),
            "median_ratio_held_out": float(self.baseline.ratio.median()), "closer_share": self.closer_share,
            "closer_by_chance": self.chance, "authenticity": self.authenticity, "compared": self.compared,
            "orientations": "flips and quarter turns",
        }  # fmt: skip
        return Verdict(copies > 0 or self.chance <= level, self._because(copies, level), figures)

    def _because(self, copies: int, level: float) -> str:
        closer = f"{self.closer_share:.0%} lie closer to a training image than to a held-out one"
        if copies:
            worst = int(self.training.distance.argmin())
            turn = int(self.training.orientation[worst])
            how = f"{ORIENTATIONS[turn]} " if turn else ""
            which = int(self.training.index[worst])
            return (
                f"copies of training images among {len(self.is_copy)} made ones: {copies}, for instance number "
                f"{worst}, which {how}is training image {which} (distance {self.training.distance[worst]:.2g}, "
                f"where the closest held-out images have {self.limit / COPY_FACTOR:.2g}); {closer}"
            )
        if self.limit < BLIND:
            return (
                f"copies cannot be recognised, as 1 % of the held-out images are themselves copies of training images; "
                f"hold out by patient and drop duplicates; {closer}"
            )
        if self.chance <= level:
            return f"no made image is a copy, but {closer}, which chance does in {self.chance:.2g} of cases"
        return f"none of {len(self.is_copy)} made images is a copy, and {closer}, no more than chance has it"


def find_copies(
    made: Images,
    training: Images,
    held_out: Images,
    distance: Distance | None = None,
    *,
    cases: tuple[np.ndarray, np.ndarray] | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Copies:
    """Search among the training images for every made one. By default pixels are compared, averaged down to 32 px;
    a perceptual distance also sees what is shifted or differs in contrast.

    A copy is closer to a training image than a quarter of what only 1 % of the held-out images reach. `held_out` must
    hold other patients than `training`, or the limit is that of one patient's images; 20 or more of each. `cases`: of
    training and of held-out images, equal for images of one patient.
    """
    distance = Pixels() if distance is None else distance
    first, (second, third) = as_unit(made, "made images"), references(training, held_out)
    same_shape(second, first, "made images")
    # one table, so that no image is looked at twice in any orientation
    found = table(torch.cat([first, second, third]), torch.cat([second, third]), distance, device=device)
    (to_training, to_held_out), (within, _), (from_held_out, _) = found.split(
        (len(first), len(second), len(third)), (len(second), len(third))
    )
    near, baseline = nearest_of(to_training), nearest_of(from_held_out)
    limit = COPY_FACTOR * float(baseline.distance.quantile(CLOSE_SHARE, interpolation="lower"))
    own = within.distances.clone().fill_diagonal_(torch.inf).amin(1)
    share, chance, compared = closer_to_training(to_training.distances, to_held_out.distances, seed, cases)
    return Copies(
        training=near,
        held_out=nearest_of(to_held_out),
        baseline=baseline,
        limit=limit,
        is_copy=near.distance < limit,
        closer_share=share,
        chance=chance,
        authenticity=float((near.distance >= own[near.index]).double().mean()),
        compared=compared,
        features=distance.name,
    )


def references(training: Images, held_out: Images) -> tuple[Tensor, Tensor]:
    """Both sets in [0, 1]; BadInput where shapes differ or images are too few."""
    first, second = as_unit(training, "training images"), as_unit(held_out, "held-out images")
    same_shape(first, second, "held-out images")
    if min(len(first), len(second)) < FEWEST:
        raise BadInput(f"copies: {len(first)} training and {len(second)} held-out images; give {FEWEST} of each")
    return first, second


def closer_to_training(
    to_training: Tensor, to_held_out: Tensor, seed: int, cases: tuple[np.ndarray, np.ndarray] | None
) -> tuple[float, float, int]:
    """The share of made images closer to training than to as many held-out images, and how often chance does it.

    All made images share the two sets, so they are no independent throws of a coin; but had the generator not seen
    the training images, these could be exchanged with the held-out ones. Each made image points to the nearest of all
    (of several equally near, to one by lot), and patients change places; so the chance is counted exactly.
    """
    rng = torch_rng(seed, "copies", "shuffles")
    count = min(to_training.shape[1], to_held_out.shape[1])
    chosen = [torch.randperm(there.shape[1], generator=rng)[:count] for there in (to_training, to_held_out)]
    first, second = to_training[:, chosen[0]], to_held_out[:, chosen[1]]
    near, far = first.amin(1), second.amin(1)
    share = float(((near < far).double() + 0.5 * (near == far).double()).mean())
    distances = torch.cat([first, second], 1)
    least = distances == distances.amin(1, keepdim=True)  # of several, one by lot: the first would be a training image
    pointed = (least * (1 + torch.rand(distances.shape, generator=rng))).argmax(1)
    # a number from 0 on for each chosen image, equal for images of one patient of one set
    groups = np.arange(2 * count)
    if cases is not None:
        pairs = zip(cases, chosen, strict=True)
        own, other = (np.unique(np.asarray(of)[index.numpy()], return_inverse=True) for of, index in pairs)
        groups = np.concatenate([own[1], len(own[0]) + other[1]])
    weights = np.bincount(groups[pointed.numpy()], minlength=int(groups.max()) + 1)
    trained = np.unique(groups[:count])
    pointing = [int(weight) for weight in weights if weight]
    chance = chance_of_sum(pointing, len(trained), len(np.unique(groups)), int(weights[trained].sum()))
    return share, chance, count


class CopySearch(AttackSettings):
    """The search as an attack: `CopySearch().run(made, training, held_out)`."""

    name: Literal["copies"] = "copies"

    reads: ClassVar[tuple[str, ...]] = ("synthetic-images", "generator", "codes")
    needs: ClassVar[Capabilities] = frozenset({Capability.SYNTHETIC_IMAGES, Capability.CANDIDATES})
    assumptions: ClassVar[str] = "held-out images are of other patients than the training images"

    run: ClassVar = staticmethod(find_copies)
