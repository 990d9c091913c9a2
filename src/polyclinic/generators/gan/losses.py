"""What two networks play for: the measure phi of a GAN as a plug-in, and what it makes of a central discriminator.

All functions give one loss per image and take scores without a bound: D is their sigmoid, D_p their softmax.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from polyclinic.generators.gan.trainer import Dice

Measure = Literal["log", "linear", "hinge"]


class Phi(ABC):
    """Losses to be lowered. Scores are [..., B], owners' logits [..., B, K]."""

    @abstractmethod
    def real(self, scores: Tensor) -> Tensor:
        """What the discriminator pays for real images with these scores."""

    @abstractmethod
    def fake(self, scores: Tensor) -> Tensor:
        """What the discriminator pays for made images with these scores."""

    @abstractmethod
    def fool(self, scores: Tensor) -> Tensor:
        """What the generator pays for made images with these scores."""

    @abstractmethod
    def found_out(self, logits: Tensor, owner: Tensor) -> Tensor:
        """What a generator pays for being recognised: phi of the probability that its images are its owner's."""


class Log(Phi):
    """phi = log (Goodfellow et al. 2014). `smoothing` is what the label of a real image lacks to 1.

    By default a generator lowers -log D instead of log(1 - D), whose slope vanishes just when images are poor.
    """

    def __init__(self, smoothing: float = 0.0, saturating: bool = False) -> None:
        self.smoothing, self.saturating = smoothing, saturating

    def real(self, scores: Tensor) -> Tensor:
        return (1 - self.smoothing) * F.softplus(-scores) + self.smoothing * F.softplus(scores)

    def fake(self, scores: Tensor) -> Tensor:
        return F.softplus(scores)

    def fool(self, scores: Tensor) -> Tensor:
        return -F.softplus(scores) if self.saturating else F.softplus(-scores)

    def found_out(self, logits: Tensor, owner: Tensor) -> Tensor:
        return _of(logits.log_softmax(-1), owner)


class Linear(Phi):
    """phi = identity: scores themselves, as a Wasserstein critic's (Arjovsky et al. 2017); needs a penalty."""

    def real(self, scores: Tensor) -> Tensor:
        return -scores

    def fake(self, scores: Tensor) -> Tensor:
        return scores

    def fool(self, scores: Tensor) -> Tensor:
        return -scores

    def found_out(self, logits: Tensor, owner: Tensor) -> Tensor:
        return _of(logits.softmax(-1), owner)


class Hinge(Phi):
    """phi cut off at a margin of 1 (Lim and Ye 2017): what is clearly right costs nothing."""

    def real(self, scores: Tensor) -> Tensor:
        return F.relu(1 - scores)

    def fake(self, scores: Tensor) -> Tensor:
        return F.relu(1 + scores)

    def fool(self, scores: Tensor) -> Tensor:
        return -scores

    def found_out(self, logits: Tensor, owner: Tensor) -> Tensor:
        """Its lead over the likeliest other owner, from a margin of 1 behind on."""
        own = _of(logits, owner)
        mine = torch.arange(logits.shape[-1], device=logits.device) == owner.unsqueeze(-1)
        others = logits.masked_fill(mine, -torch.inf)
        return F.relu(1 + own - others.amax(-1))


def phi_of(measure: Measure, smoothing: float = 0.0, saturating: bool = False) -> Phi:
    if measure == "log":
        return Log(smoothing, saturating)
    return Linear() if measure == "linear" else Hinge()


# --- the central discriminator ------------------------------------------------------------------------


def told_apart(logits: Tensor, owner: Tensor) -> Tensor:
    """What the central discriminator pays: cross-entropy of naming the owner of an image, [..., B]."""
    return -_of(logits.log_softmax(-1), owner)


def taken_for(logits: Tensor, other: Tensor) -> Tensor:
    """PrivGAN's code: a generator pays the cross-entropy of being taken for one other owner, drawn at random."""
    return -_of(logits.log_softmax(-1), other)


def another_owner(owner: Tensor, owners: int, dice: Dice) -> Tensor:
    """For each entry one of the other owners, all alike."""
    return (owner + 1 + dice.below(max(1, owners - 1), *owner.shape)) % owners


def _of(values: Tensor, owner: Tensor) -> Tensor:
    """values [..., B, K] at the owner of each row [..., B]."""
    return values.gather(-1, owner.unsqueeze(-1)).squeeze(-1)


# --- the gradient penalty -----------------------------------------------------------------------------


def gradient_penalty(score: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """(|gradient| - 1)² of a critic between real and made images (Gulrajani et al. 2017), one value per image.

    Images are [..., B, C, H, W]; `share` [..., B] says how far from the made one on the way to the real one.
    """
    share = share[..., None, None, None]
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
    return (gradient.flatten(-3).norm(dim=-1) - 1).square()
