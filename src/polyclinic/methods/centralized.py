"""Centralized: all training images in one place, the mark that federated methods are measured against.

It pools patients' images and so exists in simulation only.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.parcel import Parcel
from polyclinic.federation.site import Site, operation
from polyclinic.methods import local, pooling
from polyclinic.methods.method import Method


class Centralized(Method):
    name: Literal["centralized"] = "centralized"
    steps: int | None = Field(None, ge=1, description="steps in a round; one pass, floor(|D| / b), if not given")

    summary: ClassVar[str] = "all images in one place (simulation only)"
    simulation_only: ClassVar[bool] = True
    allows_local_norm: ClassVar[bool] = False

    def privacy_obstacle(self) -> str | None:
        return (
            "method.name: 'centralized' takes all images away from the sites, which train nothing; "
            "choose a federated method under differential privacy"
        )

    def run(self, federation: Federation) -> Weights:
        bench = federation.bench
        images = pooling.as_part(federation.once("images", lambda: pooling.pool(federation.ask_all("give_all"))))
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            model = bench.load(state.weights)
            optimizer = local.coordinator_optimizer(federation, state, model.parameters())
            bench.train(
                bench.batches(images, federation.rng("batches")),
                self.steps or bench.steps_in(images),
                optimizer,
            )
            local.keep_coordinator_optimizer(federation, state, optimizer)
            state.weights = bench.weights()
            federation.evaluate(state.weights)
        return state.weights

    @operation("real-images", "labels", "masks", simulation_only=True)
    def give_all(self, site: Site) -> tuple[Parcel, ...]:
        return pooling.release(site.data.train)
