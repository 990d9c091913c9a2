"""Methods of one round: features of an encoder at each site, sums that leave, one head that comes out.

A feature is rounded to a multiple of 2^-12 and limited to +-128, so it is a whole number of at most 19 bits and a sign.
Products have 38 bits, and sums of up to 2^24 images fit into int64. Sums of whole numbers do not depend on their order:
any partition of the same images, over any number of sites, gives the same sums, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.cohort import check_classes, check_more_images_than
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import AS_LARGE_AS_A_NETWORK
from polyclinic.methods.shared.method import Federation, Method, Site, Traits, all_sites, operation
from polyclinic.models import Encoded
from polyclinic.models.encoders import kept_features
from polyclinic.randomness import torch_rng
from polyclinic.registry import notice_once
from polyclinic.tasks.regression import scale

RESOLUTION = 2.0**-12  #: of features
LIMIT = 2.0**7  #: features beyond it count as if they were it
TARGET_RESOLUTION = 2.0**-15  #: of targets, which lie between -1 and 1, or are clipped to +-LIMIT_OF_TARGETS
LIMIT_OF_TARGETS = 4.0
MOST_IMAGES = 2**24
SLACK = 1 + 1e-9  # of float64 beside int64
PIECE = 4096  # rows of one product in float64: its sums stay below 2^53, so that they are exact


@dataclass(frozen=True)
class Moments:
    """Sums over images of (1, features) times itself and times the targets.

    products: int64 [(D + 1)(D + 2) / 2], the upper triangle row by row; its first entry is the number of images.
    cross: int64 [D + 1, T]; squares: int64 [T], of the targets. Units: RESOLUTION and TARGET_RESOLUTION.
    """

    products: Tensor
    cross: Tensor
    squares: Tensor

    @property
    def count(self) -> int:
        return int(self.products[0])

    @property
    def width(self) -> int:
        return len(self.cross) - 1

    def tensors(self) -> dict[str, Tensor]:
        return {"products": self.products, "cross": self.cross, "squares": self.squares}

    def __add__(self, other: "Moments") -> "Moments":
        check_count(self.count + other.count)
        return Moments(self.products + other.products, self.cross + other.cross, self.squares + other.squares)

    def in_units(self) -> tuple[Tensor, Tensor, Tensor]:
        """Products as a whole matrix float64 [D + 1, D + 1], cross and squares, in units of features and targets."""
        matrix = full(self.products, self.width + 1).double()
        cross, squares = self.cross.double() * TARGET_RESOLUTION, self.squares.double() * TARGET_RESOLUTION**2
        matrix[1:] *= RESOLUTION
        matrix[:, 1:] *= RESOLUTION
        cross[1:] *= RESOLUTION
        return matrix, cross, squares


def moments(features: np.ndarray, targets: Tensor, device: torch.device | str = "cpu") -> Moments:
    """The sums of features float32 [N, D] and targets [N, T]."""
    width, outputs = features.shape[1] + 1, targets.shape[1]
    products = torch.zeros(width, width, dtype=torch.int64, device=device)
    cross = torch.zeros(width, outputs, dtype=torch.int64, device=device)
    squares = torch.zeros(outputs, dtype=torch.int64, device=device)
    for start in range(0, len(features), PIECE):
        rows = whole_features(torch.from_numpy(np.array(features[start : start + PIECE])).to(device))
        rows = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)
        goals = _whole(targets[start : start + PIECE].to(device), TARGET_RESOLUTION, LIMIT_OF_TARGETS)
        # float64 holds these whole numbers exactly, and is fast
        products += (rows.T @ rows).long()
        cross += (rows.T @ goals).long()
        squares += goals.square().sum(0).long()
    return Moments(upper(products).cpu(), cross.cpu(), squares.cpu())


def sums_and_products(features: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Sums int64 [D] and the upper triangle of the products int64 [D (D + 1) / 2] of features [N, D]."""
    products = moments(features, torch.zeros(len(features), 0), device).products
    width = features.shape[1]
    return products[1 : width + 1], products[width + 1 :]


