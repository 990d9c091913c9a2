"""Distances against arithmetic done by hand."""

import math

import pytest
import torch

from polyclinic.attacks.gradient_inversion.objective import (
    DISTANCES,
    cosine,
    gaussian,
    squared_distance,
    total_variation,
)
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.randomness import torch_rng

# two layers, of two and of three numbers; one target
OBSERVED = [torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0, 6.0]])]
SIMULATED = [torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0, 6.0]])]  # squared distances 1 and 4


def kernels(*scaled_distances: float) -> float:
    """1 - exp(-D / lambda^2), the i-th layer weighted by 1 / i."""
    return sum((1 - math.exp(-distance)) / (place + 1) for place, distance in enumerate(scaled_distances))


PLAIN, WHOLE = {"variance": 8.0, "scaled": False}, {"kernel": "whole-gradient"}
LENGTHS = math.sqrt(1 + 9 + 36) * math.sqrt(1 + 4 + 4 + 36)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 5.0),
        ({"distance": "gaussian", **PLAIN}, kernels(1 / 8, 4 / 8)),
        ({"distance": "gaussian", "variance": 8.0}, 8 * kernels(1 / 8, 4 / 8)),
        # sample variances are 2 and 12; n times them 4 and 36
        ({"distance": "sapag"}, kernels(1 / 2, 4 / 12)),
        ({"distance": "sapag", "variance_factor": 2}, kernels(1 / 4, 4 / 24)),
        ({"distance": "adaptive-gaussian"}, kernels(1 / 4, 4 / 36)),
        ({"distance": "adaptive-gaussian", "variance_factor": 2}, kernels(1 / 8, 4 / 72)),
        # one kernel for the whole gradient: 1 + 4 = 5, and of all five numbers (mean 2) the variance is 26 / 4
        ({"distance": "gaussian", **PLAIN, **WHOLE}, kernels(5 / 8)),
        ({"distance": "gaussian", "variance": 8.0, **WHOLE}, 8 * kernels(5 / 8)),
        ({"distance": "sapag", **WHOLE}, kernels(5 / (26 / 4))),
        ({"distance": "adaptive-gaussian", **WHOLE}, kernels(5 / (5 * 26 / 4))),
        # along all layers together
        ({"distance": "cosine"}, 1 - (1 + 6 + 36) / LENGTHS),
    ],
    ids=str,
)
def test_distances_by_hand(settings, expected):
    distance = GradientInversion(**settings).distance_from()
    assert distance(OBSERVED)(SIMULATED).item() == pytest.approx(expected, rel=1e-5)


def test_lengths_slopes_and_roughness_by_hand():
    assert cosine(OBSERVED)([3 * layer for layer in OBSERVED]).item() == pytest.approx(0, abs=1e-6)
    a = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad((squared_distance(a, b) * torch.tensor([1.0, 10.0])).sum(), a)
    assert slope.tolist() == [[2.0, 0.0], [40.0, 80.0]]
    picture = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert total_variation(picture[None, None, None]).tolist() == [(0 + 2) / 2 + (1 + 3) / 2]


@pytest.mark.parametrize("name", ["sapag", "adaptive-gaussian"])
def test_layers_without_variance_do_no_harm(name):
    """A pruned layer, and a layer of one number."""
    observed = [torch.zeros(2, 4), torch.ones(2, 1)]
    simulated = [torch.ones(2, 4, requires_grad=True), torch.ones(2, 1, requires_grad=True)]
    loss = DISTANCES[name](observed)(simulated)
    gradients = torch.autograd.grad(loss.sum(), simulated)
    assert bool(loss.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_targets_do_not_mix():
    observed = [torch.cat((layer, torch.full_like(layer, torch.nan))) for layer in OBSERVED]
    simulated = [torch.cat((layer, layer)).requires_grad_() for layer in SIMULATED]
    for distance in DISTANCES.values():
        loss = distance(observed)(simulated)
        assert loss[0].item() == distance(OBSERVED)(SIMULATED).item()
        first, second = (g for g in torch.autograd.grad(loss.sum(), simulated)[0])
        assert bool(first.isfinite().all())
        assert not bool(second.isfinite().any())


@pytest.mark.parametrize("scaled", [True, False])
def test_each_target_may_have_a_variance_of_its_own(scaled: bool):
    rng = torch_rng("variances")
    observed, simulated = ([torch.rand(3, n, generator=rng) for n in (4, 6)] for _ in range(2))
    together = gaussian(observed, torch.tensor([0.5, 8.0, 100.0]), scaled=scaled)(simulated)
    for row, variance in enumerate((0.5, 8.0, 100.0)):
        alone = gaussian([o[row : row + 1] for o in observed], variance, scaled=scaled)
        torch.testing.assert_close(together[row], alone([s[row : row + 1] for s in simulated])[0])
