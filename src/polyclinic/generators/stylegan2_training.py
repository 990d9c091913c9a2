"""How StyleGAN2 learns: the logistic loss, regularisers that act only now and then, averaged weights, and ADA.

Gradients of regularisers need second derivatives, so they are taken of the plain networks; the main steps may use
compiled ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.duel import Dice
from polyclinic.generators.stylegan2_augmentation import augmented
from polyclinic.generators.stylegan2_discriminator import GROUP
from polyclinic.generators.stylegan2_networks import StyleGenerator

if TYPE_CHECKING:
    from polyclinic.generators.private_tuning import ExtraLoss
    from polyclinic.generators.stylegan2 import StyleGAN2

#: steps between two of a regulariser
R1_EVERY, PATH_EVERY = 16, 4
#: steps between two looks at how well the discriminator knows its images
ADA_EVERY = 4
PATH_MEMORY = 0.01
BETAS = (0.0, 0.99)


class Steps:
    """A StyleGAN2 in training, step by step. `networks` holds generator, average, discriminator and controls."""

    def __init__(
        self,
        settings: StyleGAN2,
        networks: nn.ModuleDict,
        batches: Iterator[tuple[Tensor, Tensor]],
        dice: Dice,
        *,
        precision: str = "fp32",
    ) -> None:
        """`batches`: real images [B, C, size, size] in [-1, 1] with their labels [B], on the device."""
        self.settings, self.batches, self.dice = settings, batches, dice
        self.precision, self.device = precision, dice.device
        self.networks = networks.train()
        self.generator: StyleGenerator = networks["generator"]  # type: ignore[assignment]
        self.discriminator, self.controls = networks["discriminator"], networks["controls"]
        self.synthesise: Callable = self.generator.synthesis
        self.judge: Callable = self.discriminator
        if settings.compile:
            self.synthesise, self.judge = torch.compile(self.synthesise), torch.compile(self.judge)
        self.of_average = [networks["average"].state_dict()[name] for name in self.generator.state_dict()]
        self.to_follow = list(self.generator.state_dict().values())
        path = PATH_EVERY if settings.path_weight else 0
        self.of_generator = _adam(self.generator, settings.lr, path)
        self.of_discriminator = _adam(self.discriminator, settings.lr, R1_EVERY)
        self.p = float(self.controls.get_buffer("p"))
        self.taken = 0
        self._signs: list[Tensor] = []
        self.loss = torch.zeros((), device=self.device)

    # --- one step -------------------------------------------------------------------------------------

    def step(self, extra: ExtraLoss | None = None) -> None:
        """One step of generator and discriminator, their regularisers where they are due."""
        real, labels = next(self.batches)
        self._learn(real, labels, extra)
        if self.settings.path_weight and self.taken % PATH_EVERY == 0:
            self._even_out(labels)
        self._tell_apart(real, labels)
        if self.taken % R1_EVERY == 0:
            self._flatten(real, labels)
        self._follow(len(real))
        self.taken += 1
        if self.settings.ada_target and self.taken % ADA_EVERY == 0:
            self._adapt(len(real))

    def _learn(self, real: Tensor, labels: Tensor, extra: ExtraLoss | None) -> None:
        """The generator: made images should be taken for real ones."""
        fake = self.make(labels)
        loss = F.softplus(-self._scores(fake, labels)).mean()
        self.loss = loss.detach()
        if extra is not None:
            loss = loss + extra((real + 1) / 2, ((fake + 1) / 2).clamp(0, 1))
        _descend(self.of_generator, loss)

    def _tell_apart(self, real: Tensor, labels: Tensor) -> None:
        """The discriminator: real from made, in one pass (the spread of a batch is taken of images of one kind)."""
        usable = len(real) // GROUP * GROUP or len(real)
        real, labels = real[:usable], labels[:usable]
        with torch.no_grad():
            fake = self.make(labels)
        scores = self._scores(torch.cat([fake, real]), torch.cat([labels, labels]))
        of_fake, of_real = scores.split(usable)
        _descend(self.of_discriminator, F.softplus(of_fake).mean() + F.softplus(-of_real).mean())
        self._signs.append(of_real.detach().sign().mean())

    # --- regularisers ---------------------------------------------------------------------------------

    def _flatten(self, real: Tensor, labels: Tensor) -> None:
        """R1: the discriminator's slope at real images, as it sees them, should vanish."""
        seen = self._look(real).detach().requires_grad_()
        with self._autocast():
            scores = self.discriminator(seen, labels)
        (slope,) = torch.autograd.grad(scores.float().sum(), seen, create_graph=True)
        penalty = slope.square().sum((1, 2, 3)).mean()
        _descend(self.of_discriminator, self.gamma(len(real)) / 2 * R1_EVERY * penalty)

    def _even_out(self, labels: Tensor) -> None:
        """Path length: a step in the styles should change any image by as much, whatever the style and direction."""
        some = labels[: max(1, len(labels) // 2)]
        styles = self.styles(some)
        with self._autocast():
            images = self.generator.synthesis(styles, self.noises(len(some)))
        direction = self.dice.normal(*images.shape) / math.sqrt(images.shape[2] * images.shape[3])
        (slope,) = torch.autograd.grad((images.float() * direction).sum(), styles, create_graph=True)
        lengths = slope.float().square().sum(2).mean(1).sqrt()
        mean = self.controls.get_buffer("path_length")
        mean.lerp_(lengths.detach().mean(), PATH_MEMORY)
        penalty = (lengths - mean).square().mean()
        _descend(self.of_generator, self.settings.path_weight * PATH_EVERY * penalty)

    def gamma(self, batch: int) -> float:
        """Weight of R1: the one chosen, or what suits the size of images and batch."""
        size = self.generator.synthesis.sides[-1]
        return self.settings.gamma if self.settings.gamma is not None else 0.0002 * size**2 / batch

    # --- ADA, averages --------------------------------------------------------------------------------

    def _adapt(self, batch: int) -> None:
        """Augment more where the discriminator is surer of real images than its target, else less."""
        sure = float(torch.stack(self._signs).mean())
        self._signs.clear()
        change = ADA_EVERY * batch / self.settings.ada_images
        self.p = min(1.0, max(0.0, self.p + math.copysign(change, sure - self.settings.ada_target)))
        self.controls.get_buffer("p").fill_(self.p)
        self.controls.get_buffer("sure").fill_(sure)

    @torch.no_grad()
    def _follow(self, batch: int) -> None:
        """Move the averaged generator; at first faster, as an average over much says little in the beginning."""
        half_life = min(self.settings.average_images, 0.05 * batch * max(1, self.taken))
        weight = 1 - 0.5 ** (batch / max(half_life, 1e-8))
        torch._foreach_lerp_(self.of_average, self.to_follow, weight)

    # --- making and looking ---------------------------------------------------------------------------

    def make(self, labels: Tensor) -> Tensor:
        """New images for labels [B]."""
        styles = self.styles(labels, mixed=self.settings.style_mixing)
        with self._autocast():
            return self.synthesise(styles, self.noises(len(labels))).float()

    def styles(self, labels: Tensor, mixed: float = 0.0) -> Tensor:
        """[B, layers, latent]; for a share `mixed` of calls the last layers get styles of their own."""
        mapping = self.generator.mapping
        w = mapping(self.dice.normal(len(labels), self.settings.latent), labels)
        if torch.is_grad_enabled():
            mapping.remember(w.detach())
        styles = self.generator.repeated(w)
        if mixed <= 0 or float(self.coin.uniform(1)) >= mixed:
            return styles
        other = self.generator.repeated(mapping(self.dice.normal(len(labels), self.settings.latent), labels))
        cut = 1 + int(self.coin.below(styles.shape[1] - 1, 1))
        return torch.cat([styles[:, :cut], other[:, cut:]], 1)

    @property
    def coin(self) -> Dice:
        """Numbers that decide what is computed, and so must be known on the CPU."""
        if not hasattr(self, "_coin"):
            seed = int(torch.randint(2**62, (), generator=self.dice.rng, device=self.dice.rng.device))
            self._coin = Dice(torch.Generator().manual_seed(seed), torch.device("cpu"))
        return self._coin

    def noises(self, count: int) -> list[Tensor]:
        return [self.dice.normal(count, 1, side, side) for side in self.generator.synthesis.noise_sides]

    def _scores(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            return self.judge(self._look(images), labels).float()

    def _look(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            seen = augmented(images.float(), self.p, self.coin)
        return seen.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else seen

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step of one of the two: gradients reach its weights and no others."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


def _adam(network: nn.Module, lr: float, every: int) -> torch.optim.Adam:
    """Adam that takes one more step in `every` for the regulariser, and so is slowed as much."""
    share = every / (every + 1) if every else 1.0
    parameters = list(network.parameters())
    betas = (BETAS[0] ** share, BETAS[1] ** share)
    return torch.optim.Adam(parameters, lr * share, betas=betas, eps=1e-8, fused=parameters[0].is_cuda)
