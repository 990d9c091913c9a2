"""The table [incoming] of a site's policy: how far what arrives may be from what honest training sends."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from polyclinic.settings import Settings


class Incoming(Settings):
    """How a site inspects what arrives before it works with it. `docs/incoming.md` says how the limits were measured.

    Each limit has the name of a check.
    """

    on: bool = Field(True, description="inspect weights, gradients and generators that arrive, before any work")
    images: int = Field(32, ge=2, description="training images that arriving weights are tried on")
    largest: float = Field(1e6, gt=0, description="largest single number in what arrives")
    empty: float = Field(0.2, ge=0, le=1, description="share of a layer's rows that may be zero")
    alike: float = Field(0.2, ge=0, le=1, description="share of a layer's rows that may have another row's direction")
    moved: float = Field(0.15, gt=0, description="how far a row may move between two arrivals, in units of its length")
    times_own: float = Field(
        8.0, ge=0, description="or so many times as far as the site's own training has moved a row of that layer"
    )
    at_once: int = Field(
        4,
        ge=2,
        description="rounds whose movement one arrival may bring after rounds that the site missed; if it was more, "
        "the site looks on for some rounds before it takes part again",
    )
    returns: int = Field(
        3, ge=0, description="how often in a study the site comes back so by itself; the next time it is suspended"
    )
    step: float = Field(
        0.2,
        gt=0,
        description="how far one step at the study's learning rate may move a row, in units of its length (Adam and "
        "AdamW, whose steps are about as long as the rate says)",
    )
    sgd_rate: float = Field(
        0.1, gt=0, description="the largest learning rate of SGD, whose steps are as long as the images make them"
    )
    quiet: float = Field(
        0.75,
        gt=0,
        le=1,
        description="share of a layer's units that may have turned to few of the site's images, or to none, which the "
        "site's own training did not",
    )
    exposed: float = Field(
        0.4, ge=0, le=1, description="share of the site's images that may newly have a unit for themselves"
    )
    graded: int = Field(
        9,
        ge=2,
        description="units of a layer that may measure the same thing, each with another threshold (or half as many "
        "more as after the site's own training)",
    )
    loss: float = Field(40.0, gt=1, description="how many times the largest loss so far the site's images may have")
    dominance: float = Field(
        0.9, gt=0, le=1, description="share of one image in the gradient, where the loss is larger than ever"
    )
    longer: float = Field(
        100.0, gt=1, description="how many times the longest so far gradients and generators may be as long"
    )


class Figure(NamedTuple):
    """One figure of a check: an alarm if it is above its limit. `where` names the tensor or layer."""

    check: str
    where: str
    value: float
    limit: float

    @property
    def is_alarm(self) -> bool:
        return not self.value <= self.limit  # NaN is an alarm

    def __str__(self) -> str:
        return f"{self.check} of '{self.where}' is {self.value:.3g}, and {self.limit:.3g} is the limit"
