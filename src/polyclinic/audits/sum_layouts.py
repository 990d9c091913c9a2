"""Sums of features in a statistics parcel: second moments of all images, or of each class, or Gaussians.

`read_sums` recognises the layout by the names of its tensors; `sums_like` makes a parcel of the same layout from other
images, so that a leak can be planted; `few_images` reads out what is of few images. Few images behind sums are not
hidden:

- *Second moments* X'X of n feature vectors in d dimensions, with n below d, tell the space that the vectors span: a
  candidate that lies in it was among them. With more vectors their *leverage* x'(X'X)^-1 x still tells: that of a
  vector among them is at most 1, and smaller than that of a new one. Leverage near 1 is an outlier.
- Of a class with one image the sum is its features. Of two images, sum and second moments give both.
- *Histograms of scores* with many bins hold the scores of a small site one by one. Whoever has the network computes the
  score of a candidate, and looks whether its bin counts an image of its label; every further round is another look.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedpft import Mixture, fit
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import RESOLUTION, Moments
from polyclinic.randomness import torch_rng

RANK = 1e-6  #: eigenvalues below this share of the largest are rounding
OUTLIER = 0.9  #: leverage of a vector that has a direction of its own


def leverage(moments: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Leverage [M] of vectors [M, d] under second moments X'X [d, d], and the share [M] of each that lies outside the
    space that X spans (0 for a vector of X)."""
    if moments.dim() != 2 or moments.shape[0] != moments.shape[1] or moments.shape[0] != vectors.shape[1]:
        raise BadInput(f"moments: {tuple(moments.shape)} is no square of the {vectors.shape[1]} features; give X'X")
    values, axes = torch.linalg.eigh(moments.double())
    known = values > RANK * values[-1].clamp(min=1e-300)
    along = vectors.double() @ axes
    inside = along[:, known].square() / values[known]
    outside = along[:, ~known].square().sum(1) / along.square().sum(1).clamp(min=1e-300)
    return inside.sum(1), outside


def moment_scores(moments: Tensor, vectors: Tensor) -> Tensor:
    """Membership scores [M], higher where a vector is likely among those summed: first what lies outside of their
    space, then the leverage."""
    inside, outside = leverage(moments, vectors)
    return -(outside / (outside + RANK)) - 1e-3 * inside.clamp(max=1e3) / 1e3 - 0.1 * inside / (1 + inside)


def read_pair(total: Tensor, products: Tensor) -> Tensor:
    """The two vectors [2, d] behind their sum [d] and their second moments [d, d].

    What is left without the mean is half the square of their difference.
    """
    values, axes = torch.linalg.eigh(products.double() - torch.outer(total, total).double() / 2)
    apart = axes[:, -1] * (2 * values[-1].clamp(min=0)).sqrt()
    return torch.stack([total.double() + apart, total.double() - apart]) / 2


def histogram_scores(counts: Tensor, scores: Tensor, edges: Tensor) -> Tensor:
    """Membership scores [M] of candidates with `scores` [M] from a histogram [K] of one label, whose `edges` [K - 1]
    ascend. A candidate that falls into an empty bin was not there; ties go to rarer bins."""
    found = counts.double()[torch.bucketize(scores.double().contiguous(), edges.double())]
    return torch.where(found > 0, -found / counts.double().sum().clamp(min=1), -2.0)


ALL = -1  #: in place of a class, where sums are over all classes
ITERATIONS = 10  #: of a planted mixture


