"""A GAN as a generator of images: `fit`, `sample`, and the steps of one GAN or of a stack of GANs of one shape."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyclinic.data.pixels import to_uint8
from polyclinic.federation.collaborators import Batch
from polyclinic.generators import base
from polyclinic.generators.gan.adversarial import GANLoss
from polyclinic.generators.gan.networks import OfEachClass, compute_as_products
from polyclinic.generators.gan.trainer import DRAWS, GANNetworks, GANTrainer, RealBatches, random_labels
from polyclinic.generators.latent_space import GaussianSpace
from polyclinic.randomness import seed_of
from polyclinic.training.generator_loop import LearnPrivately, Schedule, steps_are_recorded
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.image_draws import uniform

if TYPE_CHECKING:
    from polyclinic.generators.gan.settings import GAN

CHUNK_PIXELS = 2**22  # made at a time
REPORTS = 20  # times that progress is reported
LAST = 100  # steps whose mean loss is told


class GANModel(base.GeneratorModel):
    """Networks `generator`, `average` (the EMA of the generator; samples come from it) and `discriminator`."""

    def __init__(self, settings: "GAN", spec: base.ModelSpec) -> None:
        shape = settings.shape(spec.channels, spec.size, spec.target)
        networks = base.initial_networks(lambda: settings.networks(shape), seed_of(spec.seed, "generator"))
        super().__init__(networks, channels=spec.channels, size=spec.size, target=spec.target, device=spec.device)
        self.settings, self.precision = settings, spec.precision

    def fit(
        self, images: base.Array, labels: base.Array, rng: torch.Generator, options: base.FitOptions = base.PLAIN
    ) -> dict[str, float]:
        if "generator" in options.private:
            batches = RealBatches(self, images, labels, rng, options.replayed)
            return self._fit_privately(batches, rng, options.private["generator"])
        [losses] = fit_together([Learner(self, images, labels, rng, options.report, options.replayed)])
        return losses

    def begin(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> base.Steps:
        return GANSteps([Learner(self, images, labels, rng)])

    def _fit_privately(self, batches: RealBatches, rng: torch.Generator, learn: LearnPrivately) -> dict[str, float]:
        """The discriminator learns with differential privacy; the generator, which sees no image, through a copy of it.

        Before each private step on a batch the generator takes its own, so that both learn in turns as always.
        """
        settings, random, images = self.settings, base.RandomSource(rng, self.device), len(batches.images)
        discriminator = self.networks["discriminator"]
        # private gradients hang on the modules of the discriminator: the generator's must not pass there
        twin = copy.deepcopy(discriminator)
        networks = GANNetworks({**dict(self.networks.items()), "discriminator": twin})
        trainer = GANTrainer(networks, settings, device=self.device)

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
    def sample(self, labels: base.Array, rng: torch.Generator) -> Tensor:
        labels = base.check_labels(base.as_tensor(labels), len(labels), self.target)
        average, random = self.networks["average"].eval(), base.RandomSource(rng, self.device)
        sampled = []
        for some in labels.split(max(1, CHUNK_PIXELS // self.size**2)):
            noise = random.normal(len(some), self.settings.latent)
            sampled.append(to_uint8((average(noise, self.on_device(some)) + 1) / 2))
        return torch.cat(sampled)

    def latent_space(self) -> GaussianSpace:
        """The random numbers z that images are made from, given labels."""
        average = self.networks["average"].eval().requires_grad_(False)
        return GaussianSpace(lambda z, labels: (average(z, labels) + 1) / 2, self.settings.latent, labelled=True)


def private_rows(
    trainer: GANTrainer, batch: tuple[Tensor, Tensor], wanted: Tensor, random: base.RandomSource, seeds: Tensor
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


# --- stacks -------------------------------------------------------------------------------------------


class StackedNetworks:
    """M networks of one shape computed as one, with `torch.func.vmap`; `parameters` and `buffers` are [M, ...].

    Each computes what it would compute alone, up to rounding. `as_products`: compute convolutions as matrix products,
    which is faster on a GPU. Where each class has networks of its own, classes take turns (`OfEachClass`).
    """

    def __init__(self, networks: Sequence[nn.Module], *, as_products: bool = False) -> None:
        self._parameters, self._buffers = stack_module_state(list(networks))
        # only its layers are used: the weights are those in the stack
        self.layout = copy.deepcopy(networks[0])
        compute_as_products(self.layout, as_products)
        for layer in self.layout.modules():
            if isinstance(layer, OfEachClass):
                layer.in_turns = True
        self._forward = vmap(self._one)

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return functional_call(self.layout, (parameters, buffers), inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Each input [M, ...]: network m gets entry m of it."""
        return self._forward(self._parameters, self._buffers, *inputs)

    def train(self) -> None:
        self.layout.train()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.layout.named_modules()

    def parameters(self) -> list[Any]:
        return list(self._parameters.values())

    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {**self._parameters, **self._buffers}


class StackedGAN(GANNetworks):
    """The networks of M GANs."""

    def __init__(self, members: Sequence[nn.ModuleDict], *, as_products: bool = False) -> None:
        parts = ("generator", "average", "discriminator")
        how = {"as_products": as_products}
        super().__init__({part: StackedNetworks([one[part] for one in members], **how) for part in parts})

    def state(self, member: int) -> dict[str, Tensor]:
        """What `GANModel.load` of one GAN takes."""
        return {
            f"{part}.{name}": tensor[member].detach().cpu().clone()
            for part, stacked in self.networks.items()
            for name, tensor in stacked.state_dict().items()
        }