def sums_and_squares(features: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Sums int64 [D] of features [N, D], and of their squares, int64 [D]."""
    rows = whole_features(torch.from_numpy(np.array(features)).to(device)).long().cpu()
    return rows.sum(0), rows.square().sum(0)


def check_count(images: int) -> None:
    """WorkFailed where sums of so many images could overflow."""
    if images > MOST_IMAGES:
        raise WorkFailed(f"sums of more than {MOST_IMAGES:,} images can overflow; leave out some sites")


def whole_features(features: Tensor) -> Tensor:
    """Features as whole numbers of RESOLUTION, in float64."""
    return _whole(features, RESOLUTION, LIMIT)


def _whole(values: Tensor, resolution: float, limit: float) -> Tensor:
    return (values.double().clamp(-limit, limit) / resolution).round()


def upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column]


def full(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix of an upper triangle."""
    matrix = triangle.new_zeros(width, width)
    row, column = torch.triu_indices(width, width)
    matrix[row, column] = triangle
    matrix[column, row] = triangle
    return matrix


def checked(tensors: Mapping[str, Tensor], site: str, width: int, outputs: int, most: int = MOST_IMAGES) -> Moments:
    """The moments that a site sent, of at most so many images; WorkFailed where it is something else."""
    wanted = {"products": ((width + 1) * (width + 2) // 2,), "cross": (width + 1, outputs), "squares": (outputs,)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dtype == torch.int64}
    if found != wanted or len(tensors) != len(wanted):
        raise WorkFailed(f"site '{site}' sent sums of another form than {wanted}; it must run the same study")
    sums = Moments(tensors["products"], tensors["cross"], tensors["squares"])
    if not 0 < sums.count <= most:
        raise WorkFailed(
            f"site '{site}' says that its sums are of {sums.count} images, and the limit is {most:,}; leave it out"
        )
    if not _possible(sums):
        raise WorkFailed(f"site '{site}' sent sums that no {sums.count} images have; leave it out")
    return sums


def _possible(sums: Moments) -> bool:
    """True where squares are those of numbers within the limits, and products no larger than squares allow (Cauchy)."""
    matrix = full(sums.products, sums.width + 1).double()
    features, targets = matrix.diag(), sums.squares.double()
    for squares, limit in ((features[1:], LIMIT / RESOLUTION), (targets, LIMIT_OF_TARGETS / TARGET_RESOLUTION)):
        if not bool(((squares >= 0) & (squares <= sums.count * limit**2)).all()):
            return False
    return _below(matrix, features, features) and _below(sums.cross.double(), features, targets)


def _below(products: Tensor, first: Tensor, second: Tensor) -> bool:
    return bool((products.abs() <= torch.outer(first.sqrt(), second.sqrt()) * SLACK).all())


# --- a method of one round ----------------------------------------------------------------------------

IMAGES_A_CLASS = 10  # sums over fewer are close to single images


class OneRound(Method):
    """A method in which each site is asked once. Its model is a linear head on an encoder that nobody trains."""

    rounds: int = Field(1, ge=1, description="one round, whatever is written here")
    fraction: float = all_sites()
    numbers: int | None = Field(
        None,
        ge=1,
        description="project the features of an image to so many numbers, by fixed random signs that are the same in "
        "every study; all features if not given",
    )

    traits: ClassVar[Traits] = Traits(
        tasks=("classification",), trains="head", batch_norm="average", private_networks=(), label_sets=True
    )
    SUMMED: ClassVar[dict[str, str]] = {"give_sums": "sum"}
    no_privacy: ClassVar[str] = "sends exact sums of features; choose private-head, which takes private steps"

    @field_validator("rounds", mode="before")
    @classmethod
    def _one(cls, written: Any) -> int:
        if written != 1:
            notice_once(f"method.rounds: '{cls.model_fields['name'].default}' has one round, so {written} is not used")
        return 1

    def width(self, federation: Federation) -> int:
        """Numbers of an image that the sums are about."""
        features, _ = head_shape(federation)
        return features if self.numbers is None else min(self.numbers, features)

    def collect(self, federation: Federation) -> Moments:
        """The sums of all sites together."""
        return reduce(add, self.collect_each(federation).values())

    def collect_each(self, federation: Federation, operation: str = "give_sums") -> dict[str, Moments]:
        """The sums of each site; of all together, under one name, where they are added up in whole numbers."""
        width, (_, outputs) = self.width(federation), head_shape(federation)
        replies = federation.ask_all(operation)
        sent = {r.site: checked(r.parcel("statistics").tensors, r.site, width, outputs) for r in replies}
        warn_of_small_sites(federation, {site: sums.count for site, sums in sent.items()}, width)
        if federation.trainer.task.like == "classification":  # a target is 1 for its class, so their sums are counts
            counts = {site: sums.cross[0] * TARGET_RESOLUTION for site, sums in sent.items()}
            warn_of_small_classes(federation, counts)
        return sent

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation in ("give_sums", "give_held_out_sums"):
            parcel, outputs = reply.parcel("statistics"), head_shape(federation)[1]
            most = most_images(federation, call.operation)
            sums = checked(parcel.tensors, reply.site, self.width(federation), outputs, most)
            check_samples(federation, call.operation, parcel, sums.count)

    def linear_head(self, federation: Federation, head: Tensor) -> dict[str, Tensor]:
        """The model with this head [k + 1, T], offset first, in terms of all features."""
        signs = projection(head_shape(federation)[0], self.numbers)
        slopes = head[1:] if signs is None else signs @ head[1:]
        return {"fc.weight": slopes.T.float().contiguous(), "fc.bias": head[0].float()}

    @operation("statistics", most={"statistics": AS_LARGE_AS_A_NETWORK})
    def give_sums(self, site: Site) -> Parcel:
        return self.sums_at(site)

    def sums_at(self, site: Site, which: str = "training") -> Parcel:
        """The sums over the images that lie as the site's training images; `which` they are is said in a refusal."""
        check_classes(site, which)
        features = self.features(site)
        check_more_images_than(features.shape[1], site, len(features))
        sums = moments(features, scaled_targets(site), site.trainer.device)
        return Parcel("statistics", sums.tensors(), {"samples": sums.count})

    def features(self, site: Site) -> np.ndarray:
        """Features of the site's training images, projected where the study says so: float64 [N, k], whole numbers
        times RESOLUTION."""
        model = site.trainer.model
        assert isinstance(model, Encoded), "the study's checks want an encoder"
        found = kept_features(model.features.encoder(site.trainer.device), site.data.train.images)
        signs = projection(found.shape[1], self.numbers)
        return found if signs is None else project(found, signs)


def most_images(federation: Federation, operation: str) -> int:
    """Images that one reply may be of: its part of what sums can hold, so that those of all sites fit."""
    return MOST_IMAGES // (1 if operation in federation.sums.covered else max(1, len(federation.chosen)))


def check_samples(federation: Federation, operation: str, parcel: Parcel, count: int) -> None:
    """ParcelRejected where a site says another number of images than its sums have; a sum of sites says none."""
    said = parcel.metadata.get("samples")
    if said != count and operation not in federation.sums.covered:
        raise ParcelRejected(f"statistics: samples = {said}, and the sums are of {count} images")


def head_shape(federation: Federation) -> tuple[int, int]:
    """Features of the encoder, and outputs of the head."""
    model = federation.trainer.model
    assert isinstance(model, Encoded), "the study's checks want an encoder"
    return model.encoder_class.width, model.outputs


def projection(features: int, numbers: int | None) -> Tensor | None:
    """Signs [D, k] over a power of two, near the square root of D; None where nothing is projected."""
    if numbers is None or numbers >= features:
        return None
    drawn = torch.randint(2, (features, numbers), generator=torch_rng("projection", features, numbers))
    return (2.0 * drawn.double() - 1) / 2 ** round(np.log2(features) / 2)


def project(features: np.ndarray, signs: Tensor) -> np.ndarray:
    """Features [N, D] times the signs, in whole numbers, so that no row depends on others: float32 [N, k]."""
    pieces = [features[start : start + PIECE] for start in range(0, len(features), PIECE)]
    found = [(whole_features(torch.from_numpy(np.array(piece))) @ signs).round() * RESOLUTION for piece in pieces]
    return torch.cat(found).float().numpy() if found else np.zeros((0, signs.shape[1]), np.float32)


def scaled_targets(site: Site) -> Tensor:
    """Targets of the head, float64 [N, T]: one column a class, or the label scaled as the task scales it."""
    trainer, labels = site.trainer, torch.from_numpy(np.array(site.data.train.labels))
    if trainer.task.like == "classification":
        return F.one_hot(labels.long(), len(trainer.target.classes)).double()
    middle, half = scale(trainer.target)
    return ((labels.double() - middle) / half)[:, None]


def warn_of_small_sites(federation: Federation, counts: dict[str, int], width: int) -> None:
    """Say which sites' sums give their images' features away: those with no more images than numbers."""
    small = [site for site, count in counts.items() if count <= width]
    if small and federation.sums.settings.sum == "secure":
        federation.warn(
            f"all sites together have at most {width:,} images, and their sum of {width:,} features reveals the "
            f"features of single images, though not whose they are; {FEWER}"
        )
    elif small:
        federation.warn(
            f"{_names(small)}: sums of {width:,} features over at most {width:,} images are sent, and such sums reveal "
            f"the features of single images; set federation.sum = 'secure', {FEWER}, or leave the site out"
        )


def warn_of_small_classes(federation: Federation, counts: dict[str, Tensor]) -> None:
    """Say which sites have a class of few images, from the counts of each class: the sum of one is itself."""
    small = [site for site, each in counts.items() if bool(((each > 0) & (each < IMAGES_A_CLASS)).any())]
    cure = "" if federation.sums.settings.sum == "secure" else "set federation.sum = 'secure', "
    if small:
        federation.warn(
            f"{_names(small)}: sums over a class of fewer than {IMAGES_A_CLASS} images are sent, close to the features "
            f"of single images; {cure}merge rare classes (data.merge), or leave the site out"
        )


FEWER = "choose an encoder with fewer features (or a smaller method.numbers)"


def _names(sites: Sequence[str]) -> str:
    shown = ", ".join(f"'{site}'" for site in sites[:3]) + (", ..." if len(sites) > 3 else "")
    return f"site {shown}" if len(sites) == 1 else f"sites {shown}"
