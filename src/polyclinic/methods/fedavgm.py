"""FedAvgM (Hsu et al. 2019): FedAvg whose coordinator moves with momentum.

With the round's change d = w - mean and velocity v = beta * v + d, the paper's step is w - lr * v. It is written here
around the mean, as mean + (1 - lr) * d - lr * beta * v_before: the same, and with beta = 0 and lr = 1 FedAvg's mean to
the last bit.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Federation, Reply, State


class FedAvgM(FedAvg):
    name: Literal["fedavgm"] = "fedavgm"  # type: ignore[assignment]
    beta: float = Field(0.9, ge=0, lt=1, description="momentum of the coordinator; 0 is FedAvg")
    server_lr: float = Field(1.0, gt=0, description="learning rate of the coordinator")

    summary: ClassVar[str] = "FedAvg whose coordinator moves with momentum"

    def combine(self, federation: Federation, state: State, replies: Iterable[Reply]) -> dict[str, Tensor]:
        mean = super().combine(federation, state, replies)
        # batch-norm statistics are averaged, not pushed along: momentum could make a variance negative
        learned = [name for name, _ in federation.trainer.model.named_parameters() if name in mean]
        before = getattr(state, "velocity", None) or {name: torch.zeros_like(mean[name]) for name in learned}
        change = {name: state.weights[name] - mean[name] for name in learned}
        state.velocity = {name: self.beta * before[name] + change[name] for name in learned}
        lr, beta = self.server_lr, self.beta
        return mean | {n: mean[n] + (1 - lr) * change[n] - lr * beta * before[n] for n in learned}
