"""Subgroup bias: one small site with unbalanced subgroups inside a class, and sites that could help it (FELICIA)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites, StratumShares
from polyclinic.errors import BadInput
from polyclinic.settings import nearest


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
    def _somebody_to_help(self) -> SubgroupBias:
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
        self._refuse_what_is_not_there(strata, there, wanted.sum(axis=1))
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
                f"sites.subgroup: {named} must be a sub-group of one class{nearest(self._names()[0], groups)}; "
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

    def _refuse_what_is_not_there(self, strata: list, there: np.ndarray, wanted: np.ndarray) -> None:
        for (_, group), have, want in zip(strata, there, wanted, strict=True):
            if want > have:
                raise BadInput(
                    f"sites.per_class: {self.per_class} images of each class need {int(want)} of '{group}', "
                    f"and the training set has {have}; lower it"
                )
