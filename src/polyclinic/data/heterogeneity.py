"""Heterogeneity of sites: the Kolmogorov-Smirnov (KS) statistic between their label distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: share of what a guess without the site gets wrong, at most, that the site leaves open where it nearly is the class
LEFT_OPEN = 0.25
#: images below which sites differ by chance
ENOUGH_IMAGES = 20
#: bins of a histogram of values
VALUE_BINS = 24


def pairwise_ks(labels_by_site: Mapping[str, np.ndarray]) -> np.ndarray:
    """KS statistic of every pair of sites, float64 [K, K], symmetric, zero on the diagonal.

    It is the largest gap between the two cumulative distributions: 0 where they are the same, 1 where all
    labels of one site lie below all labels of the other. For two classes it is the difference of the class
    shares. For more classes it is taken on class indices: natural where classes are ordered (grades); where
    they are not, its size depends on the order in which they are listed, and only its zero does not.
    """
    cumulative = _cumulative_shares(list(labels_by_site.values()))
    table = np.zeros((len(cumulative), len(cumulative)))
    for i in range(1, len(cumulative)):
        table[i, :i] = table[:i, i] = np.abs(cumulative[:i] - cumulative[i]).max(axis=1)
    return table


def _cumulative_shares(labels: list[np.ndarray]) -> np.ndarray:
    """Share of each site's labels at or below each value that occurs anywhere, float64 [K, values]."""
    values, which = np.unique(np.concatenate(labels), return_inverse=True)
    site = np.repeat(np.arange(len(labels)), [len(each) for each in labels])
    counts = np.zeros((len(labels), len(values)))
    np.add.at(counts, (site, which), 1)
    return np.cumsum(counts, axis=1) / np.maximum(1, counts.sum(axis=1, keepdims=True))


def label_histograms(labels_by_site: Mapping[str, np.ndarray], classes: int) -> dict[str, Any]:
    """Number of labels of each site in each bin, `per_site`: a bin for each class, or bins between `edges`."""
    if classes:
        counts = {site: np.bincount(own, minlength=classes).tolist() for site, own in labels_by_site.items()}
        return {"edges": None, "per_site": counts}
    edges = np.histogram_bin_edges(np.concatenate(list(labels_by_site.values())), bins=VALUE_BINS)
    counts = {site: np.histogram(own, edges)[0].tolist() for site, own in labels_by_site.items()}
    return {"edges": [float(edge) for edge in edges], "per_site": counts}


def mean_ks(labels_by_site: Mapping[str, np.ndarray]) -> float:
    """Mean of `pairwise_ks` over the pairs of sites; 0 for a single site."""
    table = pairwise_ks(labels_by_site)
    pairs = table[np.triu_indices(len(table), k=1)]
    return float(pairs.mean()) if len(pairs) else 0.0


def masked_share(masks: np.ndarray | None) -> float:
    """The share of pixels inside a mask, of masks [N, H, W] read one by one; 0 where there are none."""
    return float(np.mean([np.mean(mask > 0) for mask in masks])) if masks is not None and len(masks) else 0.0


def tells_class(counts: Sequence[Sequence[int] | np.ndarray]) -> tuple[float, float] | None:
    """The share of images, counted by site and class, whose class the site alone tells, and that of the most frequent
    class; None unless the site tells nearly all, and several classes and sites have images."""
    table = np.array([row for row in counts if sum(row)], float)
    if len(table) < 2 or (table.sum(0) > 0).sum() < 2 or table.sum() < ENOUGH_IMAGES:
        return None
    told, most = float(table.max(1).sum() / table.sum()), float(table.sum(0).max() / table.sum())
    return (told, most) if 1 - told <= (1 - most) * LEFT_OPEN else None
