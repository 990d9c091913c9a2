"""What the incoming check remembers of a study: in the site's state, so that a resumed run goes on from there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.federation.arriving import units
from polyclinic.federation.arriving.orders import floating
from polyclinic.federation.arriving.settings import Incoming
from polyclinic.federation.state import SiteState

#: where it lies in a site's state
GROUP = "incoming"


class History:
    """Views of a site's state: weights that arrived last, figures by name, and digests of what has passed."""

    def __init__(self, state: SiteState) -> None:
        self.state = state

    def last(self) -> dict[str, Tensor]:
        """The weights that arrived last; names that never arrived are missing."""
        return self.state.group(f"{GROUP}/last")

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Remember weights that passed. Half of the digits are enough to see how far others are away."""
        for name, tensor in floating(weights).items():
            self.state[f"{GROUP}/last/{name}"] = tensor.detach().bfloat16().cpu()

    def quiet(self) -> dict[str, Tensor]:
        """bool [U]: the units of every layer that were quiet with the first weights or after own training."""
        return self.state.group(f"{GROUP}/quiet")

    def take_beginning(self, found: Mapping[str, units.Responses]) -> None:
        """Remember what the weights that a study begins with do with the site's images."""
        self.take_own(found)
        self.take_most("exposed", {name: units.exposed(one) for name, one in found.items()})

    def take_own(self, found: Mapping[str, units.Responses]) -> None:
        """Remember what weights that are the site's own, or the first ones, do with its images."""
        before = self.quiet()
        quiet = {name: units.quiet_units(one).cpu() for name, one in found.items()}
        self.state.put(f"{GROUP}/quiet", {n: one | before[n] if n in before else one for n, one in quiet.items()})
        if found and len(next(iter(found.values())).alive) >= units.ENOUGH_IMAGES:
            self.take_most("graded", {f.where: f.value for f in units.graded(found, {}, Incoming())})

    def most(self, kind: str) -> dict[str, float]:
        """The largest figures of a kind so far, by name."""
        return {name: float(value) for name, value in self.state.group(f"{GROUP}/{kind}").items()}

    def take_most(self, kind: str, figures: Mapping[str, float]) -> None:
        """Keep figures that are larger than those before."""
        before = self.most(kind)
        for name, value in figures.items():
            if value > before.get(name, 0.0):
                self.state[f"{GROUP}/{kind}/{name}"] = torch.tensor(value, dtype=torch.float64)

    def has_passed(self, digest: str) -> bool:
        """Whether these very weights have been inspected before."""
        return f"{GROUP}/passed/{digest}" in self.state

    def take_passed(self, digest: str) -> None:
        self.state[f"{GROUP}/passed/{digest}"] = torch.ones((), dtype=torch.bool)
