"""An attack of an audit: what it gets (`Seen`, a parcel as its receiver has it), and what it says (`Finding`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from polyclinic.attacks.attack import Capabilities, ThreatModel, Verdict
from polyclinic.audits.recompute import Change, carry_out_changed
from polyclinic.audits.truth import Truth, What
from polyclinic.data.parts import SiteData, open_site
from polyclinic.federation.ledger.archive import Release
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.perceptual import Distance
from polyclinic.models import Backbone
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study.tables import Effort


@dataclass(frozen=True)
class Tools:
    """What all attacks of one audit share: the study's public side, the threat model, the budget, the device."""

    assembly: Assembly
    threat: ThreatModel
    effort: Effort
    distance: Distance
    seed: int
    device: str
    trajectory: tuple[int, ...] = ()  #: steps of a search at which images and losses are kept
    level: float = 0.001  #: p at or below which a test counts: the audit's 1 %, divided by its number of tests
    #: what several attacks on a parcel train alike, by what it is: (the parcel it is for, what was trained)
    trained: dict[str, tuple[object, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.assembly.image_shape
        return channels, height, width

    @property
    def what(self) -> What:
        """What the study's network learns to tell of an image."""
        return "masks" if self.assembly.study.task.dense else "labels"

    def site_data(self, site: str) -> SiteData:
        """A site's own images: for scoring alone."""
        return (
            self.assembly.open_data(site) if self.assembly.open_data else open_site(self.assembly.prepared.folder, site)
        )


@dataclass(frozen=True)
class Seen:
    """A parcel as its receiver has it: with what left together with it, and what the site had been sent before.

    `sites`: the parcel is the mean over so many sites, the only thing that a secure sum reveals.
    """

    site: str
    parcel: Parcel
    together: tuple[Parcel, ...]
    sent_before: Callable[[str], dict[str, Tensor]]
    round: int
    step: int
    tools: Tools
    sites: int = 1
    split: str = ""  #: the images that were scored, where scores are told
    more: "Callable[[], tuple[Seen, ...]]" = tuple  #: what else the site released by this operation, and the audit has
    peers: "Callable[[], tuple[Seen, ...]]" = tuple  #: what other sites released at the same time by this operation
    #: for power checks alone: the parcels that the operation lets out where the site's images are changed
    again: Callable[[Change], Sequence[Parcel]] = lambda change: ()

    @classmethod
    def of(cls, site: str, release: Release, number: int, tools: Tools) -> "Seen":
        """A parcel of a kept release, without what only the site knows."""
        together, split = tuple(release.parcels), release.split
        seen = cls(site, together[number], together, release.received, release.round, release.step, tools, split=split)
        return replace(seen, again=partial(carry_out_changed, tools.assembly, site, release))

    @property
    def kind(self) -> str:
        return self.parcel.kind

    @property
    def where(self) -> str:
        """Whose parcel it is, for titles of pictures."""
        who = self.site if self.sites == 1 else f"sum of {self.sites} sites"
        return f"{who}, {self.kind}, round {self.round}"

    def planted(self, leak: str, words: str, truth: Truth, *parcels: Parcel, question: str = "") -> "Planted":
        """A leak that is planted in place of this parcel and its company; this parcel itself if none is given."""
        parcels = parcels or (self.parcel,)
        seen = replace(self, parcel=parcels[0], together=parcels, more=tuple)
        return Planted(leak, words, seen, truth, question)

    def companion(self, kind: str) -> Parcel | None:
        """A parcel that left together with this one."""
        return next((parcel for parcel in self.together if parcel.kind == kind), None)

    def received(self, kind: str) -> dict[str, Tensor]:
        """What the coordinator (or another site) had sent for the operation."""
        return self.sent_before(kind)

    @cached_property
    def network(self) -> Backbone:
        """The study's network with the weights that the site was sent before it computed this parcel."""
        assembly = self.tools.assembly
        backbone = assembly.backbones.get(self.site)
        model = assembly.build_model(backbone)
        model.load_state_dict({**assembly.initial_weights(backbone), **self.received("weights")})
        return model


@dataclass(frozen=True)
class SearchSteps:
    """How a search went: loss and distance at the kept steps. `draw(path)` shows the images at these steps."""

    steps: tuple[int, ...]
    loss: list[float]
    distance: list[float]
    draw: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Finding:
    """What one attack found in one parcel. `draw(path)` makes its picture, which stays at the site.

    `question`: what the attack asks, such as "images" (do they come back?) or "membership" (who was trained on?).
    `doubt`: why a longer search might win, where one might; such a finding never counts as withstood.
    """

    attack: str
    threat_model: str
    verdict: Verdict
    assumed: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None
    search: SearchSteps | None = None  #: where the audit was asked to keep steps
    question: str = "images"
    doubt: str = ""

    def with_figures(self, figures: Mapping[str, float | int | str]) -> "Finding":
        """The same with more evidence."""
        return replace(self, verdict=replace(self.verdict, evidence={**self.verdict.evidence, **figures}))


#: the question of an attack that was cut off before it could say what it asks
EVERY_QUESTION = "every"


@dataclass(frozen=True)
class NotTried:
    """An attack that could not be run on a parcel, and why. `excluded`: the threat model does not grant what it needs,
    so that it is no gap in the audit of its question. An attack that was cut off leaves a gap in every question."""

    attack: str
    why: str
    question: str = "images"
    excluded: bool = False


def not_granted(attack: str, needs: Capabilities, seen: Seen, question: str = "images") -> NotTried | None:
    """Why an attack with these needs is outside the threat model, if it is."""
    missing = needs - seen.tools.threat.granted
    why = f"the threat model does not grant {', '.join(sorted(missing))}"
    return NotTried(attack, why, question, excluded=True) if missing else None


#: what one attack gives for one parcel
Results = list[Finding | NotTried]


@dataclass(frozen=True)
class Planted:
    """A weak leak in the setting of a parcel: what its receiver would have (`seen`), and what is then true (`truth`).

    `leak` is its name, the same for all attacks that look for the same leak; `words` say what was planted. `question`:
    the only one that it is a leak of, where an attack asks several.
    """

    leak: str
    words: str
    seen: Seen
    truth: Truth
    question: str = ""


class Attack(ABC):
    """One subclass per attack; its first line is what `polyclinic list attacks` prints.

    An attack gets what the receiver of a parcel has (`seen`). The site's images (`truth`) are for scoring alone.
    """

    kinds: ClassVar[tuple[str, ...]]  #: kinds of parcel that it fits
    questions: ClassVar[tuple[str, ...]] = (EVERY_QUESTION,)  #: what it asks, and leaves open where it is cut off
    tests: ClassVar[int] = 1  #: how many chances it compares with the audit's level, for each parcel
    volumes: ClassVar[bool] = False  #: whether it is for studies of volumes; all others are for images of one shape

    @abstractmethod
    def attack(self, seen: Seen, truth: Truth) -> Results:
        """What was found in one parcel, or why it was not tried."""

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The weakest leaks that "withstood" would exclude, each planted in this parcel's own setting.

        Where the attack finds nothing, the audit runs it on these with the same budget. Only an attack that finds them
        may say "withstood"; one that plants none says "not tested". A planted leak is never an exact copy.
        """
        return []
