"""Evaluation only: the sites score the study's first weights (`model.weights`), and nothing is trained.

Besides the sums that every method's scores are made of, a site tells intervals, DeLong's interval, a coarse calibration
and sub-groups, which it computes from its own cases (`statistics.py`). Where a second model is brought, it
also tells paired tests of the two: how their metrics differ on the same patients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.method import Federation, Method, Site, Traits, Weights, all_sites, operation
from polyclinic.models import read_weights
from polyclinic.questions.statistics import changes_between, check_told, joined, tell_once, told_about


class EvaluateOnly(Method):
    name: Literal["evaluate"] = "evaluate"
    fraction: float = all_sites()
    rounds: int = Field(1, ge=1, le=1, description="one round: the model is scored once")
    by: tuple[str, ...] = Field((), description="columns of the sites' images whose values are sub-groups")

    against: str | None = Field(
        None,
        description="a second model of the same network (model.safetensors of a run): the sites test, in pairs, how "
        "far the metrics of the two differ",
    )
    against_digest: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the second model's tensors, which deployed sites compare with what comes",
    )

    summary: ClassVar[str] = "nothing is trained: the sites score a model that was brought (polyclinic deploy evaluate)"
    traits: ClassVar[Traits] = Traits(trains="nothing", private_networks=(), label_sets=True)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.against_digest and not self.against:
            raise ValueError("against_digest is of the second model: name its file in method.against, or remove it")
        return self

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            against: dict[str, Any] = {}
            if self.against is not None:
                against["against"] = second_model(self.against, state.weights)
            replies = federation.ask_all("give_intervals", weights=state.weights, by=list(self.by), **against)
            federation.report("safe_statistics", joined(replies, federation.trainer.target.classes))
            federation.evaluate(state.weights)
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "give_intervals":
            check_told(reply.parcel("statistics").tensors, len(federation.trainer.target.classes))

    @operation("statistics", splits=("test",), takes={"against": "weights"})
    def give_intervals(
        self, site: Site, weights: Weights, by: Sequence[str] = (), against: Weights | None = None
    ) -> Parcel:
        """Intervals of the metrics on the site's test images, a coarse calibration, and paired tests against a second
        model; no score of an image."""
        if tuple(by) != self.by:
            raise ParcelRejected(f"sub-groups by {list(by)} are asked for, and the study has by = {list(self.by)}")
        second = None if against is None else Parcel("weights", dict(against)).digest
        if site.secret and second != self.against_digest:
            raise ParcelRejected(
                "the second model that came is not the one that the study names (method.against_digest); it must come "
                "as it is (engine.wire = 'exact')"
            )
        tell_once(site, weights, *([second] if second else []))
        part = site.data.test
        if not len(part):
            return Parcel("statistics", {})
        tensors = told_about(site, part, weights, by)
        if against is not None:
            tensors |= changes_between(site, part, weights, against)
        return Parcel("statistics", tensors)


def second_model(file: str, first: Weights) -> Parcel:
    """The model to compare the first one with; BadInput unless both are of the same network."""
    found = read_weights(Path(file), "method.against").tensors
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in one.items()} for one in (found, first)]
    if shapes[0] != shapes[1]:
        raise BadInput(f"method.against: '{file}' has other tensors than the first model; name one of the same network")
    return Parcel("weights", dict(found))
