"""Evaluation only: the sites score the study's first weights (`model.weights`), and nothing is trained."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.federation import Federation, Weights
from polyclinic.methods.shared.method import Method
from polyclinic.methods.shared.traits import Traits


class EvaluateOnly(Method):
    name: Literal["evaluate"] = "evaluate"
    rounds: int = Field(1, ge=1, le=1, description="one round: the model is scored once")

    summary: ClassVar[str] = "nothing is trained: the sites score a model that was brought (polyclinic deploy evaluate)"
    traits: ClassVar[Traits] = Traits(private_networks=(), samples_sites=False, has_course=False)

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            federation.evaluate(state.weights)
        return state.weights
