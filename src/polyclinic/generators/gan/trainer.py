"""GAN trainer: the steps of a discriminator and a generator, for one GAN or for a stack of GANs of one shape.

One GAN takes images [B, C, H, W]; a stack of M GANs, one for each site, takes [M, B, C, H, W]. Losses are means over a
site's images and sums over sites, so that in a stack each GAN gets the gradients that it would get alone. A step is a
function of its inputs: random numbers are drawn before it (`draw_...`), which lets a CUDA graph hold it.

The discriminator sees real and fake images through the same changes. It then cannot learn few images by heart, and
since the changes have gradients, the generator learns through them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam

from polyclinic.federation.collaborators import Batch
from polyclinic.generators.base import Array, RandomSource, as_tensor, check_labels
from polyclinic.generators.gan.adversarial import gradient_penalty
from polyclinic.generators.gan.networks import LARGEST_GROUP, update_spectral_norms
from polyclinic.tasks import Target
from polyclinic.training.generator_loop import autocast

if TYPE_CHECKING:
    from polyclinic.generators.gan.model import GANModel
    from polyclinic.generators.gan.settings import GAN
    from polyclinic.generators.stylegan2.model import StyleGAN2Model

BETAS = (0.5, 0.999)


class DiscriminatorDraws(NamedTuple):
    """Random numbers of a discriminator's step; None where the settings need none."""

    noise: Tensor  #: [..., B, latent]
    augmentation: Tensor | None  #: [..., real and fake, DRAWS]
    mixing: Tensor | None  #: [..., B], how far a point of the gradient penalty is from the fake image


class GANNetworks:
    """Networks `generator`, `average` (its EMA) and `discriminator`; of one GAN, or each of them a stack of networks
    (`StackedNetworks`), whose tensors have an axis in front."""

    def __init__(self, networks: Mapping[str, Any] | nn.ModuleDict) -> None:
        self.networks = networks
        for network in networks.values():
            network.train()
        self.generator: list[nn.Parameter] = list(networks["generator"].parameters())
        self.generator_buffers: list[Tensor] = list(networks["generator"].buffers())
        self.discriminator: list[nn.Parameter] = list(networks["discriminator"].parameters())

    @torch.no_grad()
    def update_ema(self, decay: float | Tensor) -> None:
        """Move the EMA towards the present generator; `decay` [] may lie on the device."""
        average, now = self.networks["average"].state_dict(), self.networks["generator"].state_dict()
        floats = [name for name in now if now[name].is_floating_point()]
        here, there = [average[name] for name in floats], [now[name] for name in floats]
        if isinstance(decay, Tensor):
            away = torch._foreach_sub(there, here)
            torch._foreach_mul_(away, 1 - decay)
            torch._foreach_add_(here, away)
        else:
            torch._foreach_lerp_(here, there, 1 - decay)
        for name in now.keys() - floats:
            average[name].copy_(now[name])


def adam(
    parameters: list[nn.Parameter], lr: float, *, betas: tuple[float, float] = BETAS, capturable: bool = False
) -> torch.optim.Adam:
    """Adam; `capturable` in a CUDA graph: its counts lie on the device, and its step is one kernel."""
    return Adam(parameters, lr, betas=betas, capturable=capturable, fused=capturable or None)


