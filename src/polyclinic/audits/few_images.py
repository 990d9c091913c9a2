"""Features of single images, or means of few, out of a statistics parcel.

Of a class with one image the sum is its features. Of two images, sum and second moments give both. Of more, the mean is
taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.attacks.sums import read_pair
from polyclinic.audits.sum_layouts import ALL, Gaussians, MomentMatrices, read_sums
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.moments import Moments

MOST = 8  #: images of a sum whose mean is still looked at: the mean of more resembles none of them


@dataclass(frozen=True)
class FewImages:
    """Vectors [K, D] out of the sums of `images` images of a class (or `ALL`): each image's own, or their mean."""

    label: int
    vectors: Tensor
    images: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.label, len(self.vectors), self.images

    def is_of(self, labels: Tensor) -> Tensor:
        """Which labels [N] are of this class, bool [N]."""
        return torch.ones(len(labels), dtype=torch.bool) if self.label == ALL else labels == self.label


def few_images(parcel: Parcel) -> list[FewImages]:
    """The sums of a parcel that are of few images; none where it holds no sums of features that are known here."""
    return [group for group in _groups(parcel) if 0 < group.images <= MOST]


def _groups(parcel: Parcel) -> Iterator[FewImages]:
    sums = read_sums(parcel)
    if isinstance(sums, Gaussians):
        yield from _means(parcel, sums)
    elif isinstance(sums, MomentMatrices) and "cross" in parcel.tensors:
        sent = Moments(*(parcel.tensors[name] for name in ("products", "cross", "squares")))
        yield from _of_columns(*sent.in_units()[:2])
    elif isinstance(sums, MomentMatrices):
        yield from (_of_matrix(label, matrix) for label, matrix in sums.by_class.items())


def _means(parcel: Parcel, sums: Gaussians) -> Iterator[FewImages]:
    """Means of Gaussians, of classes whose number of images is told."""
    told = parcel.tensors.get("counts")
    counts = parcel.metadata.get("counts", []) if told is None else told.tolist()
    for label, mixture in sums.by_class.items():
        if label < len(counts):
            yield FewImages(label, mixture.means.double(), int(counts[label]))


def _of_columns(matrix: Tensor, cross: Tensor) -> Iterator[FewImages]:
    """Classes have a column each in `cross` [D + 1, T], whose first row counts their images; a regression has none."""
    counts = cross[0].round()
    if cross.shape[1] < 2 or not torch.allclose(counts, cross[0], atol=1e-3) or counts.sum() != matrix[0, 0].round():
        yield _of_matrix(ALL, matrix)
        return
    single = [label for label, count in enumerate(counts.tolist()) if count == 1]
    rest = [label for label, count in enumerate(counts.tolist()) if count > 1]
    known = cross[:, single]  # (1, features) of each image that is alone in its class
    if len(rest) == 1:  # what the others leave of the second moments is this class's
        yield _of_matrix(rest[0], matrix - known @ known.T)
    else:
        yield from (FewImages(label, cross[None, 1:, label] / counts[label], int(counts[label])) for label in rest)
    yield from (FewImages(label, cross[None, 1:, label], 1) for label in single)


def _of_matrix(label: int, matrix: Tensor) -> FewImages:
    """Out of second moments [D + 1, D + 1] of (1, features)."""
    images, total = round(float(matrix[0, 0])), matrix[0, 1:]
    vectors = read_pair(total, matrix[1:, 1:]) if images == 2 else total[None] / max(1, images)
    return FewImages(label, vectors, images)
