"""Inversion of latents by a decoder that the attacker trains on images of its own.

Qu et al. (preprint) say that nobody can rebuild images as long as the encoder is unknown. `PairedDecoder` has its own
images with the latents that the same encoder made of them. `SurrogateDecoder` has no such latents: it draws encoders of
its own, and brings the latents of all encoders into one form (principal components over the channels, by variance), so
that a decoder for its own encoders fits the unknown one. Latents are maps [C, h, w], whose places belong to places in
the image whatever the encoder.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from polyclinic.attacks.attack import AttackSettings, Capabilities, Capability
from polyclinic.attacks.scoring import Score, score
from polyclinic.errors import BadInput
from polyclinic.metrics.images import digest
from polyclinic.metrics.perceptual import Distance
from polyclinic.progress import tell
from polyclinic.randomness import seed_of, torch_rng

SLOWER = (1, 5, 25)  #: what the learning rate is divided by, one after the other
TRIED = 64  #: images by which a decoder is judged
FLAT = 0.01  #: of the images' own deviation: a decoder that makes the same image of all latents has not learnt
#: the decoder that was trained last, by what it was made of
_LAST: dict[str, nn.Module] = {}


@dataclass(frozen=True)
class DecodedLatents:
    """Images [N, C, H, W] in [0, 1], on the CPU, and the guess without any latents: the mean of the attacker's own."""

    images: Tensor
    guess: Tensor
    threat_model: str

    def score(self, truth: Tensor, *, distance: Distance | None = None) -> Score:
        """Against the true images [N, C, H, W] in their order; an image failed if the guess is as near to the truth."""
        guess = self.guess.expand_as(truth)
        return score(self.images[:, None], truth[:, None], guess[:, None], distance=distance)


class _DecoderSettings(AttackSettings):
    width: int = Field(128, ge=8, description="channels of the decoder at the latents' size; halved at each doubling")
    steps: int = Field(1500, ge=1, description="training steps of the decoder")
    batch_size: int = Field(32, ge=1, description="images in a training step")
    lr: float = Field(2e-3, gt=0, description="learning rate of Adam, which falls to zero along a cosine")

    reads: ClassVar[tuple[str, ...]] = ("latents", "activations")

    def _decode(
        self, latents: Tensor, sets: Sequence[Tensor], images: Tensor, seed: int, device: str
    ) -> DecodedLatents:
        """`sets`: latents of the attacker's images [M, C, H, W], one set for each encoder that made some.

        The last decoder is kept: an audit asks it about a parcel, then about planted latents."""
        given = (*sets, images)
        made_of = " ".join([*(f"{tuple(one.shape)} {digest(one)}" for one in given), str(seed), device, repr(self)])
        if made_of not in _LAST:
            _LAST.clear()
            _LAST[made_of] = self._train(sets, images.float(), seed, device)
        with torch.no_grad():
            found = torch.cat([_LAST[made_of](some.to(device)).cpu() for some in latents.float().split(64)])
        return DecodedLatents(found, images.float().mean(0, keepdim=True), str(self))

    def _train(self, sets: Sequence[Tensor], images: Tensor, seed: int, device: str) -> nn.Module:
        """A decoder that has learnt the images from their latents. A smaller rate is tried where it makes one image of
        all latents: a training that broke must not look like latents that tell nothing."""
        some = slice(0, TRIED)
        for slower in SLOWER:
            decoder = self._train_at(self.lr / slower, sets, images, seed, device)
            with torch.no_grad():
                made = decoder(sets[0][some].float().to(device)).cpu()
            flat = float(made.std(0).mean()) < FLAT * float(images[some].std(0).mean())
            if bool(made.isfinite().all()) and not flat:
                break
        return decoder

    def _train_at(self, lr: float, sets: Sequence[Tensor], images: Tensor, seed: int, device: str) -> nn.Module:
        """One training, with a batch of one set in each step."""
        decoder = _build_decoder(sets[0].shape[1:], tuple(images.shape[1:]), self.width, seed).to(device)
        optimizer = Adam(decoder.parameters(), lr)
        rng = torch_rng(seed, "latent decoder", "batches")
        there, wanted = [latents.float().to(device) for latents in sets], images.to(device)
        for step in range(self.steps):
            optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))
            rows = torch.randint(len(images), (self.batch_size,), generator=rng).to(device)
            optimizer.zero_grad()
            F.l1_loss(decoder(there[step % len(there)][rows]), wanted[rows]).backward()
            optimizer.step()
            tell("decoder of latents", step + 1, self.steps)
        return decoder.eval()


