"""GAN losses (log, Wasserstein, hinge), the losses of a central discriminator, and the gradient penalty.

All functions give one loss for each image and take scores without a bound: D is their sigmoid, D_p their softmax. The
loss is what FELICIA calls the measure phi.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["log", "linear", "hinge"]


class GANLoss(ABC):
    """Losses to be lowered. Scores are [..., B], logits of K sites [..., B, K], numbers of sites [..., B]."""

    @abstractmethod
    def real(self, scores: Tensor) -> Tensor:
        """The discriminator's loss for real images with these scores."""

    @abstractmethod
    def fake(self, scores: Tensor) -> Tensor:
        """The discriminator's loss for fake images with these scores."""

    @abstractmethod
    def generator(self, scores: Tensor) -> Tensor:
        """The generator's loss for fake images with these scores."""

    @abstractmethod
    def identification_loss(self, logits: Tensor, site: Tensor) -> Tensor:
        """A generator's loss for being identified: phi of the probability that its images are its site's."""


class Log(GANLoss):
    """phi = log (Goodfellow et al. 2014). `smoothing` is what the label of a real image lacks to 1.

    By default a generator lowers -log D instead of log(1 - D), whose gradient vanishes just when images are poor.
    """

    def __init__(self, smoothing: float = 0.0, saturating: bool = False) -> None:
        self.smoothing, self.saturating = smoothing, saturating

    def real(self, scores: Tensor) -> Tensor:
        return (1 - self.smoothing) * F.softplus(-scores) + self.smoothing * F.softplus(scores)

    def fake(self, scores: Tensor) -> Tensor:
        return F.softplus(scores)

    def generator(self, scores: Tensor) -> Tensor:
        return -F.softplus(scores) if self.saturating else F.softplus(-scores)

    def identification_loss(self, logits: Tensor, site: Tensor) -> Tensor:
        return _at(logits.log_softmax(-1), site)


class Linear(GANLoss):
    """phi = identity: scores themselves, as a Wasserstein critic's (Arjovsky et al. 2017); needs a penalty."""

    def real(self, scores: Tensor) -> Tensor:
        return -scores

    def fake(self, scores: Tensor) -> Tensor:
        return scores

    def generator(self, scores: Tensor) -> Tensor:
        return -scores

    def identification_loss(self, logits: Tensor, site: Tensor) -> Tensor:
        return _at(logits.softmax(-1), site)


class Hinge(GANLoss):
    """phi cut off at a margin of 1 (Lim and Ye 2017): what is clearly right costs nothing."""

    def real(self, scores: Tensor) -> Tensor:
        return F.relu(1 - scores)

    def fake(self, scores: Tensor) -> Tensor:
        return F.relu(1 + scores)

    def generator(self, scores: Tensor) -> Tensor:
        return -scores

    def identification_loss(self, logits: Tensor, site: Tensor) -> Tensor:
        """The site's lead over the likeliest other site, from a margin of 1 behind on."""
        own = _at(logits, site)
        mine = torch.arange(logits.shape[-1], device=logits.device) == site.unsqueeze(-1)
        others = logits.masked_fill(mine, -torch.inf)
        return F.relu(1 + own - others.amax(-1))


def gan_loss(name: LossName, smoothing: float = 0.0, saturating: bool = False) -> GANLoss:
    if name == "log":
        return Log(smoothing, saturating)
    return Linear() if name == "linear" else Hinge()


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
