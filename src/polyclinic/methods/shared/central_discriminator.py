"""FELICIA's settings, its central discriminator, and the synthetic images that this sees."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.adversarial import AdversarialGenerator, confusion_loss, site_cross_entropy
from polyclinic.generators.gan.networks import OfEachClass, update_spectral_norms
from polyclinic.generators.gan.trainer import centred
from polyclinic.methods.shared import downstream_utility
from polyclinic.methods.shared.gan_plans import adversarial_settings
from polyclinic.methods.shared.method import Federation, Method, Parcel, Reply, Site, all_sites
from polyclinic.models import Backbone
from polyclinic.randomness import seed_of
from polyclinic.training.generator_loop import autocast
from polyclinic.training.gpu.graphs import GraphedFunction


class FeliciaSettings(Method):
    """The table [method] of FELICIA; `methods/felicia.py` has the algorithm."""

    fraction: float = all_sites()
    steps: int = Field(250, ge=1, description="steps of every generator in a round")
    weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="lambda: weight of the central term; 0: none")
    towards: Literal["away", "other"] = Field(
        "away",
        description="a generator's central loss: phi of being identified (Eq. 6), or the cross-entropy of being taken "
        "for another site, drawn at random (PrivGAN's code)",
    )
    first_weights: Literal["independent", "same"] = Field(
        "independent",
        description="how sites' GANs begin: each site with weights of its own, as the paper duplicates a base GAN, or "
        "all with the same weights",
    )
    central: Literal["auto", "one", "per-class"] = Field(
        "auto",
        description="central discriminators: one for all classes, or one for each class, as PrivGAN's code, which "
        "trains classes apart; auto: one for each class where generator.condition = 'apart', else one",
    )
    central_lr: float | None = Field(None, gt=0, description="learning rate of the central discriminator, if another")
    warm_up: int = Field(0, ge=0, description="first steps in which the central term does not act yet")
    frozen: int = Field(0, ge=0, description="first steps in which the central discriminator acts and does not learn")
    schedule: Literal["synchronous", "local"] = Field(
        "synchronous",
        description="what travels: images and gradients in every step, or images and the central discriminator's "
        "weights every `exchange_every` steps",
    )
    exchange_every: int = Field(50, ge=1, description="local schedule: steps between two exchanges")
    sent: int | None = Field(
        None, ge=1, description="local schedule: images sent at an exchange; if not given, a batch a step"
    )
    wire: Literal["exact", "small"] = Field(
        "exact", description="how images and gradients travel: float32, or bytes (compressed) and bfloat16"
    )
    shared_noise: bool = Field(False, description="all generators get the same noise in a step, as in PrivGAN's code")
    images: int | None = Field(
        None, ge=1, description="synthetic images a network learns from; as many as real ones if not given"
    )
    share_images: bool = Field(
        False,
        description="at the end sites hand synthetic images to each other, and networks also learn from those of all "
        "sites (training sets synthetic-all and augmented-all)",
    )
    learner_steps: int = Field(300, ge=1, description="steps of a site's network for each training set")
    weigh_every: int = Field(0, ge=0, description="rounds after which synthetic images are evaluated; 0: the last only")
    margin: float = Field(0.0, ge=0, description="how much validation scores must rise for synthetic images to count")
    release: Literal["gate", "real", "synthetic", "augmented", "synthetic-all", "augmented-all"] = Field(
        "gate",
        description="which network a site releases: the one that validation chooses, or always that of one training "
        "set",
    )

    @model_validator(mode="after")
    def _images_are_there(self) -> Self:
        if self.release in downstream_utility.SHARED_SETS and not self.share_images:
            raise ValueError(f"release '{self.release}' needs the other sites' images; set share_images = true")
        return self

    def is_per_class(self, generator: AdversarialGenerator) -> bool:
        """True where there is a central discriminator for each class."""
        return generator.separates_classes if self.central == "auto" else self.central == "per-class"

    def check_generator(self, generator: Generator, task: str) -> None:
        if not isinstance(generator, AdversarialGenerator):
            can = [name for name, kind in GENERATORS.working().items() if issubclass(kind, AdversarialGenerator)]
            raise BadInput(f"generator.name: felicia trains GANs; choose one of {', '.join(can)}")
        if self.central == "per-class" and task != "classification":
            raise BadInput(f"method.central: 'per-class' needs classes, which {task} does not have; choose 'one'")
        if self.central == "per-class" and generator.ignores_labels:
            raise BadInput(
                "method.central: 'per-class' needs images that are made for a class, and generator.condition = 'none' "
                "ignores labels; choose 'one', or another generator.condition"
            )

    def check_sites(self, sites: Sequence[str]) -> None:
        if self.share_images and len(sites) < 2:
            raise BadInput("method.share_images: there is no other site to share with; set it to false")

    def needs_generator(self) -> bool:
        return True

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each site has a network of its own."""
        return frozenset(model.state_dict())


# --- the central discriminator ------------------------------------------------------------------------