def networks_of(models: Sequence[GANModel]) -> GANNetworks:
    """The networks of one GAN, or of several as a stack."""
    if len(models) == 1:
        return GANNetworks(models[0].networks)
    return StackedGAN([one.networks for one in models], as_products=models[0].device.type == "cuda")


def stacked(each: Sequence[Any]) -> Any:
    """The same input of each GAN as one tensor; that of a single GAN as it is, and None where there is none."""
    return each[0] if len(each) == 1 or each[0] is None else torch.stack(list(each))


# --- steps --------------------------------------------------------------------------------------------


class StepDraws:
    """What the steps of one GAN are made of: real batches and random numbers."""

    def __init__(self, model: GANModel, batches: RealBatches, rng: torch.Generator) -> None:
        self.model, self.batches = model, batches
        self.random = base.RandomSource(rng, model.device)
        #: labels of the last real batch, and of the fake images to make next
        self.labels = self.wanted = torch.empty(0)

    def for_discriminator(self, trainer: GANTrainer) -> list[Tensor | None]:
        """For each of its steps: real images and their labels, labels of fake ones, and random numbers."""
        inputs: list[Tensor | None] = []
        for _ in range(self.model.settings.critic_steps):
            real, self.labels = next(self.batches)
            self.wanted = self.labels_to_make(self.labels)
            draws = trainer.draw_for_discriminator(self.random, len(self.labels), len(self.wanted))
            inputs += [real, self.labels, self.wanted, *draws]
        return inputs

    def for_both(self, trainer: GANTrainer) -> list[Tensor | None]:
        """Noise, labels and augmentation of the generator's images, then what the discriminator needs."""
        inputs = self.for_discriminator(trainer)
        wanted = self.labels_to_make(self.labels)
        noise = self.random.normal(len(wanted), self.model.settings.latent)
        return [noise, wanted, trainer.draw_for_generator(self.random, len(wanted)), *inputs]

    def labels_to_make(self, labels: Tensor) -> Tensor:
        return self.model.settings.labels_to_make(labels, self.model.target, self.random)


def both_steps(
    trainer: GANTrainer,
    noise: Tensor,
    wanted: Tensor,
    draws: Tensor | None,
    *inputs: Tensor | None,
    image_gradient: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """A step from what was drawn for it (`StepDraws.for_both`); the generator's loss. `image_gradient(fake, real)` is
    the gradient of a further loss w.r.t. the fake images."""
    real = trainer.discriminator_steps(inputs)
    fake = trainer.generate(noise, wanted)
    gradient = None if image_gradient is None else image_gradient(fake, real)
    return trainer.generator_step(fake, wanted, draws, gradient)


class Learner(NamedTuple):
    """A GAN, and what it learns from; all of a stack have batches of one size and one shape of images."""

    model: GANModel
    images: base.Array
    labels: base.Array
    rng: torch.Generator
    progress: base.Progress = lambda *_: None
    replayed: Iterator[Batch] | None = None


class GANSteps:
    """The steps of one GAN, or of several as one. On a GPU steps without a further loss are recorded as a CUDA graph,
    unless each class has networks of its own: then a step depends on how many images of a class there are."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        first = learners[0].model
        graphed = steps_are_recorded(list(first.networks.parameters())) and not first.settings.separates_classes
        batches = [RealBatches(one.model, one.images, one.labels, one.rng, one.replayed) for one in learners]
        self.drawn = [StepDraws(one.model, some, one.rng) for one, some in zip(learners, batches, strict=True)]
        self.networks = networks_of([one.model for one in learners])
        capturable = graphed and first.device.type == "cuda"
        how: dict[str, Any] = {"device": first.device, "precision": first.precision, "capturable": capturable}
        self.trainer = GANTrainer(self.networks, first.settings, **how)
        take = functools.partial(both_steps, self.trainer)
        self._take = GraphedFunction(take, "a step of a GAN") if graphed else take

    def step(self, extra: base.ExtraLoss | None = None) -> Tensor:
        """The discriminator's steps, then one of the generator, which pays `extra` besides; its loss, [] or [M]."""
        each = [one.for_both(self.trainer) for one in self.drawn]
        inputs = [stacked(parts) for parts in zip(*each, strict=True)]
        if extra is not None:
            return both_steps(self.trainer, *inputs, image_gradient=functools.partial(_gradient, extra))
        return self._take(*inputs).clone()  # a replay overwrites it


def _gradient(extra: base.ExtraLoss, fake: Tensor, real: Tensor) -> Tensor:
    """Of the extra loss w.r.t. the fake images, which lie in [-1, 1]."""
    seen = fake.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(extra((real + 1) / 2, (seen.float() + 1) / 2), seen)
    return gradient


def fit_together(learners: Sequence[Learner]) -> list[dict[str, float]]:
    """What `GANModel.fit` does, for each of several GANs. One whose steps are through goes on with the others, and what
    it learns then is not used."""
    steps = GANSteps(learners)
    mosts = [one.model.settings.steps_on(len(one.images)) for one in learners]
    losses: list[Tensor] = []
    found: dict[int, dict[str, float]] = {}
    for step in range(1, max(mosts) + 1):
        losses = [*losses[-LAST + 1 :], steps.step().reshape(-1)]
        for place, (learner, most) in enumerate(zip(learners, mosts, strict=True)):
            if step <= most and step % max(1, most // REPORTS) == 0:
                learner.progress("generator", step, most, _mean(losses, place))
            if step == most:
                if isinstance(steps.networks, StackedGAN):
                    learner.model.load(steps.networks.state(place))
                found[place] = {"generator": _mean(losses, place)}
    return [found[place] for place in range(len(learners))]


def _mean(losses: Sequence[Tensor], place: int) -> float:
    return float(torch.stack(list(losses))[:, place].mean())
