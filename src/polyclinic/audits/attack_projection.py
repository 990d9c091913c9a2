"""Projection of members and held-out images into the latent space of a generator that was sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.projection import Projected, Projection
from polyclinic.audits.plots import histograms
from polyclinic.audits.views import Finding, NotTried, Seen, Tools, Truth, not_granted
from polyclinic.generators import GeneratorModel
from polyclinic.generators.base import even_labels
from polyclinic.generators.latent_space import LatentSpace

VALUES = 8  # labels to choose from, where they are values and none is known


@dataclass(frozen=True)
class SearchInReach:
    """A search of a generator's latent space, as the budget and the threat model have it."""

    attack: Projection
    space: LatentSpace
    tools: Tools
    choices: Tensor  #: labels to choose from where an image's own is not known

    @property
    def labelled(self) -> bool:
        return self.attack.conditional and not self.attack.guessed

    def run(self, images: Tensor, labels: Tensor) -> Projected:
        """The closest images that the generator can make."""
        return self.attack.run(
            self.space,
            images,
            self.tools.distance,
            labels=labels if self.labelled else None,
            choices=self.choices,
            seed=self.tools.seed,
            device=self.tools.device,
        )


def search_in_reach(seen: Seen, model: GeneratorModel) -> SearchInReach | NotTried:
    space, effort, tools = model.latent_space(), seen.tools.effort, seen.tools
    conditional = space is not None and space.labelled
    known = conditional and Capability.CANDIDATE_LABELS in tools.threat.granted
    attack = Projection(
        iterations=effort.projection_steps, conditional=conditional, guessed=not known, at_once=effort.projected
    )
    if space is None:
        return NotTried(attack.name, "this generator names no space to search in", "membership")
    choices = even_labels(len(model.target.classes) or VALUES, model.target)
    return not_granted(attack, seen, "membership") or SearchInReach(attack, space, tools, choices)


def attack_by_projection(seen: Seen, truth: Truth, model: GeneratorModel) -> Finding | NotTried:
    """The closest images that the generator can make to members and to held-out images."""
    search, count = search_in_reach(seen, model), seen.tools.effort.projected
    if isinstance(search, NotTried):
        return search
    members, others = truth.members(count), truth.held_out(count)
    if min(len(members[0]), len(others[0])) < 2:
        return NotTried(search.attack.name, "the site has no held-out images to compare with", "membership")
    found = search.attack.judge(search.run(*members), search.run(*others), truth.cases(count))
    draw = histograms(
        f"{found.members.features} distance after projection",
        {"training images": found.members.distances, "held-out images": found.held_out.distances},
        title=f"{seen.where}, {search.attack.name}\nHow near the generator comes to training images, and to others",
    )
    verdict = found.verdict(seen.tools.level)
    return Finding(search.attack.name, found.threat_model, verdict, draw=draw, question="membership")
