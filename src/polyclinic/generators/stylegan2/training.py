"""How StyleGAN2 learns: the logistic loss, regularisers that act only now and then, averaged weights, and ADA.

On a GPU each kind of step is a CUDA graph, so nothing here asks the GPU for a number. Adaptive discriminator
augmentation (ADA, Karras et al. 2020b): the discriminator sees images changed as needed. Each change is made with a
probability p, so that below some p it cannot leak into what the generator makes. p begins at 0 and follows how surely
the discriminator recognises the images it has been trained on.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from polyclinic.generators.base import RandomSource
from polyclinic.generators.stylegan2.networks import GROUP, StyleGenerator
from polyclinic.training.generator_loop import autocast
from polyclinic.training.gpu.graphs import GraphedFunction

if TYPE_CHECKING:
    from polyclinic.generators.private_tuning import ExtraLoss
    from polyclinic.generators.stylegan2.model import StyleGAN2Model

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
        model: "StyleGAN2Model",
        batches: Iterator[tuple[Tensor, Tensor]],
        random: RandomSource,
        *,
        graphs: bool = True,
    ) -> None:
        """`batches`: real images [B, C, size, size] in [-1, 1] with their labels [B], on the device."""
        settings, networks = model.settings, model.networks.train()
        self.settings, self.batches, self.random = settings, batches, random
        self.precision, self.device, self.networks = model.precision, random.device, networks
        self.generator: StyleGenerator = networks["generator"]  # type: ignore[assignment]
        self.discriminator, self.controls = networks["discriminator"], networks["controls"]
        self.of_average = [networks["average"].state_dict()[name] for name in self.generator.state_dict()]
        self.to_follow = list(self.generator.state_dict().values())
        path = PATH_EVERY if settings.path_weight else 0
        self.of_generator = _adam(self.generator, settings.lr, path)
        self.of_discriminator = _adam(self.discriminator, settings.lr, R1_EVERY)
        self.p = self.controls.get_buffer("p")
        self.taken = 0
        self._sure, self.loss = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self._learners: dict[ExtraLoss | None, Callable] = {}
        recorded = graphs and settings.graphs and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if recorded else None
        if self._stream is not None:
            for name in ("_even_out", "_tell_apart", "_flatten"):
                setattr(self, name, self._graphed(getattr(self, name)))

    def _graphed(self, function: Callable) -> Callable:
        if self._stream is None:
            return function
        name = "generator.graphs: a step of StyleGAN2"
        return GraphedFunction(function, name, rngs=[self.random.rng], stream=self._stream)

    # --- one step -------------------------------------------------------------------------------------

    def step(self, extra: "ExtraLoss | None" = None) -> None:
        """One step of generator and discriminator, their regularisers where they are due."""
        real, labels = next(self.batches)
        if extra not in self._learners:
            self._learners[extra] = self._graphed(functools.partial(self._learn, extra=extra))
        self.loss = self._learners[extra](real, labels)
        if self.settings.path_weight and self.taken % PATH_EVERY == 0:
            self._even_out(labels)
        self._sure += self._tell_apart(real, labels)
        if self.taken % R1_EVERY == 0:
            self._flatten(real, labels)
        self._end_step(len(real))

    def _end_step(self, batch: int) -> None:
        self._follow(batch)
        self.taken += 1
        if self.settings.ada_target and self.taken % ADA_EVERY == 0:
            self._adapt(batch)

    # --- one step in two halves, for images that others judge in between ------------------------------
    # The generator's weights get gradients outside any CUDA graph here: with `graphs` a recording would fail.

    def discriminator_half(self) -> Tensor:
        """The discriminator's step and R1 where it is due; the labels of the real batch."""
        real, labels = next(self.batches)
        self._sure += self._tell_apart(real, labels)
        if self.taken % R1_EVERY == 0:
            self._flatten(real, labels)
        return labels

    def generator_half(self, fake: Tensor, labels: Tensor, image_gradient: Tensor | None = None) -> None:
        """The generator's step for images of `make`, path length where it is due, the average and ADA.

        `image_gradient` is the gradient of a further loss w.r.t. those images, of their shape.
        """
        self.loss = F.softplus(-self._scores(fake, labels)).mean()
        further = image_gradient is not None
        ends, gradients = ([self.loss, fake], [None, image_gradient]) if further else ([self.loss], [None])
        self.of_generator.zero_grad(set_to_none=True)
        torch.autograd.backward(ends, gradients, inputs=list(self.generator.parameters()))
        self.of_generator.step()
        self.loss = self.loss.detach()
        if self.settings.path_weight and self.taken % PATH_EVERY == 0:
            self._even_out(labels)
        self._end_step(len(labels))

    def counters(self) -> dict[str, Tensor]:
        """What ADA has counted since it last changed the augmentation; who goes on later puts it back."""
        return {"sure": self._sure.detach().cpu().clone()}

    def restore_counters(self, kept: Mapping[str, Tensor]) -> None:
        if "sure" in kept:
            self._sure.copy_(kept["sure"])

    def _learn(self, real: Tensor, labels: Tensor, extra: "ExtraLoss | None" = None) -> Tensor:
        """The generator: made images should be taken for real ones. Its loss, without the extra one."""
        fake = self.make(labels)
        loss = F.softplus(-self._scores(fake, labels)).mean()
        paid = loss if extra is None else loss + extra((real + 1) / 2, ((fake + 1) / 2).clamp(0, 1))
        _descend(self.of_generator, paid)
        return loss.detach()

    def _tell_apart(self, real: Tensor, labels: Tensor) -> Tensor:
        """The discriminator: real from made, in one pass (the spread of a batch is taken of images of one kind).

        How sure it is of real images: 1 if it takes all of them for real, -1 if none.
        """
        usable = len(real) // GROUP * GROUP or len(real)
        real, labels = real[:usable], labels[:usable]
        with torch.no_grad():
            fake = self.make(labels)
        scores = self._scores(torch.cat([fake, real]), torch.cat([labels, labels]))
        of_fake, of_real = scores.split(usable)
        _descend(self.of_discriminator, F.softplus(of_fake).mean() + F.softplus(-of_real).mean())
        return of_real.detach().sign().mean()

    # --- regularisers ---------------------------------------------------------------------------------

    def _flatten(self, real: Tensor, labels: Tensor) -> None:
        """R1: the discriminator's gradient at real images, as it sees them, should vanish."""
        seen = self._augment(real).detach().requires_grad_()
        with autocast(self.device, self.precision):
            scores = self.discriminator(seen, labels)
        (gradient,) = torch.autograd.grad(scores.float().sum(), seen, create_graph=True)
        penalty = gradient.square().sum((1, 2, 3)).mean()
        _descend(self.of_discriminator, self.gamma(len(real)) / 2 * R1_EVERY * penalty)

    def _even_out(self, labels: Tensor) -> None:
        """Path length: a step in the styles should change any image by as much, whatever the style and direction."""
        some = labels[: max(1, len(labels) // 2)]
        styles = self.styles(some)
        with autocast(self.device, self.precision):
            images = self.generator.synthesis(styles, self.noises(len(some)))
        direction = self.random.normal(*images.shape) / math.sqrt(images.shape[2] * images.shape[3])
        (gradient,) = torch.autograd.grad((images.float() * direction).sum(), styles, create_graph=True)
        lengths = gradient.float().square().sum(2).mean(1).sqrt()
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
        sure = self.controls.get_buffer("sure").copy_(self._sure / ADA_EVERY)
        change = ADA_EVERY * batch / self.settings.ada_images
        self.p.add_((sure - self.settings.ada_target).sign() * change).clamp_(0, 1)
        self._sure.zero_()

    @torch.no_grad()
    def _follow(self, batch: int) -> None:
        """Move the averaged generator; at first faster, as an average over much says little in the beginning."""
        half_life = min(self.settings.average_images, 0.05 * batch * max(1, self.taken))
        weight = 1 - 0.5 ** (batch / max(half_life, 1e-8))
        torch._foreach_lerp_(self.of_average, self.to_follow, weight)

    # --- making and looking ---------------------------------------------------------------------------

    def make(self, labels: Tensor, noise: RandomSource | None = None) -> Tensor:
        """New images for labels [B]; `noise` is where their noise z comes from, if not from the steps' own source."""
        styles = self.styles(labels, self.settings.style_mixing, noise)
        with autocast(self.device, self.precision):
            return self.generator.synthesis(styles, self.noises(len(labels))).float()

    def styles(self, labels: Tensor, mixed: float = 0.0, noise: RandomSource | None = None) -> Tensor:
        """[B, layers, latent]; for a share `mixed` of calls the last layers get styles of their own."""
        mapping, generator, z = self.generator.mapping, self.generator, noise or self.random
        w = mapping(z.normal(len(labels), self.settings.latent), labels)
        if torch.is_grad_enabled():
            mapping.remember(w.detach())
        if mixed <= 0:
            return generator.repeated(w)
        other = mapping(z.normal(len(labels), self.settings.latent), labels)
        layers = generator.synthesis.layers
        first = torch.arange(layers, device=self.device) <= self.random.integers(layers - 1, 1)
        first = first | (self.random.uniform(1) >= mixed)
        return torch.where(first[:, None], generator.repeated(w), generator.repeated(other))

    def noises(self, count: int) -> list[Tensor]:
        return [self.random.normal(count, 1, side, side) for side in self.generator.synthesis.noise_sides]

    def _scores(self, images: Tensor, labels: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            return self.discriminator(self._augment(images), labels).float()

    def _augment(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            seen = augmented(images.float(), self.p, self.random)
        return seen.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else seen


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
    on_gpu = parameters[0].is_cuda
    return Adam(parameters, lr * share, betas=betas, eps=1e-8, fused=on_gpu, capturable=on_gpu)


# --- augmentation -----------------------------------------------------------------------------------------


def augmented(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """Images [B, C, H, W] in [-1, 1], each change made with probability p []; has gradients for the generator.

    Pixels beyond the border are those of the image mirrored there.
    """
    if not images.is_cuda and float(p) <= 0:  # a GPU is not asked for p, which would make it wait
        return images
    moves, colours = _moves(images, p, random), _colours(images, p, random)
    grid = F.affine_grid(moves[:, :2], list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return recoloured(moved, colours)


def _moves(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """A 3x3 matrix for each image, from places in the new one to places in the old, in units of half a side."""
    count, side = len(images), images.shape[-1]
    draw = Draws(count, p, random)
    flip = draw.chosen(1.0 - 2.0 * random.integers(2, count).float(), 1.0)
    matrix = _scaling(flip, torch.ones_like(flip))
    matrix = matrix @ _rotation(draw.chosen(random.integers(4, count).float() * (math.pi / 2), 0.0))
    shift = (random.uniform(count, 2) * 2 - 1) * 0.125
    whole = (shift * side).round() * (2 / side)  # by whole pixels
    matrix = matrix @ _translation(draw.chosen(whole, 0.0))
    grown = draw.chosen(torch.exp2(0.2 * random.normal(count)), 1.0)
    matrix = matrix @ _scaling(grown, grown)
    # a rotation before and one after the stretching, so that at least one of the two happens with probability p
    draw.p = 1 - (1 - p).sqrt()
    matrix = matrix @ _rotation(draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0))
    draw.p = p
    stretched = draw.chosen(torch.exp2(0.2 * random.normal(count)), 1.0)
    matrix = matrix @ _scaling(stretched, 1 / stretched)
    draw.p = 1 - (1 - p).sqrt()
    matrix = matrix @ _rotation(draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0))
    draw.p = p
    return matrix @ _translation(draw.chosen(0.25 * random.normal(count, 2), 0.0))


class Draws:
    """Chooses, for each image, between a drawn value and the one that changes nothing."""

    def __init__(self, count: int, p: Tensor, random: RandomSource) -> None:
        self.count, self.p, self.random = count, p, random

    def chosen(self, drawn: Tensor, neutral: float) -> Tensor:
        made = self.random.uniform(self.count) < self.p
        # not `neutral` itself: a number would be copied to the GPU, which cannot be recorded
        return torch.where(made.reshape(-1, *[1] * (drawn.dim() - 1)), drawn, torch.full_like(drawn, neutral))


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y, torch.ones_like(x)], 1))


def _rotation(angle: Tensor) -> Tensor:
    cos, sin, one = angle.cos(), angle.sin(), torch.ones_like(angle)
    zero = torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], 1).reshape(-1, 3, 3)


