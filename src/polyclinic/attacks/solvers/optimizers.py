"""Adam and AdamW for N independent problems in one batch, a learning rate that decays; no host synchronisation."""

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
    ) -> None:
        """`start` [N, D]. The learning rate is multiplied by `decay` at each share of the steps in `decay_at`.

        `signed` takes only the gradient's signs (Geiping et al.); `box` = (d, low, high) holds the first d variables
        between two bounds.
        """
        count = len(start)
        self.steps, self.decay, self.weight_decay = steps, decay, weight_decay
        self.limit = steps
        self.decoupled, self.signed, self.box = decoupled, signed, box
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
        flat = gradient.abs().amax(1) <= 0
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


CURVATURE = 1e-10  # torch's bound for a pair to be remembered
#: torch's: iterations of a step, the largest gradient that is none, and the least change
INNER, TOLERANCE_GRAD, TOLERANCE_CHANGE = 20, 1e-7, 1e-9


class LBFGS:
    """Minimises N functions of D variables; the caller evaluates them at `point` and passes the result to `update`."""

    def __init__(self, start: Tensor, *, lr: float | Tensor = 1.0, steps: int = 100, history: int = 100) -> None:
        """`start` [N, D]; `lr` one for all or [N]; `steps`: calls of torch's step; `history` as torch's."""
        count, size = start.shape
        self.lr = torch.as_tensor(lr, dtype=start.dtype, device=start.device).expand(count).clone()
        self.steps = steps
        self.limit = steps * INNER
        self.point = start.detach().clone()
        self.diverged = torch.zeros(count, dtype=torch.bool, device=start.device)
        self.started, self.converged = self.diverged.clone(), self.diverged.clone()
        self.active = ~self.diverged
        self.step_count = torch.zeros(count, dtype=torch.long, device=start.device)
        self.inner_count = self.step_count.clone()
        self.loss = start.new_zeros(count)
        self.gradient = torch.zeros_like(self.point)
        self.move = torch.zeros_like(self.point)
        self.memory = Memory(count, history, size, like=start)

    def update(self, loss: Tensor, gradient: Tensor) -> None:
        """Take the loss [N] and gradient [N, D] at `point`, and move every active target by one iteration."""
        finite = loss.isfinite() & gradient.isfinite().all(1)
        flat = gradient.abs().amax(1) <= TOLERANCE_GRAD
        # a step in which nothing moves any more is over; the target's next one begins at the same place
        still = self.move.abs().amax(1) <= TOLERANCE_CHANGE
        still |= (loss - self.loss).abs() < TOLERANCE_CHANGE
        still &= self.active & (self.inner_count > 0)
        self.step_count += still
        self.inner_count.masked_fill_(still, 0)
        going = self.active & finite & ~flat & (self.step_count < self.steps)

        self.memory.remember(self.move, gradient - self.gradient, going & self.started)
        direction = torch.where(self.started[:, None], self.memory.direction(gradient), -gradient)
        downhill = ~((gradient * direction).sum(1) > -TOLERANCE_CHANGE)  # true for NaN, as in torch
        self.diverged |= self.active & ~finite
        self.converged |= self.active & finite & (flat | (going & ~downhill))
        going &= downhill

        first = (1 / gradient.abs().sum(1)).clamp(max=1) * self.lr
        length = torch.where(self.started, self.lr, first)
        self.move.copy_(torch.where(going[:, None], length[:, None] * direction, self.move))
        self.point.copy_(torch.where(going[:, None], self.point + self.move, self.point))
        self.gradient.copy_(gradient)
        self.loss.copy_(loss)
        self.started |= going
        self.inner_count += going
        over = self.inner_count >= INNER
        self.step_count += over
        self.inner_count.masked_fill_(over, 0)
        self.active.copy_(going & (self.step_count < self.steps))

    @property
    def steps_taken(self) -> Tensor:
        return self.step_count

    def select_rows(self, rows: Tensor) -> None:
        """Go on with some of the targets only."""
        flags = ("started", "diverged", "converged", "active", "step_count", "inner_count")
        for name in ("point", "lr", "loss", "gradient", "move", *flags):
            setattr(self, name, getattr(self, name)[rows])
        self.memory.select_rows(rows)


