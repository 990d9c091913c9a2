"""FELICIA (Rajotte et al. 2021): sites' GANs, joined by a central discriminator that sees synthetic images only.

Every site i trains a generator G_i and a discriminator D_i on its own images. The central discriminator D_p learns to
identify which site made an image; each generator learns, besides fooling its own D_i, not to be identified:

    sum_i V_phi(G_i, D_i) + lambda * R_p ,    R_p = mean over a site's images of phi[D_p^i(G_i(z))]        (Eq. 6)

R_p reaches a generator as its gradient w.r.t. the synthetic images. Two schedules. Synchronous: in every step the
sites' images go up and this gradient comes down. Local: the weights of D_p come down every `exchange_every` steps, and
images go up. Nothing else leaves a site but its scores. With lambda 0, or one site, every site trains for itself.

Afterwards each site trains the task's network on real images, on synthetic ones and on both; validation images decide
whether synthetic ones helped, and so which network is released (`methods/shared/utility.py`). PrivGAN (Mukherjee et
al. 2021) is the special case of one site's images in random parts: `sites.partition = "iid"`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.data.parts import ImageSet
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.call import Reply
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.batches import centred
from polyclinic.generators.gan.losses import confusion_loss, site_cross_entropy
from polyclinic.generators.gan.networks import update_spectral_norms
from polyclinic.generators.gan.settings import GAN
from polyclinic.generators.gan.trainer import adam
from polyclinic.methods.shared import utility
from polyclinic.methods.shared.gan_site import SiteGANs, by_gans, gan_model, gan_settings, stackable
from polyclinic.methods.shared.method import Method, Own
from polyclinic.methods.shared.optimizer_state import optimizer_tensors, restore_optimizer
from polyclinic.methods.shared.traits import Traits
from polyclinic.models import Backbone
from polyclinic.randomness import seed_of
from polyclinic.training import private
from polyclinic.training.graphs import GraphedFunction

Tensors = Mapping[str, Tensor]


class Felicia(Method):
    name: Literal["felicia"] = "felicia"
    steps: int = Field(250, ge=1, description="steps of every generator in a round")
    weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="lambda: what the central term counts beside a site's own; 0: none",
    )
    towards: Literal["away", "other"] = Field(
        "away",
        description="a generator's central loss: phi of being identified (Eq. 6), or the cross-entropy of being taken "
        "for another site, drawn at random (PrivGAN's code)",
    )
    central_lr: float | None = Field(None, gt=0, description="learning rate of the central discriminator, if another")
    warm_up: int = Field(0, ge=0, description="first steps in which the central term does not act yet")
    frozen: int = Field(
        0, ge=0, description="first steps in which the central discriminator does not learn, while its term acts"
    )
    schedule: Literal["synchronous", "local"] = Field(
        "synchronous",
        description="what travels: images and gradients in every step, or images and the central discriminator's "
        "weights every `exchange_every` steps",
    )
    exchange_every: int = Field(50, ge=1, description="local schedule: steps between two exchanges")
    sent: int | None = Field(
        None,
        ge=1,
        description="local schedule: images a site sends at an exchange; a batch for each step if not given",
    )
    wire: Literal["exact", "small"] = Field(
        "exact", description="how images and gradients travel: float32, or bytes (compressed) and bfloat16"
    )
    shared_noise: bool = Field(False, description="all generators get the same noise in a step, as in PrivGAN's code")
    images: int | None = Field(
        None,
        ge=1,
        description="synthetic images a site's network learns from; as many as it has real ones if not given",
    )
    learner_steps: int = Field(300, ge=1, description="steps of a site's network for each training set")
    weigh_every: int = Field(
        0, ge=0, description="rounds after which synthetic images are evaluated; 0 for the last round only"
    )
    margin: float = Field(
        0.0, ge=0, description="by how much validation scores must rise for synthetic images to count"
    )
    release: Literal["gate", "real", "synthetic", "augmented"] = Field(
        "gate",
        description="which network a site releases: the one that validation chooses, or always that of one training "
        "set",
    )

    summary: ClassVar[str] = "sites' GANs, joined by a central discriminator that sees synthetic images only"
    traits: ClassVar[Traits] = Traits(
        tasks=("classification", "regression"), private_networks=("generator",), tunes_generator=False
    )

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        self.check_generator(federation)
        state = federation.state(central={}, moments={}, worth=[])
        for number in federation.rounds(self.rounds, state):
            if self.weight == 0 or len(federation.sites) == 1:
                federation.ask_all("train_alone")
            elif self.schedule == "synchronous":
                self.synchronous_round(federation, state)
            else:
                self.local_round(federation, state)
            if number == self.rounds or (self.weigh_every and number % self.weigh_every == 0):
                state.worth = [*state.worth, utility.ask_utility(federation, "evaluate_utility")]
            federation.evaluate()
        federation.report("worth", state.worth)
        return {}

    def synchronous_round(self, federation: Federation, state: State) -> None:
        """Images up, gradients w.r.t. these images down, in every step: every D_i, then D_p, then every G_i."""
        central, first = None, (federation.round - 1) * self.steps
        replies = federation.ask_all("start_round")
        for step in range(first, first + self.steps):
            images, site = self.gather_images(federation, replies)
            central = central or self.central_discriminator(federation, state, images)
            other = central.other_sites(site, federation.rng(f"other owner {step}"))
            gradient = central.step_and_gradient(images, site, other, learn=self.learns(step), act=self.acts(step))
            replies = self.ask_generators(federation, replies, gradient, last=step == first + self.steps - 1)
            if not replies:
                break
        if central is not None:
            _remember(central, state)

    def ask_generators(
        self, federation: Federation, replies: list[Reply], gradient: Tensor | None, *, last: bool
    ) -> list[Reply]:
        """Hand every site lambda times the gradient of the mean of R over its images; their next images, or nothing
        after the last step."""
        down, start = {}, 0
        for reply in replies:
            count = len(_images(reply))
            if gradient is not None:
                own = self.weight * gradient[start : start + count] / count
                down[reply.site] = {"gradients": {"images": self.pack_gradient(own)}}
            start += count
        asked = [reply.site for reply in replies]
        answers = federation.ask_all("generator_step", sites=asked, by_site=down, last=last)
        return [] if last else answers

    def local_round(self, federation: Federation, state: State) -> None:
        """The central discriminator's weights down, images up, every few steps."""
        central, first = None, (federation.round - 1) * self.steps
        for begin in range(first, first + self.steps, self.exchange_every):
            steps = min(self.exchange_every, first + self.steps - begin)
            down = Parcel("generator", state.central) if state.central else None
            names = list(federation.sites)
            replies = federation.ask_all("train_locally", central=down, begin=begin, steps=steps, names=names)
            images, site = self.gather_images(federation, replies)
            central = central or self.central_discriminator(federation, state, images)
            for step in range(begin, begin + steps):
                share = _share_of_step(site, step - begin, steps)
                if self.learns(step) and bool(share.any()):
                    central.step(images[share], site[share])
            _remember(central, state)

    def learns(self, step: int) -> bool:
        """Whether the central discriminator learns in this step; steps count from 0."""
        return step >= self.frozen

    def acts(self, step: int) -> bool:
        """Whether generators pay the central term in this step."""
        return step >= self.warm_up

    def central_discriminator(self, federation: Federation, state: State, images: Tensor) -> CentralDiscriminator:
        """As it stands; built when the first synthetic images show their shape."""
        settings, count = gan_settings(federation), len(federation.sites)
        central = CentralDiscriminator(self, settings, federation.trainer, images.shape, count, federation.seed)
        if state.central:
            central.network.load_state_dict(dict(state.central))
        restore_optimizer(central.optimizer, state.moments)
        return central

    def gather_images(self, federation: Federation, replies: list[Reply]) -> tuple[Tensor, Tensor]:
        """All sites' images in [-1, 1], and the number of the site of each."""
        images = [_floats(_images(reply)) for reply in replies]
        site = [
            torch.full((len(some),), federation.sites.index(r.site)) for r, some in zip(replies, images, strict=True)
        ]
        return torch.cat(images).to(federation.trainer.device), torch.cat(site).to(federation.trainer.device)

    def pack_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.cpu() if self.wire == "exact" else gradient.to(torch.bfloat16).cpu()

    def check_generator(self, federation: Federation) -> None:
        if not isinstance(federation.generator, GAN):
            raise BadInput("generator.name: felicia trains GANs; choose one of gan, dcgan, wgan-gp")
        federation.generator.check_target(federation.trainer.target)

    def needs_generator(self) -> bool:
        return True

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each site has a network of its own."""
        return frozenset(model.state_dict())

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """Each site's network for each training set on the test images of all sites, in all and by sub-group."""
        return {"diets": utility.test_tables(federation, "test_sums")} if federation.engine.simulation else {}

    # --- at the sites -----------------------------------------------------------------------------
    # Each operation gets one site, or all sites that are simulated on one device: their GANs train as a stack.

    @operation(grouped=True)
    def train_alone(self, sites: Sequence[Site]) -> list[None]:
        """A round without the central term."""
        for group in stackable(sites):
            gans = SiteGANs(group, steps=self.steps, shared_noise=self.shared_noise)
            for _ in range(self.steps):
                gans.local_step()
            gans.keep()
        return [None] * len(sites)

    @operation("synthetic-images", grouped=True, address="begin")
    def start_round(self, sites: Sequence[Site]) -> list[Parcel]:
        """Start a round of the synchronous schedule with the discriminator's step; the first images."""
        images: list[Tensor] = []
        for group in stackable(sites):
            gans = SiteGANs(group, steps=self.steps, shared_noise=self.shared_noise)
            for site in group:
                site.memory["gans"] = gans
            images += gans.start()
        return [self.parcel_of(site, own) for site, own in zip(sites, images, strict=True)]

    @operation("synthetic-images", grouped=True, address="go_on")
    def generator_step(
        self, sites: Sequence[Site], last: Sequence[bool], gradients: Sequence[Tensors | None] | None = None
    ) -> list[Parcel | None]:
        """The generator's step for the images sent last, then the discriminator's; the next images."""
        came = zip(sites, gradients or [None] * len(sites), strict=True)
        by_site = {site.name: own["images"] for site, own in came if own is not None}
        released: dict[str, Parcel] = {}
        for gans, group in by_gans(sites):
            own = {site.name: by_site[site.name] for site in group if site.name in by_site}
            if last[0]:
                gans.finish(own)
                for site in group:
                    site.memory.clear()
                continue
            images = dict(zip(gans.names, gans.advance(own), strict=True))
            released |= {site.name: self.parcel_of(site, images[site.name]) for site in group}
        return [released.get(site.name) for site in sites]

    @operation("synthetic-images", grouped=True, address="train_apart")
    def train_locally(
        self,
        sites: Sequence[Site],
        begin: Sequence[int],
        steps: Sequence[int],
        names: Sequence[list[str]],
        central: Sequence[Tensors | None] | None = None,
    ) -> list[Parcel]:
        """Some steps with the central discriminator as it came (in the beginning, as everyone builds it); images."""
        images: list[Tensor] = []
        for group in stackable(sites):
            gans = SiteGANs(group, steps=steps[0], shared_noise=self.shared_noise, purpose=f"gan from {begin[0]}")
            received = self.received(group[0], central[0] if central else None, len(names[0]))
            for step in range(begin[0], begin[0] + steps[0]):
                self.local_step(gans, group, received, names[0], step)
            gans.keep()
            images += gans.sample(self.sent or steps[0] * gan_settings(group[0]).batch_size)
        return [self.parcel_of(site, own) for site, own in zip(sites, images, strict=True)]

    def local_step(
        self, gans: SiteGANs, group: Sequence[Site], central: CentralDiscriminator, names: list[str], step: int
    ) -> None:
        """A step of the local schedule, with the central discriminator as it came down."""
        if not self.acts(step):
            gans.local_step()
            return
        rows, device = gans.rows, central.device
        number = [torch.full((rows,), names.index(site.name), device=device) for site in group]
        others = [
            central.other_sites(n, site.rng(f"other owner {step}")) for n, site in zip(number, group, strict=True)
        ]
        site = torch.cat(number)

        def image_gradient(fake: Tensor, other: Tensor) -> Tensor:
            """lambda times the gradient of the mean of R over each site's images."""
            together = fake.reshape(-1, *fake.shape[-3:])
            return (self.weight * central.image_gradient(together, site, other) / rows).reshape(fake.shape)

        gans.local_step(image_gradient, torch.cat(others))

    def received(self, site: Site, central: Tensors | None, sites: int) -> CentralDiscriminator:
        """The central discriminator as it came down, for its gradients only."""
        found = CentralDiscriminator(
            self, gan_settings(site), site.trainer, site.data.train.images.shape, sites, site.seed
        )
        if central:
            found.network.load_state_dict(dict(central))
        return found

    def parcel_of(self, site: Site, images: Tensor) -> Parcel:
        """Synthetic images as they travel, with what differential privacy says about them."""
        privacy = private.record_of(site, "generator")
        if privacy is not None:
            privacy = {**privacy, "covers": ["images made by the generator"]}
        if self.wire == "small":
            return Parcel("synthetic-images", {"images": to_uint8((images + 1) / 2)}, {}, privacy, ("images",))
        return Parcel("synthetic-images", {"images": images.float().cpu()}, {}, privacy)

    # --- at the sites: what synthetic images are worth --------------------------------------------

    @operation("metrics", address="weigh")
    def evaluate_utility(self, site: Site) -> Parcel:
        """Sample images, train on each training set, keep what is best on validation images; scores and coverage."""
        synthetic = utility.sample_part(site, gan_model(site), self.images)
        spec = utility.Selection(self.learner_steps, self.margin, None if self.release == "gate" else self.release)
        return utility.evaluate(site, synthetic, spec)

    @operation("metrics", address="mark")
    def test_sums(self, site: Site, weights: Weights) -> Parcel | None:
        """The additive sums of a network's metrics on the site's test images, in all and by sub-group."""
        return utility.test_sums(site, weights)

    def score(self, site: Site, part: ImageSet, weights: Weights, own: Own) -> dict[str, Tensor]:
        """As for any method; before the first evaluation of its images a site has no network to score."""
        if own != "none" and not site.state.group("local"):
            return {}
        return super().score(site, part, weights, own)

    @operation()
    def remember(self, site: Site) -> None:
        """Nothing to do: the site has selected for itself."""


