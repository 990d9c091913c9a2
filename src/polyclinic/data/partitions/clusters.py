"""Feature skew: k-means clusters of similar images, partly mixed (FELICIA)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites, StratumShares
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

COMPONENTS = 50  # as in FELICIA
FIT_IMAGES = 2000  # images the components and clusters are found on
FIT_SIDE = 32  # images are averaged down to this side: clusters are about the whole, not about grain
CHUNK = 1000  # images in float at a time
TRIES = 20  # starts of k-means, of which a few may end with an empty cluster


@dataclass(frozen=True)
class Clustering:
    """Principal components of some images, and clusters in their coordinates.

    mean float32 [D], components float32 [D, P], centres float32 [K, P]
    """

    mean: np.ndarray
    components: np.ndarray
    centres: np.ndarray

    def nearest(self, images: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The cluster of each image at `index`, int64 [len(index)]; images: uint8 [N, C, H, W]."""
        found = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(index), CHUNK):
            pixels = small_pixels(images[index[start : start + CHUNK]])
            found.append(scipy.cluster.vq.vq((pixels - self.mean) @ self.components, self.centres)[0].astype(np.int64))
        return np.concatenate(found)


def small_pixels(images: np.ndarray) -> np.ndarray:
    """float32 [N, D] in [0, 1] from uint8 [N, C, H, W], averaged over blocks down to FIT_SIDE at most."""
    n, channels, height, width = images.shape
    block = -(-max(height, width) // FIT_SIDE)
    images = images[:, :, : height // block * block, : width // block * block]
    blocks = images.reshape(n, channels, height // block, block, width // block, block)
    return blocks.mean(axis=(3, 5), dtype=np.float32).reshape(n, -1) / 255


def fit_clusters(pixels: np.ndarray, count: int, rng: np.random.Generator) -> Clustering:
    """PCA, then k-means on the leading components; clusters in the order of their first coordinate."""
    mean = pixels.mean(axis=0)
    components = leading_directions(pixels - mean)
    coordinates = (pixels - mean) @ components
    different = len(np.unique(coordinates, axis=0)) if coordinates.size else 1
    for _ in range(TRIES if different >= count else 0):
        try:
            centres, _ = scipy.cluster.vq.kmeans2(coordinates, count, minit="++", iter=50, missing="raise", seed=rng)
        except scipy.cluster.vq.ClusterError:  # an empty cluster: start again from other centres
            continue
        return Clustering(mean, components, centres[np.argsort(centres[:, 0])])
    raise BadInput(f"sites.count: found no {count} clusters in {len(pixels)} images; take fewer sites")


def leading_directions(centred: np.ndarray) -> np.ndarray:
    """Up to 50 leading directions, float32 [D, P], each with its largest entry positive."""
    gram = centred @ centred.T
    wanted = min(COMPONENTS, len(gram) - 1)
    _, vectors = scipy.linalg.eigh(gram.astype(np.float64), subset_by_index=(len(gram) - wanted, len(gram) - 1))
    directions = centred.T @ vectors[:, ::-1].astype(np.float32)
    length = np.linalg.norm(directions, axis=0)
    directions = directions[:, length > 1e-6 * length.max()]
    directions /= np.linalg.norm(directions, axis=0)
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=0)[None], axis=0)
    return directions * np.sign(largest)


class Clusters(Sites):
    """Site k holds the k-th cluster of similar images, less the part that is exchanged for others' images.

    As in FELICIA: 50 principal components, k-means, found on the training images and applied to all. With two
    sites, `mixing` 0 separates them fully and 50 makes them alike. Sites are as large as their clusters.
    Images of one patient may come to several sites; they never cross a split.
    """

    partition: Literal["clusters"] = Field("clusters", description="similar images lie at one site")
    mixing: float = Field(0.0, ge=0, le=100, description="percentage of each cluster spread evenly over other sites")
    per_class: bool = Field(True, description="cluster each class by itself: sites differ in looks, not in labels")

    @model_validator(mode="after")
    def _several_clusters(self) -> "Clusters":
        if len(self.site_names()) < 2:
            raise ValueError("the clusters partition needs at least two sites")
        return self

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> StratumShares:
        names = self.site_names()
        groups = max(1, len(dataset.classes)) if self.per_class else 1
        found = [self._fit(dataset, train, group, groups, address) for group in range(groups)]

        def strata_of(dataset: Dataset, index: np.ndarray) -> np.ndarray:
            strata = np.zeros(len(index), dtype=np.int64)
            for group, clustering in enumerate(found):
                members = _members(dataset, index, group, groups)
                strata[members] = group * len(names) + clustering.nearest(dataset.images, index[members])
            return strata

        return StratumShares(names, strata_of, np.tile(self._exchange(len(names)), (groups, 1)))

    def _fit(self, dataset: Dataset, train: np.ndarray, group: int, groups: int, address: Address) -> Clustering:
        members = train[_members(dataset, train, group, groups)]
        if len(members) < 2 * len(self.site_names()):
            what = f"class '{dataset.classes[group]}'" if groups > 1 else "the training set"
            raise BadInput(
                f"sites.per_class: {what} has {len(members)} images, too few for {len(self.site_names())} "
                "clusters; set it to false or take fewer sites"
            )
        rng = numpy_rng(*address, "clusters", group)
        some = np.sort(rng.permutation(members)[:FIT_IMAGES])
        return fit_clusters(small_pixels(dataset.images[some]), len(self.site_names()), rng)

    def _exchange(self, count: int) -> np.ndarray:
        """Shares [clusters, sites]: `mixing` % of each row spread over the other sites."""
        away = self.mixing / 100
        return np.eye(count) * (1 - away) + (1 - np.eye(count)) * away / (count - 1)


def _members(dataset: Dataset, index: np.ndarray, group: int, groups: int) -> np.ndarray:
    """bool [len(index)]: which images belong to the group, a class where there are several groups."""
    return dataset.labels[index] == group if groups > 1 else np.ones(len(index), dtype=bool)
