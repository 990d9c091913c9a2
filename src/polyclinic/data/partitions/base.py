"""The base class of partitions, the `[sites]` table of a study; partitions at random (iid, quantity, dirichlet) and by
a column, such as the institution; and what several of them share."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.randomness import numpy_rng
from polyclinic.settings import Settings

Address = tuple[str | int, ...]


class Plan(Protocol):
    """The rule that a partition learnt from the training images; it spreads any split in the same way."""

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        """The indices of each site, sorted, out of `index`; every index is used at most once.

        `address` seeds the draws; it differs from split to split.
        """
        ...


class Sites(Settings):
    """One subclass per partition, in one file of `data/partitions/`, with its own settings as fields."""

    partition: str = Field(description="how the images are spread over the sites")
    names: tuple[str, ...] | None = Field(None, description="names of the sites, instead of a count")
    count: int | None = Field(None, ge=1, le=10_000, description="number of sites, named site-1, site-2, ...")

    #: whether the partition finds its sites in the data, so that neither names nor count is needed
    finds_sites: ClassVar[bool] = False

    @model_validator(mode="after")
    def _one_way_to_name_the_sites(self) -> "Sites":
        if self.names is not None and self.count is not None:
            raise ValueError("give names or count, not both")
        if self.names is None and self.count is None and not self.finds_sites:
            raise ValueError(f"the {self.partition} partition needs names or count")
        if self.names is not None and (not self.names or len(set(self.names)) < len(self.names)):
            raise ValueError("names must be at least one, and all different")
        return self

    def site_names(self) -> tuple[str, ...]:
        """Names of the sites, in order."""
        return self.names if self.names is not None else tuple(f"site-{k + 1}" for k in range(self.count or 0))

    def left_out(self, dataset: Dataset) -> dict[str, int]:
        """Images that belong to no site of the study, by where they come from; none in most partitions."""
        return {}

    @abstractmethod
    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> Plan:
        """The plan to spread images over the sites, learnt from the training images at `train` only."""


def cuts(shares: np.ndarray, total: int) -> np.ndarray:
    """The places at which to cut `total` images into parts of the given shares (they sum to 1): int64 [len(shares) -
    1]."""
    return np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)


def deal_patients(
    names: Sequence[str], index: np.ndarray, patient: np.ndarray, shares: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Whole patients to each site, at random, so that its share of the images is as near as patients allow.

    `patient` [len(index)] names each image's patient. Patients with most images go first, each to the site
    that lacks most.
    """
    _, which, sizes = np.unique(patient, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    lacking = shares * len(index)
    site_of = np.empty(len(sizes), dtype=np.int64)
    for who in order:
        site_of[who] = np.argmax(lacking)
        lacking[site_of[who]] -= sizes[who]
    return {name: np.sort(index[site_of[which] == k]) for k, name in enumerate(names)}


#: gives the stratum of each image at `index`, int64 [len(index)]
StrataOf = Callable[[Dataset, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class StratumShares:
    """`shares` float64 [strata, sites]: each site's part of a stratum; what a row lacks to 1 is left out."""

    names: tuple[str, ...]
    strata_of: StrataOf
    shares: np.ndarray

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        strata = self.strata_of(dataset, index)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.names}
        for stratum, shares in enumerate(self.shares):
            members = numpy_rng(*address, stratum).permutation(index[strata == stratum])
            with_rest = np.append(shares, 1 - shares.sum())
            for name, part in zip(self.names, np.split(members, cuts(with_rest, len(members))), strict=False):
                parts[name].append(part)
        return {name: np.sort(np.concatenate(found)) for name, found in parts.items()}


# --- partitions at random and by a column ----------------------------------------------------------------------


@dataclass(frozen=True)
class RandomShares:
    """Images at random, in the given shares; whole patients where the dataset names them."""

    names: tuple[str, ...]
    shares: np.ndarray

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        rng = numpy_rng(*address)
        if dataset.patient is not None:
            return deal_patients(self.names, index, dataset.patient[index], self.shares, rng)
        equal, ordered = np.allclose(self.shares, 1 / len(self.names)), rng.permutation(index)
        where = len(self.names) if equal else cuts(self.shares, len(ordered))  # equal but for one image
        return {name: np.sort(part) for name, part in zip(self.names, np.array_split(ordered, where), strict=True)}


class Iid(Sites):
    """Every site has the same distribution and size; images of one patient stay together."""

    partition: Literal["iid"] = Field("iid", description="at random, equally many images at each site")

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> RandomShares:
        names = self.site_names()
        return RandomShares(names, np.full(len(names), 1 / len(names)))


class Quantity(Sites):
    """Images at random, in unequal shares; images of one patient stay together.

    Either `shares`, one number per site (they are scaled to sum to 1), or a power law: the k-th site has
    1 / k ** power of the first site's images.
    """

    partition: Literal["quantity"] = Field("quantity", description="sites of different sizes, labels alike")
    power: float = Field(1.0, ge=0, le=10, description="exponent of the sizes' power law; 0 makes them equal")
    shares: tuple[float, ...] | None = Field(None, description="relative sizes, instead of a power law")

    @model_validator(mode="after")
    def _a_share_for_every_site(self) -> "Quantity":
        if self.shares is None:
            return self
        if len(self.shares) != len(self.site_names()):
            raise ValueError(f"shares has {len(self.shares)} numbers for {len(self.site_names())} sites")
        if min(self.shares) <= 0:
            raise ValueError("shares must all be above 0")
        return self

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> RandomShares:
        names = self.site_names()
        sizes = np.array(self.shares) if self.shares else 1 / np.arange(1, len(names) + 1) ** self.power
        return RandomShares(names, sizes / sizes.sum())


TRIES = 200  #: draws until every site has min_size images
TENTHS = 10  #: strata of values


class Dirichlet(Sites):
    """Small `alpha`: a class lies at few sites; large `alpha`: evenly everywhere. Sizes differ, too.

    Regression labels are divided by tenths of their distribution. Images of one patient may come to several
    sites; they never cross a split.
    """

    partition: Literal["dirichlet"] = Field("dirichlet", description="each class in Dirichlet shares")
    alpha: float = Field(0.5, gt=0, le=1e6, description="concentration: the smaller, the more sites differ")
    min_size: int = Field(10, ge=1, description="fewest training images a site has; shares are drawn until all do")

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> StratumShares:
        names, rng = self.site_names(), numpy_rng(*address)
        edges = np.quantile(dataset.labels[train], np.linspace(0, 1, TENTHS + 1)[1:-1])

        def strata_of(dataset: Dataset, index: np.ndarray) -> np.ndarray:
            labels = dataset.labels[index]
            return labels if dataset.classes else np.searchsorted(edges, labels, side="right")

        for _ in range(TRIES):
            shares = rng.dirichlet(np.full(len(names), self.alpha), size=len(dataset.classes) or TENTHS)
            plan = StratumShares(names, strata_of, shares)
            if min(map(len, plan.assign(dataset, train, (*address, "train")).values())) >= self.min_size:
                return plan
        raise BadInput(
            f"sites.min_size: no draw of {TRIES} left every one of {len(names)} sites {self.min_size} of "
            f"{len(train)} training images at alpha = {self.alpha:g}; lower it or raise sites.alpha"
        )


@dataclass(frozen=True)
class ByColumn:
    """`recorded` maps a site's name to what the dataset calls it."""

    recorded: dict[str, str]

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        assert dataset.site is not None
        found = dataset.site[index].astype(str)
        return {name: np.sort(index[found == value]) for name, value in self.recorded.items()}


class Column(Sites):
    """Every image stays where it was taken; a patient seen at two institutions is at both.

    `names` keeps only these institutions, in this order; `rename` gives some of them another name.
    """

    partition: Literal["column"] = Field("column", description="a site for each value of the column data.site")
    rename: dict[str, str] = Field(default={}, description="new names of sites, by the recorded ones")

    finds_sites: ClassVar[bool] = True

    @model_validator(mode="after")
    def _sites_are_found_not_counted(self) -> "Column":
        if self.count is not None:
            raise ValueError(
                f'remove the line count = {self.count}; with partition = "column" the data say how many sites there '
                "are (sites.names keeps some of them)"
            )
        return self

    def left_out(self, dataset: Dataset) -> dict[str, int]:
        if dataset.site is None or self.names is None:
            return {}
        found = Counter(str(site) for site in dataset.site)
        return {name: count for name, count in sorted(found.items()) if name not in self.names}

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> ByColumn:
        if dataset.site is None:
            raise BadInput(
                "sites.partition: 'column' needs a site for every image, and this source has none; "
                "name a site array or column in [data], or choose another partition"
            )
        known = sorted({str(site) for site in dataset.site})
        chosen = self.names or tuple(known)
        for name in (*chosen, *self.rename):
            if name not in known:
                raise BadInput(
                    f"sites.names: no site '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}"
                )
        recorded = {self.rename.get(name, name): name for name in chosen}
        if len(recorded) < len(chosen):
            raise BadInput("sites.rename: two sites would have the same name; give each its own")
        return ByColumn(recorded)
