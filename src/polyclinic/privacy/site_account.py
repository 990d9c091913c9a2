"""A site's privacy account: every noisy step it has taken on its images, and the epsilon that these add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyclinic.privacy.epsilon import Accountant, Mechanism, composed_epsilon, steps_for


@dataclass
class Account:
    """`history` in the order of the steps; those of one kind in a row are one mechanism.

    A deployed site may be put back and trained again, for which its budget must pay twice. So every training has a name
    (`trained`, an integer), and a record says of which one it is, and which one the record before it was of (`after`).
    """

    delta: float
    accountant: Accountant = "rdp"
    history: list[Mechanism] = field(default_factory=list)
    trained: int = 0
    recorded: int = 0
    after: int = 0

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.history)

    @property
    def epsilon(self) -> float:
        """What has been spent so far."""
        return composed_epsilon(self.history, self.delta, self.accountant)

    def add(self, noise: float, sampling_rate: float, steps: int) -> None:
        """Enter steps that were taken (or are about to be: entered too early is safe, too late is not)."""
        if not steps:
            return
        last = self.history[-1] if self.history else None
        if last is not None and (last.noise, last.sampling_rate) == (noise, sampling_rate):
            self.history[-1] = last._replace(steps=last.steps + steps)
        else:
            self.history.append(Mechanism(noise, sampling_rate, steps))

    def steps_left(self, target: float | None, noise: float, sampling_rate: float, wanted: int) -> int:
        """How many of the `wanted` steps may still be taken without passing the target epsilon."""
        after = [*self.history, Mechanism(noise, sampling_rate, wanted)]
        if target is None or composed_epsilon(after, self.delta, self.accountant) <= target:
            return wanted
        return steps_for(target, sampling_rate, noise, self.delta, self.accountant, after=self.history)

    def put_on_record(self) -> None:
        """Something of the latest training is about to be released, with a record."""
        if self.trained != self.recorded:
            self.recorded, self.after = self.trained, self.recorded

    # --- in a site's state ------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """As a site keeps it. history float64 [mechanisms, 3]: noise, sampling rate, steps; names int64 [3]."""
        names = torch.tensor([self.trained, self.recorded, self.after])
        return {"history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3), "names": names}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], delta: float, accountant: Accountant) -> Account:
        """The account whose `tensors` a site has kept; an empty one if it has none."""
        rows = tensors["history"].tolist() if "history" in tensors else []
        history = [Mechanism(noise, rate, int(steps)) for noise, rate, steps in rows]
        names = tensors["names"].tolist() if "names" in tensors else (0, 0, 0)
        return cls(delta, accountant, history, *names)
