"""What every GAN is (its settings, its training in halves of a step), and the losses that it learns by.

All losses are of one image each, and take scores without a bound: D is their sigmoid, D_p their softmax. The loss is
what FELICIA calls the measure phi.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.base import Generator, GeneratorModel, RandomSource
from polyclinic.tasks import Target

LossName = Literal["log", "linear", "hinge"]


class GANLoss(NamedTuple):
    """Losses to be lowered. Scores are [..., B], logits of K sites [..., B, K], numbers of sites [..., B]."""

    real: Callable[[Tensor], Tensor]  #: the discriminator's, of real images with these scores
    fake: Callable[[Tensor], Tensor]  #: the discriminator's, of fake images
    generator: Callable[[Tensor], Tensor]  #: the generator's, of fake images
    #: a generator's for being identified: phi of the probability that its images are its site's
    identification_loss: Callable[[Tensor, Tensor], Tensor]


def gan_loss(name: LossName, smoothing: float = 0.0, saturating: bool = False) -> GANLoss:
    """The measure phi: `log` (Goodfellow et al. 2014), `linear` (the scores themselves, as a Wasserstein critic's: it
    needs a penalty; Arjovsky et al. 2017) or `hinge` (cut off at a margin of 1; Lim and Ye 2017).

    With `log`, `smoothing` is what the label of a real image lacks to 1; unless `saturating`, a generator lowers -log D
    instead of log(1 - D), whose gradient vanishes just when images are poor.
    """
    if name == "linear":
        return GANLoss(torch.neg, lambda scores: scores, torch.neg, lambda logits, site: _at(logits.softmax(-1), site))
    if name == "hinge":
        return GANLoss(lambda scores: F.relu(1 - scores), lambda scores: F.relu(1 + scores), torch.neg, _lead)

    def real(scores: Tensor) -> Tensor:
        return (1 - smoothing) * F.softplus(-scores) + smoothing * F.softplus(scores)

    def generator(scores: Tensor) -> Tensor:
        return -F.softplus(scores) if saturating else F.softplus(-scores)

    return GANLoss(real, F.softplus, generator, lambda logits, site: _at(logits.log_softmax(-1), site))


def _lead(logits: Tensor, site: Tensor) -> Tensor:
    """The site's lead over the likeliest other site, from a margin of 1 behind on."""
    mine = torch.arange(logits.shape[-1], device=logits.device) == site.unsqueeze(-1)
    return F.relu(1 + _at(logits, site) - logits.masked_fill(mine, -torch.inf).amax(-1))


# --- the central discriminator ------------------------------------------------------------------------


def site_cross_entropy(logits: Tensor, site: Tensor) -> Tensor:
    """The central discriminator's loss: cross-entropy of naming the site that made an image, [..., B]."""
    return -_at(logits.log_softmax(-1), site)


def confusion_loss(logits: Tensor, other: Tensor) -> Tensor:
    """PrivGAN's code: a generator's loss is the cross-entropy of being taken for one other site, drawn at random."""
    return -_at(logits.log_softmax(-1), other)


def _at(values: Tensor, site: Tensor) -> Tensor:
    """values [..., B, K] at the site of each row [..., B]."""
    return values.gather(-1, site.unsqueeze(-1)).squeeze(-1)


# --- the gradient penalty -----------------------------------------------------------------------------


def gradient_penalty(score: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mixing: Tensor) -> Tensor:
    """(|gradient| - 1)² of a critic between real and fake images (Gulrajani et al. 2017), one value per image.

    Images are [..., B, C, H, W]; `mixing` [..., B] says how far from the fake one on the way to the real one.
    """
    mixing = mixing[..., None, None, None]
    between = (mixing * real + (1 - mixing) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
    return (gradient.flatten(-3).norm(dim=-1) - 1).square()


# --- GANs for FELICIA -----------------------------------------------------------------------------


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
    def separates_classes(self) -> bool:
        """Whether each class has networks of its own."""
        return False

    @property
    def ignores_labels(self) -> bool:
        """Whether images are made without regard to labels."""
        return False

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
