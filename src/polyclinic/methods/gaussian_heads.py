"""Gaussian heads: classes as Gaussians in the space of frozen features, from sums that the sites send once.

FedCGS (Guan et al., AAAI 2025) and GH-OFL (ICLR 2026) send class-wise sums and second moments, from which the head of
Gaussian discriminant analysis follows: with one covariance for all classes (`lda`; `fisher` takes all classes as
equally frequent), with a variance of each feature and class (`naive-bayes`), or a covariance of each class (`qda`).
Covariances are shrunk by OAS (Chen et al. 2010), which needs nothing but them and the number of images.
"""

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.cohort import check_classes, check_more_images_than
from polyclinic.federation.operation import AS_LARGE_AS_A_NETWORK
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.method import Federation, Parcel, ParcelRejected, Site, Weights, operation
from polyclinic.methods.shared.one_round import RESOLUTION, OneRound, head_shape

LEAST_VARIANCE = (4 * RESOLUTION) ** 2  # below that a feature is mostly rounding


class GaussianHeads(OneRound):
    name: Literal["gaussian-heads"] = "gaussian-heads"
    rule: Literal["lda", "fisher", "naive-bayes", "qda"] = Field(
        "lda", description="what the classes' Gaussians have in common: all but the mean (lda, fisher), or nothing"
    )

    summary: ClassVar[str] = "one round: classes are Gaussians of an encoder's features, from class sums and products"
    SUMMED: ClassVar[dict[str, str]] = {**OneRound.SUMMED, "give_class_sums": "sum"}

    @model_validator(mode="after")
    def _numbers_of_linear_heads(self) -> "GaussianHeads":
        if self.numbers is not None and self.head != "linear":
            raise ValueError(f"numbers: a projection is for rule lda and fisher, not {self.rule}; leave numbers out")
        return self

    @property
    def head(self) -> Literal["linear", "diagonal", "quadratic"]:
        return {"naive-bayes": "diagonal", "qda": "quadratic"}.get(self.rule, "linear")  # type: ignore[return-value]

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            if self.head == "linear":
                state.weights = self.linear_head(federation, self.head_of(self.collect(federation)))
            else:
                fit = naive_bayes if self.rule == "naive-bayes" else quadratic
                state.weights = fit(*self.collect_by_class(federation))
            federation.evaluate(state.weights)
        return state.weights

    def head_of(self, sums: one_round.Moments) -> Tensor:
        """The linear head float64 [k + 1, C] that sums give: offset, then slopes."""
        return discriminant(*class_moments(sums), priors=self.rule == "lda")

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        super().check_reply(federation, call, reply)
        if call.operation == "give_class_sums":
            width, classes = head_shape(federation)
            second = width if self.rule == "naive-bayes" else width * (width + 1) // 2
            wanted = {"counts": (classes,), "first": (classes, width), "second": (classes, second)}
            sent = reply.parcel("statistics").tensors
            found = {name: tuple(t.shape) for name, t in sent.items() if t.dtype == torch.int64}
            if found != wanted or len(sent) != len(wanted) or bool((sent["counts"] < 0).any()):
                raise ParcelRejected(f"statistics: the sums are of another form than {wanted}")
            self.check_class_sums(federation, call.operation, reply.parcel("statistics"))

    def check_class_sums(self, federation: Federation, operation: str, parcel: Parcel) -> None:
        """ParcelRejected for sums of more images than fit, or that no images within the features' limit have."""
        counts, most = parcel.tensors["counts"], one_round.most_images(federation, operation)
        if int(counts.max()) > most or not 0 < int(counts.sum()) <= most:
            raise ParcelRejected(f"statistics: the sums are of no image or of more than {most:,}")
        one_round.check_samples(federation, operation, parcel, int(counts.sum()))
        first, second = parcel.tensors["first"].double(), parcel.tensors["second"].double()
        number, width = counts.double()[:, None], first.shape[1]
        row, column = torch.triu_indices(width, width)
        squares = second if self.rule == "naive-bayes" else second[:, row == column]
        limit = number * (one_round.LIMIT / RESOLUTION) ** 2
        fits = (squares >= 0) & (squares <= limit) & (first.square() <= number * squares * one_round.SLACK)
        if not bool(fits.all()) or not bool((second.abs() <= limit).all()):
            raise ParcelRejected("statistics: the sums are those of no images")

    def collect_by_class(self, federation: Federation) -> tuple[Tensor, Tensor, Tensor]:
        """Counts [C], sums [C, D] and second moments, [C, D] or [C, D (D + 1) / 2], of all sites' classes, int64."""
        width, _ = head_shape(federation)
        total: dict[str, Tensor] = {}
        counts = {}
        for reply in federation.ask_all("give_class_sums"):
            sent = reply.parcel("statistics").tensors
            counts[reply.site] = sent["counts"]
            total = {name: tensor + total.get(name, 0) for name, tensor in sent.items()}
        one_round.check_count(sum(int(each.sum()) for each in counts.values()))
        one_round.warn_of_small_sites(federation, {site: int(each.sum()) for site, each in counts.items()}, width)
        one_round.warn_of_small_classes(federation, counts)
        return total["counts"], total["first"], total["second"]

    @operation("statistics", most={"statistics": AS_LARGE_AS_A_NETWORK})
    def give_class_sums(self, site: Site) -> Parcel:
        """Counts, sums and second moments of the features of each class."""
        check_classes(site)
        features, labels = self.features(site), np.asarray(site.data.train.labels)
        rows = [features[labels == place] for place in range(len(site.trainer.target.classes))]
        if self.rule != "naive-bayes":
            for one in rows:
                check_more_images_than(features.shape[1], site, len(one))
        sums = one_round.sums_and_squares if self.rule == "naive-bayes" else one_round.sums_and_products
        pairs = [sums(one, site.trainer.device) for one in rows]
        tensors = {
            "counts": torch.tensor([len(one) for one in rows]),
            "first": torch.stack([first for first, _ in pairs]),
            "second": torch.stack([second for _, second in pairs]),
        }
        return Parcel("statistics", tensors, {"samples": len(labels)})


