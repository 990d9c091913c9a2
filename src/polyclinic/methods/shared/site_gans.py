"""GANs at sites, in training: of one site, or of several simulated sites as one stacked GAN (`torch.func.vmap`).

Everything here is at the sites; what may leave are the images that `start` and `advance` give. Each site draws its
batches and random numbers from generators of its own, stacked or not: the stack is arithmetic, nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.site import Site
from polyclinic.generators.base import RandomSource
from polyclinic.generators.gan.model import (
    GANModel,
    StackedGAN,
    StepDraws,
    both_steps,
    networks_of,
    private_losses,
    private_rows,
    stacked,
)
from polyclinic.generators.gan.trainer import GANTrainer, RealBatches
from polyclinic.methods.shared import gan_plans
from polyclinic.methods.shared.gan_plans import ImageGradient, SyntheticBatch, TrainingGANs, steps_taken
from polyclinic.randomness import torch_rng
from polyclinic.training import private, private_steps
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

GRAPH_PAYS = 100  # steps of a round from which on recording a CUDA graph takes less time than it saves


class SiteGANs(TrainingGANs):
    """Lives for one round in the sites' memories; `purpose` names its draws. Where the engine records CUDA graphs and a
    round has many `steps`, a step is launched as one graph."""

    def __init__(
        self,
        sites: Sequence[Site],
        models: Sequence[GANModel],
        *,
        steps: int,
        shared_noise: bool = False,
        purpose: str = "gan",
    ) -> None:
        self.members = [SiteGAN(site, own, shared_noise, purpose) for site, own in zip(sites, models, strict=True)]
        first, trainer = self.members[0].model, sites[0].trainer
        self.settings, self.device = first.settings, first.device
        self.private = private.is_private(sites[0], "generator")
        self.graphed = trainer.graphs and not self.private and steps >= GRAPH_PAYS
        self.networks = networks_of(models)
        capturable = self.graphed and self.device.type == "cuda"
        how: dict[str, Any] = {"device": self.device, "precision": first.precision, "capturable": capturable}
        self.trainer = GANTrainer(self.networks, self.settings, **how)
        self.names = [site.name for site in sites]
        self.rows = self.settings.batch_size if self.private else gan_plans.batch_rows(sites[0])
        self.noise = self.fake = torch.empty(0)  # of the images that were made last
        self.statistics = [buffer.clone() for buffer in self.networks.generator_buffers]
        self._graphs: dict[str, GraphedFunction] = {}
        self.optimizers = {
            gan_plans.GENERATOR_ADAM: self.trainer.generator_optimizer,
            gan_plans.DISCRIMINATOR_ADAM: self.trainer.discriminator_optimizer,
        }
        for group, optimizer in self.optimizers.items():
            states = [site.state.group(group) for site in sites]
            restored = states[0]
            if len(sites) > 1:  # counts of steps are the same for all
                names = [name for name in restored if not name.endswith("/step")]
                restored = {**restored, **{name: torch.stack([state[name] for state in states]) for name in names}}
            restore_optimizer(optimizer, restored)
        self.trainer.steps += steps_taken(sites[0])

    # --- a round in step with a coordinator ---------------------------------------------------------

    def start(self) -> list[SyntheticBatch]:
        if self.private:
            self._private_steps()
        else:
            self.trainer.discriminator_steps(self._discriminator_inputs())
        self.noise = self._draw_noise()
        if self.graphed:  # a CUDA graph cannot keep fake images with gradients from call to call (`_make_again`)
            return self._each(self._make_once(self.noise, self._wanted()), self._wanted())
        self.fake = self.trainer.generate(self.noise, self._wanted())
        return self._each(self.fake.detach(), self._wanted())

    def advance(self, gradients: Mapping[str, Tensor]) -> list[SyntheticBatch]:
        gradient = self._gradient(gradients)
        if not self.graphed or gradient is None:
            return super().advance(gradients)
        before = (gradient, self.noise, self._wanted(), self._generator_draws())
        inputs = self._discriminator_inputs()
        self.noise = self._draw_noise()
        step, wanted = self._step("advance", self._recorded_advance), self._wanted()
        return self._each(step(*before, self.noise, wanted, *inputs), wanted)

    def generator_step(self, gradients: Mapping[str, Tensor]) -> None:
        fake = self._make_again(self.noise, self._wanted()) if self.graphed else self.fake
        self.trainer.generator_step(fake, self._wanted(), self._generator_draws(), self._gradient(gradients))
        self.fake = torch.empty(0)

    # --- steps without a coordinator ----------------------------------------------------------------

    def local_step(self, image_gradient: ImageGradient | None = None, draws: Tensor | None = None) -> None:
        if self.private:
            self._private_steps()
            wanted = self._wanted()
            fake = self.trainer.generate(self.members[0].draw_noise(), wanted)
            gradient = None if image_gradient is None else image_gradient(fake, wanted, draws)  # type: ignore[arg-type]
            self.trainer.generator_step(fake, wanted, self._generator_draws(), gradient)
            return
        inputs, noise = self._discriminator_inputs(), self._draw_noise()

        def take(draws: Tensor, noise: Tensor, wanted: Tensor, *inputs: Tensor | None) -> None:
            further = None if image_gradient is None else lambda fake, real: image_gradient(fake, wanted, draws)
            both_steps(self.trainer, noise, wanted, *inputs, image_gradient=further)

        step = self._step("local" if image_gradient is None else "local, with a further loss", take)
        step(draws, noise, self._wanted(), self._generator_draws(), *inputs)

    @torch.no_grad()
    def sample(self, count: int) -> list[SyntheticBatch]:
        sampled: list[Tensor] = []
        labels_of_all: list[Tensor] = []
        while sum(some.shape[-4] for some in sampled) < count:
            for member in self.members:
                labels = member.drawn_labels() if self.private else member.labels_to_make(next(member.batches)[1])
                member.wanted = labels
            noise = self._draw_noise()
            labels_of_all.append(self._wanted())
            sampled.append(self.trainer.generate(noise, labels_of_all[-1]))
        batches = self._each(torch.cat(sampled, -4), torch.cat(labels_of_all, -1))
        return [SyntheticBatch(images[:count], labels[:count]) for images, labels in batches]

    def keep(self) -> None:
        adams = {group: optimizer_tensors(optimizer) for group, optimizer in self.optimizers.items()}
        for place, member in enumerate(self.members):
            state = member.site.state
            stack = self.networks if isinstance(self.networks, StackedGAN) else None
            state.put(gan_plans.NETWORKS, member.model.state() if stack is None else stack.state(place))
            for group, tensors in adams.items():
                if stack is None:
                    state.put(group, tensors)
                else:
                    own = {n: t if n.endswith("/step") else t[place].clone() for n, t in tensors.items()}
                    state.put(group, own)
            state[gan_plans.STEPS] = torch.tensor(int(self.trainer.steps))

    # --- inside -------------------------------------------------------------------------------------

    def _discriminator_inputs(self) -> list[Tensor | None]:
        each = [member.for_discriminator(self.trainer) for member in self.members]
        return [stacked(parts) for parts in zip(*each, strict=True)]

    def _generator_draws(self) -> Tensor | None:
        return stacked([self.trainer.draw_for_generator(one.random, len(one.wanted)) for one in self.members])

    def _draw_noise(self) -> Tensor:
        return stacked([member.draw_noise() for member in self.members])

    @torch.no_grad()
    def _make_once(self, noise: Tensor, wanted: Tensor) -> Tensor:
        """Fake images without gradients; remembers the statistics of batch norm as they were before."""
        for kept, now in zip(self.statistics, self.networks.generator_buffers, strict=True):
            kept.copy_(now)
        return self.trainer.generate(noise, wanted)

    def _make_again(self, noise: Tensor, wanted: Tensor) -> Tensor:
        """The images of `_make_once` with gradients; the statistics of batch norm count them once only."""
        for kept, now in zip(self.statistics, self.networks.generator_buffers, strict=True):
            now.copy_(kept)
        return self.trainer.generate(noise, wanted)

    def _step(self, name: str, function: Callable[..., Tensor | None]) -> Callable[..., Any]:
        if self.graphed and name not in self._graphs:
            self._graphs[name] = GraphedFunction(function, "a step of FELICIA's GANs")
        return self._graphs.get(name, function)

    def _recorded_advance(
        self,
        gradient: Tensor,
        noise: Tensor,
        wanted: Tensor,
        generator_draws: Tensor | None,
        next_noise: Tensor,
        next_wanted: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        """`advance` as one function of its inputs."""
        self.trainer.generator_step(self._make_again(noise, wanted), wanted, generator_draws, gradient)
        self.trainer.discriminator_steps(inputs)
        return self._make_once(next_noise, next_wanted)

    def _wanted(self) -> Tensor:
        return stacked([member.wanted for member in self.members])

    def _gradient(self, by_site: Mapping[str, Tensor]) -> Tensor | None:
        """In a stack a site that dropped out goes on without the further loss; nobody gets what it makes."""
        if not by_site:
            return None
        nothing = torch.zeros_like(next(iter(by_site.values())))
        found = [by_site.get(member.site.name, nothing) for member in self.members]
        return stacked([one.to(self.device).float() for one in found])

    def _each(self, images: Tensor, labels: Tensor) -> list[SyntheticBatch]:
        if len(self.members) == 1:
            return [SyntheticBatch(images, labels)]
        return [SyntheticBatch(*own) for own in zip(images, labels, strict=True)]

    def _private_steps(self) -> None:
        """DP-GAN: the discriminator's gradients are clipped for each image, and noisy; fake images join each batch."""
        [member] = self.members
        discriminator, size = member.model.networks["discriminator"], self.settings.batch_size
        member.wanted = member.drawn_labels()

        def fetch(index: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
            return private_rows(self.trainer, member.batches.at(index), member.wanted, member.random, seeds)

        losses, steps = private_losses(discriminator, self.settings.gan_loss), self.settings.critic_steps
        optimizer = self.trainer.discriminator_optimizer
        objective = private_steps.PrivateObjective(discriminator, losses, fetch, size, joined=size)
        private_steps.take_private_steps(member.site, objective, steps, optimizer)


class SiteGAN(StepDraws):
    """One site's model, real batches and random numbers."""

    def __init__(self, site: Site, model: GANModel, shared_noise: bool, purpose: str) -> None:
        part, rng = site.data.train, site.rng(purpose)
        super().__init__(model, RealBatches(model, np.asarray(part.images), np.asarray(part.labels), rng), rng)
        self.site, self.noise = site, self.random
        if shared_noise:  # PrivGAN's code: in every step all generators get the same noise
            self.noise = RandomSource(torch_rng(site.seed, "noise", purpose, site.round), model.device)

    def draw_noise(self) -> Tensor:
        return self.noise.normal(len(self.wanted), self.model.settings.latent)

    def drawn_labels(self) -> Tensor:
        """Labels in which no real image has a part."""
        return self.labels_to_make(torch.zeros(self.model.settings.batch_size, device=self.random.device))
