"""What a GAN must have for FELICIA: a discriminator that can also identify sites, and a step in two halves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from polyclinic.generators.base import Generator, GeneratorModel
from polyclinic.generators.gan.losses import GANLoss
from polyclinic.generators.random_source import RandomSource
from polyclinic.tasks import Target


class AdversarialSteps(Protocol):
    """A GAN in training, each step in two halves: others judge the images that are made in between."""

    #: steps that were taken
    taken: int

    @property
    def random(self) -> RandomSource:
        """What it draws from."""

    @property
    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Real images [B, C, H, W] in [-1, 1] and their labels [B], without end."""

    @property
    def of_generator(self) -> torch.optim.Optimizer: ...
    @property
    def of_discriminator(self) -> torch.optim.Optimizer: ...

    def discriminator_half(self) -> Tensor:
        """The discriminator's step; the labels of the real batch."""

    def make(self, labels: Tensor, noise: RandomSource | None = None) -> Tensor:
        """New images in [-1, 1] with gradients; `noise` is where their noise comes from, if not from `random`.

        They may be larger than real ones: what is more to the right and below is cut off."""

    def generator_half(self, fake: Tensor, labels: Tensor, image_gradient: Tensor | None = None) -> None:
        """The generator's step for images of `make`, with the gradient of a further loss w.r.t. those images."""

    def counters(self) -> Mapping[str, Tensor]:
        """What training keeps from round to round besides networks, optimisers and `taken`; often nothing."""

    def restore_counters(self, kept: Mapping[str, Tensor]) -> None:
        """Put back what `counters` gave."""


class AdversarialModel(GeneratorModel):
    """A GAN that trains in halves of a step. `GANModel` is none: methods train it by its own parts, and in stacks."""

    @abstractmethod
    def begin_halves(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> AdversarialSteps:
        """The networks ready to learn from images uint8 [N, C, H, W], from where they stand."""


class AdversarialGenerator(Generator):
    """Settings of a generator that is trained against a discriminator. It builds a `GANModel` or an
    `AdversarialModel`."""

    #: whether simulated sites' GANs can be trained as one stack; then it builds a `GANModel`
    stackable: ClassVar[bool] = False

    @property
    def balances_classes(self) -> bool:
        """Whether a real batch has as many images of each class as of any other, repeated where a site has few."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether labels of made images are the classes in turns (0, 1, 0, 1, ...) where a site has all of them."""
        return False

    @property
    @abstractmethod
    def gan_loss(self) -> GANLoss:
        """The measure phi."""

    @property
    @abstractmethod
    def separates_classes(self) -> bool:
        """Whether each class has networks of its own."""

    @property
    @abstractmethod
    def ignores_labels(self) -> bool:
        """Whether images are made without regard to labels."""

    @abstractmethod
    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        """The discriminator with an output for each site instead of one, and without labels as an input.

        It takes images [B, C, H, W] in [-1, 1] and labels [B], and gives logits [B, sites]. `per_class`: there is a
        network for each class, and labels choose it; otherwise labels change nothing. Its weights are drawn from
        torch's global state.
        """

    @abstractmethod
    def central_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float | None, *, capturable: bool
    ) -> torch.optim.Optimizer:
        """The optimiser that this generator's discriminator has, with another learning rate where one is given."""