class GANTrainer:
    """Networks with their two optimisers. `steps` counts the generator's; where a CUDA graph holds the steps
    (`capturable`), it lies on the device, as the optimisers' counts do."""

    def __init__(
        self,
        networks: GANNetworks,
        settings: "GAN",
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        capturable: bool = False,
    ) -> None:
        self.networks, self.settings, self.loss = networks, settings, settings.gan_loss
        self.device, self.precision = torch.device(device), precision
        self.steps: int | Tensor = torch.zeros((), device=self.device) if capturable else 0
        self.generator_optimizer = adam(networks.generator, settings.lr, capturable=capturable)
        lr = settings.lr_discriminator or settings.lr
        self.discriminator_optimizer = adam(networks.discriminator, lr, capturable=capturable)

    # --- the discriminator ------------------------------------------------------------------------

    def draw_for_discriminator(self, random: RandomSource, real: int, fake: int) -> DiscriminatorDraws:
        """For a step on so many real and fake images."""
        noise = random.normal(fake, self.settings.latent)
        augmentation = random.uniform(real + fake, DRAWS) if self.settings.augment else None
        return DiscriminatorDraws(noise, augmentation, random.uniform(real) if self.settings.penalty else None)

    def discriminator_step(self, real: Tensor, labels: Tensor, wanted: Tensor, draws: DiscriminatorDraws) -> Tensor:
        """A step on real images with their labels and on fake ones with the labels `wanted`; its loss, [...]."""
        with torch.no_grad():
            fake = self.generate(draws.noise, wanted)
        update_spectral_norms(self.networks.networks["discriminator"])
        rows = [real.shape[-4], fake.shape[-4]]
        seen, made = self.augment(torch.cat([real, fake], -4), draws.augmentation).split(rows, -4)
        real_scores, fake_scores = self.scores([seen, made], [labels, wanted])
        loss = self.loss.real(real_scores).mean(-1) + self.loss.fake(fake_scores).mean(-1)
        if draws.mixing is not None:
            steep = gradient_penalty(lambda between: self.score(between, labels), seen, made, draws.mixing)
            loss = loss + self.settings.penalty * steep.mean(-1)
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        self.discriminator_optimizer.step()
        return loss.detach()

    def discriminator_steps(self, inputs: Sequence[Any]) -> Tensor:
        """Steps on inputs that are drawn already, six for each; the last real batch."""
        for start in range(0, len(inputs), 6):
            real, labels, wanted, *draws = inputs[start : start + 6]
            self.discriminator_step(real, labels, wanted, DiscriminatorDraws(*draws))
        return real

    # --- the generator ----------------------------------------------------------------------------

    def make_images(self, labels: Tensor, random: RandomSource) -> Tensor:
        """New images in [-1, 1] for labels [..., B], differentiable w.r.t. the generator's weights."""
        return self.generate(random.normal(labels.shape[-1], self.settings.latent), labels)

    def generate(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images in [-1, 1], [..., B, C, H, W], from noise [..., B, latent]."""
        with autocast(self.device, self.precision):
            return self.networks.networks["generator"](noise, labels)

    def draw_for_generator(self, random: RandomSource, count: int) -> Tensor | None:
        """Augmentation of so many fake images, for a step."""
        return random.uniform(count, DRAWS) if self.settings.augment else None

    def generator_step(
        self, fake: Tensor, labels: Tensor, draws: Tensor | None, image_gradient: Tensor | None = None
    ) -> Tensor:
        """A step for images that were just made; the generator's own loss, [...].

        `image_gradient` is the gradient of a further loss w.r.t. those images, of their shape.
        """
        scores = self.score(self.augment(fake, draws), labels)
        loss = self.loss.generator(scores).mean(-1)
        self.generator_optimizer.zero_grad(set_to_none=True)
        further = image_gradient is not None
        ends, gradients = ([loss.sum(), fake], [None, image_gradient]) if further else ([loss.sum()], [None])
        torch.autograd.backward(ends, gradients, inputs=self.networks.generator)
        self.generator_optimizer.step()
        self.steps += 1
        most, early = self.settings.average, (1 + self.steps) / (10 + self.steps)  # the decay's warm-up
        self.networks.update_ema(early.clamp(max=most) if isinstance(early, Tensor) else min(most, early))
        return loss.detach()

    # --- both -------------------------------------------------------------------------------------

    def augment(self, images: Tensor, draws: Tensor | None) -> Tensor:
        """Images [..., B, C, H, W] as the discriminator sees them."""
        return images if draws is None else augment(images, draws)

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        """How real the discriminator takes images for, [..., B]."""
        with autocast(self.device, self.precision):
            return self.networks.networks["discriminator"](images, labels)[..., 0]

    def scores(self, parts: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
        """Scores of several sets of images; in one pass, where no group of `MinibatchSpread` would mix two sets.

        Where each class has networks of its own, the images of one class may be any number.
        """
        if self.settings.separates_classes or any(part.shape[-4] % LARGEST_GROUP for part in parts):
            return [self.score(part, known) for part, known in zip(parts, labels, strict=True)]
        together = self.score(torch.cat(parts, -4), torch.cat(labels, -1))
        return list(together.split([part.shape[-4] for part in parts], -1))


# --- batches --------------------------------------------------------------------------------------


def random_labels(count: int, target: Target, random: RandomSource) -> Tensor:
    """Labels drawn alike from the classes, or from the public range of values: they tell nothing about any image."""
    if target.classes:
        return random.integers(len(target.classes), count)
    low, high = target.label_range or (0.0, 0.0)
    return low + (high - low) * random.uniform(count)


class RealBatches:
    """Shuffled mini-batches of real images in [-1, 1] on the device, joined by replayed ones where there are any."""

    def __init__(
        self,
        model: "GANModel | StyleGAN2Model",
        images: Array,
        labels: Array,
        rng: torch.Generator,
        replayed: Iterator[Batch] | None = None,
    ) -> None:
        self.model, self.replayed = model, replayed
        self.images = model.on_device(model.accept_images(images))
        self.labels = model.on_device(check_labels(as_tensor(labels), len(images), model.target))
        size = model.settings.batch_size
        self._order = endless_batches(len(self.images), size, rng)
        if model.settings.balances_classes and not self.labels.is_floating_point():
            self._order = balanced_batches(self.labels.cpu(), size, rng)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        return self.at(next(self._order))

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        index = self.model.on_device(index)
        real, labels = centred(self.images[index]), self.labels[index]
        if self.replayed is None:
            return real, labels
        more, known = next(self.replayed)
        joined = self.model.on_device(more) * 2 - 1
        return torch.cat([real, joined]), torch.cat([labels, self.model.on_device(known).to(labels.dtype)])


def centred(images: Tensor) -> Tensor:
    """uint8 images as float32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def balanced_batches(labels: Tensor, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices drawn with replacement: the classes that are there take turns, so each comes as often in a batch."""
    groups = [torch.nonzero(labels == one)[:, 0] for one in labels.unique()]
    turns = [groups[row % len(groups)] for row in range(size)]
    while True:
        draws = torch.rand(size, generator=rng)
        yield torch.stack([group[int(at * len(group))] for group, at in zip(turns, draws.tolist(), strict=True)])


def endless_batches(images: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of one shuffled pass after another, in batches of exactly `size`, or of all images if those are fewer."""
    size = min(size, images)
    while True:
        order = torch.randperm(images, generator=rng, device=rng.device)
        yield from order[: images // size * size].split(size)


# --- differentiable augmentation (Zhao et al. 2020) -----------------------------------------------


DRAWS = 7  # random numbers an image needs


def augment(images: Tensor, draws: Tensor) -> Tensor:
    """Images [..., C, H, W] in [-1, 1], each brightened, its contrast and colour changed, shifted and partly blanked.

    `draws` [..., DRAWS] are uniform in [0, 1).
    """
    flat, numbers = images.reshape(-1, *images.shape[-3:]), draws.reshape(-1, DRAWS)
    changed = cut(shifted(coloured(flat, numbers[:, :3]), numbers[:, 3:5]), numbers[:, 5:7])
    return changed.reshape(images.shape)


def coloured(images: Tensor, draws: Tensor) -> Tensor:
    brightness, saturation, contrast = (column[:, None, None, None] for column in draws.unbind(1))
    images = images + (brightness - 0.5)
    if images.shape[1] > 1:
        grey = images.mean(1, keepdim=True)
        images = grey + (images - grey) * (2 * saturation)
    middle = images.mean((1, 2, 3), keepdim=True)
    return middle + (images - middle) * (contrast + 0.5)


def shifted(images: Tensor, draws: Tensor) -> Tensor:
    """Moved by up to an eighth of the side in each direction; what comes in is black, as beyond the frame.

    Pixels are gathered by index: unlike a sampled grid, that has second derivatives.
    """
    side = images.shape[-1]
    reach = side // 8
    moves = (draws * (2 * reach + 1)).long() - reach
    for axis, move in ((2, moves[:, 0]), (3, moves[:, 1])):
        at = torch.arange(side, device=images.device)[None] + move[:, None]
        shape = (-1, 1, side, 1) if axis == 2 else (-1, 1, 1, side)
        inside = ((at >= 0) & (at < side)).reshape(shape)
        index = at.clamp(0, side - 1).reshape(shape).expand_as(images)
        images = torch.where(inside, images.gather(axis, index), -1.0)
    return images


def cut(images: Tensor, draws: Tensor) -> Tensor:
    """With a grey square of half the side somewhere."""
    side = images.shape[-1]
    place = torch.arange(side, device=images.device)[None]
    row, column = ((place - (draws[:, k : k + 1] * side).floor()).abs() < side / 4 for k in (0, 1))
    return torch.where((row[:, :, None] & column[:, None, :])[:, None], 0.0, images)
