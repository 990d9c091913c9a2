"""A site's account: every noisy step it has taken on its images, whatever was trained, and what that adds up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyclinic.privacy.accounting import Accountant, Mechanism, spent_by, steps_for


@dataclass
class Account:
    """`history` in the order of the steps; those of one kind in a row are one mechanism."""

    delta: float
    accountant: Accountant = "rdp"
    history: list[Mechanism] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.history)

    @property
    def epsilon(self) -> float:
        """What has been spent so far."""
        return spent_by(self.history, self.delta, self.accountant)

    def add(self, noise: float, sampling_rate: float, steps: int) -> None:
        """Enter steps that were taken (or are about to be: entered too early is safe, too late is not)."""
        if not steps:
            return
        last = self.history[-1] if self.history else None
        if last is not None and (last.noise, last.sampling_rate) == (noise, sampling_rate):
            self.history[-1] = last._replace(steps=last.steps + steps)
        else:
            self.history.append(Mechanism(noise, sampling_rate, steps))

    def left(self, target: float | None, noise: float, sampling_rate: float, wanted: int) -> int:
        """How many of the `wanted` steps may still be taken without passing the target epsilon."""
        after = [*self.history, Mechanism(noise, sampling_rate, wanted)]
        if target is None or spent_by(after, self.delta, self.accountant) <= target:
            return wanted
        return steps_for(target, sampling_rate, noise, self.delta, self.accountant, after=self.history)

    # --- in a site's state ------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The history as a site keeps it: float64 [mechanisms, 3] of noise, sampling rate, steps."""
        return {"history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3)}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], delta: float, accountant: Accountant) -> Account:
        """The account whose `tensors` a site has kept; an empty one if it has none."""
        rows = tensors["history"].tolist() if "history" in tensors else []
        return cls(delta, accountant, [Mechanism(noise, rate, int(steps)) for noise, rate, steps in rows])
