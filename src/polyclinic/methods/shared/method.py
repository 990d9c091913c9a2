"""A method: settings, traits for the checks of a study, a coordinator half (`run`), a site half made of operations."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.layers.cohort import cohort
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation, Work, operation
from polyclinic.federation.site import Site
from polyclinic.federation.sums.arithmetic import LARGEST
from polyclinic.generators import Generator
from polyclinic.methods.shared import local_training
from polyclinic.models import Backbone, statistics_names
from polyclinic.settings import Settings
from polyclinic.training import private
from polyclinic.training.batches import ReplayedBatches
from polyclinic.training.plans import Score

#: the words that a method is written in
__all__ = [
    "Call",
    "Federation",
    "Method",
    "Own",
    "OwnModels",
    "Parcel",
    "ParcelRejected",
    "ReplayMethod",
    "Reply",
    "Site",
    "State",
    "Traits",
    "Weights",
    "Work",
    "all_sites",
    "operation",
]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Abilities and needs of a method, as far as its base class, settings and operations do not say so already.

    The defaults hold for a method whose sites train with `local_training.train`. A subclass starts from its parent's:
    `traits = replace(FedAvg.traits, label_sets=False)`.
    """

    #: tasks the method can do
    tasks: tuple[str, ...] = ("classification", "regression", "segmentation")
    #: what comes about: a network that sites train with `local_training` (mixup works then), or in steps of the
    #: method's own; a head on the features of an encoder; such a head with noise (it needs [privacy]); nothing
    trains: Literal["network", "network in steps", "head", "private head", "nothing"] = "network"
    #: batch-norm layers are averaged or stay at the sites as `model.batch_norm` says, or always the one or the other
    batch_norm: Literal["as the study says", "average", "local"] = "as the study says"
    #: what can be trained with differential privacy (`privacy.on`), besides a generator that sites replay: classifier
    #: (the network of any task), encoder, primary (by the coordinator), generator. A site does not release weights or
    #: gradients that were trained without, where the study wants them private (`federation/layers/privacy.py`)
    private_networks: tuple[str, ...] = ("classifier",)
    #: its coordinator and its sites take weights wherever they lie, so that those of sites that are simulated on a GPU
    #: can stay there. Not one that mixes weights with tensors of a site's state, which may lie on the CPU
    weights_stay: bool = False
    #: cuts the network, and so needs `model.cut`
    needs_cut: bool = False
    #: sites train on nothing but their own images, so that what frozen layers give can take the images' place
    takes_frozen_features: bool = False
    #: a site that knows only some classes (`federation.label_sets`) does not make the common model unlearn others
    label_sets: bool = False

    @property
    def needs_encoder(self) -> bool:
        """True where `model.backbone` must be an encoder."""
        return self.trains in ("head", "private head")

    @property
    def gradual(self) -> bool:
        """True where weights change gradually, so that a site can compare those that come with those before."""
        return self.trains in ("network", "network in steps")


#: which part of its own a site adds to a model: the one it has now, that of the best round, or none
Own = Literal["current", "best", "none"]


def all_sites() -> Any:
    """`fraction` of a method that needs all sites in every round."""
    return Field(1.0, ge=1, le=1, description="all sites take part in every round")


