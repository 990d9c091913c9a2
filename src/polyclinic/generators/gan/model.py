"""A GAN as a generator of images: `fit`, `sample`, and the trainer of its networks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.generators.base import (
    PLAIN,
    Array,
    ExtraLoss,
    FitOptions,
    GeneratorModel,
    ModelSpec,
    RandomSource,
    Steps,
    as_tensor,
    check_labels,
    initial_networks,
)
from polyclinic.generators.gan.adversarial import GANLoss
from polyclinic.generators.gan.trainer import (
    DRAWS,
    DiscriminatorDraws,
    GANTrainer,
    RealBatches,
    SingleGAN,
    random_labels,
)
from polyclinic.generators.latent_space import GaussianSpace
from polyclinic.randomness import seed_of
from polyclinic.training.generator_loop import LearnPrivately, Schedule, steps_are_recorded
from polyclinic.training.gpu.graphs import GraphedStep
from polyclinic.training.image_draws import uniform

if TYPE_CHECKING:
    from polyclinic.generators.gan.settings import GAN

CHUNK_PIXELS = 2**22  # made at a time
REPORTS = 20  # times that progress is reported


class GANModel(GeneratorModel):
    """Networks `generator`, `average` (the EMA of the generator; samples come from it) and `discriminator`."""

    def __init__(self, settings: GAN, spec: ModelSpec) -> None:
        shape = settings.shape(spec.channels, spec.size, spec.target)
        networks = initial_networks(lambda: settings.networks(shape), seed_of(spec.seed, "generator"))
        super().__init__(networks, channels=spec.channels, size=spec.size, target=spec.target, device=spec.device)
        self.settings, self.precision = settings, spec.precision

    def fit(self, images: Array, labels: Array, rng: torch.Generator, options: FitOptions = PLAIN) -> dict[str, float]:
        batches = RealBatches(self, images, labels, rng, options.replayed)
        if "generator" in options.private:
            return self._fit_privately(batches, rng, options.private["generator"])
        steps = GANSteps(self, batches, rng)
        losses, most = [], self.settings.steps_on(len(images))
        for step in range(1, most + 1):
            losses.append(steps.step())
            if step % max(1, most // REPORTS) == 0:
                options.report("generator", step, most, float(torch.stack(losses[-100:]).mean()))
        return {"generator": float(torch.stack(losses[-100:]).mean())}

    def begin(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Steps:
        return TunedSteps(self, images, labels, rng)

    def trainer(self, networks: nn.ModuleDict | None = None, *, capturable: bool = False) -> GANTrainer:
        """The trainer of its networks, or of others of the same shape."""
        gan, spec = SingleGAN(networks or self.networks), self.settings.spec
        return GANTrainer(gan, spec, device=self.device, precision=self.precision, capturable=capturable)

    def _fit_privately(self, batches: RealBatches, rng: torch.Generator, learn: LearnPrivately) -> dict[str, float]:
        """The discriminator learns with differential privacy; the generator, which sees no image, through a copy of it.

        Before each private step on a batch the generator takes its own, so that both learn in turns as always.
        """
        settings, random, images = self.settings, RandomSource(rng, self.device), len(batches.images)
        discriminator = self.networks["discriminator"]
        # private gradients hang on the modules of the discriminator: the generator's must not pass there
        twin = copy.deepcopy(discriminator)
        networks = SingleGAN(nn.ModuleDict({**dict(self.networks.items()), "discriminator": twin}))
        trainer = GANTrainer(networks, settings.spec, device=self.device)

        def batch_of(index: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
            twin.load_state_dict(discriminator.state_dict())
            wanted = random_labels(settings.batch_size, self.target, random)
            fake = trainer.make_images(wanted, random)
            trainer.generator_step(fake, wanted, trainer.draw_for_generator(random, len(wanted)))
            return private_rows(trainer, batches.at(index), wanted, random, seeds)

        losses = private_losses(discriminator, settings.gan_loss)
        steps_in_pass = max(1, images // settings.batch_size)
        passes = -(-settings.steps_on(images) * settings.critic_steps // steps_in_pass)
        joined = settings.batch_size * (2 if batches.replayed else 1)  # fake images, and replayed ones
        learn(discriminator, losses, batch_of, Schedule(passes, settings.batch_size, settings.lr), joined)
        return {"generator": float("nan")}

    @torch.no_grad()
    def sample(self, labels: Array, rng: torch.Generator) -> Tensor:
        labels = check_labels(as_tensor(labels), len(labels), self.target)
        average, random = self.networks["average"].eval(), RandomSource(rng, self.device)
        sampled = []
        for some in labels.split(max(1, CHUNK_PIXELS // self.size**2)):
            noise = random.normal(len(some), self.settings.latent)
            sampled.append(to_uint8((average(noise, self.on_device(some)) + 1) / 2))
        return torch.cat(sampled)

    def latent_space(self) -> GaussianSpace:
        """The random numbers z that images are made from, given labels."""
        average = self.networks["average"].eval().requires_grad_(False)
        return GaussianSpace(lambda z, labels: (average(z, labels) + 1) / 2, self.settings.latent, labelled=True)


class StepDraws:
    """What the steps of one GAN are made of: real batches and random numbers. `real` is the last real batch."""

    def __init__(self, model: GANModel, batches: RealBatches, rng: torch.Generator) -> None:
        self.model, self.batches = model, batches
        self.random = RandomSource(rng, model.device)
        self.real = torch.empty(0)

    def draw(self, trainer: GANTrainer) -> list[Tensor | None]:
        """The inputs of a step: noise, labels and augmentation of the generator's images, then six for each step of
        the discriminator."""
        labels = torch.empty(0)
        inputs: list[Tensor | None] = []
        for _ in range(self.model.settings.critic_steps):
            self.real, labels = self.batches.next()
            wanted = self._labels_to_make(labels)
            inputs += [self.real, labels, wanted]
            inputs += trainer.draw_for_discriminator(self.random, len(labels), len(wanted))
        wanted = self._labels_to_make(labels)
        noise = self.random.normal(len(wanted), self.model.settings.latent)
        return [noise, wanted, trainer.draw_for_generator(self.random, len(wanted)), *inputs]

    def _labels_to_make(self, labels: Tensor) -> Tensor:
        return self.model.settings.labels_to_make(labels, self.model.target, self.random)


class GANSteps:
    """A GAN's training, step by step. On a GPU steps without a further loss are recorded as a CUDA graph."""

    def __init__(self, model: GANModel, batches: RealBatches, rng: torch.Generator) -> None:
        graphed = gan_steps_are_recorded(model)
        self.drawn = StepDraws(model, batches, rng)
        self.trainer = model.trainer(capturable=graphed and model.device.type == "cuda")
        self._take = GraphedStep(self._both, "a step of a GAN", graphed=graphed)

    def step(self, image_gradient: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The discriminator's steps, then one of the generator; its loss. `image_gradient(fake)` gives the gradient of
        a further loss w.r.t. the fake images."""
        inputs = self.drawn.draw(self.trainer)
        if image_gradient is not None:
            return both_steps(self.trainer, *inputs, image_gradient=image_gradient)  # type: ignore[arg-type]
        return self._take(*inputs).clone()  # a replay overwrites it

    def _both(self, *inputs: Any) -> Tensor:
        return both_steps(self.trainer, *inputs)


def gan_steps_are_recorded(model: GANModel) -> bool:
    """Where each class has networks of its own, a step depends on how many images of a class there are."""
    return steps_are_recorded(list(model.networks.parameters())) and not model.settings.spec.per_class


def both_steps(
    trainer: GANTrainer,
    noise: Tensor,
    wanted: Tensor,
    draws: Tensor | None,
    *inputs: Tensor | None,
    image_gradient: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A step from what was drawn for it (`StepDraws.draw`), of one GAN or of a stack of GANs; the generator's loss."""
    for start in range(0, len(inputs), 6):
        real, labels, made, *drawn = inputs[start : start + 6]
        trainer.discriminator_step(real, labels, made, DiscriminatorDraws(*drawn))  # type: ignore[arg-type]
    fake = trainer.generate(noise, wanted)
    gradient = None if image_gradient is None else image_gradient(fake)
    return trainer.generator_step(fake, wanted, draws, gradient)


class TunedSteps:
    """A GAN's training, step by step: what `fit` does, and an extra loss."""

    def __init__(self, model: GANModel, images: Tensor, labels: Tensor, rng: torch.Generator) -> None:
        self.steps = GANSteps(model, RealBatches(model, images, labels, rng), rng)

    def step(self, extra: ExtraLoss | None = None) -> None:
        self.steps.step(None if extra is None else functools.partial(self._gradient, extra))

    def _gradient(self, extra: ExtraLoss, fake: Tensor) -> Tensor:
        """Of the extra loss w.r.t. the fake images, which lie in [-1, 1]."""
        seen = fake.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(extra((self.steps.drawn.real + 1) / 2, (seen.float() + 1) / 2), seen)
        return gradient


def private_rows(
    trainer: GANTrainer, batch: tuple[Tensor, Tensor], wanted: Tensor, random: RandomSource, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch for a discriminator with differential privacy: real and fake images, labels, and which are real.

    Real images are augmented by their own `seeds`, so that none depends on which others are in the batch.
    """
    real, labels = batch
    with torch.no_grad():
        fake = trainer.make_images(wanted, random)
    draws = trainer.draw_for_generator(random, len(real) - len(seeds))  # of replayed images behind the real ones
    if draws is not None:
        draws = torch.cat([uniform(seeds, DRAWS, purpose="augmentation").to(draws), draws])
    parts = [trainer.augment(real, draws), trainer.augment(fake, trainer.draw_for_generator(random, len(fake)))]
    is_real = torch.arange(len(real) + len(fake), device=real.device) < len(real)
    return torch.cat(parts), torch.cat([labels, wanted.to(labels.dtype)]), is_real


def private_losses(discriminator: nn.Module, loss: GANLoss) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The discriminator's loss of each row, given images, labels and which of them are real."""

    def losses(rows: Tensor, labels: Tensor, is_real: Tensor) -> Tensor:
        scores = discriminator(rows, labels)[:, 0]
        return torch.where(is_real, loss.real(scores), loss.fake(scores))

    return losses
