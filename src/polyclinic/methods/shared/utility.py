"""What an owner does with a generator: it trains on real images, on synthetic ones and on both; validation judges.

A base for methods whose sites make images for themselves. Each site keeps the best network for each diet; it releases
the one that saw synthetic images only where its own validation images say that they helped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.contact_sheet import contact_sheet
from polyclinic.data.parts import Part
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.generators import utility
from polyclinic.generators.base import as_tensor
from polyclinic.generators.utility import DIETS, Learnt
from polyclinic.methods.shared.gan_site import model_of
from polyclinic.methods.shared.method import Method, Own
from polyclinic.methods.shared.synthetic_buffer import uniform_labels
from polyclinic.methods.shared.traits import Traits
from polyclinic.metrics.distribution import NEIGHBOURS, precision_recall
from polyclinic.metrics.principal_components import principal_components

if TYPE_CHECKING:
    from polyclinic.models import Backbone

SHOWN = 8  # columns of the contact sheet
COVERED = 1000  # images that coverage is measured on


class Worth(Method):
    images: int | None = Field(
        None,
        ge=1,
        description="synthetic images an owner's network learns from; as many as it has real ones if not given",
    )
    learner_steps: int = Field(300, ge=1, description="steps of an owner's network for each diet")
    weigh_every: int = Field(
        0, ge=0, description="rounds after which synthetic images are judged; 0 for the last round only"
    )
    margin: float = Field(
        0.0, ge=0, description="by how much validation scores must rise for synthetic images to count"
    )
    release: Literal["gate", "real", "synthetic", "augmented"] = Field(
        "gate",
        description="which network an owner releases: the one that validation chooses, or always that of one diet",
    )

    traits: ClassVar[Traits] = Traits(
        tasks=("classification", "regression"), private_parts=("generator",), tunes_generator=False
    )

    def needs_generator(self) -> bool:
        return True

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each owner has a network of its own."""
        return frozenset(model.state_dict())

    # --- the coordinator --------------------------------------------------------------------------

    def is_weighed(self, round: int) -> bool:
        return round == self.rounds or (self.weigh_every > 0 and round % self.weigh_every == 0)

    def weigh_all(self, federation: Federation, state: State) -> None:
        """Have every owner judge its synthetic images as they are now; what they found goes into the result."""
        found = {
            reply.site: {name: round(float(value), 5) for name, value in reply.metrics.items()}
            for reply in federation.ask_all("weigh")
        }
        state.worth = [*state.worth, {"round": federation.round, "sites": found}]

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """Each owner's network for each diet on the test images of all sites, in all and by sub-group.

        Uncounted: only a simulator can try an owner's networks elsewhere.
        """
        if not federation.engine.simulation:
            return {}
        table: dict[str, Any] = {}
        for site in federation.sites:
            kept = federation.simulated_state(site)
            diets = {diet: self.marks(federation, kept.group(f"diet-{diet}")) for diet in DIETS}
            table[site] = {**diets, "released": _released(kept)} if any(diets.values()) else {}
        return {"diets": table}

    def marks(self, federation: Federation, weights: Weights) -> dict[str, Any]:
        """Test metrics of one network, pooled over sites, and of each sub-group."""
        if not weights:
            return {}
        task = federation.trainer.task
        sums: dict[str, dict[str, dict[str, Tensor]]] = {}
        for reply in federation.ask_all("mark", counted=False, weights=weights):
            for name, value in reply.metrics.items():
                group, _, metric = name.rpartition("/")
                sums.setdefault(group, {}).setdefault(reply.site, {})[metric] = value
        scored = {group: task.finish(functools.reduce(task.add, of.values())) for group, of in sums.items()}
        return {"test": scored.pop("", {}), "subgroups": scored}

    # --- at an owner ------------------------------------------------------------------------------

    @operation("metrics")
    def weigh(self, site: Site) -> Parcel:
        """Make images, train on each diet, keep what is best on validation images; scores and coverage."""
        made = self.make_part(site)
        found = self.learn(site, made)
        chosen = utility.gated(found, self.margin) if self.release == "gate" else self.release
        site.state.put("local", found[chosen].weights)
        site.state.put("best", found[chosen].weights)
        site.state["released"] = torch.tensor(DIETS.index(chosen))
        draw_sheet(site, made)
        figures = {f"validation_{diet}": learnt.score for diet, learnt in found.items()}
        figures |= {f"test_{diet}": self.test_score(site, learnt) for diet, learnt in found.items()}
        figures |= cover(site, made)
        return Parcel(
            "metrics", {n: torch.tensor(v, dtype=torch.float64) for n, v in figures.items() if np.isfinite(v)}
        )

    def make_part(self, site: Site) -> Part:
        """Synthetic images with labels drawn alike from the classes that the site has."""
        own = site.data.train
        labels = uniform_labels(self.images or len(own), own.labels, site.trainer.target, site.rng("synthetic labels"))
        made = model_of(site).sample(labels, site.rng("synthetic"))
        return Part(made.numpy(), labels.numpy())

    def learn(self, site: Site, made: Part) -> dict[str, Learnt]:
        """Networks for all diets; of each, the one of this or an earlier moment that validation likes best."""
        before = {diet: kept for diet in DIETS if (kept := _kept(site.state, diet)) is not None}
        now = utility.learn_all(
            site.trainer,
            site.trainer.initial_local,
            site.data.train,
            made,
            site.data.validation,
            steps=self.learner_steps,
            rng=site.lasting_rng("learners"),
            known={diet: learnt for diet, learnt in before.items() if diet == "real"},
        )
        best = {d: before[d] if d in before and before[d].score > learnt.score else learnt for d, learnt in now.items()}
        for diet, learnt in best.items():
            site.state.put(f"diet-{diet}", learnt.weights)
            site.state[f"score-{diet}"] = torch.tensor(learnt.score, dtype=torch.float64)
        return best

    @staticmethod
    def test_score(site: Site, learnt: Learnt) -> float:
        """For curves along training; nothing is chosen by it."""
        site.trainer.load(learnt.weights)
        return utility.score(site.trainer, site.data.test) if len(site.data.test) else float("nan")

    @operation("metrics")
    def mark(self, site: Site, weights: Weights) -> Parcel | None:
        """The additive sums of a network's metrics on the site's test images, in all and by sub-group."""
        part = site.data.test
        if len(part) == 0:
            return None
        site.trainer.load(weights)
        sums = {f"/{name}": value for name, value in site.trainer.evaluate(part).items()}
        for group in np.unique(part.subgroup) if part.subgroup is not None else []:
            own = utility.some(part, np.flatnonzero(part.subgroup == group))
            sums |= {f"{group}/{name}": value for name, value in site.trainer.evaluate(own).items()}
        return Parcel("metrics", sums)

    def score(self, site: Site, part: Part, weights: Weights, own: Own) -> dict[str, Tensor]:
        """As for any method; before the first weighing an owner has no network to score."""
        if own != "none" and not site.state.group("local"):
            return {}
        return super().score(site, part, weights, own)

    @operation()
    def remember(self, site: Site) -> None:
        """Nothing to do: the owner has selected for itself."""


