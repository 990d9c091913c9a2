"""FELICIA (Rajotte et al. 2021): owners' GANs, joined by a central discriminator that sees synthetic images only.

Every owner trains a generator and a discriminator on its own images. The central discriminator learns whose images are
whose; each generator learns, besides fooling its own discriminator, not to be recognised:

    sum_i V_phi(G_i, D_i) + lambda * R_p        (Eq. 6)

Two schedules. Synchronous: in every step the owners' images go up and the slope of R at these images comes down. Local:
the central discriminator's weights come down every `exchange_every` steps, and images go up. Nothing else leaves an
owner but the scores it is judged by. With lambda 0, or one owner, every owner trains for itself.

Afterwards each owner trains the task's network on real images, on synthetic ones and on both; validation images decide
whether synthetic ones helped, and so which network is released (`methods/shared/utility.py`). PrivGAN (Mukherjee et
al. 2021) is the special case of one owner's images in random parts: `sites.partition = "iid"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.central import Central, CentralTerm
from polyclinic.generators.gan.model import GAN, centred
from polyclinic.generators.gan.trainer import Dice
from polyclinic.methods.shared.gan_site import Owner, gan_settings
from polyclinic.methods.shared.optimizer_state import optimizer_tensors, restore_optimizer
from polyclinic.methods.shared.utility import Worth
from polyclinic.randomness import seed_of
from polyclinic.tasks import Target
from polyclinic.training import private

Tensors = Mapping[str, Tensor]


class Felicia(Worth, CentralTerm):
    name: Literal["felicia"] = "felicia"
    steps: int = Field(250, ge=1, description="steps of every generator in a round")
    schedule: Literal["synchronous", "local"] = Field(
        "synchronous",
        description="what travels: images and slopes in every step, or images and the central discriminator's weights "
        "every `exchange_every` steps",
    )
    exchange_every: int = Field(50, ge=1, description="local schedule: steps between two exchanges")
    sent: int | None = Field(
        None,
        ge=1,
        description="local schedule: images an owner sends at an exchange; a batch for each step if not given",
    )
    wire: Literal["exact", "small"] = Field(
        "exact", description="how images and slopes travel: float32, or bytes (compressed) and bfloat16"
    )
    shared_noise: bool = Field(False, description="all generators get the same noise in a step, as in PrivGAN's code")

    summary: ClassVar[str] = "owners' GANs, joined by a central discriminator that sees synthetic images only"

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        self.check_generator(federation)
        state = federation.state(central={}, moments={}, worth=[])
        for number in federation.rounds(self.rounds, state):
            if self.weight == 0 or len(federation.sites) == 1:
                federation.ask_all("train_alone")
            elif self.schedule == "synchronous":
                self.in_step(federation, state)
            else:
                self.apart(federation, state)
            if self.is_weighed(number):
                self.weigh_all(federation, state)
            federation.evaluate()
        federation.report("worth", state.worth)
        return {}

    def in_step(self, federation: Federation, state: State) -> None:
        """A round of the synchronous schedule: images up, slopes down, in every step."""
        central, first = None, (federation.round - 1) * self.steps
        replies = federation.ask_all("begin")
        for step in range(first, first + self.steps):
            fakes, owner = self.gathered(federation, replies)
            central = central or self.central(federation, state, fakes)
            if self.learns(step):
                central.judge(fakes, owner)
            slopes = None
            if self.acts(step):
                dice = Dice(federation.rng(f"other owner {step}"), fakes.device)
                slopes = self.weight * central.slope(fakes, owner, dice)
            replies = self.next_step(federation, replies, slopes, last=step == first + self.steps - 1)
            if not replies:
                break
        if central is not None:
            _remember(central, state)

    def next_step(
        self, federation: Federation, replies: list[Reply], slopes: Tensor | None, *, last: bool
    ) -> list[Reply]:
        """Hand every owner the slopes at its images; their next images, or nothing after the last step."""
        answers, start = [], 0
        for reply in replies:
            count = len(_images(reply))
            # an owner's term is the mean over its images
            own = None if slopes is None else self.packed_slope(slopes[start : start + count] / count)
            start += count
            sent = None if own is None else {"images": own}
            answer = federation.ask(reply.site, "go_on", gradients=sent, last=last)
            if isinstance(answer, Reply):
                answers.append(answer)
        return [] if last else answers

    def apart(self, federation: Federation, state: State) -> None:
        """A round of the local schedule: the central discriminator's weights down, images up, every few steps."""
        central, first = None, (federation.round - 1) * self.steps
        for begin in range(first, first + self.steps, self.exchange_every):
            steps = min(self.exchange_every, first + self.steps - begin)
            down = Parcel("generator", state.central) if state.central else None
            replies = federation.ask_all(
                "train_apart", central=down, begin=begin, steps=steps, owners=list(federation.sites)
            )
            fakes, owner = self.gathered(federation, replies)
            central = central or self.central(federation, state, fakes)
            for step in range(begin, begin + steps):
                some = _share(owner, step - begin, steps)
                if self.learns(step) and bool(some.any()):
                    central.judge(fakes[some], owner[some])
            _remember(central, state)

    def central(self, federation: Federation, state: State, fakes: Tensor) -> Central:
        """The central discriminator as it stands; built when the first synthetic images show their shape."""
        settings, trainer = gan_settings(federation), federation.trainer
        network = central_network(settings, fakes.shape, trainer.target, len(federation.sites), federation.seed)
        if state.central:
            network.load_state_dict(dict(state.central))
        central = Central.of(
            network.to(trainer.device),
            settings.phi,
            self,
            owners=len(federation.sites),
            lr=settings.lr_discriminator or settings.lr,
            precision=trainer.precision,
            device=str(trainer.device),
        )
        restore_optimizer(central.optimizer, state.moments)
        return central

    def gathered(self, federation: Federation, replies: list[Reply]) -> tuple[Tensor, Tensor]:
        """All owners' images in [-1, 1], and the number of the owner of each."""
        images = [_floats(_images(reply)) for reply in replies]
        owner = [
            torch.full((len(some),), federation.sites.index(r.site)) for r, some in zip(replies, images, strict=True)
        ]
        return torch.cat(images).to(federation.trainer.device), torch.cat(owner).to(federation.trainer.device)

    def packed_slope(self, slope: Tensor) -> Tensor:
        return slope.cpu() if self.wire == "exact" else slope.to(torch.bfloat16).cpu()

    def check_generator(self, federation: Federation) -> None:
        if not isinstance(federation.generator, GAN):
            raise BadInput("generator.name: felicia trains GANs; choose one of gan, dcgan, wgan-gp")
        federation.generator.check_target(federation.trainer.target)

    # --- at an owner ------------------------------------------------------------------------------

    @operation()
    def train_alone(self, site: Site) -> None:
        """A round without the central term."""
        owner = Owner(site, shared_noise=self.shared_noise)
        for _ in range(self.steps):
            owner.judge()
            owner.make()
            owner.learn(None)
        owner.keep()

    @operation("synthetic-images")
    def begin(self, site: Site) -> Parcel:
        """Start a round of the synchronous schedule with the discriminator's step; the first images."""
        site.memory["owner"] = owner = Owner(site, shared_noise=self.shared_noise)
        owner.judge()
        return self.parcel_of(site, owner.make().detach())

    @operation("synthetic-images")
    def go_on(self, site: Site, gradients: Tensors | None = None, last: bool = False) -> Parcel | None:
        """The generator's step for the images sent last, then the discriminator's; the next images."""
        owner: Owner = site.memory["owner"]
        owner.learn(None if gradients is None else gradients["images"].to(site.trainer.device).float())
        if last:
            owner.keep()
            site.memory.clear()
            return None
        owner.judge()
        return self.parcel_of(site, owner.make().detach())

    @operation("synthetic-images")
    def train_apart(
        self, site: Site, begin: int, steps: int, owners: list[str], central: Tensors | None = None
    ) -> Parcel:
        """Some steps with the central discriminator as it came (in the beginning, as everyone builds it); images."""
        owner = Owner(site, shared_noise=self.shared_noise, purpose=f"gan from {begin}")
        judge, number = self.received(site, central, len(owners)), owners.index(site.name)
        for step in range(begin, begin + steps):
            owner.judge()
            made, slope = owner.make(), None
            if self.acts(step):
                own = torch.full((len(made),), number, device=made.device)
                dice = Dice(site.rng(f"other owner {step}"), made.device)
                slope = self.weight * judge.slope(made, own, dice) / len(made)
            owner.learn(slope)
        owner.keep()
        return self.parcel_of(site, owner.more(self.sent or steps * gan_settings(site).batch_size))

    def received(self, site: Site, central: Tensors | None, owners: int) -> Central:
        """The central discriminator as it came down, for slopes only."""
        settings, device = gan_settings(site), site.trainer.device
        network = central_network(settings, site.data.train.images.shape, site.trainer.target, owners, site.seed)
        if central:
            network.load_state_dict(dict(central))
        where = {"precision": site.trainer.precision, "device": str(device)}
        return Central.of(network.to(device), settings.phi, self, owners=owners, lr=settings.lr, **where)

    def parcel_of(self, site: Site, images: Tensor) -> Parcel:
        """Made images as they travel, with what differential privacy says about them."""
        privacy = private.record_of(site, "generator")
        if privacy is not None:
            privacy = {**privacy, "covers": ["images made by the generator"]}
        if self.wire == "small":
            return Parcel("synthetic-images", {"images": to_uint8((images + 1) / 2)}, {}, privacy, ("images",))
        return Parcel("synthetic-images", {"images": images.float().cpu()}, {}, privacy)


def central_network(settings: GAN, images: Sequence[int], target: Target, owners: int, seed: int) -> nn.Module:
    """The central discriminator in the beginning, the same wherever it is built; `images` is the shape [N, C, H, W]."""
    shape = settings.shape(images[1], images[2], target)
    return initial_networks(lambda: {"central": settings.central(shape, owners)}, seed_of(seed, "central"))["central"]


def _images(reply: Reply) -> Tensor:
    return reply.parcel("synthetic-images").tensors["images"]


def _floats(images: Tensor) -> Tensor:
    return centred(images) if images.dtype == torch.uint8 else images


def _share(owner: Tensor, place: int, places: int) -> Tensor:
    """Which images the central discriminator sees in this step: of each owner an equal part, every image once."""
    rank = torch.zeros_like(owner)
    for one in owner.unique():
        mine = owner == one
        rank[mine] = torch.arange(int(mine.sum()), device=owner.device)
    return rank % places == place


def _remember(central: Central, state: State) -> None:
    network = central.network
    assert isinstance(network, nn.Module)
    state.central = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
    state.moments = optimizer_tensors(central.optimizer)
