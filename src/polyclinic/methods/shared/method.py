"""A method: settings, traits for the checks of a study, a coordinator half (`run`), a site half made of operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation, Work, operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared import local_training
from polyclinic.models import statistics_names
from polyclinic.settings import Settings
from polyclinic.training import private
from polyclinic.training.plans import Score

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.generators import Generator
    from polyclinic.models import Backbone
    from polyclinic.training.batches import ReplayedBatches


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The defaults hold for a method whose sites train with `local_training.train`; a method states what differs.

    A subclass starts from its parent's: `traits = replace(FedAvg.traits, serial=True)`.
    """

    #: tasks the method can do
    tasks: tuple[str, ...] = ("classification", "regression", "segmentation")
    #: sites take turns, so that `polyclinic forgetting` has hand-overs to show
    serial: bool = False
    #: batch-norm layers are averaged or stay at the sites as `model.batch_norm` says, or always the one or the other
    batch_norm: Literal["as the study says", "average", "local"] = "as the study says"
    #: what can be trained with differential privacy (`privacy.on`), besides a generator that sites replay: classifier
    #: (the network of any task), encoder, primary (by the coordinator), generator. A site does not release weights or
    #: gradients that were trained without, where the study wants them private (`federation/layers/privacy.py`)
    private_networks: tuple[str, ...] = ("classifier",)
    #: its sites train on `replayed=self.replayed(site)`, so that a table [replay] can join replayed images
    takes_replay: bool = False
    #: sites may have different networks (`model.backbones`)
    mixes_backbones: bool = False
    #: trains its generator in the phases of [tuning], where it trains one
    tunes_generator: bool = True
    #: its coordinator and its sites take weights wherever they lie, so that those of sites that are simulated on a GPU
    #: can stay there. Not one that mixes weights with tensors of a site's state, which may lie on the CPU
    weights_stay: bool = False
    #: cuts the network, and so needs `model.cut`
    needs_cut: bool = False
    #: its sites can mix two training images (`optimizer.augment`, mixup)
    takes_mixup: bool = True
    #: a share of the sites can take part in a round (`method.fraction`)
    samples_sites: bool = True
    #: sites train on nothing but their own images, so that what frozen layers give can take the images' place
    takes_frozen_features: bool = False
    #: fits a head on features of an encoder, and so needs one as `model.backbone`
    needs_encoder: bool = False
    #: its weights come nearer step by step, by training at the sites, and are not solved for or averaged at the end, so
    #: that the incoming check can compare them with those before
    has_course: bool = True
    #: its coordinator needs the mean or the sum of the sites' answers only, so that it can be secret
    #: (`federation.sum = "secure"`)
    sums: bool = False
    #: a site that knows only some classes (`federation.label_sets`) does not make the common model unlearn others
    label_sets: bool = False
    #: is for studies with a table [privacy] only
    needs_privacy: bool = False


#: which part of its own a site adds to a model: the one it has now, that of the best round, or none
Own = Literal["current", "best", "none"]


class Method(Settings):
    """One subclass per method, in one file, with its own settings as fields; its name is in the registry."""

    name: str = Field(description="which method trains across the sites")
    rounds: int = Field(20, ge=1, description="rounds of training")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of the sites that take part in a round, drawn anew for each; at least one"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many rounds without a better validation score; never if not given"
    )

    #: one sentence for lists and tables
    summary: ClassVar[str]
    #: what it can do and what it needs
    traits: ClassVar[Traits] = Traits()
    #: operations whose answers the coordinator needs the "mean" of only, which is the model that is scored and that the
    #: next round begins with, or the "sum", or the "secure sum" where nothing else protects them (`federation.sum`)
    SUMMED: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def run(self, federation: Federation) -> Weights:
        """The coordinator half: train across the sites, and return the last weights."""

    def replayed(self, site: Site) -> ReplayedBatches | None:
        """Replayed images that join a site's mini-batches; None here, see `generative_replay.GenerativeReplay`."""
        return None

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
        """Whether sites train the study's generator and hand out what it makes."""
        return False

    @property
    def head(self) -> Literal["linear", "diagonal", "quadratic"]:
        """What follows an encoder in the method's model (`models.encoders`)."""
        return "linear"

    def needs_first_weights(self) -> bool:
        """Whether the method, as it is set, builds on first weights that are not random (`model.weights`)."""
        return False

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """Test metrics that only this kind of method has, by name, from the released models of each site."""
        return {}

    def privacy_obstacle(self) -> str | None:
        """Why the method, as it is set, cannot go with differential privacy: a sentence with the cure, or None."""
        return None

    def sum_obstacle(self) -> str | None:
        """Why the sites' answers, as the method is set, cannot be added up (`federation.sum`): a sentence with the
        cure, or None."""
        if self.traits.sums:
            return None
        return (
            f"method.name: the coordinator of '{self.name}' needs each site's answer by itself; choose fedavg, fedsgd "
            "or analytic, or set federation.sum = 'float'"
        )

    @classmethod
    def operation_named(cls, name: str) -> Operation | None:
        """What the method declares of an operation; None for those of the federation itself."""
        return getattr(getattr(cls, name, None), "operation", None)

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        """ParcelRejected for a reply that the method cannot use. A site may send anything: whatever would stop the
        coordinator half in the middle is refused here, and only that site fails."""

    @operation("metrics", plan=Score)
    def evaluate(
        self,
        site: Site,
        weights: Weights | None = None,
        split: str = "validation",
        own: Own = "current",
    ) -> Work[Parcel | None]:
        """Score a model on the site's images: `weights` with the site's own part, current or as of the best round.

        A site without images in this split releases nothing; nor does one whose epsilon allows no score any more.
        """
        part, shared = private.scored_images(site, split), {} if weights is None else weights
        sums = yield Score(site, part, shared, partial(self.score, site, part, shared, own))
        released = private.release_scores(site, sums) if sums else sums
        return Parcel("metrics", released, privacy=private.scores_record(site, split)) if released else None

    @classmethod
    def scores_one_model(cls, trainer: TrainerLike) -> bool:
        """Whether sites score common weights as they are: they have no part of their own and nothing to select."""
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
