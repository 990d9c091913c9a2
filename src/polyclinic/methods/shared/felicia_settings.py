"""FELICIA's settings, and the checks that they go with a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.gan.adversarial import AdversarialGenerator
from polyclinic.methods.shared import utility
from polyclinic.methods.shared.method import Method
from polyclinic.models import Backbone


class FeliciaSettings(Method):
    """The table [method] of FELICIA; `methods/felicia.py` has the algorithm."""

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
    share_images: bool = Field(
        False,
        description="at the end sites hand synthetic images to each other, and networks also learn from those of all "
        "sites (training sets synthetic-all and augmented-all)",
    )
    learner_steps: int = Field(300, ge=1, description="steps of a site's network for each training set")
    weigh_every: int = Field(
        0, ge=0, description="rounds after which synthetic images are evaluated; 0 for the last round only"
    )
    margin: float = Field(
        0.0, ge=0, description="by how much validation scores must rise for synthetic images to count"
    )
    release: Literal["gate", "real", "synthetic", "augmented", "synthetic-all", "augmented-all"] = Field(
        "gate",
        description="which network a site releases: the one that validation chooses, or always that of one training "
        "set",
    )

    @model_validator(mode="after")
    def _images_are_there(self) -> Self:
        if self.release in utility.SHARED_SETS and not self.share_images:
            raise ValueError(f"release '{self.release}' needs the other sites' images; set share_images = true")
        return self

    def is_per_class(self, generator: AdversarialGenerator) -> bool:
        """Whether there is a central discriminator for each class."""
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
