"""Gradient inversion: images (and labels) whose gradients are those that a site sent.

DLG (Zhu et al. 2019), iDLG (Zhao et al. 2020), SAPAG (Wang et al. 2020), the adaptive Gaussian (Dahlgaard et al. 2022)
and cosine + total variation (Geiping et al. 2020) are settings of one search; `PRESETS` names them.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.attacks.attack import AttackSettings, Capability
from polyclinic.attacks.gradient_inversion.objective import ADAPTED, DISTANCES, DistanceFrom, Kernel, gaussian
from polyclinic.attacks.gradient_inversion.solver import Inversion, Knowledge, Reconstruction, Scaling, Scheme
from polyclinic.attacks.solvers.optimizers import LBFGS, Adam
from polyclinic.attacks.solvers.search import BatchedOptimizer
from polyclinic.federation.ledger.parcel import Parcel

GAUSSIAN = ("gaussian", *ADAPTED)


class GradientInversion(AttackSettings):
    """Settings of the search: `GradientInversion(distance="adaptive-gaussian").run(parcels, knowledge)`."""

    name: Literal["gradient-inversion"] = "gradient-inversion"
    kind: Literal["gradients", "weights"] = Field("gradients", description="what the parcels hold")
    distance: Literal["euclidean", "gaussian", "sapag", "adaptive-gaussian", "cosine"] = Field(
        "euclidean", description="how far gradients are from those that were sent"
    )
    variance: float | None = Field(None, gt=0, description="lambda squared of the distance 'gaussian'")
    kernel: Kernel = Field(
        "per-layer",
        description="of the distances 'gaussian', 'sapag' and 'adaptive-gaussian': one exponential for each layer i "
        "with weight 1/i, as the papers write it, or one for the gradients of all layers together, as in the code of "
        "Dahlgaard et al. for a fixed lambda squared",
    )
    variance_factor: float = Field(1.0, gt=0, description="factor of lambda squared of 'sapag' and 'adaptive-gaussian'")
    scaled: bool = Field(True, description="that distance is multiplied by lambda squared; false: as papers have it")
    total_variation: float = Field(0.0, ge=0, description="weight of the images' roughness")
    image_prior: float = Field(0.0, ge=0, description="weight of what images of this kind look like (public images)")
    batch_norm_prior: float = Field(0.0, ge=0, description="weight of batch-norm statistics that came with the update")
    joined: bool = Field(False, description="the parcels are rounds of the same images, which are searched for once")
    start: Scheme = Field("transformed-gaussian", description="images and labels to start from")
    start_scaling: Scaling = Field(
        "image",
        description="what of the uniform and the transformed-gaussian start is scaled to [0, 1] at once: an image, as "
        "Dahlgaard et al. write, or each channel, as in their code",
    )
    label: Literal["joint", "sign", "counts", "known"] = Field(
        "joint", description="labels: searched for, read off the gradient (one image; a batch), or known"
    )
    optimizer: Literal["lbfgs", "adam", "adamw"] = Field("lbfgs", description="lbfgs, adam or adamw")
    lr: float | None = Field(None, gt=0, description="learning rate; 0.1 for lbfgs, 0.001 for the others if not given")
    iterations: int = Field(100, ge=1, description="optimiser steps; a step of lbfgs has up to 20 iterations")
    decay: float = Field(0.1, gt=0, le=1, description="factor of the learning rate of adam(w) at each of decay_at")
    decay_at: tuple[float, ...] = Field((), description="shares of the iterations after which the rate decays")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of adam(w)")
    signed: bool = Field(False, description="adam(w) sees only the signs of the gradient")
    box: bool = Field(False, description="adam(w) keeps pixels between 0 and 1")
    restarts: int = Field(1, ge=1, description="starts, of which the one with the lowest loss counts")
    returns: Literal["best", "last"] = Field("best", description="the point of lowest loss, or the last one")
    trajectory: tuple[int, ...] = Field((), description="ascending steps whose images and figures are kept; 0: start")
    batch_norm: Literal["train", "eval"] = Field("train", description="normalised by its batch, or running statistics")
    at_once: int = Field(128, ge=1, description="targets in one batch; fewer need less memory")
    precision: Literal["fp32", "tf32", "fp64"] = Field("fp32", description="tf32: quick on a GPU, too coarse for lbfgs")

    reads: ClassVar[tuple[str, ...]] = ("gradients", "weights")

    @model_validator(mode="after")
    def _no_contradiction(self) -> "GradientInversion":
        if (self.distance == "gaussian") != (self.variance is not None):
            raise ValueError("the distance 'gaussian' needs variance, its lambda squared, and no other takes one")
        if self.kernel != "per-layer" and self.distance not in GAUSSIAN:
            raise ValueError("kernel goes with the distances gaussian, sapag and adaptive-gaussian; choose one of them")
        if self.variance_factor != 1 and self.distance not in ADAPTED:
            raise ValueError("variance_factor goes with sapag and adaptive-gaussian; give variance for 'gaussian'")
        if self.optimizer == "lbfgs" and (self.box or self.signed or self.decay_at or self.weight_decay):
            raise ValueError("box, signed, decay_at and weight_decay go with adam or adamw; drop them, or lbfgs")
        if any(step < 0 for step in self.trajectory) or sorted(set(self.trajectory)) != list(self.trajectory):
            raise ValueError("trajectory: give steps in ascending order, each once, from 0 on, such as [0, 10, 100]")
        if self.trajectory and self.trajectory[-1] > self.iterations:
            raise ValueError(f"trajectory: there are {self.iterations} iterations; give no step beyond the last")
        return self

    # --- what the attacker has --------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[Capability]:
        always = {Capability.ARCHITECTURE, Capability.BATCH_SIZE, Capability(self.kind)}
        sometimes = {
            Capability.LOCAL_TRAINING: self.kind == "weights", Capability.LABELS: self.label == "known",
            Capability.PRIOR: self.start == "given", Capability.SIMILAR_IMAGES: self.image_prior > 0,
            Capability.BATCH_NORM_STATISTICS: self.batch_norm == "eval" or self.batch_norm_prior > 0,
        }  # fmt: skip
        return frozenset(always | {capability for capability, needed in sometimes.items() if needed})

    @property
    def assumptions(self) -> str:
        found = {
            "joint": "labels are searched for together with the images",
            "sign": "the label is read off the last layer's gradient",
            "counts": "how many images have each label is read off the last layer's gradient",
            "known": "labels are known",
        }[self.label]
        mode = {"train": "training mode (the batch's own statistics)", "eval": "evaluation mode"}[self.batch_norm]
        steps = "one step on one batch" if self.kind == "gradients" else "plain local SGD"
        return f"{found}, {steps}, batch norm (if any) in {mode}"

    # --- the attack -------------------------------------------------------------------------------

    def run(
        self, parcels: Sequence[Parcel], knowledge: Knowledge, *, seed: int = 0, device: str = "cpu"
    ) -> Reconstruction:
        """Attack each parcel as a target of its own, many at once.

        Where a search starts depends on `seed` and the parcel alone, so that a target's result does not depend on its
        neighbours (but for rounding).
        """
        return Inversion(self, knowledge, seed=seed, device=device).run(parcels)

    def distance_from(self) -> DistanceFrom:
        if self.variance is not None:
            return partial(gaussian, variance=self.variance, kernel=self.kernel, scaled=self.scaled)
        if self.distance in ADAPTED:
            spread = ADAPTED[self.distance]
            return partial(gaussian, variance=spread, kernel=self.kernel, factor=self.variance_factor)
        return DISTANCES[self.distance]

    def optimizer_at(self, start: Tensor, pixels: int) -> BatchedOptimizer:
        """The optimiser of targets that start at [N, D], of which the first `pixels` variables are the images."""
        if self.optimizer == "lbfgs":
            return LBFGS(start, lr=self.lr or 0.1, steps=self.iterations)
        return Adam(
            start,
            lr=self.lr or 1e-3,
            steps=self.iterations,
            weight_decay=self.weight_decay,
            decoupled=self.optimizer == "adamw",
            decay=self.decay,
            decay_at=self.decay_at,
            signed=self.signed,
            box=(pixels, 0.0, 1.0) if self.box else None,
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32


#: settings of the papers, by the names of their attacks
PRESETS: dict[str, GradientInversion] = {
    "dlg": GradientInversion(start="normal", lr=1.0),
    "idlg": GradientInversion(start="normal", lr=1.0, label="sign"),
    "sapag": GradientInversion(distance="sapag", optimizer="adamw", iterations=5000),
    "adaptive-gaussian": GradientInversion(distance="adaptive-gaussian"),
    "geiping": GradientInversion(
        distance="cosine",
        total_variation=1e-2,
        start="normal",
        label="counts",
        optimizer="adam",
        lr=0.1,
        iterations=4800,
        decay_at=(3 / 8, 5 / 8, 7 / 8),
        signed=True,
        box=True,
    ),
}
