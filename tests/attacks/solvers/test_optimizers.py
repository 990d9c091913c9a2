"""Adam and L-BFGS for many targets against torch's own, one by one."""

import pytest
import torch
from pretended_gpu import pretend_gpu
from torch import Tensor

from polyclinic.attacks.solvers.optimizers import LBFGS, Adam, Memory
from polyclinic.attacks.solvers.search import search
from polyclinic.randomness import torch_rng


def slope(x: Tensor) -> Tensor:
    return torch.cos(3 * x) + x


def start(count: int = 3, size: int = 5) -> Tensor:
    return torch.randn(count, size, generator=torch_rng("adam"), dtype=torch.float64)


def run(optimizer: Adam) -> Tensor:
    while bool(optimizer.active.any()):
        optimizer.update(optimizer.point.sum(1), slope(optimizer.point))
    return optimizer.point


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_torchs(decoupled: bool):
    begin = start()
    found = run(Adam(begin, lr=0.01, steps=20, weight_decay=0.1, decoupled=decoupled, decay=0.1, decay_at=(0.5,)))
    x = begin.clone()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([x], lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], gamma=0.1)
    for _ in range(20):
        x.grad = slope(x)
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-14)


def test_signs_and_box():
    begin = torch.full((1, 3), 0.5)
    optimizer = Adam(begin, lr=0.1, steps=30, signed=True, box=(2, 0.0, 1.0))
    while bool(optimizer.active.any()):
        optimizer.update(torch.zeros(1), torch.tensor([[1e-6, -1e6, 1.0]]))
    assert optimizer.point[0, :2].tolist() == [0.0, 1.0]
    assert optimizer.point[0, 2] == pytest.approx(0.5 - 30 * 0.1, rel=1e-4)  # free to leave


def test_a_target_that_diverges_or_whose_gradient_has_vanished_stops_alone():
    """Momentum would carry it on."""
    optimizer = Adam(start(2), lr=0.1, steps=10)
    for step in range(10):
        gradient = torch.ones(2, 5, dtype=torch.float64)
        gradient[1] = 0.0 if step >= 3 else 1.0
        optimizer.update(torch.ones(2, dtype=torch.float64), gradient)
        if step == 2:
            there = optimizer.point[1].clone()
    assert optimizer.converged.tolist() == [False, True]
    assert torch.equal(optimizer.point[1], there)
    assert not torch.equal(optimizer.point[0], optimizer.point[1])
    begin = start()
    wild = Adam(begin, lr=0.01, steps=10)
    for step in range(10):
        gradient = slope(wild.point)
        loss = wild.point.sum(1)
        loss[1] = torch.nan if step >= 4 else loss[1]
        wild.update(loss, gradient)
    calm = run(Adam(begin, lr=0.01, steps=10))
    assert wild.diverged.tolist() == [False, True, False]
    assert torch.equal(wild.point[[0, 2]], calm[[0, 2]])
    assert not torch.equal(wild.point[1], calm[1])


class Valleys:
    """Rosenbrock functions of D variables, one for each target, with minima at different places."""

    def __init__(self, bends: Tensor) -> None:
        self.bends = bends

    @staticmethod
    def height(x: Tensor, bend: Tensor) -> Tensor:
        return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (bend - x[..., :-1]) ** 2).sum(-1)

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().requires_grad_()
        loss = self.height(point, self.bends[:, None])
        return loss.detach(), torch.autograd.grad(loss.sum(), point)[0]

    def select_rows(self, rows: Tensor) -> "Valleys":
        return Valleys(self.bends[rows])


def valleys(count: int = 4, size: int = 9) -> tuple[Valleys, Tensor]:
    rng = torch_rng("valleys", 0)  # from where no search runs away, torch's as little as ours
    bends = torch.rand(count, generator=rng, dtype=torch.float64) + 0.5
    return Valleys(bends), torch.randn(count, size, generator=rng, dtype=torch.float64)


def torchs(problem: Valleys, row: int, start: Tensor, steps: int, **settings) -> tuple[Tensor, int]:
    x = start[row].clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.height(x, problem.bends[row])
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return x.detach(), optimizer.state[x]["func_evals"]