class PairedDecoder(_DecoderSettings):
    """`PairedDecoder().run(latents, own_images, own_latents)`."""

    name: Literal["paired-decoder"] = "paired-decoder"

    needs: ClassVar[Capabilities] = frozenset({Capability.LATENTS, Capability.PAIRED_LATENTS})
    assumptions: ClassVar[str] = (
        "the encoder is unknown; a decoder is trained on the attacker's own pairs of image and latents"
    )

    def run(
        self, latents: Tensor, own_images: Tensor, own_latents: Tensor, *, seed: int = 0, device: str = "cpu"
    ) -> DecodedLatents:
        """Images behind latents [N, C, h, w], from pairs of own_images [M, C, H, W] in [0, 1] and own_latents."""
        _check_maps(latents)
        if own_latents.shape[1:] != latents.shape[1:] or len(own_latents) != len(own_images):
            raise BadInput(
                f"attack: there are {len(own_images)} images with latents {tuple(own_latents.shape)}, and the parcel "
                f"holds {tuple(latents.shape)}; give the latents of the attacker's images by the same encoder"
            )
        mean, deviation = _statistics(own_latents)
        prepared = [(maps.float() - mean) / deviation for maps in (latents, own_latents)]
        return self._decode(prepared[0], prepared[1:], own_images, seed, device)


class SurrogateDecoder(_DecoderSettings):
    """`SurrogateDecoder().run(latents, own_images)`."""

    name: Literal["surrogate-decoder"] = "surrogate-decoder"
    surrogates: int = Field(24, ge=1, description="encoders that the attacker draws")
    components: int = Field(6, ge=1, description="principal components of the channels that the decoder sees")

    needs: ClassVar[Capabilities] = frozenset({Capability.LATENTS, Capability.SIMILAR_IMAGES})
    assumptions: ClassVar[str] = (
        "structure and weights of the encoder are unknown; encoders that the attacker draws stand for it"
    )

    def run(self, latents: Tensor, own_images: Tensor, *, seed: int = 0, device: str = "cpu") -> DecodedLatents:
        """Images behind latents [N, C, h, w] of one encoder, N in the hundreds, from images of the same kind alone."""
        _check_maps(latents)
        made = [
            draw_encoder(own_images.shape[1], own_images.shape[-1] // latents.shape[-1], seed_of(seed, "surrogate", i))
            for i in range(self.surrogates)
        ]
        count = min(self.components, latents.shape[1])
        height, width = latents.shape[2:]
        layout = F.adaptive_avg_pool2d(own_images.float().mean((0, 1), keepdim=True), (height, width))[0, 0]
        with torch.no_grad():
            batches = own_images.float().split(256)
            sets = [torch.cat([one.to(device)(some.to(device)).cpu() for some in batches]) for one in made]
        for maps in sets:
            if maps.shape[2:] != latents.shape[2:]:
                raise BadInput(
                    f"attack: encoders for these images make maps of {maps.shape[2]} x {maps.shape[3]}, and the parcel "
                    f"holds {height} x {width}; give images of another size"
                )
        prepared = [principal_maps(maps, count, layout) for maps in (latents, *sets)]
        return self._decode(prepared[0], prepared[1:], own_images, seed, device)


def principal_maps(latents: Tensor, count: int, layout: Tensor) -> Tensor:
    """Latents [N, C, h, w] of one encoder as `count` principal components over channels, [N, count, h, w].

    Each has mean 0 and variance 1 over all images and places. Its sign is open; it is chosen so that the mean over all
    images goes with `layout` [h, w], the mean of the attacker's own images: medical images share their layout.
    """
    mean, deviation = _statistics(latents)
    flat = ((latents.float() - mean) / deviation).transpose(0, 1).flatten(1)  # [C, N * h * w]
    _, directions = torch.linalg.eigh(flat @ flat.T / flat.shape[1])
    maps = directions.flip(1)[:, :count].T @ flat
    maps = maps / maps.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
    maps = maps.unflatten(1, (len(latents), *latents.shape[2:]))  # [count, N, h, w]
    agreement = (maps.mean(1) * (layout - layout.mean())).sum((1, 2))
    return (maps * torch.where(agreement < 0, -1.0, 1.0)[:, None, None, None]).transpose(0, 1)


def draw_encoder(channels: int, factor: int, seed: int) -> nn.Module:
    """A convolutional encoder with random weights and structure that makes sides `factor` times smaller."""
    rng = torch_rng(seed, "structure")
    layers: list[nn.Module] = []
    before, remaining = channels, factor
    while remaining > 1 or not layers:
        kernel, width = (int(torch.randint(*span, (1,), generator=rng)) for span in ((1, 4), (16, 65)))
        stride = 2 if remaining > 1 else 1
        layer = nn.Conv2d(before, width, 2 * kernel + 1, stride, kernel, bias=False)
        nn.init.kaiming_normal_(layer.weight, generator=rng)
        layers += [layer, nn.BatchNorm2d(width, track_running_stats=False), nn.ReLU()]
        before, remaining = width, remaining // stride
    return nn.Sequential(*layers)


def _statistics(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, [1, C, 1, 1]."""
    deviation, mean = torch.std_mean(latents.float(), (0, 2, 3), keepdim=True)
    return mean, deviation.clamp(min=1e-6)


def _build_decoder(latents: torch.Size, image: tuple[int, ...], width: int, seed: int) -> nn.Module:
    """Maps [C, h, w] to images [C, H, W]: convolutions, sides doubled until they are at least those of the image, with
    half as many channels each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, "latent decoder", "weights"))
        layers: list[nn.Module] = [nn.Conv2d(latents[0], width, 1), _Residual(width), _Residual(width)]
        for _ in range(max(0, math.ceil(math.log2(image[1] / latents[1])))):
            narrow = max(8, width // 8 * 4)  # whole groups of four
            layers += [nn.Conv2d(width, narrow, 1), nn.Upsample(scale_factor=2, mode="bilinear"), _Residual(narrow)]
            layers.append(_Residual(narrow))
            width = narrow
        layers += [nn.Upsample(size=image[1:], mode="bilinear"), nn.Conv2d(width, image[0], 3, padding=1), nn.Sigmoid()]
        return nn.Sequential(*layers)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x).relu())


