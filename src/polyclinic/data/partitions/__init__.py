"""Partitions: how images are assigned to sites. A class for each, and one line in `PARTITIONS`."""

from collections.abc import Mapping

import numpy as np

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Column, Dirichlet, Iid, Plan, Quantity, Sites
from polyclinic.data.partitions.clusters import Clusters
from polyclinic.data.partitions.label_skew import LabelSkew, SubgroupBias
from polyclinic.errors import BadInput
from polyclinic.registry import Registry

PARTITIONS: Registry[type[Sites]] = Registry(
    "polyclinic.partitions",
    {
        "iid": Iid,
        "label-skew": LabelSkew,
        "dirichlet": Dirichlet,
        "quantity": Quantity,
        "column": Column,
        "clusters": Clusters,
        "subgroup-bias": SubgroupBias,
    },
    base=Sites,
)

__all__ = ["PARTITIONS", "Plan", "Sites", "assign_to_sites"]


def assign_to_sites(
    sites: Sites, dataset: Dataset, splits: Mapping[str, np.ndarray], seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """Indices into `dataset` of each site's part of each split: `result[site][split]`, sites in order.

    `splits` holds the indices of "train" and of any other split. The plan is made from "train"; every other
    split is spread by the same plan, so each site's validation and test images follow its own training
    distribution, and the pooled test set is the union of the sites' test sets.
    """
    plan = sites.plan(dataset, np.asarray(splits["train"]), (seed, "partition"))
    parts: dict[str, dict[str, np.ndarray]] = {}
    for split, index in splits.items():
        assigned = plan.assign(dataset, np.asarray(index), (seed, "partition", split))
        used = np.concatenate([np.asarray(part, dtype=np.int64) for part in assigned.values()] or [index[:0]])
        if len(np.unique(used)) < len(used) or not np.isin(used, index).all():
            raise BadInput(
                f"sites.partition: '{sites.partition}' assigns an image twice, or one of another split; `assign` must "
                "give every index that it gets to one site at most"
            )
        for site, part in assigned.items():
            parts.setdefault(site, {})[split] = part
    empty = [site for site, part in parts.items() if len(part["train"]) == 0]
    if empty:
        named = ", ".join(empty[:4]) + (f" and {len(empty) - 4} more" if len(empty) > 4 else "")
        raise BadInput(
            f"sites.partition: '{sites.partition}' leaves {named} without training images; "
            "take fewer sites or more images"
        )
    return parts