def _translation(by: Tensor) -> Tensor:
    matrix = torch.eye(3, device=by.device).repeat(len(by), 1, 1)
    matrix[:, :2, 2] = by
    return matrix


def recoloured(images: Tensor, matrix: Tensor) -> Tensor:
    """Colours [B, C, H, W] through a 4x4 matrix each; of grey images only the mean of what it does to the channels.

    A mask, the last of two or of four channels, has no colour and stays as it is.
    """
    if images.shape[1] in (2, 4):
        return torch.cat([recoloured(images[:, :-1], matrix), images[:, -1:]], 1)
    linear, offset = matrix[:, :3, :3], matrix[:, :3, 3]
    if images.shape[1] == 1:
        factor = linear.sum(2).mean(1)
        return images * factor[:, None, None, None] + offset.mean(1)[:, None, None, None]
    mixed = torch.einsum("bij,bjhw->bihw", linear, images)
    return mixed + offset[:, :, None, None]


def _colours(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """A 4x4 matrix for each image: brightness, contrast, inverted luma, hue and saturation."""
    count, device = len(images), random.device
    draw = Draws(count, p, random)
    matrix = torch.eye(4, device=device).repeat(count, 1, 1)
    matrix[:, :3, 3] = draw.chosen(0.2 * random.normal(count), 0.0)[:, None]
    contrast = draw.chosen(torch.exp2(0.5 * random.normal(count)), 1.0)
    matrix = _scaled(contrast) @ matrix
    along, colourless, _ = _greys(device)
    keep = torch.eye(4, device=device)
    inverted = draw.chosen(random.integers(2, count).float(), 0.0)
    matrix = (keep - 2 * along * inverted[:, None, None]) @ matrix
    if images.shape[1] <= 2:  # grey, perhaps with a mask
        return matrix
    turned = draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0)
    matrix = _turned(turned) @ matrix
    saturation = draw.chosen(torch.exp2(random.normal(count)), 1.0)
    return (colourless + (keep - colourless) * saturation[:, None, None]) @ matrix


def _scaled(factor: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([factor, factor, factor, torch.ones_like(factor)], 1))


def _turned(angle: Tensor) -> Tensor:
    """Rotations of colours by `angle` [B] about the axis of greys (Rodrigues' formula)."""
    *_, cross = _greys(angle.device)
    sin, cos = angle.sin()[:, None, None], angle.cos()[:, None, None]
    matrix = torch.eye(4, device=angle.device).repeat(len(angle), 1, 1)
    matrix[:, :3, :3] = torch.eye(3, device=angle.device) + sin * cross + (1 - cos) * (cross @ cross)
    return matrix


@functools.cache
def _greys(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """About the axis of greys: what projects colours onto it ([4, 4], without and with the constant), and the cross
    product with it [3, 3]. Kept, as a recorded step must not fetch numbers."""
    along = torch.zeros(4, 4)
    along[:3, :3] = 1 / 3
    signs = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    constant = torch.diag(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    return along.to(device), (along + constant).to(device), (signs / math.sqrt(3)).to(device)
