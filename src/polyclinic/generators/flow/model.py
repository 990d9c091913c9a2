"""Rectified flow (Liu et al. 2023, Lipman et al. 2023): a network learns the velocity that carries noise to images.

An image x and noise e are joined by a straight line, (1 - t) x + t e; the network learns x - e from a point of it, t
and the label. Samples follow the velocity from noise, by Heun's rule. They come from a moving average (EMA) of the
network.

Vectors of features (space = "features", where the study's public front gives vectors) have a small network of their
own, which can learn with differential privacy.
"""

import copy
import functools
import itertools
import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.generators import base
from polyclinic.generators.flow.autoencoder import LATENT_CHANNELS, ImageAutoencoder
from polyclinic.generators.flow.networks import CHANGES, TIMES, WIDER, FeatureFlow, ImageFlow, changed
from polyclinic.generators.latent_space import GaussianSpace
from polyclinic.randomness import device_rng, seed_of
from polyclinic.training.generator_loop import LearnPrivately, Schedule, adam, autocast, steps_are_recorded
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.image_draws import uniform
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

#: features lie this many deviations of phantoms from the middle (`replay_space.Limits`), which makes theirs about one
DEVIATIONS = 6.0
CHUNK_NUMBERS = 2**22  # made at a time
REPORTS = 20  # times that progress is reported
SEARCH_STEPS = 6  # of a path that attacks search through
#: times at which losses tell what is remembered, and how often noise is drawn at each
LEVELS, DRAWS = (0.1, 0.3, 0.5, 0.7), 4


class Flow(base.Generator):
    """The `[generator]` table with `name = "flow"`."""

    name: Literal["flow"] = "flow"
    space: Literal["pixels", "latents", "features"] = Field(
        "pixels",
        description="what the flow learns: pixels; latents of an autoencoder that the site trains first; or features: "
        "what the study's public front gives (an encoder, or the layers that model.freeze freezes), with fedsamples",
    )
    steps: int = Field(3000, ge=1, description="steps of training")
    batch_size: int = Field(64, ge=1, description="real images in a mini-batch; as many replayed ones join them")
    lr: float = Field(4e-4, gt=0, description="learning rate of Adam")
    average: float = Field(0.999, ge=0, lt=1, description="samples come from this moving average of the network")
    width: int = Field(
        64, ge=8, multiple_of=8, description="channels at full size; of vectors of features eight times as many"
    )
    levels: int = Field(3, ge=1, le=6, description="sizes of the U-Net, each half the one before")
    blocks: int = Field(2, ge=1, description="residual blocks a level, or of the network for vectors")
    sample_steps: int = Field(18, ge=1, le=500, description="steps from noise to an image, of two passes each")
    augment: bool = Field(True, description="mirror, turn, resize and move images, and tell the network how")
    draws: int = Field(8, ge=1, description="with differential privacy: noisy copies of a vector in a step")

    summary: ClassVar[str] = "rectified flow: a network that carries noise to images, or to features"
    resumable: ClassVar[bool] = True
    learns_maps: ClassVar[bool] = True

    def model_for(self, spec: base.ModelSpec) -> "FlowModel":
        return FlowModel(self, spec)

    def dp_obstacle(self) -> str | None:
        if self.space != "features":
            return (
                "generator.space: a flow learns with differential privacy from vectors of features only; set "
                "generator.space = 'features' with an encoder as model.backbone, or choose another generator"
            )
        return None


