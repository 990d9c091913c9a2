"""Latent inversion (white box, Eq. 2 of Qu et al. 2022): images whose features at the cut are those that a site sent.

The attacker has the encoder, as every site has in FedReplay and SplitNN, and looks for

    min over x of |E(x) - latents|² / |latents|² + alpha TV(x)

with AdamW, for many images at once. The first term is the paper's up to a factor for each image, which makes alpha mean
the same at every cut and changes no step of AdamW otherwise.
"""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import vmap

from polyclinic.attacks.attack import AttackSettings, Capability
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import total_variation
from polyclinic.attacks.gradient_inversion.solver import draw
from polyclinic.attacks.scoring import Score, score
from polyclinic.attacks.solvers.optimizers import Adam
from polyclinic.attacks.solvers.search import search
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.wire import restore
from polyclinic.metrics.images import digest
from polyclinic.metrics.perceptual import Distance
from polyclinic.randomness import torch_rng


@dataclass(frozen=True)
class LatentReconstruction:
    """What came back, on the CPU: images [N, C, H, W] in [0, 1], those the search started from, and [T] each for the
    targets (an image, or a batch that shares its batch-norm statistics): loss, evaluations, who diverged."""

    images: Tensor
    start: Tensor
    loss: Tensor
    evaluations: Tensor
    diverged: Tensor
    together: int  #: images of a target
    threat_model: str

    def score(self, truth: Tensor, *, distance: Distance | None = None) -> Score:
        """Against the true images [N, C, H, W] in [0, 1], in their order: latents keep it, so nothing is assigned."""
        found, true, start = (images[:, None] for images in (self.images, truth, self.start))
        return score(found, true, start, distance=distance)


