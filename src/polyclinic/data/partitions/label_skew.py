"""Label skew to a chosen mean pairwise Kolmogorov-Smirnov statistic, at equal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.heterogeneity import mean_ks
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

TOLERANCE = 0.02  #: of the mean KS: the paper's splits are given with two digits
BISECTIONS = 60  #: more than a float has binary digits
CLOSE_ENOUGH = 0.0005  #: far below the tolerance: the search may end


class Spectrum:
    """Ways to give images, in label order, to `count` equal sites: from sorted to evenly mixed."""

    def __init__(self, labels: np.ndarray, count: int, rng: np.random.Generator) -> None:
        from scipy.special import ndtri  # here: every process of a run would pay for it

        n, rounds = len(labels), -(-len(labels) // count)
        self.labels, self.count = np.sort(labels), count
        self._sorted = ndtri((np.arange(n) + 0.5) / n)
        # of any `count` neighbours in label order, one goes to each site
        dealt = rng.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1).ravel()[:n]
        self._mixed = ndtri((dealt + rng.random(n)) / count)

    def sites_at(self, mixing: float) -> np.ndarray:
        """The site of each image, in label order, int64 [N]; `mixing` runs from 0 (sorted) to 1."""
        order = np.argsort((1 - mixing) * self._sorted + mixing * self._mixed, kind="stable")
        sites = np.empty(len(order), dtype=np.int64)
        for k, part in enumerate(np.array_split(order, self.count)):
            sites[part] = k
        return sites

    def ks_at(self, mixing: float) -> float:
        sites = self.sites_at(mixing)
        return mean_ks({str(k): self.labels[sites == k] for k in range(self.count)})

    def mixing_for(self, target: float) -> float:
        """The mixing whose KS is nearest to the target.

        Along the way pairs of images trade places one by one, so the KS moves in steps of 4 / N at most and
        bisection ends at a step across the target.
        """
        low, high, best = 0.0, 1.0, (float("inf"), 0.0)
        for mixing in (low, high):
            best = min(best, (abs(self.ks_at(mixing) - target), mixing))
        for _ in range(BISECTIONS):
            if best[0] < CLOSE_ENOUGH:
                break
            middle = (low + high) / 2
            ks = self.ks_at(middle)
            best = min(best, (abs(ks - target), middle))
            low, high = (middle, high) if ks > target else (low, middle)
        return best[1]


@dataclass(frozen=True)
class SiteAlongLabels:
    """`sequence` int64 [N]: the site of each training image, from the lowest label to the highest."""

    names: tuple[str, ...]
    sequence: np.ndarray

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        """Walk up the labels; each image goes to the site furthest behind its training share so far."""
        index = numpy_rng(*address).permutation(index)
        index = index[np.argsort(dataset.labels[index], kind="stable")]
        edges = np.rint(np.linspace(0, len(self.sequence), len(index) + 1)).astype(np.int64)
        scale = len(index) / len(self.sequence)
        lacking = np.zeros(len(self.names))
        site_of = np.empty(len(index), dtype=np.int64)
        for i in range(len(index)):
            np.add.at(lacking, self.sequence[edges[i] : edges[i + 1]], scale)
            site_of[i] = np.argmax(lacking)
            lacking[site_of[i]] -= 1
        return {name: np.sort(index[site_of == k]) for k, name in enumerate(self.names)}


class LabelSkew(Sites):
    """The first site has the lowest labels, the last the highest; `target_ks` says how little they overlap.

    Works for classes (on class indices, see `heterogeneity.pairwise_ks`) and for regression labels. The mean
    pairwise KS of the training parts is within 0.02 of the target, and their sizes differ by one at most.
    Images of one patient may come to several sites, since labels differ; they never cross a split.
    """

    partition: Literal["label-skew"] = Field("label-skew", description="labels differ by a chosen amount")
    target_ks: float = Field(
        0.4, ge=0, le=1, description="mean pairwise Kolmogorov-Smirnov statistic between the sites' labels"
    )

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> SiteAlongLabels:
        names = self.site_names()
        if len(names) < 2 or len(train) < len(names):
            raise BadInput(
                f"sites.target_ks: needs at least two sites and an image for each, "
                f"not {len(train)} images for {len(names)}; set sites.count"
            )
        spectrum = Spectrum(dataset.labels[train], len(names), numpy_rng(*address))
        mixing = spectrum.mixing_for(self.target_ks)
        if abs(spectrum.ks_at(mixing) - self.target_ks) > TOLERANCE:
            raise BadInput(
                f"sites.target_ks: {self.target_ks:g} cannot be reached within {TOLERANCE} with these {len(train)} "
                f"labels on {len(names)} equal sites, whose range is {spectrum.ks_at(1):.2f} to "
                f"{spectrum.ks_at(0):.2f}; "
                f"the nearest is {spectrum.ks_at(mixing):.2f}"
            )
        return SiteAlongLabels(names, spectrum.sites_at(mixing))