class CentralDiscriminator:
    """D_p: a network that identifies the site that made an image, and its optimiser. It never sees a real image.

    Images are [N, C, H, W] in [-1, 1], `site` [N] is the number of the site that made each, logits are [N, K].
    """

    def __init__(
        self, method: Felicia, settings: GAN, trainer: TrainerLike, images: Sequence[int], sites: int, seed: int
    ) -> None:
        """In the beginning it is the same wherever it is built; `images` is the shape [N, C, H, W]."""
        shape = settings.shape(images[1], images[2], trainer.target)
        built = initial_networks(
            lambda: {"central": settings.central_discriminator(shape, sites)}, seed_of(seed, "central")
        )
        self.network: nn.Module = built["central"].to(trainer.device).train()
        self.towards, self.loss, self.sites = method.towards, settings.gan_loss, sites
        self.precision, self.device = trainer.precision, trainer.device
        lr = method.central_lr or settings.lr_discriminator or settings.lr
        self.optimizer = adam(list(self.network.parameters()), lr, capturable=trainer.graphs)
        name = "a step of FELICIA's central discriminator"
        self._both = GraphedFunction(self._step_and_gradient, name) if trainer.graphs else self._step_and_gradient

    def step_and_gradient(
        self, images: Tensor, site: Tensor, other: Tensor, *, learn: bool, act: bool
    ) -> Tensor | None:
        """A step, where it is to learn; then the gradient of R w.r.t. the images, where that is to act."""
        if learn and act:
            return self._both(images, site, other)
        if learn:
            self.step(images, site)
        return self.image_gradient(images, site, other) if act else None

    def _step_and_gradient(self, images: Tensor, site: Tensor, other: Tensor) -> Tensor:
        self.step(images, site)
        return self.image_gradient(images, site, other)

    def step(self, images: Tensor, site: Tensor) -> Tensor:
        """A step on synthetic images; the share of them whose site it named."""
        update_spectral_norms(self.network)
        logits = self.logits(images.detach())
        self.optimizer.zero_grad(set_to_none=True)
        site_cross_entropy(logits, site).mean().backward()
        self.optimizer.step()
        return (logits.argmax(-1) == site).float().mean().detach()

    def image_gradient(self, images: Tensor, site: Tensor, other: Tensor) -> Tensor:
        """The gradient of R, summed over images, w.r.t. each image; `other` [N]: sites to be taken for instead."""
        images = images.detach().requires_grad_()
        logits = self.logits(images)
        confused = self.towards == "other"
        loss = confusion_loss(logits, other) if confused else self.loss.identification_loss(logits, site)
        (gradient,) = torch.autograd.grad(loss.sum(), images)
        return gradient

    def other_sites(self, site: Tensor, rng: torch.Generator) -> Tensor:
        """For each image one of the other sites, all alike; nobody draws where Eq. 6 is used as printed."""
        if self.towards == "away":
            return site
        ahead = torch.randint(max(1, self.sites - 1), site.shape, generator=rng).to(site.device)
        return (site + 1 + ahead) % self.sites

    def logits(self, images: Tensor) -> Tensor:
        with self.autocast():
            return self.network(images, images.new_zeros(len(images)))

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _images(reply: Reply) -> Tensor:
    return reply.parcel("synthetic-images").tensors["images"]


def _floats(images: Tensor) -> Tensor:
    return centred(images) if images.dtype == torch.uint8 else images


def _share_of_step(site: Tensor, place: int, places: int) -> Tensor:
    """Which images the central discriminator sees in this step: of each site an equal part, every image once."""
    rank = torch.zeros_like(site)
    for one in site.unique():
        mine = site == one
        rank[mine] = torch.arange(int(mine.sum()), device=site.device)
    return rank % places == place


def _remember(central: CentralDiscriminator, state: State) -> None:
    state.central = {name: tensor.detach().cpu().clone() for name, tensor in central.network.state_dict().items()}
    state.moments = optimizer_tensors(central.optimizer)
