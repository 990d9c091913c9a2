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

    def take(self, weights: Mapping[str, Tensor], round: int) -> None:
        """Remember weights that passed, and in which round, which never goes back. Half of the digits are enough to see
        how far others are away."""
        for name, tensor in floating(weights).items():
            self.state[f"{GROUP}/last/{name}"] = tensor.detach().bfloat16().cpu()
        last = self.state.group(f"{GROUP}/round").get("last")
        self.state[f"{GROUP}/round/last"] = torch.tensor(round if last is None else max(round, int(last)))

    def last_round(self) -> int:
        """The round in which weights arrived last; -1 where none did."""
        return int(self.state.group(f"{GROUP}/round").get("last", -1))

    def rounds_since(self, round: int) -> int:
        """How many rounds the weights that arrived last are behind `round`, as its sender counts; at least one."""
        last = self.state.group(f"{GROUP}/round").get("last")
        return 1 if last is None else max(1, round - int(last))

    def owed(self) -> int:
        """Rounds that the site owes since it came back (`returning`); nothing leaves until they are paid."""
        return int(self.state.group(f"{GROUP}/owed").get("rounds", 0))

    def take_owed(self, owed: int, *, returned: bool) -> None:
        """Remember what is owed now, and whether the site came back just now."""
        if owed != self.owed():
            self.state[f"{GROUP}/owed/rounds"] = torch.tensor(owed)
        if returned:
            self.state[f"{GROUP}/owed/returns"] = torch.tensor(self.returns() + 1)

    def returns(self) -> int:
        """How often the site came back by itself, as its state knows."""
        return int(self.state.group(f"{GROUP}/owed").get("returns", 0))

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

    def own(self, lr: float) -> dict[str, float]:
        """How far the site's own training moved the rows of each layer, in proportion to the learning rate if that was
        larger than `lr`. It does not grow with the rate: a rate of next to nothing would make anything of rounding."""
        rates = self.most("rate")
        return {layer: value * min(1.0, lr / rates[layer]) for layer, value in self.most("own").items()}

    def take_movement(self, moved: Mapping[str, float], lr: float) -> None:
        """Remember how far the site's own training moved rows at a learning rate, where that is farther than before."""
        before = self.own(lr)
        for layer, value in moved.items():
            if value > before.get(layer, 0.0):
                self.state[f"{GROUP}/own/{layer}"] = torch.tensor(value, dtype=torch.float64)
                self.state[f"{GROUP}/rate/{layer}"] = torch.tensor(lr, dtype=torch.float64)

    def most(self, kind: str) -> dict[str, float]:
        """The largest figures of a kind so far, by name."""
        return {name: float(value) for name, value in self.state.group(f"{GROUP}/{kind}").items()}

    def take_most(self, kind: str, figures: Mapping[str, float]) -> None:
        """Keep figures that are larger than those before."""
        before = self.most(kind)
        for name, value in figures.items():
            if value > before.get(name, 0.0):
                self.state[f"{GROUP}/{kind}/{name}"] = torch.tensor(value, dtype=torch.float64)

    def has_passed(self, digest: str, *, has_course: bool) -> bool:
        """Whether these very weights have been inspected before, as thoroughly."""
        return any(f"{GROUP}/{one}/{digest}" in self.state for one in ("passed", *(() if has_course else ("seen",))))

    def take_passed(self, digest: str, *, has_course: bool) -> None:
        self.state[f"{GROUP}/{'passed' if has_course else 'seen'}/{digest}"] = torch.ones((), dtype=torch.bool)
