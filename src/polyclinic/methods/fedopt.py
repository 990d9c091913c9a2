"""FedOpt (Reddi et al. 2021, Algorithm 2): FedAvg whose coordinator takes an adaptive step along the mean change.

With the mean change d: m = beta1 m + (1 - beta1) d, v by adagrad, adam or yogi, and x + lr m / (sqrt(v) + tau). There
is no bias correction, and v begins at tau squared, as in the paper. With `sgd` the step is lr m; lr = 1 and beta1 = 0
are FedAvg. Batch-norm statistics are averaged.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Federation, Reply, State, Traits


class FedOpt(FedAvg):
    name: Literal["fedopt"] = "fedopt"  # type: ignore[assignment]
    server_optimizer: Literal["adam", "yogi", "adagrad", "sgd"] = Field(
        "adam", description="the coordinator's step: adam, yogi or adagrad (the paper's three), or plain sgd"
    )
    server_lr: float = Field(0.01, gt=0, description="learning rate of the coordinator")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum of the coordinator")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the squares, for adam and yogi")
    tau: float = Field(0.001, gt=0, description="how little adaptive a step is; added to the root of the squares")

    summary: ClassVar[str] = "FedAvg whose coordinator takes adaptive steps (Adam, Yogi, Adagrad)"
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False)

    def combine(self, federation: Federation, state: State, replies: Iterable[Reply]) -> dict[str, Tensor]:
        mean = super().combine(federation, state, replies)
        learned = [name for name, _ in federation.trainer.model.named_parameters() if name in mean]
        change = {name: mean[name] - state.weights[name] for name in learned}
        before = getattr(state, "momentum", None) or {name: torch.zeros_like(change[name]) for name in learned}
        squares = getattr(state, "squares", None) or {n: torch.full_like(change[n], self.tau**2) for n in learned}
        state.momentum = {n: self.beta1 * before[n] + (1 - self.beta1) * change[n] for n in learned}
        state.squares = {name: self._squares(squares[name], change[name].square()) for name in learned}
        step = {name: self._step(state.momentum[name], state.squares[name]) for name in learned}
        # around the mean, so that a step as long as the change gives the mean to the last bit
        return mean | {name: mean[name] + (step[name] - change[name]) for name in learned}

    def _squares(self, before: Tensor, new: Tensor) -> Tensor:
        if self.server_optimizer == "adagrad":
            return before + new
        if self.server_optimizer == "yogi":
            return before - (1 - self.beta2) * new * torch.sign(before - new)
        return self.beta2 * before + (1 - self.beta2) * new

    def _step(self, momentum: Tensor, squares: Tensor) -> Tensor:
        if self.server_optimizer == "sgd":
            return self.server_lr * momentum
        return self.server_lr * momentum / (squares.sqrt() + self.tau)
