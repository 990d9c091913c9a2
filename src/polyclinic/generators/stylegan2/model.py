"""StyleGAN2 with adaptive discriminator augmentation, conditioned on labels (Karras et al. 2020a, 2020b).

Written from the papers. Images of any size from 28 px on: inside, their side is the next power of two.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.generators.base import (
    PLAIN,
    Array,
    FitOptions,
    ModelSpec,
    RandomSource,
    as_tensor,
    check_labels,
    even_labels,
    initial_networks,
)
from polyclinic.generators.gan.adversarial import AdversarialGenerator, AdversarialModel, GANLoss, gan_loss
from polyclinic.generators.gan.networks import OfEachClass
from polyclinic.generators.gan.trainer import RealBatches, adam
from polyclinic.generators.latent_space import GaussianSpace
from polyclinic.generators.stylegan2.networks import Discriminator, SiteDiscriminator, StyleGAN2Shape, StyleGenerator
from polyclinic.generators.stylegan2.training import BETAS, Steps
from polyclinic.randomness import device_rng, seed_of, torch_rng
from polyclinic.tasks import Target

SAMPLED_AT_ONCE = 64
LARGEST_SIDE = 1024
REPORTS = 20


class StyleGAN2(AdversarialGenerator):
    """The `[generator]` table with `name = "stylegan2"`."""

    tunable: ClassVar[bool] = True

    name: Literal["stylegan2"] = "stylegan2"
    steps: int = Field(4000, ge=1, description="steps of both networks in one fit")
    lr: float = Field(0.0025, gt=0, description="learning rate of Adam, for both networks")
    width: int = Field(32, ge=2, description="channels at full size; each smaller one has twice as many, up to 8 times")
    latent: int = Field(128, ge=2, description="random numbers an image is made from, and length of a style")
    mapping_layers: int = Field(2, ge=1, description="layers from noise to style")
    label_layers: int = Field(
        0, ge=0, description="discriminator's layers behind a label's embedding, 0 for none; the reference has 8"
    )
    style_memory: float = Field(
        0.998, ge=0, lt=1, description="share of the mean style (for truncation) kept after a batch; reference: 0.995"
    )
    gamma: float | None = Field(None, ge=0, description="weight of R1; 0.0002 · side² / batch size if not given")
    path_weight: float = Field(2.0, ge=0, description="weight of path-length regularisation; 0 for none")
    style_mixing: float = Field(0.9, ge=0, le=1, description="share of steps in which images have two styles")
    ada_target: float = Field(0.6, ge=0, lt=1, description="how sure the discriminator may be of real images; 0: off")
    ada_images: int = Field(500_000, ge=1, description="images seen while the share of augmentation grows from 0 to 1")
    average_images: float = Field(10_000, gt=0, description="half-life of the averaged generator, in images")
    truncation: float = Field(1.0, ge=0, le=1, description="samples are moved so far from the mean style; 1 as drawn")
    graphs: bool = Field(True, description="on a GPU, record the steps once and replay them; false: start each kernel")

    summary: ClassVar[str] = "StyleGAN2 with adaptive augmentation, conditional; the good one"

    def model_for(self, spec: ModelSpec) -> "StyleGAN2Model":
        return StyleGAN2Model(self, spec)

    def dp_obstacle(self) -> str | None:
        return (
            "generator.name: StyleGAN2's discriminator compares the images of a batch with each other, and ADA follows "
            "real images outside any accountant; choose vqvae2, or dcgan without spectral norm, under differential "
            "privacy"
        )

    def check_images(self, size: int, task: str) -> None:
        if size > LARGEST_SIDE:
            raise BadInput(f"data.size: StyleGAN2 here makes images of up to {LARGEST_SIDE} px, and these have {size}")

    def shape(self, channels: int, size: int, target: Target) -> StyleGAN2Shape:
        """Of networks for images of this size: inside, their side is a power of two."""
        self.check_images(size, "")
        inner = 2 ** max(5, (size - 1).bit_length())
        layers = (self.mapping_layers, self.label_layers)
        return StyleGAN2Shape(channels, inner, target, self.width, self.latent, *layers, self.style_memory)

    # --- for FELICIA --------------------------------------------------------------------------------

    @property
    def gan_loss(self) -> GANLoss:
        return gan_loss("log")

    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        shape = self.shape(channels, size, target)
        if not per_class:
            return SiteDiscriminator(shape, sites)
        return OfEachClass(target, lambda: SiteDiscriminator(shape, sites))

    def central_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float | None, *, capturable: bool
    ) -> torch.optim.Optimizer:
        return adam(list(parameters), lr or self.lr, betas=BETAS, capturable=capturable)


class Controls(nn.Module):
    """Numbers that training keeps: how much is augmented, how sure the discriminator is, the usual path length."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("p", "sure", "path_length"):
            self.register_buffer(name, torch.zeros(()))