class FlowModel(base.GeneratorModel):
    """Networks `flow` and `average`, its EMA; with space = "latents" also `autoencoder`."""

    def __init__(self, settings: Flow, spec: base.ModelSpec) -> None:
        self.settings, self.precision = settings, spec.precision
        self.is_vector, self.is_map = spec.size == 1, spec.channels > base.MOST_PICTURE_CHANNELS
        self.augmented = CHANGES if settings.augment and not self.is_map and not self.is_vector else 0
        networks = base.initial_networks(lambda: self._networks(spec), seed_of(spec.seed, "generator"))
        super().__init__(networks, channels=spec.channels, size=spec.size, target=spec.target, device=spec.device)
        self.reach = DEVIATIONS if self.is_map else 1.0

    def _networks(self, spec: base.ModelSpec) -> dict[str, nn.Module]:
        settings, condition = self.settings, (spec.target, self.augmented)
        networks: dict[str, nn.Module] = {}
        channels = spec.channels
        if settings.space == "latents":
            networks["autoencoder"] = ImageAutoencoder(channels, settings.width)
            channels = LATENT_CHANNELS
        if self.is_vector:
            flow: nn.Module = FeatureFlow(channels, condition, WIDER * settings.width, settings.blocks)
        else:
            flow = ImageFlow(channels, condition, settings.width, settings.levels, settings.blocks)
        return {**networks, "flow": flow, "average": copy.deepcopy(flow).requires_grad_(False)}

    @property
    def autoencoder(self) -> ImageAutoencoder | None:
        return dict(self.networks.items()).get("autoencoder")  # type: ignore[return-value]

    # --- learning ---------------------------------------------------------------------------------

    def fit(
        self, images: base.Array, labels: base.Array, rng: torch.Generator, options: base.FitOptions = base.PLAIN
    ) -> dict[str, float]:
        images = self.accept_images(images)
        labels = base.check_labels(base.as_tensor(labels), len(images), self.target)
        if "generator" in options.private:
            return self._fit_privately(images, labels, options.private["generator"])
        leg, legs = options.leg
        first, last = (self.settings.steps * (leg - 1) // legs, self.settings.steps * leg // legs)
        losses: dict[str, float] = {}
        if self.autoencoder is not None and leg == 1:
            steps = max(1, self.settings.steps // 2)
            losses["autoencoder"] = self.autoencoder.fit(self, images, rng, steps, options.report)
        learner = _Learner(self, self.near(images), labels, rng, options)
        losses["generator"] = learner.take(first, last)
        if not math.isfinite(losses["generator"]):
            raise WorkFailed("generator: the flow's loss is not finite any more; lower generator.lr")
        return losses

    def _fit_privately(self, images: Tensor, labels: Tensor, learn: LearnPrivately) -> dict[str, float]:
        """Steps of DP-SGD; every vector comes with several draws of noise and time, and counts once."""
        if not self.is_vector:
            raise BadInput("generator.space: only vectors of features are learned privately; choose an encoder")
        settings, taken = self.settings, 0
        vectors = self.learned(images).flatten(1).cpu()

        def batch_of(index: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
            nonlocal taken
            self.move_average(torch.tensor(self.decay(taken)))  # to where the last private step went
            taken += 1
            drawn = uniform(seeds, settings.draws, vectors.shape[1] + 1, purpose="flow").clamp(1e-6, 1 - 1e-6)
            noise, time = math.sqrt(2) * torch.erfinv(2 * drawn[..., :-1] - 1), drawn[..., -1:]
            x = vectors[index][:, None]
            rows = ((1 - time) * x + time * noise, x - noise, TIMES * time[..., 0], labels[index][:, None].float())
            return tuple(self.on_device(row) for row in rows)

        def losses(noisy: Tensor, wanted: Tensor, times: Tensor, condition: Tensor) -> Tensor:
            return (self.networks["flow"](noisy, times, condition) - wanted).square().mean((1, 2))

        passes = -(-settings.steps // max(1, len(images) // settings.batch_size))
        learn(self.networks["flow"].train(), losses, batch_of, Schedule(passes, settings.batch_size, settings.lr), 0)
        self.move_average(torch.tensor(self.decay(taken)))
        return {"generator": float("nan")}

    def decay(self, step: int) -> float:
        """What the moving average keeps of itself in a step: less in the first ones, which are far from the last."""
        return min(self.settings.average, (1 + step) / (10 + step))

    @torch.no_grad()
    def move_average(self, decay: Tensor) -> None:
        average: Any = list(self.networks["average"].parameters())
        own: Any = list(self.networks["flow"].parameters())
        steps: Any = torch._foreach_sub(own, average)
        torch._foreach_mul_(steps, 1 - decay.to(average[0].device))
        torch._foreach_add_(average, steps)

    def loss(self, x: Tensor, condition: Tensor, noise: Tensor, time: Tensor, network: str = "flow") -> Tensor:
        """The loss of each image, [B]: x and noise [B, C, H, W], time [B] in [0, 1]."""
        at = time[:, None, None, None]
        with autocast(self.device, self.precision):
            found = self.networks[network]((1 - at) * x + at * noise, TIMES * time, condition)
        return (found.float() - (x - noise)).square().mean((1, 2, 3))

    def learned(self, images: Tensor) -> Tensor:
        """What the flow learns of images uint8: about zero, and about one in size; no latents."""
        return self.reach * (2 * self.to_unit(images) - 1)

    def condition(self, labels: Tensor, how: Tensor | None = None) -> Tensor:
        """Labels [B], and how images were changed; not at all if not given."""
        known = self.on_device(labels).float()[:, None]
        more = known.new_zeros(len(known), self.augmented) if how is None else how
        return torch.cat([known, more], 1)

    # --- making images ----------------------------------------------------------------------------

    def from_noise(self, noise: Tensor, condition: Tensor, steps: int) -> Tensor:
        """The images in [0, 1] that noise [B, C, H, W] is carried to."""
        from monai.networks.schedulers.rectified_flow import RFlowScheduler

        scheduler, average = RFlowScheduler(TIMES), self.networks["average"].eval()
        scheduler.set_timesteps(steps)
        times, x = [*scheduler.timesteps.tolist(), 0], noise

        def velocity(x: Tensor, time: int) -> Tensor:
            with autocast(self.device, self.precision):
                return average(x, torch.full((len(x),), float(time), device=x.device), condition).float()

        for time, after in itertools.pairwise(times):
            speed = velocity(x, time)
            reached, _ = scheduler.step(speed, time, x, after)
            if after:  # Heun's rule: the mean of the velocities at both ends
                reached, _ = scheduler.step((speed + velocity(reached, after)) / 2, time, x, after)
            x = reached
        return (x / self.reach + 1) / 2 if self.autoencoder is None else self.autoencoder.decode(x)

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        if self.autoencoder is None:
            return (self.channels, self.size, self.size)
        return (LATENT_CHANNELS, *self.autoencoder.sides(self.size))

    @torch.no_grad()
    def sample(self, labels: base.Array, rng: torch.Generator) -> Tensor:
        labels = base.check_labels(base.as_tensor(labels), len(labels), self.target)
        random, made = base.RandomSource(rng, self.device), []
        for some in labels.split(max(1, min(1024, CHUNK_NUMBERS // math.prod(self.noise_shape)))):
            noise = random.normal(len(some), *self.noise_shape)
            images = self.from_noise(noise, self.condition(some), self.settings.sample_steps)
            made.append(to_uint8(images[..., : self.size, : self.size]))
        return torch.cat(made)

    def latent_space(self) -> GaussianSpace:
        """The noise that images are made from, through a path of few steps."""
        shape = self.noise_shape

        def images(z: Tensor, labels: Tensor | None) -> Tensor:
            known = torch.zeros(len(z)) if labels is None else labels
            made = self.from_noise(z.reshape(-1, *shape), self.condition(known), SEARCH_STEPS)
            return made[..., : self.size, : self.size]

        return GaussianSpace(images, math.prod(shape), labelled=True)

    # --- what it remembers ------------------------------------------------------------------------

    @torch.no_grad()
    def losses(self, images: base.Array, labels: base.Array, rng: torch.Generator) -> Tensor:
        """The loss of each image at several times, [N, levels]; all images have the same noise."""
        images, labels = self.accept_images(images), base.as_tensor(labels)
        self.networks["average"].eval()
        random = base.RandomSource(rng, self.device)
        noises = [random.normal(DRAWS, *self.noise_shape) for _ in LEVELS]
        found = []
        for some, known in zip(images.split(256), labels.split(256), strict=True):
            x = self.learned(some) if self.autoencoder is None else self.autoencoder.latents(self.to_unit(some))
            condition = self.condition(known)
            columns = []
            for level, drawn in zip(LEVELS, noises, strict=True):
                time = torch.full((len(x),), level, device=self.device)
                each = [self.loss(x, condition, one.expand_as(x), time, "average") for one in drawn]
                columns.append(torch.stack(each).mean(0))
            found.append(torch.stack(columns, 1).cpu())
        return torch.cat(found)


class _Learner:
    """Steps of a flow on the images of one site, recorded on a GPU. It goes on from the optimiser that was kept."""

    def __init__(
        self, model: FlowModel, images: Tensor, labels: Tensor, rng: torch.Generator, options: base.FitOptions
    ) -> None:
        self.model, self.images, self.options = model, images, options
        self.labels, self.order = labels.float().to(images.device), rng
        network = model.networks["flow"].train()
        self.drawn = device_rng(model.device, int(torch.randint(2**62, (), generator=rng)))
        self.parameters = [one for one in network.parameters() if one.requires_grad]
        self.optimizer = adam(self.parameters, model.settings.lr)
        restore_optimizer(self.optimizer, options.kept or {})
        recorded = steps_are_recorded(self.parameters)
        self._take = GraphedFunction(self._step, "a step of a flow", rngs=[self.drawn]) if recorded else self._step

    def take(self, first: int, last: int) -> float:
        """Steps from one number to another; the mean loss of the last ones."""
        model = self.model
        losses: list[Tensor] = []
        size, most = model.settings.batch_size, model.settings.steps
        order = torch.randint(len(self.images), (last - first, size), generator=self.order).to(self.images.device)
        for step, index in enumerate(order, first):
            batch, labels = model.on_device(self.images[index]), model.on_device(self.labels[index])
            if self.options.replayed is not None:
                more, theirs = next(self.options.replayed)
                made = (255 * more.to(model.device)).round().to(torch.uint8)
                batch, labels = torch.cat([batch, made]), torch.cat([labels, theirs.to(labels)])
            loss = self._take(batch, labels, torch.tensor(model.decay(step), device=model.device))
            losses = [*losses[-99:], loss.clone()]  # the next replay writes into the same tensor
            if (step + 1) % max(1, most // REPORTS) == 0:
                self.options.report("generator", step + 1, most, float(torch.stack(losses).mean()))
        if self.options.kept is not None:
            self.options.kept.update(optimizer_tensors(self.optimizer))
        return float(torch.stack(losses).mean()) if losses else 0.0

    def _step(self, batch: Tensor, labels: Tensor, decay: Tensor) -> Tensor:
        model = self.model
        x, how = model.learned(batch), None
        draw: Any = functools.partial(torch.rand, generator=self.drawn, device=model.device)
        if model.augmented:
            x, how = changed(x, draw(len(x), CHANGES + 1))
        if model.autoencoder is not None:
            with torch.no_grad():
                x = model.autoencoder.latents((x + 1) / 2)
        noise = torch.randn(x.shape, generator=self.drawn, device=model.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = model.loss(x, model.condition(labels, how), noise, draw(len(x))).mean()
        loss.backward()
        self.optimizer.step()
        model.move_average(decay)
        return loss.detach()
