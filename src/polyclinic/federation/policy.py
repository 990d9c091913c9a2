"""The policy of a site: what its own people let out."""

from typing import Literal

from pydantic import Field

from polyclinic.federation.ledger.kinds import KINDS, KindNames
from polyclinic.privacy.epsilon import Accountant, default_delta
from polyclinic.settings import Settings

#: kinds a deployed site lets out unless its own policy says otherwise; one that a plug-in adds must be named
DEFAULT_KINDS = tuple(kind for kind in KINDS.builtin if kind not in ("real-images", "labels", "masks"))


class Incoming(Settings):
    """The table [incoming]: how a site inspects what arrives before it works with it (`layers/incoming.py`).

    Each limit has the name of a figure. `docs/incoming.md` says how they were measured.
    """

    on: bool = Field(True, description="inspect weights, gradients and generators that arrive, before any work")
    largest: float = Field(1e6, gt=0, description="largest single number in what arrives")
    empty: float = Field(0.2, ge=0, le=1, description="share of a layer's rows that may be zero")
    alike: float = Field(0.2, ge=0, le=1, description="share of a layer's rows that may have another row's direction")
    moved: float = Field(0.15, gt=0, description="how far a row may move between two arrivals, in units of its length")
    times_own: float = Field(8.0, ge=0, description="or so many times as far as own training moved a row of the layer")
    at_once: int = Field(
        4,
        ge=2,
        description="rounds whose movement one arrival may bring after rounds that the site missed; if it was more, "
        "the site looks on for some rounds before it takes part again",
    )
    returns: int = Field(3, ge=0, description="how often in a study a site comes back by itself; then it is suspended")
    step: float = Field(
        0.2,
        gt=0,
        description="how far one step at the study's learning rate may move a row, in units of its length (Adam and "
        "AdamW, whose steps are about as long as the rate says)",
    )
    sgd_rate: float = Field(0.1, gt=0, description="the largest learning rate of SGD, whose steps follow the images")
    dominance: float = Field(0.9, gt=0, le=1, description="share of one image in a gradient that arrives for a batch")
    longer: float = Field(100.0, gt=1, description="how many times the longest so far gradients and generators may be")


class Policy(Settings):
    """What a site lets out. `deployed` is true at a real institution and cannot be set by a study."""

    kinds: KindNames = Field(DEFAULT_KINDS, description="kinds of parcel that may leave this site")
    max_bytes: int | None = Field(None, ge=0, description="bytes that may leave this site, over all its runs together")
    max_epsilon: float | None = Field(
        None, gt=0, description="epsilon that may be spent, over all runs; what it does not cover stays at the site"
    )
    max_delta: float | None = Field(
        None, gt=0, lt=1, description="delta that epsilon is counted at, whatever studies say; else 1 / training images"
    )
    accountants: tuple[Accountant, ...] = Field(("rdp", "prv"), min_length=1, description="accountants that it accepts")
    unit: Literal["image", "patient"] = Field(
        "image",
        description="whom epsilon protects: one image, or a patient with all images (by group privacy, unless a study "
        "has privacy.unit = 'patient')",
    )
    max_scores: int | None = Field(None, ge=0, description="parcels of metrics that may leave this site, in all runs")
    scores: Literal["coarse", "fine"] = Field(
        "coarse",
        description="how scores leave a deployed site: coarse (few bins, no small counts, rounded), or fine (exact)",
    )
    draws: Literal["own", "study"] = Field(
        "own",
        description="what a deployed site's batches and other random draws come from: own (a secret, new for "
        "each run and kept when it is resumed), or study (its seed, which the coordinator knows)",
    )
    shares: Literal["random", "equal"] = Field(
        "random",
        description="how much an image weighs in a gradient of a deployed site: random (drawn anew for each batch), so "
        "that two gradients cannot be subtracted, or equal (all images alike)",
    )
    min_cohort: int = Field(0, ge=0, description="fewest patients (else images) that anything may be computed from")
    few_images: Literal["refuse", "allow"] = Field(
        "refuse",
        description="sums of products of features (analytic, gaussian-heads) from a deployed site with no more images "
        "than features, of which the features of single images follow: refuse, or allow",
    )

    min_sites: int | None = Field(
        None,
        ge=3,
        description="fewest sites of a secure sum that this site takes part in (federation.sum = 'secure'); if not "
        "given, more than half of the sites whose keys its kit pins, and at least 3",
    )
    liars: int | None = Field(
        None,
        ge=0,
        description="sites of a secure sum that may work together with a lying coordinator without opening what this "
        "site sends; if not given, a sixth of the sites whose keys its kit pins, and at least 1",
    )
    samples: Literal["tell", "hide"] = Field(
        "tell",
        description="whether the site tells how many images its answers are of: hide wants a secure sum, in which the "
        "number is added up too, or method.weighting = 'uniform'",
    )

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to what may leave in all."""
        return any(limit is not None for limit in (self.max_bytes, self.max_epsilon, self.max_scores))

    def delta_for(self, images: int) -> float:
        """The delta at which a site with so many training images counts epsilon."""
        return self.max_delta if self.max_delta is not None else default_delta(images)

    incoming: Incoming = Field(default_factory=lambda: Incoming(on=True), description="how what arrives is inspected")
    deployed: bool = Field(False, description="true at a real institution, where pooling images is never allowed")