@dataclass(frozen=True)
class MomentMatrices:
    """Second moments [D + 1, D + 1] of (1, features), of each class or of all."""

    by_class: Mapping[int, Tensor]

    @property
    def images(self) -> int:
        return sum(round(float(one[0, 0])) for one in self.by_class.values())

    def scores(self, features: Tensor, labels: Tensor) -> Tensor:
        """Membership scores [M] of features [M, D]: how much of each lies outside the space of the sums."""
        return self._each(features, labels, moment_scores)

    def leverages(self, features: Tensor, labels: Tensor) -> Tensor:
        """Leverage [M]: near 1 for an image that has a direction of its own."""
        return self._each(features, labels, lambda matrix, rows: leverage(matrix, rows)[0])

    def _each(self, features: Tensor, labels: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        rows = torch.cat([torch.ones(len(features), 1, dtype=torch.float64), features.double()], 1)
        found = torch.full((len(rows),), -1e9, dtype=torch.float64)
        for label, matrix in self.by_class.items():
            chosen = torch.ones(len(rows), dtype=torch.bool) if label == ALL else labels == label
            if bool(chosen.any()) and float(matrix[0, 0]) > 0:
                found[chosen] = score(matrix, rows[chosen])
        return found


@dataclass(frozen=True)
class Gaussians:
    """A mixture of Gaussians for each class: an image among those it was fitted to is likelier under it."""

    by_class: Mapping[int, Mixture]
    images: int

    def scores(self, features: Tensor, labels: Tensor) -> Tensor:
        """The log density [M] of features [M, D] under the mixture of their class."""
        found = torch.full((len(features),), -1e9, dtype=torch.float64)
        for label, mixture in self.by_class.items():
            chosen = labels == label
            if bool(chosen.any()):
                found[chosen] = mixture.log_densities(features[chosen].double()).logsumexp(1)
        return found


def read_sums(parcel: Parcel) -> MomentMatrices | Gaussians | None:
    """What the sums of a parcel are; None where it holds no sums of features that are known here."""
    sent = parcel.tensors
    if {"products", "cross", "squares"} <= sent.keys():
        return MomentMatrices({ALL: one_round.Moments(sent["products"], sent["cross"], sent["squares"]).in_units()[0]})
    if {"counts", "first", "second"} <= sent.keys():
        return _of_classes(sent["counts"].double(), sent["first"].double(), sent["second"].double())
    names = sorted({int(name.split("/")[0]) for name in sent if name.endswith("/means") and name[0].isdigit()})
    if names:
        mixtures = {n: Mixture(*(sent[f"{n}/{part}"].double() for part in Mixture._fields)) for n in names}
        return Gaussians(mixtures, int(parcel.metadata.get("samples", 0)))
    return None


def names_of_sums(parcel: Parcel) -> set[str]:
    """The tensors that `read_sums` reads; none where it knows no sums in the parcel."""
    sent = set(parcel.tensors)
    for layout in ({"products", "cross", "squares"}, {"counts", "first", "second"}):
        if layout <= sent:
            return layout
    return {name for name in sent if name.split("/")[0].isdigit() and name.split("/")[-1] in Mixture._fields}


def _of_classes(counts: Tensor, first: Tensor, second: Tensor) -> MomentMatrices | Gaussians:
    """Counts [C], sums [C, D], and squares [C, D] or products [C, D (D + 1) / 2], in whole numbers."""
    present = [label for label in range(len(counts)) if float(counts[label]) > 0]
    width = first.shape[1]
    if second.shape[1] == width:
        sizes = counts.clamp(min=1)[:, None]
        means = first * RESOLUTION / sizes
        spread = (second * RESOLUTION**2 / sizes - means.square()).clamp(min=1e-6)
        alone = {n: Mixture(torch.ones(1).double(), means[n][None], spread[n][None]) for n in present}
        return Gaussians(alone, int(counts.sum()))
    matrices = {}
    for label in present:
        matrix = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        matrix[1:, 1:] = one_round.full(second[label], width) * RESOLUTION**2
        matrix[0, 1:] = matrix[1:, 0] = first[label] * RESOLUTION
        matrix[0, 0] = counts[label]
        matrices[label] = matrix
    return MomentMatrices(matrices)


def sums_like(parcel: Parcel, features: np.ndarray, labels: Tensor) -> Parcel:
    """The same kind of sums of other images, features [N, D] and labels [N]."""
    sent = parcel.tensors
    if "products" in sent:
        outputs = sent["cross"].shape[1]
        targets = F.one_hot(labels.long().clamp(0, outputs - 1), outputs).double()
        return Parcel(parcel.kind, one_round.moments(features, targets).tensors(), {"samples": len(features)})
    if "counts" in sent:
        of_class = [features[(labels == label).numpy()] for label in range(len(sent["counts"]))]
        squares = sent["second"].shape[1] == features.shape[1]
        pairs = [(one_round.sums_and_squares if squares else one_round.sums_and_products)(rows) for rows in of_class]
        tensors = {
            "counts": torch.tensor([len(rows) for rows in of_class]),
            "first": torch.stack([first for first, _ in pairs]),
            "second": torch.stack([second for _, second in pairs]),
        }
        return Parcel(parcel.kind, tensors, {"samples": len(features)})
    return _mixtures_like(parcel, features, labels)


def _mixtures_like(parcel: Parcel, features: np.ndarray, labels: Tensor) -> Parcel:
    """Mixtures of as many components, for each class that is there."""
    made: dict[str, Tensor] = {}
    for label in sorted(set(labels.long().tolist())):
        rows = torch.from_numpy(np.array(features[(labels == label).numpy()])).double()
        sent = parcel.tensors.get(f"{label}/shares")
        components = max(1, min(1 if sent is None else len(sent), len(rows) // 2))
        mixture = fit(rows, components, ITERATIONS, torch_rng("planted mixture", label))
        made |= {f"{label}/{part}": value.float() for part, value in mixture._asdict().items()}
    return Parcel(parcel.kind, made, {"samples": len(features)})


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
