"""A decoder for a known encoder, learnt from the attacker's own images: seconds of training instead of a search.

Whoever has the encoder (every site in FedReplay and SplitNN, anybody where its weights are public) can make as many
pairs of image and latents as it has images, and train a decoder on them. It needs no image of the attacked site. At
deep cuts it gives back far more than a search for images with the same latents does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.attack import Capability, ThreatModel
from polyclinic.attacks.latent_decoder import DecodedLatents, PairedDecoder

PENALTIES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  #: of a linear decoder, in units of a vector's own length


class LearnedDecoder(PairedDecoder):
    """`LearnedDecoder().decode(latents, encoder, own_images)`."""

    name: Literal["learned-decoder"] = "learned-decoder"  # type: ignore[assignment]

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability.LATENTS, Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES})

    @property
    def assumptions(self) -> str:
        return "a decoder is trained on the attacker's own images and the latents that the known encoder makes of them"

    def decode(
        self,
        latents: Tensor,
        encoder: nn.Module,
        own_images: Tensor,
        *,
        together: int = 0,
        threat: ThreatModel | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> DecodedLatents:
        """Images behind latents [N, C, h, w] or [N, D], from images of its own [M, C, H, W] in [0, 1].

        `together`: images of a mini-batch whose statistics batch norm used; 0: its running statistics.
        """
        if threat is not None:
            self.check(threat)
        own = encode_images(encoder, own_images, together=together, device=device)
        return self.run(as_maps(latents), own_images[: len(own)], as_maps(own), seed=seed, device=device)


class FeatureDecoder(LearnedDecoder):
    """The same for features that were read out of sums: `FeatureDecoder().decode_vectors(vectors, own_images, own)`."""

    name: Literal["feature-decoder"] = "feature-decoder"  # type: ignore[assignment]

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES})

    @property
    def assumptions(self) -> str:
        return "features are read out of sums; a decoder is trained on the attacker's own images and their features"

    def decode_vectors(
        self, vectors: Tensor, own_images: Tensor, own_vectors: Tensor, *, seed: int = 0, device: str = "cpu"
    ) -> DecodedLatents:
        """Images behind vectors [N, D], from images of its own [M, C, H, W] in [0, 1] and their vectors [M, D].

        A network and a linear map learn from four fifths of its own; the one that is nearer to the rest decodes."""
        tried = len(own_images) // 5
        asked = torch.cat([own_vectors[:tried], vectors]).float()
        known = own_vectors[tried:].float()
        found = self.run(as_maps(asked), own_images[tried:], as_maps(known), seed=seed, device=device)
        linear = [ridge(known, own_images[tried:], asked, penalty) for penalty in PENALTIES]
        best = min([found.images, *linear], key=lambda made: float((made[:tried] - own_images[:tried]).square().mean()))
        return replace(found, images=best[tried:])


def ridge(known: Tensor, images: Tensor, asked: Tensor, penalty: float) -> Tensor:
    """Images [N, C, H, W] of vectors `asked` [N, D] by ridge regression from vectors `known` [M, D] to images
    [M, C, H, W]; in its dual form, a system of M equations."""
    deviation, mean = torch.std_mean(known.double(), 0)
    rows, others = ((some.double() - mean) / deviation.clamp(min=1e-6) for some in (known, asked))
    products = rows @ rows.T
    products += penalty * products.diagonal().mean() * torch.eye(len(rows), dtype=products.dtype)
    weights = torch.linalg.solve(products, rows @ others.T).T.float()
    guess = images.float().mean(0)
    return (guess + (weights @ (images.float() - guess).flatten(1)).unflatten(1, guess.shape)).clamp(0, 1)


@torch.no_grad()
def encode_images(encoder: nn.Module, images: Tensor, *, together: int = 0, device: str = "cpu") -> Tensor:
    """Latents of images [N, C, H, W] in [0, 1]; where batch norm uses whole batches, what is left over is left out."""
    network = copy.deepcopy(encoder).to(device).train(together > 0)
    batches = images.float().split(together or 64)
    if together and len(batches) > 1:
        batches = tuple(batch for batch in batches if len(batch) == together)
    return torch.cat([network(batch.to(device)).cpu() for batch in batches])


def as_maps(latents: Tensor) -> Tensor:
    """Vectors [N, D] are maps of one place, [N, D, 1, 1]."""
    return latents[:, :, None, None] if latents.dim() == 2 else latents


@dataclass(frozen=True)
class PickedOut:
    """How many of `images` reconstructions point to the right one of `among` images, with the 95 % interval of the
    share. By chance it is one in `among`."""

    right: int
    images: int
    among: int

    @property
    def share(self) -> float:
        return self.right / self.images if self.images else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        found = binomtest(self.right, self.images).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.1%} ({low:.1%} to {high:.1%}) point to the right one of {self.among} images"


def pick_out(found: Tensor, truth: Tensor, others: Tensor) -> PickedOut:
    """Ask of each found image [N, C, H, W] which of the true images [N, ...] and of others [M, ...] it shows.

    It is the one with the largest correlation after the mean of all is subtracted: brightness and contrast do not
    count.
    """
    candidates = torch.cat([truth, others]).float()
    mean = candidates.mean(0)
    first, second = (_directions(images - mean) for images in (found.float(), candidates))
    nearest = (first @ second.T).argmax(1)
    right = int((nearest == torch.arange(len(found))).sum())
    return PickedOut(right, len(found), len(candidates))


def _directions(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