class ImagesOfSites(NamedTuple):
    """Synthetic images of all sites, for the central discriminator."""

    images: Tensor  #: [N, C, H, W] in [-1, 1]
    site: Tensor  #: [N], the number of the site that made each
    labels: Tensor  #: [N], the class that each was made for, where each class has a central discriminator
    turns: bool  #: whether the classes take turns image by image (0, 1, 0, 1, ...)


class CentralDiscriminator:
    """D_p: a network that identifies the site that made an image, and its optimiser. It never sees a real image.

    Images are [N, C, H, W] in [-1, 1], `site` [N] is the number of the site that made each, logits are [N, K]. Where
    each class has a central discriminator, this holds all of them, and `labels` [N] choose one for each image.
    """

    def __init__(
        self,
        method: FeliciaSettings,
        at: Federation | Site,
        images: Sequence[int],
        sites: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """As it begins, the same wherever it is built, or with the `weights` that came; `images` is the shape
        [N, C, H, W]."""
        settings, trainer = adversarial_settings(at), at.trainer
        shape: dict[str, Any] = {"channels": images[1], "size": images[2], "target": trainer.target, "sites": sites}
        shape["per_class"] = method.is_per_class(settings)
        seed = seed_of(at.seed, "central")
        built = initial_networks(lambda: {"central": settings.central_discriminator(**shape)}, seed)
        self.network: nn.Module = built["central"].to(trainer.device).train()
        self.towards, self.loss, self.sites = method.towards, settings.gan_loss, sites
        self.precision, self.device = trainer.precision, trainer.device
        parameters = self.network.parameters()
        self.optimizer = settings.central_optimizer(parameters, method.central_lr, capturable=trainer.graphs)
        if weights:
            self.network.load_state_dict(dict(weights))
        name = "a step of FELICIA's central discriminator"
        self._both = GraphedFunction(self._step_and_gradient, name) if trainer.graphs else self._step_and_gradient

    def expect_turns(self, turns: bool) -> None:
        """Say that classes take turns in the images to come, or not: then those of each are found without sorting."""
        if isinstance(self.network, OfEachClass):
            self.network.in_turns = turns

    def step_and_gradient(self, batch: ImagesOfSites, other: Tensor, *, learn: bool, act: bool) -> Tensor | None:
        """A step, where it is to learn; then the gradient of R w.r.t. the images, where that is to act."""
        images, site, labels, turns = batch
        self.expect_turns(turns)
        if learn and act:
            both = self._both if turns else self._step_and_gradient  # a graph is recorded for images in turns
            return both(images, site, other, labels)
        if learn:
            self.step(images, site, labels)
        return self.image_gradient(images, site, other, labels) if act else None

    def _step_and_gradient(self, images: Tensor, site: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        self.step(images, site, labels)
        return self.image_gradient(images, site, other, labels)

    def step(self, images: Tensor, site: Tensor, labels: Tensor) -> Tensor:
        """A step on synthetic images; the share of them whose site it named."""
        update_spectral_norms(self.network)
        logits = self.logits(images.detach(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        site_cross_entropy(logits, site).mean().backward()
        self.optimizer.step()
        return (logits.argmax(-1) == site).float().mean().detach()

    def image_gradient(self, images: Tensor, site: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        """The gradient of R, summed over images, w.r.t. each image; `other` [N]: sites to be taken for instead."""
        images = images.detach().requires_grad_()
        logits = self.logits(images, labels)
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

    def logits(self, images: Tensor, labels: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            return self.network(images, labels)


# --- synthetic images of the sites' replies, which `Felicia.check_reply` has looked at ----------------


def join_images(federation: Federation, replies: list[Reply], *, per_class: bool) -> ImagesOfSites:
    """All sites' images, and the number of the site and, with `per_class`, the label of each."""
    device = federation.trainer.device
    images = [centred(some) if some.dtype == torch.uint8 else some for some in map(images_of, replies)]
    site = [torch.full((len(some),), federation.sites.index(r.site)) for r, some in zip(replies, images, strict=True)]
    classes, labels = len(federation.trainer.target.classes), torch.zeros(sum(map(len, images)))
    if per_class:
        labels = torch.cat([reply.parcel("synthetic-images").tensors["labels"] for reply in replies])
    turns = not per_class or bool((labels == torch.arange(len(labels)) % classes).all())
    return ImagesOfSites(torch.cat(images).to(device), torch.cat(site).to(device), labels.to(device), turns)


def images_of_others(replies: list[Reply]) -> dict[str, dict[str, Parcel]]:
    """For each site, the synthetic images that all the others share."""
    given = {reply.site: reply.parcel("synthetic-images").tensors for reply in replies}
    others = {site: [tensors for name, tensors in given.items() if name != site] for site in given}
    joined = {
        site: {name: torch.cat([tensors[name] for tensors in sets]) for name in ("images", "labels")}
        for site, sets in others.items()
        if sets
    }
    return {
        site: {"synthetic_images": Parcel("synthetic-images", tensors, compressed=("images",))}
        for site, tensors in joined.items()
    }


def images_of(reply: Reply) -> Tensor:
    """The synthetic images that a site sent."""
    return reply.parcel("synthetic-images").tensors["images"]
