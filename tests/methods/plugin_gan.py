"""A plug-in file with a GAN of a third party that FELICIA can join: two linear layers, trained in halves of a step."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic import generators


class LinearGAN(generators.AdversarialGenerator):
    """A linear generator against a linear discriminator; no labels."""

    name: Literal["linear-gan"] = "linear-gan"
    latent: int = 4
    lr: float = 0.01

    summary: ClassVar[str] = "two linear layers"
    separates_classes: ClassVar[bool] = False
    ignores_labels: ClassVar[bool] = True

    @property
    def gan_loss(self):
        return generators.gan_loss("log", 0.0, saturating=False)

    def build(self, *, channels, size, target, seed, device="cpu", precision="fp32"):
        model = LinearGANModel(
            {
                "generator": nn.Linear(self.latent, channels * size**2),
                "discriminator": nn.Linear(channels * size**2, 1),
            },
            **{"channels": channels, "size": size, "target": target, "device": device},
        )
        rng = torch.Generator().manual_seed(seed)
        for weight in model.networks.parameters():
            nn.init.normal_(weight, std=0.1, generator=rng)
        model.settings = self
        return model

    def dp_obstacle(self):
        return "generator.name: linear-gan has no gradients per image; choose dcgan"

    def central_discriminator(self, *, channels, size, target, sites, per_class=False):
        return Central(channels * size**2, sites)

    def central_optimizer(self, parameters, lr, *, capturable):
        return torch.optim.SGD(parameters, lr or self.lr)


class Central(nn.Module):
    def __init__(self, pixels: int, sites: int) -> None:
        super().__init__()
        self.layer = nn.Linear(pixels, sites)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


class LinearGANModel(generators.AdversarialModel):
    def fit(self, images, labels, rng, options=None):
        raise NotImplementedError  # FELICIA never calls it

    def begin_halves(self, images, labels, rng):
        return Halves(self, self.to_unit(images) * 2 - 1, labels, rng)

    @torch.no_grad()
    def sample(self, labels, rng):
        made = Halves.images(self, torch.randn(len(labels), self.settings.latent, generator=rng))
        return ((made + 1) * 127.5).clamp(0, 255).byte()


class Halves:
    def __init__(self, model: LinearGANModel, images: Tensor, labels: Tensor, rng: torch.Generator) -> None:
        self.model, self.random = model, generators.RandomSource(rng, model.device)
        self.batches = self._batches(images, labels)
        self.of_generator, self.of_discriminator = (
            torch.optim.Adam(model.networks[name].parameters(), model.settings.lr)
            for name in ("generator", "discriminator")
        )
        self.taken = 0

    def _batches(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = min(self.model.settings.batch_size, len(images))
        while True:
            some = self.random.integers(len(images), size)
            yield images[some], labels[some]

    @staticmethod
    def images(model: LinearGANModel, noise: Tensor) -> Tensor:
        return model.networks["generator"](noise).tanh().unflatten(1, (model.channels, model.size, model.size))

    def make(self, labels, noise=None):
        return self.images(self.model, (noise or self.random).normal(len(labels), self.model.settings.latent))

    def scores(self, images: Tensor) -> Tensor:
        return self.model.networks["discriminator"](images.flatten(1))

    def discriminator_half(self):
        real, labels = next(self.batches)
        loss = F.softplus(-self.scores(real)) + F.softplus(self.scores(self.make(labels).detach()))
        self.of_discriminator.zero_grad()
        loss.mean().backward()
        self.of_discriminator.step()
        return labels

    def generator_half(self, fake, labels, image_gradient=None):
        self.of_generator.zero_grad()
        loss = F.softplus(-self.scores(fake)).mean()
        if image_gradient is not None:
            loss = loss + (fake * image_gradient).sum()
        loss.backward()
        self.of_generator.step()
        self.taken += 1

    def counters(self):
        return {}

    def restore_counters(self, kept):
        assert kept == {}


GENERATORS = {"linear-gan": LinearGAN}
