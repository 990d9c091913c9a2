"""How sums of features come in a statistics parcel: second moments of all images, or of each class, or Gaussians.

`read_sums` recognises the layout by the names of its tensors; `sums_like` makes a parcel of the same layout from other
images, so that a leak can be planted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.sums import leverage, moment_scores
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedpft import Mixture, fit
from polyclinic.methods.shared import moments
from polyclinic.methods.shared.moments import RESOLUTION
from polyclinic.randomness import torch_rng

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
        return MomentMatrices({ALL: moments.Moments(sent["products"], sent["cross"], sent["squares"]).in_units()[0]})
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
        matrix[1:, 1:] = moments.full(second[label], width) * RESOLUTION**2
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
        return Parcel(parcel.kind, moments.moments(features, targets).tensors(), {"samples": len(features)})
    if "counts" in sent:
        of_class = [features[(labels == label).numpy()] for label in range(len(sent["counts"]))]
        squares = sent["second"].shape[1] == features.shape[1]
        pairs = [(moments.sums_and_squares if squares else moments.sums_and_products)(rows) for rows in of_class]
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