def class_moments(sums: one_round.Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Counts [C], means [C, D] and the covariance within classes [D, D], float64."""
    matrix, cross, _ = sums.in_units()
    counts = cross[0]
    means = cross[1:].T / counts.clamp(min=1)[:, None]
    within = (matrix[1:, 1:] - (means * counts[:, None]).T @ means) / sums.count
    return counts, means, within


def discriminant(counts: Tensor, means: Tensor, within: Tensor, *, priors: bool) -> Tensor:
    """The head [D + 1, C] of linear discriminant analysis: offset, then slopes."""
    scale = within.diag().clamp(min=LEAST_VARIANCE).sqrt()
    inverse = torch.linalg.inv(shrunk(within / torch.outer(scale, scale), float(counts.sum())))
    slopes = inverse / torch.outer(scale, scale) @ means.T
    offset = -0.5 * (means.T * slopes).sum(0) + log_priors(counts, equal=not priors)
    return torch.cat([offset[None], slopes])


def naive_bayes(counts: Tensor, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """The weights of a diagonal head: a Gaussian of each feature and class."""
    sizes = counts.double()[:, None]
    means = first.double() * RESOLUTION / sizes.clamp(min=1)
    variances = second.double() * RESOLUTION**2 / sizes.clamp(min=1) - means.square()
    pooled = (variances * sizes).sum(0) / sizes.sum()
    # as many images as two count for the variance of all classes together: a class of one image has none
    variances = ((variances * sizes + 2 * pooled) / (sizes + 2)).clamp(min=LEAST_VARIANCE)
    center = (means * sizes).sum(0) / sizes.sum()
    means = means - center
    bias = log_priors(counts) - 0.5 * (variances.log() + means.square() / variances).sum(1)
    return _head(center, means / variances, bias, -0.5 / variances)


def quadratic(counts: Tensor, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """The weights of a quadratic head: a Gaussian of each class, its covariance shrunk towards that of all classes."""
    sizes, width = counts.double(), first.shape[1]
    means = first.double() * RESOLUTION / sizes.clamp(min=1)[:, None]
    products = [one_round.full(one, width).double() * RESOLUTION**2 for one in second]
    covariances = [p / n - torch.outer(m, m) for p, n, m in zip(products, sizes.clamp(min=1), means, strict=True)]
    pooled = sum((c * n for c, n in zip(covariances, sizes, strict=True)), torch.zeros(width, width)) / sizes.sum()
    scale = pooled.diag().clamp(min=LEAST_VARIANCE).sqrt()
    values, vectors = torch.linalg.eigh(shrunk(pooled / torch.outer(scale, scale), float(sizes.sum())))
    whiten = vectors * values.rsqrt() @ vectors.T / scale  # rows: whitened numbers, columns: features
    center = (means * sizes[:, None]).sum(0) / sizes.sum()
    inner = [shrunk(whiten @ c @ whiten.T, float(n)) for c, n in zip(covariances, sizes, strict=True)]
    inverses = torch.stack([whiten.T @ torch.linalg.inv(one) @ whiten for one in inner])
    means = means - center
    slopes = torch.einsum("cij,cj->ci", inverses, means)
    volumes = torch.stack([torch.logdet(one) for one in inner])
    bias = log_priors(counts) - 0.5 * (volumes + (slopes * means).sum(1))
    return _head(center, slopes, bias, -0.5 * inverses)


def shrunk(covariance: Tensor, count: float) -> Tensor:
    """OAS: the covariance drawn towards a multiple of the identity, more so the fewer images it is of."""
    width = len(covariance)
    trace, squares = float(covariance.diag().sum()), float(covariance.square().sum())
    difference = (count + 1 - 2 / width) * (squares - trace**2 / width)
    share = min(1.0, ((1 - 2 / width) * squares + trace**2) / difference) if difference > 0 else 1.0
    level = max(trace / width, LEAST_VARIANCE)
    return (1 - share) * covariance + share * level * torch.eye(width, dtype=covariance.dtype)


def log_priors(counts: Tensor, *, equal: bool = False) -> Tensor:
    """Logarithms of the classes' frequencies; a class that nobody has is never chosen."""
    counts = counts.double()
    shares = (counts > 0).double() if equal else counts / counts.sum()
    return shares.clamp(min=1e-30).log()


def _head(center: Tensor, slopes: Tensor, bias: Tensor, products: Tensor) -> dict[str, Tensor]:
    named = {"fc.center": center, "fc.weight": slopes, "fc.bias": bias, "fc.products": products}
    return {name: tensor.float().contiguous() for name, tensor in named.items()}
