"""Label skew to a chosen mean pairwise Kolmogorov-Smirnov statistic; sub-group bias of one small site (FELICIA)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.labels import mean_ks
from polyclinic.data.partitions.base import Address, Sites, StratumShares
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.randomness import numpy_rng

TOLERANCE = 0.02  #: of the mean KS: the paper's splits are given with two digits
BISECTIONS = 60  #: more than a float has binary digits
CLOSE_ENOUGH = 0.0005  #: far below the tolerance: the search may end


class Spectrum:
    """Ways to give images, in label order, to `count` equal sites: from sorted to evenly mixed."""

    def __init__(self, labels: np.ndarray, count: int, rng: np.random.Generator) -> None:
        n, rounds = len(labels), -(-len(labels) // count)
        self.labels, self.count = np.sort(labels), count
        self._sorted = scipy.special.ndtri((np.arange(n) + 0.5) / n)
        # of any `count` neighbours in label order, one goes to each site
        dealt = rng.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1).ravel()[:n]
        self._mixed = scipy.special.ndtri((dealt + rng.random(n)) / count)

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

    Works for classes (on class indices, see `labels.pairwise_ks`) and for regression labels. The mean
    pairwise KS of the training parts is within 0.02 of the target, and their sizes differ by one at most.
    Images of one patient may come to several sites, since labels differ; they never cross a split.
    """

    partition: Literal["label-skew"] = Field("label-skew", description="labels differ by a chosen amount")
    target_ks: float = Field(0.4, ge=0, le=1, description="mean pairwise Kolmogorov-Smirnov statistic of sites' labels")

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


# --- subgroup bias ------------------------------------------------------------------------------------------


class SubgroupBias(Sites):
    """The first site has `per_class` training images of each class; in one, a sub-group has share `share`.

    Its other classes are balanced over their sub-groups. The other sites share what remains ("remainder", as
    FELICIA's skin lesions), or have `per_class` images of each class themselves, balanced everywhere
    ("balanced", as its CIFAR-10). Images of one patient may come to several sites; they never cross a split.
    """

    partition: Literal["subgroup-bias"] = Field("subgroup-bias", description="one site lacks a sub-group of a class")
    subgroup: str | tuple[str, ...] = Field(
        description="the sub-group whose share is set, e.g. melanoma; of several names, the first that the data have"
    )
    share: float = Field(0.1, ge=0, le=1, description="its share of its class at the first site (FELICIA's beta)")
    per_class: int = Field(300, ge=1, description="training images of each class at the first site")
    others: Literal["remainder", "balanced"] = Field("remainder", description="what the other sites hold")

    @model_validator(mode="after")
    def _somebody_to_help(self) -> "SubgroupBias":
        if len(self.site_names()) < 2:
            raise ValueError("the subgroup-bias partition needs at least two sites")
        return self

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> StratumShares:
        strata = self._strata(dataset)
        names, known = self.site_names(), dataset.subgroup
        assert known is not None
        there = np.array([np.sum((dataset.labels[train] == c) & (known[train] == g)) for c, g in strata])
        first, fair = self._wanted(strata, biased=True), self._wanted(strata, biased=False)
        rest = len(names) - 1
        wanted = np.column_stack([first, *([fair] * rest if self.others == "balanced" else [])])
        for (_, group), have, want in zip(strata, there, wanted.sum(axis=1), strict=True):
            if want > have:
                raise BadInput(
                    f"sites.per_class: {self.per_class} images of each class need {int(want)} of '{group}', "
                    f"and the training set has {have}; lower it"
                )
        if self.others == "remainder":
            wanted = np.column_stack([first, *[(there - first) / rest] * rest])

        def strata_of(dataset: Dataset, index: np.ndarray) -> np.ndarray:
            assert dataset.subgroup is not None
            pairs = zip(dataset.labels[index], dataset.subgroup[index], strict=True)
            return np.array([where[int(c), str(g)] for c, g in pairs], dtype=np.int64)

        where = {pair: i for i, pair in enumerate(strata)}
        return StratumShares(names, strata_of, wanted / np.maximum(there, 1)[:, None])

    def _strata(self, dataset: Dataset) -> list[tuple[int, str]]:
        """Every pair of class and sub-group, in order."""
        if dataset.subgroup is None or not dataset.classes:
            raise BadInput("sites.partition: 'subgroup-bias' needs classes and sub-groups, as skin-phantom has")
        strata = sorted({(int(c), str(g)) for c, g in zip(dataset.labels, dataset.subgroup, strict=True)})
        groups = [g for _, g in strata]
        if groups.count(self._chosen(strata)) != 1:
            named = " or ".join(f"'{name}'" for name in self._names())
            raise BadInput(
                f"sites.subgroup: {named} must be a sub-group of one class{did_you_mean(self._names()[0], groups)}; "
                f"there are {', '.join(groups)}"
            )
        return strata

    def _names(self) -> tuple[str, ...]:
        return (self.subgroup,) if isinstance(self.subgroup, str) else self.subgroup

    def _chosen(self, strata: list[tuple[int, str]]) -> str:
        """The first name that is a sub-group of the data, or '' where none is."""
        groups = {g for _, g in strata}
        return next((name for name in self._names() if name in groups), "")

    def _wanted(self, strata: list[tuple[int, str]], *, biased: bool) -> np.ndarray:
        """Training images of each stratum at the biased first site, or at a balanced one: [strata]."""
        in_class = {c: [g for k, g in strata if k == c] for c, _ in strata}
        chosen = self._chosen(strata)
        wanted = []
        for c, g in strata:
            peers = len(in_class[c])
            share = 1 / peers
            if biased and chosen in in_class[c] and peers > 1:
                share = self.share if g == chosen else (1 - self.share) / (peers - 1)
            wanted.append(self.per_class * share)
        return np.rint(wanted)