@pytest.mark.parametrize(
    ("rates", "steps", "history"),
    [([1.0], 1, 100), ([0.1], 3, 100), ([0.1], 2, 4), ([0.5], 2, 7), ([0.1, 1.0], 2, 100)],
)
def test_first_steps_are_torchs(rates: list[float], steps: int, history: int):
    """All targets at one rate, or each at its own."""
    problem, start = valleys()
    each = rates * (len(start) // len(rates))
    lr = rates[0] if len(rates) == 1 else torch.tensor(each, dtype=torch.float64)
    found = search(problem, LBFGS(start, lr=lr, steps=steps, history=history), returns="last")
    for row in range(len(start)):
        expected, evaluations = torchs(problem, row, start, steps, lr=each[row], history_size=history)
        torch.testing.assert_close(found.point[row], expected, rtol=0, atol=1e-8)
        assert found.evaluations[row] == evaluations


class Plains(Valleys):
    """So flat that no iteration changes the loss by 1e-9, though slopes are above every other tolerance."""

    @staticmethod
    def height(x: Tensor, bend: Tensor) -> Tensor:
        return 1.45e-5 * (bend * x**2).sum(-1)


def test_a_step_in_which_the_loss_stands_still_is_over():
    problem, start = Plains(torch.tensor([1.0, 1.1], dtype=torch.float64)), torch.ones(2, 6, dtype=torch.float64)
    found = search(problem, LBFGS(start, lr=0.1, steps=3), returns="last")
    for row in range(2):
        expected, evaluations = torchs(problem, row, start, 3, lr=0.1)
        torch.testing.assert_close(found.point[row], expected, rtol=0, atol=1e-12)
        assert evaluations <= 6  # not 3 x 20
        assert found.evaluations[row] <= evaluations


def test_ends_where_torch_ends():
    """Steps that end early, convergence and all: torch's loss, with fewer evaluations, since it looks twice."""
    problem, start = valleys()
    found = search(problem, LBFGS(start, lr=0.5, steps=60), returns="last")
    assert bool(found.converged.all())
    for row in range(len(start)):
        expected, evaluations = torchs(problem, row, start, 60, lr=0.5)
        torch.testing.assert_close(found.point[row], expected, rtol=0, atol=1e-5)
        assert found.evaluations[row] < evaluations


def test_coefficients_give_the_two_loop_recursion():
    """A memory of 3 that has seen 5 pairs, against the recursion written out."""
    rng = torch_rng("pairs")
    pairs = [torch.randn(2, 1, 6, generator=rng, dtype=torch.float64) for _ in range(5)]
    pairs = [(s, y if (s * y).sum() > 0 else -y) for s, y in pairs]
    memory = Memory(1, 3, 6, like=torch.zeros(1, dtype=torch.float64))
    gradient = torch.randn(1, 6, generator=rng, dtype=torch.float64)
    for s, y in pairs:
        memory.remember(s, y, torch.ones(1, dtype=torch.bool))
        found = memory.direction(gradient)
    q, alphas = -gradient, []
    for s, y in reversed(pairs[-3:]):
        alphas.append((s * q).sum() / (s * y).sum())
        q = q - alphas[-1] * y
    s, y = pairs[-1]
    q = q * (s * y).sum() / (y * y).sum()
    for (s, y), alpha in zip(pairs[-3:], reversed(alphas), strict=True):
        q = q + s * (alpha - (y * q).sum() / (s * y).sum())
    torch.testing.assert_close(found, q, rtol=1e-10, atol=1e-12)


def test_fixed_shapes_change_nothing(monkeypatch):
    """On a GPU the empty places of the memory take part, so that shapes never change."""
    problem, start = valleys()
    growing = search(problem, LBFGS(start, lr=0.1, steps=2), returns="last")
    monkeypatch.setattr(Memory, "used", property(lambda memory: memory.history))
    fixed = search(problem, LBFGS(start, lr=0.1, steps=2), returns="last")
    torch.testing.assert_close(fixed.point, growing.point, rtol=0, atol=1e-10)


def test_targets_that_diverge_or_finish_leave_the_others_as_they_are():
    problem, start = valleys()
    calm = search(problem, LBFGS(start, lr=0.1, steps=5), returns="last")
    wild = start.clone()
    wild[1] = 1e200  # its loss overflows at once
    found = search(problem, LBFGS(wild, lr=0.1, steps=5), returns="last")
    assert found.diverged.tolist() == [False, True, False, False]
    others = [0, 2, 3]
    assert torch.equal(found.point[others], calm.point[others])
    assert torch.equal(found.loss[others], calm.loss[others])
    assert found.evaluations[1] == 1
    # Three of four are done at the start: the last goes on alone, to where it would have gone alone.
    problem, start = valleys()
    done = start.clone()
    problem.bends[:3] = done[:3] = 1.0  # the bottom of the valley with bend 1
    found = search(problem, LBFGS(done, lr=0.1, steps=3), returns="last")
    alone = search(problem.select_rows(torch.tensor([3])), LBFGS(done[3:], lr=0.1, steps=3), returns="last")
    assert found.converged.tolist() == [True, True, True, False]
    assert found.evaluations.tolist()[:3] == [1, 1, 1]
    torch.testing.assert_close(found.point[3], alone.point[0], rtol=0, atol=1e-10)


def test_the_best_point_is_the_one_of_lowest_loss():
    problem, start = valleys()
    last = search(problem, LBFGS(start, lr=1.9, steps=1), returns="last")
    best = search(problem, LBFGS(start, lr=1.9, steps=1), returns="best")
    assert bool((best.loss <= last.loss).all())
    assert bool((best.loss < last.loss).any())  # without a line search some step goes uphill
    torch.testing.assert_close(problem(best.point)[0], best.loss)


@pytest.mark.parametrize("steps", [1, 5])
def test_iterations_as_cuda_graphs_are_the_iterations(steps, monkeypatch):
    """On a pretended GPU; a step is up to 20 iterations, and targets finish at different ones."""
    problem, start = valleys()
    plain = search(problem, LBFGS(start, lr=0.5, steps=steps))
    pretend_gpu(monkeypatch)
    monkeypatch.setattr("polyclinic.attacks.solvers.search.on_gpu", lambda tensor: True)
    graphed = search(problem, LBFGS(start, lr=0.5, steps=steps))
    for name in ("point", "loss", "evaluations", "converged", "diverged"):
        assert torch.equal(getattr(graphed, name), getattr(plain, name)), name
