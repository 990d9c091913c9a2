"""Standalone: every site trains for itself. Nothing leaves but the metrics it is judged by."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.method import Federation, Own, OwnModels, Site, Traits, Weights, Work, operation
from polyclinic.training.plans import Fit, FitSpec


class Standalone(LocalWork, OwnModels):
    name: Literal["standalone"] = "standalone"

    summary: ClassVar[str] = "every site trains alone"
    traits: ClassVar[Traits] = Traits(weights_stay=True, takes_frozen_features=True)

    def run(self, federation: Federation) -> Weights:
        state = federation.state()
        for _ in federation.rounds(self.rounds, state):
            federation.ask_all("train")
            federation.evaluate()
        return {}

    @operation(plan=Fit)
    def train(self, site: Site) -> Work[None]:
        yield from local_training.plan_train(site, {}, FitSpec(self.steps_at(site)))

    def score(self, site: Site, part: ImageSet, weights: Weights, own: Own) -> dict[str, Tensor]:
        """Sums as for any method; a site alone also selects its best round alone, by its validation images."""
        sums = super().score(site, part, weights, own)
        if part is not site.data.validation or own != "current":
            return sums
        task = site.trainer.task
        if not sums:  # no validation images: the last round is as good a choice as any
            site.state.put("best", site.state.group("local"))
            return sums
        rank = task.rank(task.finish(sums), site.trainer.metric)
        if rank and ("best_score" not in site.state or rank > tuple(site.state["best_score"].flatten().tolist())):
            site.state["best_score"] = torch.tensor(rank, dtype=torch.float64)
            site.state.put("best", site.state.group("local"))
        return sums

    @operation()
    def remember(self, site: Site) -> None:
        """Nothing to do: the site has selected for itself."""