def _check_maps(latents: Tensor) -> None:
    if latents.dim() != 4:
        shape = tuple(latents.shape)
        raise BadInput(f"attack: latents of shape {shape} are no maps [N, C, h, w]; a decoder needs their places")


PENALTIES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  #: of a linear decoder, in units of a vector's own length


class LearnedDecoder(PairedDecoder):
    """`LearnedDecoder().decode(latents, encoder, own_images)`."""

    name: Literal["learned-decoder"] = "learned-decoder"  # type: ignore[assignment]

    needs: ClassVar[Capabilities] = frozenset({Capability.LATENTS, Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES})
    assumptions: ClassVar[str] = (
        "a decoder is trained on the attacker's own images and the latents that the known encoder makes of them"
    )

    def decode(
        self,
        latents: Tensor,
        encoder: nn.Module,
        own_images: Tensor,
        *,
        together: int = 0,
        seed: int = 0,
        device: str = "cpu",
    ) -> DecodedLatents:
        """Images behind latents [N, C, h, w] or [N, D], from images of its own [M, C, H, W] in [0, 1].

        `together`: images of a mini-batch whose statistics batch norm used; 0: its running statistics.
        """
        own = encode_images(encoder, own_images, together=together, device=device)
        return self.run(as_maps(latents), own_images[: len(own)], as_maps(own), seed=seed, device=device)


class FeatureDecoder(LearnedDecoder):
    """The same for features that were read out of sums: `FeatureDecoder().decode_vectors(vectors, own_images, own)`."""

    name: Literal["feature-decoder"] = "feature-decoder"  # type: ignore[assignment]

    needs: ClassVar[Capabilities] = frozenset({Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES})
    assumptions: ClassVar[str] = (
        "features are read out of sums; a decoder is trained on the attacker's own images and their features"
    )

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