class Method(Settings):
    """One subclass per method, in one file, with its own settings as fields; its name is in the registry."""

    name: str = Field(description="which method trains across the sites")
    rounds: int = Field(20, ge=1, description="rounds of training")
    fraction: float = Field(1.0, gt=0, le=1, description="share of sites in a round, drawn anew for each; at least one")
    patience: int | None = Field(None, ge=1, description="stop after so many rounds without a better validation score")

    #: one sentence for lists and tables
    summary: ClassVar[str]
    #: what it can do and what it needs
    traits: ClassVar[Traits] = Traits()
    #: why it never goes with differential privacy, and the cure; nothing where it may
    no_privacy: ClassVar[str] = ""
    #: the generator of a study that names none, where the method needs one; and whether that may learn features
    usual_generator: ClassVar[str] = "dcgan"
    learns_features: ClassVar[bool] = False
    #: operations whose answers the coordinator needs the "mean" of only, which is the model that is scored and that the
    #: next round begins with, or the "sum", or the "secure sum" where nothing else protects them (`federation.sum`)
    SUMMED: ClassVar[Mapping[str, str]] = {}

    @field_validator("fraction", mode="before")
    @classmethod
    def _check_fraction(cls, value: object) -> object:
        if value != 1 and any(getattr(bound, "ge", None) == 1 for bound in cls.model_fields["fraction"].metadata):
            raise ValueError("this method needs all sites in every round; set method.fraction = 1")
        return value

    @abstractmethod
    def run(self, federation: Federation) -> Weights:
        """The coordinator half: train across the sites, and return the last weights."""

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """Names of the weights that stay at each site: batch-norm statistics where the study says so."""
        return frozenset(statistics_names(model)) if batch_norm == "local" else frozenset()

    def check_task(self, task: str) -> None:
        """BadInput where a setting of the method does not go with the study's task."""

    def check_cuts(self, backbone: str, cuts: Sequence[str]) -> None:
        """BadInput where a setting of the method names a cut that the study's network does not have."""

    def check_generator(self, generator: Generator, task: str) -> None:
        """BadInput where the method's sites cannot train the study's generator for its task."""

    def check_sites(self, sites: Sequence[str]) -> None:
        """BadInput where a setting of the method does not go with the sites that there are."""

    def needs_generator(self) -> bool:
        """True where sites train the study's generator and hand out what it makes."""
        return False

    def tunes_generator(self) -> bool:
        """True where that generator is trained in the phases of [tuning], and so not with privacy of its own."""
        return self.needs_generator() and "generator" not in self.traits.private_networks

    @property
    def head(self) -> Literal["linear", "diagonal", "quadratic"]:
        """The head after an encoder in the method's model (`models.encoders`)."""
        return "linear"

    def needs_first_weights(self) -> bool:
        """True where the method, as it is set, builds on first weights that are not random (`model.weights`)."""
        return False

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """Test metrics that only this kind of method has, by name, from the released models of each site."""
        return {}

    def privacy_obstacle(self) -> str | None:
        """Why the method, as it is set, cannot go with differential privacy: a sentence with the cure, or None."""
        return f"method.name: '{self.name}' {self.no_privacy}" if self.no_privacy else None

    def sum_obstacle(self) -> str | None:
        """Why the sites' answers, as the method is set, cannot be added up (`federation.sum`): a sentence with the
        cure, or None."""
        if self.SUMMED:
            return None
        return (
            f"method.name: the coordinator of '{self.name}' needs each site's answer by itself; choose fedavg, fedsgd "
            "or analytic, or set federation.sum = 'float'"
        )

    @classmethod
    def operation_named(cls, name: str) -> Operation | None:
        """The declaration of an operation; None for those of the federation itself."""
        return getattr(getattr(cls, name, None), "operation", None)

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        """ParcelRejected for a reply that the method cannot use. A site may send anything: whatever would stop the
        coordinator half in the middle is refused here, and only that site fails."""

    @operation("metrics", plan=Score)
    def evaluate(
        self, site: Site, weights: Weights | None = None, split: str = "validation", own: Own = "current"
    ) -> Work[Parcel | None]:
        """Score a model on the site's images: `weights` with the site's own part, current or as of the best round.

        A site without images in this split releases nothing; nor does one whose epsilon allows no score any more.
        """
        sums = yield self._scores(site, weights or {}, split, own)
        return private.release_scores(site, split, sums) if sums else None

    def _scores(self, site: Site, weights: Weights, split: str, own: Own) -> Score:
        is_private = site.trainer.privacy is not None
        part: ImageSet = private.scored_images(site, split) if is_private else getattr(site.data, split)
        return Score(site, part, weights, partial(self.score, site, part, weights, own))

    @operation("metrics", plan=Score)
    def add_scores(
        self, site: Site, weights: Weights | None = None, split: str = "validation", own: Own = "current"
    ) -> Work[Parcel | None]:
        """Score a model on the site's images, in few cells; the figures of all sites are added up, and nobody sees one
        site's. One without images, or with those of fewer than min_cohort patients, adds zeros."""
        sums, task = (yield self._scores(site, weights or {}, split, own)), site.trainer.task
        if not sums or cohort(site.data, split) < site.min_cohort:
            sums = self.score(site, site.data.train.take(np.arange(1)), weights or {}, own)
            sums = {name: torch.zeros_like(one) for name, one in sums.items()}
        return private.release_scores(site, split, task.summable(sums, LARGEST / 2.0**site.study.federation.bits))

    @operation("metrics", plan=Score)
    def add_final_scores(
        self, site: Site, weights: Weights | None = None, split: str = "test", own: Own = "current"
    ) -> Work[Parcel | None]:
        """Score the finished model on the site's images, once; the figures of all sites are added up."""
        return (yield from self.add_scores(site, weights, split, own))

    @classmethod
    def scores_one_model(cls, trainer: TrainerLike) -> bool:
        """True where sites score common weights as they are: they have no part of their own and nothing to select."""
        return cls.score is Method.score and not trainer.local_names

    def score(self, site: Site, part: ImageSet, weights: Weights, own: Own) -> dict[str, Tensor]:
        """Additive sums of the task's metrics over a part of the site's images; empty if there is nothing to score."""
        if len(part) == 0:
            return {}
        trainer = site.trainer_for(weights) if weights and own == "none" else site.trainer
        trainer.load(local_training.assemble(site, weights, own))
        return trainer.evaluate(part)

    @operation()
    def keep_model(self, site: Site, weights: Weights | None = None, own: Own = "current") -> None:
        """The run is over: its model, with the site's own part, is the site's to use."""
        model = local_training.assemble(site, weights or {}, own)
        if site.keep_model and model:
            site.keep_model(model)

    @operation()
    def remember(self, site: Site) -> None:
        """Keep the site's own part of the model as it is now: this round was the best one."""
        site.state.put("best", site.state.group("local"))


class ReplayMethod(Method):
    """A method whose sites train on what `replayed` gives, beside their own images, where a study has [replay]."""

    def replayed(self, site: Site) -> ReplayedBatches | None:
        """Replayed images that join a site's mini-batches; see `generative_replay.GenerativeReplay`."""
        return None


class OwnModels(Method):
    """A method without a common model: every site has one of its own, of any network (`model.backbones`)."""

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        return frozenset(model.state_dict())
