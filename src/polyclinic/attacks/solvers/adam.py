"""Adam and AdamW for N independent problems in one batch, a learning rate that decays; no host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.999)
EPS = 1e-8


class Adam:
    """Minimises N functions of D variables; the caller evaluates them at `point` and passes the result to `update`.

    The numbers are torch.optim.AdamW's, or torch.optim.Adam's unless `decoupled`. A target whose loss is not a number
    any more stops; one whose gradient has vanished has converged.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        lr: float = 1e-3,
        steps: int = 5000,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        decay: float = 1.0,
        decay_at: Sequence[float] = (),
        signed: bool = False,
        box: tuple[int, float, float] | None = None,
        tolerance_grad: float = 0.0,
    ) -> None:
        """`start` [N, D]. The learning rate is multiplied by `decay` at each share of the steps in `decay_at`.

        `signed` takes only the gradient's signs (Geiping et al.); `box` = (d, low, high) holds the first d variables
        between two bounds.
        """
        count = len(start)
        self.steps, self.decay, self.weight_decay = steps, decay, weight_decay
        self.limit = steps
        self.decoupled, self.signed, self.box = decoupled, signed, box
        self.tolerance_grad = tolerance_grad
        self.milestones = torch.tensor([round(share * steps) for share in decay_at], device=start.device)
        self.lr = torch.full((), lr, dtype=start.dtype, device=start.device)
        self.point = start.detach().clone()
        self.first = torch.zeros_like(self.point)
        self.second = torch.zeros_like(self.point)
        self.step_count = torch.zeros((), dtype=torch.long, device=start.device)
        self.diverged = torch.zeros(count, dtype=torch.bool, device=start.device)
        self.converged = self.diverged.clone()
        self.active = ~self.diverged

    def update(self, loss: Tensor, gradient: Tensor) -> None:
        """Take the loss [N] and gradient [N, D] at `point`, and move every active target by one step."""
        finite = loss.isfinite() & gradient.isfinite().all(1)
        flat = gradient.abs().amax(1) <= self.tolerance_grad
        self.diverged |= self.active & ~finite
        self.converged |= self.active & finite & flat
        self.active &= finite & ~flat
        moved = self._moved(gradient.sign() if self.signed else gradient)
        self.point.copy_(torch.where(self.active[:, None], moved, self.point))
        self.active &= self.step_count < self.steps

    def _moved(self, gradient: Tensor) -> Tensor:
        """The points after the step, also of targets that will not take it."""
        self.step_count += 1
        lr = self.lr * self.decay ** (self.milestones < self.step_count).sum().double()
        if self.weight_decay and not self.decoupled:
            gradient = gradient + self.weight_decay * self.point
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        times = self.step_count.double()  # in float32 the first steps would be off by 1e-5
        deviation = (self.second / (1 - BETAS[1] ** times)).sqrt_().add_(EPS)
        kept = self.point * (1 - lr * self.weight_decay) if self.decoupled else self.point
        moved = kept - lr / (1 - BETAS[0] ** times) * self.first / deviation
        if self.box is not None:
            size, low, high = self.box
            moved[:, :size].clamp_(low, high)
        return moved

    @property
    def steps_taken(self) -> Tensor:
        return self.step_count.expand(len(self.point))

    def select_rows(self, rows: Tensor) -> None:
        """Go on with some of the targets only."""
        for name in ("point", "first", "second", "diverged", "converged", "active"):
            setattr(self, name, getattr(self, name)[rows])
