"""Sites whose labels differ by a chosen mean pairwise Kolmogorov-Smirnov statistic, at equal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field
from scipy.special import ndtri

from polyclinic.data.dataset import Dataset
from polyclinic.data.heterogeneity import mean_ks
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.data.partitions.dealing import equal_slices
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

TOLERANCE = 0.02
BISECTIONS = 60


def ordering_keys(labels: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two keys per image, float64 [N]: one that sorts by label, one that mixes the labels evenly over `count` slices.

    Equal labels get neighbouring ranks in random order. The mixing key deals ranks round robin: of any `count`
    neighbours in rank, one goes to each slice.
    """
    n = len(labels)
    rank = np.empty(n, dtype=np.int64)
    rank[np.lexsort((rng.random(n), labels))] = np.arange(n)
    rounds = -(-n // count)
    dealt = rng.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1).ravel()[rank]
    return ndtri((rank + 0.5) / n), ndtri((dealt + rng.random(n)) / count)


@dataclass(frozen=True)
class SkewedSlices:
    """Equal slices of the images in an order between sorted (`mixing` 0) and evenly mixed (`mixing` 1)."""

    names: tuple[str, ...]
    mixing: float

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        ordered, mixed = ordering_keys(dataset.labels[index], len(self.names), numpy_rng(*address))
        return self.slice(index, ordered, mixed)

    def slice(self, index: np.ndarray, ordered: np.ndarray, mixed: np.ndarray) -> dict[str, np.ndarray]:
        key = (1 - self.mixing) * ordered + self.mixing * mixed
        return equal_slices(self.names, index[np.argsort(key, kind="stable")])


class LabelSkew(Sites):
    """The first site has the lowest labels, the last the highest, overlapping as much as `target_ks` asks for.

    Works for classes (on class indices, see `heterogeneity.pairwise_ks`) and for regression labels. The
    mean pairwise KS of the training parts is within 0.02 of the target. Images of one patient may
    come to several sites, since their labels may differ; they never cross a split.
    """

    partition: Literal["label-skew"] = Field("label-skew", description="labels differ by a chosen amount")
    target_ks: float = Field(
        0.4, ge=0, le=1, description="mean pairwise Kolmogorov-Smirnov statistic between the sites' labels"
    )

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> SkewedSlices:
        names = self.site_names()
        if len(names) < 2 or len(train) < len(names):
            raise BadInput(
                f"sites.target_ks: needs at least two sites and an image for each, "
                f"not {len(train)} images for {len(names)}; set sites.count"
            )
        labels = dataset.labels[train]
        # the same address as `spread` gives for the training split, so that the plan reaches there what it reached here
        ordered, mixed = ordering_keys(labels, len(names), numpy_rng(*address, "train"))

        def ks_at(mixing: float) -> float:
            parts = SkewedSlices(names, mixing).slice(np.arange(len(train)), ordered, mixed)
            return mean_ks({name: labels[part] for name, part in parts.items()})

        return SkewedSlices(names, self._mixing_for_target(ks_at))

    def _mixing_for_target(self, ks_at) -> float:
        """Bisect: along the path single pairs of images trade places, so the KS moves in steps of at most 4 / N."""
        least, most = ks_at(1.0), ks_at(0.0)
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if ks_at(middle) > self.target_ks else (low, middle)
        best = min((low, high), key=lambda mixing: abs(ks_at(mixing) - self.target_ks))
        if abs(ks_at(best) - self.target_ks) > TOLERANCE:
            raise BadInput(
                f"sites.target_ks: {self.target_ks:g} cannot be reached with these labels on {len(self.site_names())} "
                f"equal sites; choose a value from {least:.2f} to {most:.2f}"
            )
        return best
