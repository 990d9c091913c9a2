"""How much sites differ: the Kolmogorov-Smirnov (KS) statistic between their label distributions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import ks_2samp


def pairwise_ks(labels_by_site: Mapping[str, np.ndarray]) -> np.ndarray:
    """KS statistic of every pair of sites, float64 [K, K], symmetric with a zero diagonal, in the mapping's order.

    0 means the same distribution, 1 that no value lies in between the two sites' ranges. For two classes it is the
    difference of their class shares. For more classes it is taken on class indices, so it is meaningful
    where the classes are ordered (grades); for unordered classes it depends on their order, and only its zero does not.
    """
    labels = list(labels_by_site.values())
    table = np.zeros((len(labels), len(labels)))
    for i in range(len(labels)):
        for j in range(i):
            table[i, j] = table[j, i] = ks_2samp(labels[i], labels[j], method="asymp").statistic
    return table


def mean_ks(labels_by_site: Mapping[str, np.ndarray]) -> float:
    """Mean of `pairwise_ks` over the pairs of sites; 0 for a single site."""
    table = pairwise_ks(labels_by_site)
    pairs = table[np.triu_indices(len(table), k=1)]
    return float(pairs.mean()) if len(pairs) else 0.0
