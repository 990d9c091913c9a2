"""Projection into a latent space (GAN inversion; FedER, section 4.4): the closest image that a generator can make.

A generator that has learnt its training images by heart comes closer to them than to images of the same kind that it
never saw. So members and held-out images are projected alike, and only the difference between the two counts.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from scipy import stats
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capability, Verdict
from polyclinic.attacks.solvers.optimizers import Adam
from polyclinic.attacks.solvers.search import search
from polyclinic.errors import BadInput
from polyclinic.generators.latent_space import LatentSpace
from polyclinic.metrics.images import Images, as_unit, same_shape
from polyclinic.metrics.perceptual import Distance, embed_all, squared_distances
from polyclinic.metrics.roc import Separation, separation
from polyclinic.metrics.statistics.significance import by_patient
from polyclinic.randomness import torch_rng

SIGNIFICANT = 0.01


@dataclass(frozen=True)
class Projected:
    """The closest images found [N, C, H, W], how far they are from the real ones [N], and the points of the latent
    space [N, D] from which the search began."""

    images: Tensor
    distances: Tensor
    features: str
    start: Tensor | None = None


@dataclass(frozen=True)
class Projections:
    """Of members and of held-out images, and how they differ: the two-sample Kolmogorov-Smirnov test (two-sided, and
    that members are closer), and how well the distance tells them apart."""

    members: Projected
    held_out: Projected
    ks: float
    p_value: float
    p_members_closer: float
    separation: Separation
    threat_model: str

    def verdict(self, level: float = SIGNIFICANT) -> Verdict:
        """In words, with the figures. `level`: the p at which members count as closer."""
        near, far = (float(found.distances.median()) for found in (self.members, self.held_out))
        leak = self.p_members_closer <= level
        comparison = "closer to members than to" if leak else "no closer to members than to"
        because = (
            f"projection comes {comparison} held-out images (median {self.members.features} distance {near:.3g} and "
            f"{far:.3g}, KS {self.ks:.2f}, p {self.p_members_closer:.2g} that members are closer by chance; "
            f"{self.separation})"
        )
        tested = {"ks": self.ks, "p_value": self.p_value, "p_members_closer": self.p_members_closer}
        medians: dict[str, float | str] = {
            "features": self.members.features, "median_members": near, "median_held_out": far,
        }  # fmt: skip
        return Verdict(leak, because, {**medians, **tested, "auc": self.separation.auc})


class Projection(AttackSettings):
    """Settings of the search: `Projection().compare(space, members, held_out, distance)`."""

    name: Literal["projection"] = "projection"
    starts: int = Field(64, ge=1, description="random points, of which the one that is closest to a target starts it")
    iterations: int = Field(200, ge=1, description="steps of Adam in the latent space")
    lr: float = Field(0.05, gt=0, description="learning rate, in units of the latent space's own spread")
    decay: float = Field(0.2, gt=0, le=1, description="factor of the learning rate at each of decay_at")
    decay_at: tuple[float, ...] = Field((0.6, 0.85), description="shares of the steps after which the rate decays")
    at_once: int = Field(32, ge=1, description="targets in one batch; fewer need less memory")
    conditional: bool = Field(True, description="the generator is asked for the target's own label")
    guessed: bool = Field(False, description="that label is not known: the one of the closest random point is taken")

    reads: ClassVar[tuple[str, ...]] = ("generator", "codes")

    @property
    def needs(self) -> frozenset[Capability]:
        held = {Capability.GENERATOR, Capability.CANDIDATES}
        return frozenset(held | {Capability.CANDIDATE_LABELS} if self.conditional and not self.guessed else held)

    @property
    def assumptions(self) -> str:
        label = "; an image's label is guessed" if self.conditional and self.guessed else ""
        return f"noise inside the generator is frozen, and every image is projected by the same number of steps{label}"

    def compare(
        self,
        space: LatentSpace,
        members: Images,
        held_out: Images,
        distance: Distance,
        *,
        member_labels: Tensor | None = None,
        held_out_labels: Tensor | None = None,
        choices: Tensor | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> Projections:
        """Project training images and held-out ones. Which is which is not known to the search."""
        run = partial(self.run, space, distance=distance, choices=choices, seed=seed, device=device)
        return self.judge(run(members, labels=member_labels), run(held_out, labels=held_out_labels))

    def judge(self, near: Projected, far: Projected, cases: tuple[np.ndarray, np.ndarray] | None = None) -> Projections:
        """Whether members (`near`) came out closer than held-out images. `cases`: of both, equal for images of one
        patient, who counts once."""
        own, other = cases or (None, None)
        closest = by_patient(near.distances, own), by_patient(far.distances, other)
        both = stats.ks_2samp(*closest)
        closer = stats.ks_2samp(*closest, alternative="greater")
        separated = separation(-near.distances, -far.distances)
        figures = (float(both.statistic), float(both.pvalue), float(closer.pvalue))
        return Projections(near, far, *figures, separated, str(self))

    def run(
        self,
        space: LatentSpace,
        images: Images,
        distance: Distance,
        *,
        labels: Tensor | None = None,
        choices: Tensor | None = None,
        start: Tensor | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> Projected:
        """The closest image that the generator can make for each of N, given its label [N] where `conditional`.

        Where labels are `guessed`, `choices` [K] are those to choose from. `start` [N, D] are the points to begin with,
        instead of the closest of some random ones. The result for an image does not depend on the others (but for
        rounding). `distance` lies on `device`.
        """
        targets = as_unit(images, "images to project")
        if self.conditional and self.guessed:
            labels = self._guess_labels(space, targets, choices, distance, seed, device)
        if self.conditional and (labels is None or len(labels) != len(targets)):
            given = "no" if labels is None else str(len(labels))
            cure = "give one for each, or set conditional = false"
            raise BadInput(f"attack.conditional: {len(targets)} images have {given} labels; {cure}")
        points = space.draw(self.starts, torch_rng(seed, "projection", "starts")).to(device)  # the same for all
        parts = []
        for rows in torch.arange(len(targets)).split(self.at_once):
            theirs = torch.as_tensor(labels)[rows].to(device) if self.conditional else None
            some = targets[rows].to(device)
            with torch.no_grad():
                wanted = distance.embed(some)
            if start is None:
                begin = self._start(space, some, wanted, theirs, distance, points)
            else:
                begin = start[rows].to(device)
            adam = Adam(begin, lr=self.lr, steps=self.iterations, decay=self.decay, decay_at=self.decay_at)
            found = search(ProjectionObjective(space, wanted, theirs, distance), adam)
            with torch.no_grad():
                images = space.images(found.point, theirs).clamp(0, 1)
            parts.append((images, found.loss, begin))
        made, distances, begun = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return Projected(made, distances, distance.name, begun)

    def _guess_labels(
        self, space: LatentSpace, targets: Tensor, choices: Tensor | None, distance: Distance, seed: int, device: str
    ) -> Tensor:
        """For each target the label, one of `choices`, whose random images come closest to it."""
        if choices is None or not len(choices):
            raise BadInput("attack.guessed: give the labels to choose from as choices")
        vectors = embed_all(targets, distance, device=device).to(device)
        points = space.draw(self.starts, torch_rng(seed, "projection", "starts")).to(device)  # the same for all
        closest = []
        for label in choices.to(device):
            made = _images_of(space, points, label.expand(len(points)))
            near = squared_distances(vectors, embed_all(made, distance, device=device).to(device))
            closest.append(near.amin(1))
        return choices[torch.stack(closest).argmin(0).to(choices.device)]

    def _start(
        self,
        space: LatentSpace,
        targets: Tensor,
        wanted: Tensor,
        labels: Tensor | None,
        distance: Distance,
        points: Tensor,
    ) -> Tensor:
        """For each target the closest of some points [P, D], the same ones for all targets of a label."""
        start = torch.empty(len(targets), points.shape[1], device=targets.device)
        kinds = torch.zeros(len(targets), device=targets.device) if labels is None else labels
        for kind in kinds.unique():
            rows = (kinds == kind).nonzero()[:, 0]
            made = _images_of(space, points, None if labels is None else kind.expand(len(points)))
            same_shape(targets, made, "images of the generator")
            vectors = embed_all(made, distance, device=targets.device).to(targets.device)
            start[rows] = points[squared_distances(wanted[rows], vectors).argmin(1)]
        return start


@torch.no_grad()
def _images_of(space: LatentSpace, points: Tensor, labels: Tensor | None) -> Tensor:
    """Images of some points, made twice: a search makes no sense where noise changes in between."""
    made = space.images(points, labels)
    if not torch.allclose(made[:2], space.images(points, labels)[:2], atol=1e-4):
        raise BadInput("attack: the generator makes another image from the same point each time; freeze its noise")
    return made.clamp(0, 1)


class ProjectionObjective:
    """`objective(point [N, D])` gives the distance of the generated images to the targets [N], and its gradient."""

    def __init__(self, space: LatentSpace, wanted: Tensor, labels: Tensor | None, distance: Distance) -> None:
        """`wanted`: the targets' vectors [N, E], as `distance.embed` gives them."""
        self.space, self.wanted, self.labels, self.distance = space, wanted, labels, distance

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().requires_grad_()
        made = self.distance.embed(self.space.images(point, self.labels))
        loss = (made - self.wanted).square().sum(1)
        (gradient,) = torch.autograd.grad(loss.sum(), point)
        return loss.detach(), gradient

    def select_rows(self, rows: Tensor) -> "ProjectionObjective":
        """The same for some of the targets only."""
        labels = None if self.labels is None else self.labels[rows]
        return ProjectionObjective(self.space, self.wanted[rows], labels, self.distance)
