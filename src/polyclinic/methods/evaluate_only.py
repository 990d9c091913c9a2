"""Evaluation only: the sites score the study's first weights (`model.weights`), and nothing is trained.

Besides the sums that every method's scores are made of, a site tells intervals, DeLong's interval, a coarse calibration
and sub-groups, which it computes from its own cases (`shared/safe_statistics.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared.method import Method
from polyclinic.methods.shared.safe_statistics import check_told, joined, tell_once, told_about
from polyclinic.methods.shared.traits import Traits


class EvaluateOnly(Method):
    name: Literal["evaluate"] = "evaluate"
    rounds: int = Field(1, ge=1, le=1, description="one round: the model is scored once")
    by: tuple[str, ...] = Field((), description="columns of the sites' images whose values are sub-groups")

    summary: ClassVar[str] = "nothing is trained: the sites score a model that was brought (polyclinic deploy evaluate)"
    traits: ClassVar[Traits] = Traits(private_networks=(), samples_sites=False, has_course=False)

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_all("give_intervals", weights=state.weights, by=list(self.by))
            federation.report("safe_statistics", joined(replies, federation.trainer.target.classes))
            federation.evaluate(state.weights)
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "give_intervals":
            check_told(reply.parcel("statistics").tensors, len(federation.trainer.target.classes))

    @operation("statistics", scores=("test",))
    def give_intervals(self, site: Site, weights: Weights, by: Sequence[str] = ()) -> Parcel:
        """Intervals of the metrics on the site's test images, and a coarse calibration; no score of an image."""
        if tuple(by) != self.by:
            raise ParcelRejected(f"sub-groups by {list(by)} are asked for, and the study has by = {list(self.by)}")
        tell_once(site, weights)
        part = site.data.test
        return Parcel("statistics", told_about(site, part, weights, by) if len(part) else {})
