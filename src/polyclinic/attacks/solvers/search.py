"""The optimisation loop of an attack: N independent problems (targets) in one batch, each until it has converged."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from polyclinic.attacks.solvers.optimizers import LBFGS, Adam
from polyclinic.progress import tell
from polyclinic.training.gpu.graphs import GraphedFunction


@dataclass(frozen=True)
class Trajectory:
    """By target and chosen step: points [N, K, D] and losses [N, K]; a target that had finished stands still."""

    steps: tuple[int, ...]
    points: Tensor
    loss: Tensor


class Recorder:
    """Keeps points at chosen steps; tensor arithmetic on fixed shapes, so that a CUDA graph can hold it."""

    def __init__(self, steps: Sequence[int], point: Tensor) -> None:
        """`steps`: ascending numbers of steps, 0 being the start; `point` [N, D]: where the targets start."""
        never = torch.iinfo(torch.long).max
        self.steps = tuple(steps)
        self.wanted = torch.tensor([*steps, never], device=point.device)
        self.next = torch.zeros(len(point), dtype=torch.long, device=point.device)  # the place to be filled next
        self.points = point[:, None].repeat(1, len(self.steps) + 1, 1)  # the last place is for what nobody asked for
        self.loss = torch.full_like(self.points[..., 0], torch.nan)

    def note(self, point: Tensor, loss: Tensor, taken: Tensor) -> None:
        """Take the loss [N] at `point` [N, D], where each target has taken so many steps [N]."""
        due = taken >= self.wanted[self.next]
        rows = torch.arange(len(point), device=point.device)
        place = torch.where(due, self.next, len(self.steps))
        self.points[rows, place] = point
        self.loss[rows, place] = loss
        self.next += due

    def select_rows(self, rows: Tensor) -> None:
        for name in ("next", "points", "loss"):
            setattr(self, name, getattr(self, name)[rows])

    def result(self, point: Tensor, loss: Tensor) -> Trajectory:
        """What was kept; a target that has not come so far is where it ended, at `point` [N, D] with `loss` [N]."""
        places = torch.arange(len(self.steps), device=point.device)
        open_places = places >= self.next[:, None]
        points = torch.where(open_places[..., None], point[:, None], self.points[:, :-1])
        return Trajectory(self.steps, points, torch.where(open_places, loss[:, None], self.loss[:, :-1]))


CHECK_EVERY = 20  # iterations on a GPU between two looks at who has finished: each look waits for the device
SHRINK_AT = {"cpu": 1 / 2, "cuda": 1 / 8}  # a GPU gains little from a smaller batch, and must record it anew
#: ordinary iterations before one is recorded. The first one compiles kernels and makes the libraries' workspaces; a
#: second has nothing left to prepare, and takes several times as long as a recorded one
WARM_UP = 1


class Minimised(Protocol):
    """N independent functions: points [N, D] to values [N] and gradients [N, D]; `select_rows` leaves out others."""

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]: ...

    def select_rows(self, rows: Tensor) -> "Minimised": ...


BatchedOptimizer = Adam | LBFGS


@dataclass(frozen=True)
class SearchResult:
    """Where the search ended, by target: points [N, D] and for each target [N]: its loss, how often it was
    evaluated, and whether it converged or diverged (neither: its steps were used up); the trajectory, if asked for."""

    point: Tensor
    loss: Tensor
    evaluations: Tensor
    converged: Tensor
    diverged: Tensor
    trajectory: Trajectory


def search(
    objective: Minimised,
    optimizer: BatchedOptimizer,
    *,
    returns: Literal["best", "last"] = "best",
    graphs: bool = True,
    trajectory: Sequence[int] = (),
) -> SearchResult:
    """Minimise until every target has finished. "best" returns the iterate with the
    lowest attack loss; ground truth is not used. `trajectory`: steps at which to keep points and losses.

    Targets that have finished are masked, which leaves the others as they are to the last bit. Once only half of a
    batch is left (an eighth on a GPU) the finished ones leave it, which may change the rest by rounding. On a GPU an
    iteration is one CUDA graph.
    """
    batch = _Batch(objective, optimizer, trajectory)
    found = batch.results(returns)
    rows = torch.arange(len(optimizer.point), device=optimizer.point.device)
    while True:
        iterate = batch.run(graphs)
        left = ~optimizer.active
        batch.evaluate_last_point(iterate)
        now = batch.results(returns)
        for name in ("point", "loss", "evaluations", "converged", "diverged"):
            getattr(found, name)[rows[left]] = getattr(now, name)[left]
        for name in ("points", "loss"):
            getattr(found.trajectory, name)[rows[left]] = getattr(now.trajectory, name)[left]
        if bool(left.all()):
            return found
        rows = rows[~left]
        batch.select_rows((~left).nonzero()[:, 0])


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Whether a GPU may round factors of products to 11 bits inside (TF32).

    Torch does so in convolutions unless told otherwise, and L-BFGS then ends far from where float32 would get.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _Batch:
    """The targets that are still searched for, the best point of each, and one iteration of all."""

    def __init__(self, objective: Minimised, optimizer: BatchedOptimizer, trajectory: Sequence[int]) -> None:
        self.objective, self.optimizer = objective, optimizer
        self.recorder = Recorder(trajectory, optimizer.point)
        self.best = optimizer.point.clone()
        self.best_loss = torch.full_like(optimizer.point[:, 0], torch.inf)
        self.loss = self.best_loss.clone()
        self.evaluations = torch.zeros(len(self.best), dtype=torch.long, device=self.best.device)
        self.iterations = 0

    def iterate(self) -> None:
        loss, gradient = self.objective(self.optimizer.point)
        self._note(loss)
        if self.recorder.steps:
            self.recorder.note(self.optimizer.point, loss, self.optimizer.steps_taken)
        self.evaluations += self.optimizer.active
        self.optimizer.update(loss, gradient)

    def _note(self, loss: Tensor) -> None:
        better = loss < self.best_loss  # false for NaN
        self.best.copy_(torch.where(better[:, None], self.optimizer.point, self.best))
        self.best_loss.copy_(torch.where(better, loss, self.best_loss))
        self.loss.copy_(loss)

    def evaluate_last_point(self, iterate: Callable[[], None]) -> None:
        """The last point of a target has been moved to, but not been evaluated yet.

        Once every target has finished, an iteration moves none of them: a recorded one is the quickest way.
        """
        recorded = isinstance(iterate, GraphedFunction) and bool(iterate.graphs)
        if recorded and not bool(self.optimizer.active.any()):
            iterate()
        else:
            self._note(self.objective(self.optimizer.point)[0])

    def run(self, graphs: bool) -> Callable[[], None]:
        """Iterate until so many targets have finished that the rest should go on without them. What it iterated with
        is not kept here: a graph that its own batch held would keep its memory until Python looks for such circles."""
        enough = SHRINK_AT.get(self.best.device.type, 1 / 2) * len(self.best)
        gpu = on_gpu(self.best)
        iterate = GraphedFunction(self.iterate, "the attack", warm_up=WARM_UP) if gpu and graphs else self.iterate
        while int(self.optimizer.active.sum()) > enough:
            for _ in range(min(CHECK_EVERY if gpu else 1, self.optimizer.limit - self.iterations)):
                iterate()
                self.iterations += 1
            tell("search for images", self.iterations, self.optimizer.limit)
        return iterate

    def select_rows(self, rows: Tensor) -> None:
        self.objective = self.objective.select_rows(rows)
        self.optimizer.select_rows(rows)
        self.recorder.select_rows(rows)
        for name in ("best", "best_loss", "loss", "evaluations"):
            setattr(self, name, getattr(self, name)[rows])

    def results(self, returns: str) -> SearchResult:
        """A copy of how things stand."""
        best = returns == "best"
        return SearchResult(
            (self.best if best else self.optimizer.point).clone(),
            (self.best_loss if best else self.loss).clone(),
            self.evaluations.clone(),
            self.optimizer.converged.clone(),
            self.optimizer.diverged.clone(),
            self.recorder.result(self.optimizer.point, self.loss),
        )