class StyleGAN2Model(AdversarialModel):
    """Networks `generator`, `average` (samples come from it), `discriminator`, and `controls`."""

    def __init__(self, settings: StyleGAN2, spec: ModelSpec) -> None:
        shape = settings.shape(spec.channels, spec.size, spec.target)
        made = initial_networks(lambda: _networks(shape), seed_of(spec.seed, "generator"))
        super().__init__(made, channels=spec.channels, size=spec.size, target=spec.target, device=spec.device)
        if self.device.type == "cuda":
            self.networks.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.settings, self.precision, self.inner = settings, spec.precision, shape.size

    @property
    def average(self) -> StyleGenerator:
        """The generator that samples come from."""
        return self.networks["average"]  # type: ignore[return-value]

    # --- learning -----------------------------------------------------------------------------------

    def fit(self, images: Array, labels: Array, rng: torch.Generator, options: FitOptions = PLAIN) -> dict[str, float]:
        if options.private:
            raise BadInput(str(self.settings.dp_obstacle()))
        steps = self.begin(images, labels, rng, replayed=options.replayed)
        for number in range(1, self.settings.steps + 1):
            steps.step()
            if number % max(1, self.settings.steps // REPORTS) == 0:
                options.report("generator", number, self.settings.steps, float(steps.loss))
        return {"generator": float(steps.loss), "augmentation": float(self.networks["controls"].get_buffer("p"))}

    def begin(
        self,
        images: Array,
        labels: Array,
        rng: torch.Generator,
        *,
        replayed: Iterator[Batch] | None = None,
        graphs: bool = True,
    ) -> Steps:
        """The networks ready to learn from images uint8 [N, C, H, W] step by step, from where they stand.

        `graphs`: steps may be recorded as CUDA graphs, where the settings say so.
        """
        drawn = _on_device(rng, self.device)
        real = RealBatches(self, images, labels, drawn, replayed)
        batches = ((self._enlarged(some), known) for some, known in real)
        return Steps(self, batches, RandomSource(drawn, self.device), graphs=graphs)

    def begin_halves(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Steps:
        return self.begin(images, labels, rng, graphs=False)  # see `Steps.generator_half`

    def _enlarged(self, images: Tensor) -> Tensor:
        missing = self.inner - self.size
        return F.pad(images, (0, missing, 0, missing), mode="replicate") if missing else images

    # --- making -------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, labels: Array, rng: torch.Generator) -> Tensor:
        labels = check_labels(as_tensor(labels), len(labels), self.target)
        if not len(labels):  # a GPU cannot reshape what has no images
            return torch.zeros(0, self.channels, self.size, self.size, dtype=torch.uint8)
        network, random = self.average.eval(), RandomSource(rng, self.device)
        made = []
        for some in labels.split(SAMPLED_AT_ONCE):
            w = network.mapping(random.normal(len(some), self.settings.latent), self.on_device(some))
            noises = [random.normal(len(some), 1, side, side) for side in network.synthesis.noise_sides]
            made.append(to_uint8(self.images_of(network.truncated(w, self.settings.truncation), noises)))
        return torch.cat(made)

    def latent_space(self) -> GaussianSpace:
        """The styles w, with fixed noise maps. They have no label: the mapping network has put it in."""
        average, noises = self.average.eval().requires_grad_(False), self.fixed_noises()

        def styles(points: Tensor) -> Tensor:
            labels = even_labels(len(points), self.target).to(self.device)
            with torch.no_grad():
                return average.mapping(points.to(self.device), labels)

        return GaussianSpace(lambda w, labels: self.images_of(w, noises), self.settings.latent, styles)

    def images_of(self, w: Tensor, noises: list[Tensor]) -> Tensor:
        """Images in about [0, 1] of styles w [B, latent]; differentiable. With the same noise always the same."""
        images = self.average.synthesis(self.average.repeated(w), noises)
        return (images[..., : self.size, : self.size] + 1) / 2

    def fixed_noises(self) -> list[Tensor]:
        """Noise maps to search with, the same for every image: a projection must not chase noise that changes."""
        rng = torch_rng(0)
        sides = self.average.synthesis.noise_sides
        return [torch.randn(1, 1, side, side, generator=rng).to(self.device) for side in sides]


def _networks(shape: StyleGAN2Shape) -> dict[str, nn.Module]:
    generator = StyleGenerator(shape)
    return {
        "generator": generator, "average": copy.deepcopy(generator).requires_grad_(False),
        "discriminator": Discriminator(shape), "controls": Controls(),
    }  # fmt: skip


def _on_device(rng: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator that draws on the device, seeded by one on the CPU: a GPU would wait for many small copies."""
    if device.type == "cpu":
        return rng
    seed = int(torch.randint(2**62, (), generator=rng))
    return device_rng(device, seed)
