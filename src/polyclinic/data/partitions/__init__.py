"""How images are spread over sites: one file a partition, and one line here.

They read a `Dataset` and give indices; they may import `errors`, `settings`, `randomness` and `data.heterogeneity`.
"""

from polyclinic.data.partitions.base import Plan, Sites, spread
from polyclinic.data.partitions.iid import Iid
from polyclinic.data.partitions.label_skew import LabelSkew

PARTITIONS: dict[str, type[Sites]] = {
    "iid": Iid,
    "label-skew": LabelSkew,
}

__all__ = ["PARTITIONS", "Plan", "Sites", "spread"]