class Memory:
    """The last steps s and changes of gradient y of each target: [N, m, D], in rings of their own.

    `triangle` (s_i·y_j for i <= j) and `gram` (y_i·y_j) are [N, m, m] in the order of age with the newest last, so
    that empty places come first; they are float64, since solving with them is where rounding would hurt.
    """

    def __init__(self, count: int, history: int, size: int, *, like: Tensor) -> None:
        self.s = like.new_zeros(count, history, size)
        self.y = like.new_zeros(count, history, size)
        eye = torch.eye(history, dtype=torch.float64, device=like.device)
        self.triangle = eye.repeat(count, 1, 1)
        self.gram = torch.zeros_like(self.triangle)
        self.next = torch.zeros(count, dtype=torch.long, device=like.device)
        self.scale = like.new_ones(count)
        self.history = history
        self.calls = 0
        self._new = like.new_zeros(count, size)
        self._accepted = torch.zeros(count, dtype=torch.bool, device=like.device)

    @property
    def used(self) -> int:
        """Places of the rings that any target may have filled; on a GPU all, so that shapes never change."""
        return self.history if self.s.is_cuda else min(self.history, max(1, self.calls))

    def remember(self, s: Tensor, y: Tensor, allowed: Tensor) -> None:
        """Add a pair [N, D] for each target that `allowed` [N] names and whose curvature is positive enough."""
        self.calls += 1
        curvature = (s * y).sum(1)
        accepted = allowed & (curvature > CURVATURE)
        rows = torch.arange(len(s), device=s.device)
        for ring, new in ((self.s, s), (self.y, y)):
            ring[rows, self.next] = torch.where(accepted[:, None], new, ring[rows, self.next])
        self.next.copy_(torch.where(accepted, (self.next + 1) % self.history, self.next))
        self.scale.copy_(torch.where(accepted, curvature / (y * y).sum(1), self.scale))
        self._new.copy_(y)
        self._accepted.copy_(accepted)

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient [N, D]."""
        used = self.used
        s, y = self.s[:, :used], self.y[:, :used]
        ages = (self.next[:, None] + torch.arange(used, device=s.device)) % used  # the place of the k-th oldest
        vectors = torch.stack((gradient, self._new), 1).mT  # laid out so: the products are thrice as fast on a CPU
        s_g, s_new = self._products(s, vectors, ages)
        y_g, y_new = self._products(y, vectors, ages)
        self._grow(s_new, y_new)

        triangle, gram = self.triangle[:, -used:, -used:], self.gram[:, -used:, -used:]
        scale = self.scale.double()[:, None]
        alpha = torch.linalg.solve_triangular(triangle, -s_g[..., None], upper=True)
        y_q = -y_g - (gram @ alpha)[..., 0]
        curvature = triangle.diagonal(dim1=1, dim2=2)
        right = curvature * alpha[..., 0] - scale * y_q
        gamma = torch.linalg.solve_triangular(triangle.mT, right[..., None], upper=False)

        of_y = self._in_places(-scale * alpha[..., 0], ages)
        of_s = self._in_places(gamma[..., 0], ages)
        return -self.scale[:, None] * gradient + (of_s @ s)[:, 0] + (of_y @ y)[:, 0]

    @staticmethod
    def _products(ring: Tensor, vectors: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        """Products of the remembered vectors with two others [N, D, 2], each [N, used] by age in float64."""
        products = torch.bmm(ring, vectors).double()
        by_age = products.gather(1, ages[:, :, None].expand(-1, -1, 2))
        return by_age[..., 0], by_age[..., 1]

    def _grow(self, s_new: Tensor, y_new: Tensor) -> None:
        """Add the column of the newest pair where one was accepted: all others become one older."""
        used = s_new.shape[1]
        accepted = self._accepted[:, None]
        empty = torch.zeros_like(s_new)
        for matrix, column, row in ((self.triangle, s_new, empty), (self.gram, y_new, y_new)):
            part = matrix[:, -used:, -used:]
            part[:, :-1, :-1] = torch.where(accepted[..., None], part[:, 1:, 1:], part[:, :-1, :-1])
            part[:, -1, :] = torch.where(accepted, row, part[:, -1, :])
            part[:, :, -1] = torch.where(accepted, column, part[:, :, -1])

    def _in_places(self, coefficients: Tensor, ages: Tensor) -> Tensor:
        """Coefficients by age to coefficients by place, [N, 1, used], in the rings' precision."""
        placed = torch.zeros_like(coefficients).scatter(1, ages, coefficients)
        return placed[:, None].to(self.s.dtype)

    def select_rows(self, rows: Tensor) -> None:
        for name in ("s", "y", "triangle", "gram", "next", "scale", "_new", "_accepted"):
            setattr(self, name, getattr(self, name)[rows])