def cover(site: Site, made: Part) -> dict[str, float]:
    """How well made images cover the owner's held-out real ones."""
    held_out = [part.images[:COVERED] for part in (site.data.validation, site.data.test) if len(part)]
    if not held_out or min(sum(map(len, held_out)), len(made)) <= NEIGHBOURS:
        return {}
    found = principal_components(as_tensor(np.asarray(site.data.train.images[:COVERED])))
    real = found.project(torch.from_numpy(np.concatenate(held_out)))
    return precision_recall(real, found.project(torch.from_numpy(made.images[:COVERED])))


def draw_sheet(site: Site, made: Part) -> None:
    """Real and synthetic images of each class, in the owner's own folder."""
    rows: dict[str, Tensor] = {}
    names = site.trainer.target.classes or ("",)
    for number, name in enumerate(names[:5]):
        for kind, part in (("real", site.data.train), ("synthetic", made)):
            chosen = np.flatnonzero(part.labels == number)[:SHOWN] if names != ("",) else np.arange(SHOWN)
            if len(chosen):
                rows[f"{kind} {name}"] = torch.from_numpy(np.asarray(part.images[chosen]).copy())
    contact_sheet(rows, site.folder / "samples.png")


def _kept(state: Any, diet: str) -> Learnt | None:
    weights = state.group(f"diet-{diet}")
    return Learnt(weights, float(state[f"score-{diet}"])) if weights else None


def _released(state: Any) -> str:
    return DIETS[int(state["released"])] if "released" in state else ""