class LatentInversion(AttackSettings):
    """Settings of the search: `LatentInversion().run(latents, encoder, image_shape)`."""

    name: Literal["latent-inversion"] = "latent-inversion"
    total_variation: float = Field(1e-3, ge=0, description="alpha, the weight of the images' roughness")
    start: Literal["uniform", "transformed-gaussian", "normal"] = Field("uniform", description="images to start from")
    lr: float = Field(0.05, gt=0, description="learning rate of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    iterations: int = Field(1000, ge=1, description="steps; the paper has up to 20,000")
    decay: float = Field(0.1, gt=0, le=1, description="factor of the learning rate at each of decay_at")
    decay_at: tuple[float, ...] = Field((0.6, 0.85), description="shares of the steps after which the rate decays")
    batch_norm: Literal["eval", "train"] = Field(
        "eval", description="what the site normalised by: running statistics (FedReplay), or its batch (SplitNN)"
    )
    at_once: int = Field(64, ge=1, description="images in one batch of the search; fewer need less memory")

    reads: ClassVar[tuple[str, ...]] = ("latents", "activations")

    @property
    def needs(self) -> frozenset[Capability]:
        statistics = {Capability.BATCH_NORM_STATISTICS} if self.batch_norm == "eval" else set()
        return frozenset({Capability.LATENTS, Capability.ARCHITECTURE, *statistics})

    @property
    def assumptions(self) -> str:
        mode = {"eval": "evaluation mode", "train": "training mode (the batch's own statistics)"}[self.batch_norm]
        return f"the encoder's weights are those that the site computed with, batch norm (if any) in {mode}"

    def run(
        self,
        latents: Tensor,
        encoder: nn.Module,
        image_shape: tuple[int, int, int],
        *,
        together: int = 1,
        seed: int = 0,
        device: str = "cpu",
    ) -> LatentReconstruction:
        """Invert latents [N, ...], the output of `encoder` (the front of `models.split`) for N images of `image_shape`.

        `together`: consecutive images that the site sent in one mini-batch, which matters where batch norm used its
        statistics. Where a search starts depends on `seed` and the latents alone.
        """
        size = together
        if self.batch_norm == "train":
            if together < 1 or len(latents) % together:
                given = f"{len(latents)} latents are no whole batches of {together}"
                raise BadInput(f"attack.together: {given}; give whole batches")
            network = prepare_for_attack(encoder, batch_norm="train", device=device)
        else:  # images do not mix
            size, network = 1, copy.deepcopy(encoder).to(device).eval().requires_grad_(False)
        targets = latents.float().unflatten(0, (-1, size))
        with torch.no_grad():
            found = network(torch.zeros(size, *image_shape, device=device)).shape
        if found[1:] != targets.shape[2:]:
            raise BadInput(
                f"attack: the encoder makes latents of shape {tuple(found[1:])} from such images, and the parcel holds "
                f"{tuple(targets.shape[2:])}; give the encoder and the image shape that the site used"
            )
        parts = [
            self._search(network, some.to(device), image_shape, seed)
            for some in targets.split(max(1, self.at_once // size))
        ]
        fields = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        return LatentReconstruction(**fields, together=size, threat_model=str(self))

    def _search(
        self, network: nn.Module, targets: Tensor, image_shape: tuple[int, int, int], seed: int
    ) -> dict[str, Tensor]:
        count, size = targets.shape[:2]
        shape = (size, *image_shape)
        rngs = [torch_rng(seed, "latent inversion", digest(one)) for one in targets]
        starts = [draw(self.start, size, image_shape, rng) for rng in rngs]
        start = torch.stack(starts).to(targets.device)
        objective = LatentObjective(network, targets, shape, self.total_variation, mixed=self.batch_norm == "train")
        optimizer = Adam(
            start.flatten(1),
            lr=self.lr,
            steps=self.iterations,
            weight_decay=self.weight_decay,
            decay=self.decay,
            decay_at=self.decay_at,
            box=(math.prod(shape), 0.0, 1.0),
        )
        found = search(objective, optimizer)
        images = found.point.reshape(count * size, *image_shape)
        fields = {"loss": found.loss, "evaluations": found.evaluations, "diverged": found.diverged}
        return {"images": images, "start": start.flatten(0, 1), **fields}


class LatentObjective:
    """`objective(point [T, D])` gives the loss [T] and its gradient [T, D]; a row holds one target's images."""

    def __init__(
        self, network: nn.Module, latents: Tensor, shape: tuple[int, int, int, int], smoothness: float, *, mixed: bool
    ) -> None:
        """`latents` [T, B, ...]; `mixed`: images of a target share statistics and must pass together."""
        self.network, self.latents, self.shape = network, latents, shape
        self.smoothness, self.mixed = smoothness, mixed
        self.scale = latents.flatten(1).square().sum(1).clamp(min=torch.finfo(latents.dtype).tiny)

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().requires_grad_()
        images = point.reshape(-1, *self.shape)
        found = vmap(self.network)(images) if self.mixed else self.network(images.flatten(0, 1))
        difference = found.reshape(self.latents.shape) - self.latents
        loss = difference.flatten(1).square().sum(1) / self.scale
        if self.smoothness:
            loss = loss + self.smoothness * total_variation(images)
        (gradient,) = torch.autograd.grad(loss.sum(), point)
        return loss.detach(), gradient

    def select_rows(self, rows: Tensor) -> "LatentObjective":
        """The same for some of the targets only."""
        return LatentObjective(self.network, self.latents[rows], self.shape, self.smoothness, mixed=self.mixed)


def read_latents(parcel: Parcel) -> Tensor:
    """float32 [N, ...] out of a parcel of latents (FedReplay) or activations (SplitNN)."""
    if parcel.kind not in LatentInversion.reads or parcel.kind not in parcel.tensors:
        raise BadInput(f"attack: a parcel of kind '{parcel.kind}' holds no latents; give latents or activations")
    if parcel.kind == "latents":
        return restore(parcel.tensors)
    return parcel.tensors["activations"].float()
