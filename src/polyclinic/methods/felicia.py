"""FELICIA (Rajotte et al. 2021): sites' GANs, joined by a central discriminator that sees synthetic images only.

Every site i trains a generator G_i and a discriminator D_i on its own images. The central discriminator D_p learns to
identify which site made an image; each generator learns, besides fooling its own D_i, not to be identified:

    sum_i V_phi(G_i, D_i) + lambda * R_p ,    R_p = mean over a site's images of phi[D_p^i(G_i(z))]        (Eq. 6)

R_p reaches a generator as its gradient w.r.t. the synthetic images. Two schedules. Synchronous: in every step the
sites' images go up and this gradient comes down. Local: the weights of D_p come down every `exchange_every` steps, and
images go up. Nothing else leaves a site but its scores. With lambda 0, or one site, every site trains for itself.

Afterwards each site trains the task's network on real images, on synthetic ones and on both; validation images decide
whether synthetic ones helped, and so which network is released (`shared/downstream_utility.py`). PrivGAN (Mukherjee et
al. 2021) is the special case of one site's images in random parts: `sites.partition = "iid"`. The settings are in
`shared/central_discriminator.py`, and so is D_p; a site's GAN in training is in `shared/site_gans.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.generators import GeneratorModel
from polyclinic.generators.base import check_labels
from polyclinic.generators.gan.adversarial import AdversarialModel
from polyclinic.generators.gan.model import GANModel
from polyclinic.methods.shared import downstream_utility, gan_plans
from polyclinic.methods.shared.central_discriminator import (
    CentralDiscriminator,
    FeliciaSettings,
    ImagesOfSites,
    images_of,
    images_of_others,
    join_images,
)
from polyclinic.methods.shared.gan_plans import TrainGAN, TrainingGANs, adversarial_settings
from polyclinic.methods.shared.method import Federation, Own, Parcel, Site, State, Traits, Weights, Work, operation
from polyclinic.methods.shared.site_gans import SiteGANs
from polyclinic.methods.shared.site_generator import build_generator, numbers_of
from polyclinic.randomness import seed_of
from polyclinic.training import private
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

Tensors = Mapping[str, Tensor]
#: operations whose answer is synthetic images for the central discriminator
SENDS_IMAGES = ("start_round", "generator_step", "train_locally")


def _most(method: "Felicia", site: Site) -> int:
    exchanged = method.exchange_every * adversarial_settings(site).batch_size
    return numbers_of(site, max(exchanged, method.sent or 0, method.images or len(site.data.train)))


CENTRAL, MOST = {"central": "generator"}, {"synthetic-images": _most}


class Felicia(FeliciaSettings):
    name: Literal["felicia"] = "felicia"
    summary: ClassVar[str] = "sites' GANs, joined by a central discriminator that sees synthetic images only"
    traits: ClassVar[Traits] = Traits(
        tasks=("classification", "regression"), private_networks=("generator",), trains="network in steps"
    )

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        state = federation.state(central={}, moments={}, worth=[])
        for number in federation.rounds(self.rounds, state):
            if self.weight == 0 or len(federation.sites) == 1:
                federation.ask_all("train_alone")
            elif self.schedule == "synchronous":
                self.synchronous_round(federation, state)
            else:
                self.local_round(federation, state)
            if number == self.rounds or (self.weigh_every and number % self.weigh_every == 0):
                others = self.collect_images(federation)
                state.worth = [*state.worth, downstream_utility.ask_utility(federation, "evaluate_utility", others)]
            federation.evaluate()
        federation.report("worth", state.worth)
        return {}

    def synchronous_round(self, federation: Federation, state: State) -> None:
        """Images up, gradients w.r.t. these images down, in every step: every D_i, then D_p, then every G_i."""
        central, first = None, (federation.round - 1) * self.steps
        replies = federation.ask_all("start_round")
        for step in range(first, first + self.steps):
            batch = self.gather_images(federation, replies)
            central = central or self.central_discriminator(federation, state, batch.images)
            other = central.other_sites(batch.site, federation.rng(f"other owner {step}"))
            gradient = central.step_and_gradient(batch, other, learn=step >= self.frozen, act=step >= self.warm_up)
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
            count = len(images_of(reply))
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
            batch = self.gather_images(federation, replies)
            central = central or self.central_discriminator(federation, state, batch.images)
            for step in range(begin, begin + steps):
                share = _share_of_step(batch.site, step - begin, steps)
                if step >= self.frozen and bool(share.any()):
                    central.step(batch.images[share], batch.site[share], batch.labels[share])
            _remember(central, state)

    def central_discriminator(self, federation: Federation, state: State, images: Tensor) -> CentralDiscriminator:
        """The central discriminator as it stands; built when the first synthetic images show their shape."""
        central = CentralDiscriminator(self, federation, images.shape, len(federation.sites), state.central)
        restore_optimizer(central.optimizer, state.moments)
        return central

    def gather_images(self, federation: Federation, replies: list[Reply]) -> ImagesOfSites:
        """All sites' images, and the number of the site and the label of each."""
        return join_images(federation, replies, per_class=self.is_per_class(adversarial_settings(federation)))

    def collect_images(self, federation: Federation) -> dict[str, dict[str, Parcel]]:
        """For each site, the synthetic images of all the others; nothing where sites do not share them."""
        if not self.share_images or len(federation.sites) == 1:
            return {}
        return images_of_others(federation.ask_all("give_images"))

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        """Images are of the study's size, with a class each where the central discriminator or other sites need it."""
        shared = call.operation == "give_images"
        if not shared and (call.operation not in SENDS_IMAGES or call.arguments.get("last")):
            return
        if not reply.parcels:
            raise ParcelRejected("no synthetic images came")
        images = reply.parcels[0].tensors.get("images", torch.empty(0))
        kinds = (torch.uint8,) if shared or self.wire == "small" else (torch.float32,)
        if images.dtype not in kinds or tuple(images.shape[1:]) != federation.image_shape or not len(images):
            raise ParcelRejected("what came as synthetic images is none of the study's size")
        labels, target = reply.parcels[0].tensors.get("labels"), federation.trainer.target
        if labels is None and (shared or self.is_per_class(adversarial_settings(federation))):
            raise ParcelRejected("synthetic images came without labels")
        if labels is not None:
            if target.classes and labels.dtype != torch.long:
                raise ParcelRejected("synthetic images came with labels that are no classes")
            try:
                check_labels(labels, len(images), target)
            except BadInput as error:
                raise ParcelRejected(str(error)) from None

    def pack_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.cpu() if self.wire == "exact" else gradient.to(torch.bfloat16).cpu()

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """Each site's network for each training set on the test images of all sites, in all and by sub-group."""
        return (
            {"diets": downstream_utility.test_tables(federation, "test_sums")} if federation.engine.simulation else {}
        )

    # --- at a site --------------------------------------------------------------------------------
    # The GANs of simulated sites on one device train as a stack: what a plan gets as `sites` is one site, or those of
    # the stack.

    @operation(plan=TrainGAN)
    def train_alone(self, site: Site) -> Work[None]:
        """A round without the central term."""

        def take_steps(gans: TrainingGANs, sites: Sequence[Site]) -> None:
            for _ in range(self.steps):
                gans.local_step()

        yield TrainGAN(site, partial(self.gans_of, steps=self.steps), take_steps)

    @operation("synthetic-images", plan=gan_plans.StartGAN, address="begin", most=MOST)
    def start_round(self, site: Site) -> Work[Parcel]:
        """Start a round of the synchronous schedule with the discriminator's step; the first images."""
        made = yield gan_plans.StartGAN(site, partial(self.gans_of, steps=self.steps))
        return self.parcel_of(site, made)

    @operation("synthetic-images", plan=gan_plans.AdvanceGAN, address="go_on", repeats=True, most=MOST)
    def generator_step(self, site: Site, last: bool, gradients: Tensors | None = None) -> Work[Parcel | None]:
        """The generator's step for the images sent last, then the discriminator's; the next images."""
        made = yield gan_plans.AdvanceGAN(site, None if gradients is None else gradients["images"], last)
        return None if made is None else self.parcel_of(site, made)

    @operation("synthetic-images", plan=TrainGAN, address="train_apart", repeats=True, takes=CENTRAL, most=MOST)
    def train_locally(
        self, site: Site, begin: int, steps: int, names: list[str], central: Tensors | None = None
    ) -> Work[Parcel]:
        """Some steps with the central discriminator as it came (in the beginning, as everyone builds it); images."""

        def take_steps(gans: TrainingGANs, sites: Sequence[Site]) -> None:
            received = CentralDiscriminator(self, sites[0], sites[0].data.train.images.shape, len(names), central)
            received.expect_turns(gan_plans.classes_take_turns(sites))
            for step in range(begin, begin + steps):
                self.local_step(gans, sites, received, names, step)

        gans = partial(self.gans_of, steps=steps, purpose=f"gan from {begin}")
        made = yield TrainGAN(site, gans, take_steps, self.sent or steps * adversarial_settings(site).batch_size)
        return self.parcel_of(site, made)

    def gans_of(self, group: Sequence[Site], steps: int, purpose: str = "gan") -> TrainingGANs:
        """The GANs of some sites, ready for the steps of a round."""
        models = [self.model_of(site) for site in group]
        if isinstance(models[0], AdversarialModel):
            return gan_plans.SiteGANInHalves(group[0], models[0], shared_noise=self.shared_noise, purpose=purpose)
        gans = [model for model in models if isinstance(model, GANModel)]
        return SiteGANs(group, gans, steps=steps, shared_noise=self.shared_noise, purpose=purpose)

    def model_of(self, site: Site) -> GeneratorModel:
        """The site's GAN as it is now; first its weights are the site's own, or those that all begin with."""
        own = seed_of(site.seed, site.name, "first weights")
        seed = own if self.first_weights == "independent" else site.seed
        return build_generator(site, site.state.group(gan_plans.NETWORKS), seed=seed)

    def local_step(
        self, gans: TrainingGANs, group: Sequence[Site], central: CentralDiscriminator, names: list[str], step: int
    ) -> None:
        """A step of the local schedule, with the central discriminator as it came down."""
        if step < self.warm_up:
            gans.local_step()
            return
        rows, device = gans.rows, central.device
        number = [torch.full((rows,), names.index(site.name), device=device) for site in group]
        rngs = [site.rng(f"other owner {step}") for site in group]
        others = [central.other_sites(own, rng) for own, rng in zip(number, rngs, strict=True)]
        site = torch.cat(number)

        def image_gradient(fake: Tensor, labels: Tensor, other: Tensor) -> Tensor:
            """lambda times the gradient of the mean of R over each site's images."""
            together = fake.reshape(-1, *fake.shape[-3:])
            gradient = central.image_gradient(together, site, other, labels.flatten())
            return (self.weight * gradient / rows).reshape(fake.shape)

        gans.local_step(image_gradient, torch.cat(others))

    def parcel_of(self, site: Site, made: gan_plans.SyntheticBatch) -> Parcel:
        """Synthetic images as they travel, with what differential privacy says about them; with the labels that they
        were made for where each class has a central discriminator."""
        privacy, small = self.privacy_of(site), self.wire == "small"
        images = to_uint8((made.images + 1) / 2) if small else made.images.float().cpu()
        tensors = {"images": images}
        if self.is_per_class(adversarial_settings(site)):
            tensors["labels"] = made.labels.cpu()
        return Parcel("synthetic-images", tensors, {}, privacy, ("images",) if small else ())

    def privacy_of(self, site: Site) -> dict[str, Any] | None:
        """The privacy record of the images that the site's generator makes."""
        privacy = private.record_of(site, "generator")
        return None if privacy is None else {**privacy, "covers": ["images made by the generator"]}

    # --- at the sites: what synthetic images are worth --------------------------------------------

    @operation("synthetic-images", most=MOST)
    def give_images(self, site: Site) -> Parcel:
        """Synthetic images and the labels that they were made for, for the other sites' networks to learn from."""
        part = downstream_utility.sample_part(site, self.model_of(site), self.images)
        tensors = {"images": torch.from_numpy(part.images), "labels": torch.from_numpy(part.labels)}
        return Parcel("synthetic-images", tensors, {}, self.privacy_of(site), ("images",))

    @operation("metrics", address="weigh", splits=("train", "validation", "test"))
    def evaluate_utility(self, site: Site, synthetic_images: Tensors | None = None) -> Parcel:
        """Sample images, train on each training set, keep what is best on validation images; scores and coverage.

        `synthetic_images` are those of all other sites.
        """
        synthetic = downstream_utility.sample_part(site, self.model_of(site), self.images)
        others = None if synthetic_images is None else downstream_utility.received_part(site, synthetic_images)
        release = None if self.release == "gate" else self.release
        spec = downstream_utility.Selection(self.learner_steps, self.margin, release)
        return downstream_utility.evaluate(site, synthetic, spec, others)

    @operation("metrics", address="mark", splits=("test",), partner="simulator")
    def test_sums(self, site: Site, weights: Weights) -> Parcel | None:
        """The additive sums of a network's metrics on the site's test images, in all and by sub-group."""
        return downstream_utility.test_sums(site, weights)

    def score(self, site: Site, part: ImageSet, weights: Weights, own: Own) -> dict[str, Tensor]:
        """Sums as for any method; before the first evaluation of its images a site has no network to score."""
        if own != "none" and not site.state.group("local"):
            return {}
        return super().score(site, part, weights, own)

    @operation()
    def remember(self, site: Site) -> None:
        """Nothing to do: the site has selected for itself."""


def _share_of_step(site: Tensor, place: int, places: int) -> Tensor:
    """Images that the central discriminator sees in a step, bool [N]: of each site an equal part, each once."""
    rank = torch.zeros_like(site)
    for one in site.unique():
        mine = site == one
        rank[mine] = torch.arange(int(mine.sum()), device=site.device)
    return rank % places == place


def _remember(central: CentralDiscriminator, state: State) -> None:
    state.central = {name: tensor.detach().cpu().clone() for name, tensor in central.network.state_dict().items()}
    state.moments = optimizer_tensors(central.optimizer)
