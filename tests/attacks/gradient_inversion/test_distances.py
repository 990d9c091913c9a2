"""Distances against arithmetic done by hand."""

import math

import pytest
import torch

from polyclinic.attacks.gradient_inversion.objective import (
    DISTANCES,
    cosine,
    euclidean,
    gaussian,
    squared_distance,
    total_variation,
)
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.randomness import torch_rng

# two layers, of two and of three numbers; one target
OBSERVED = [torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0, 6.0]])]
SIMULATED = [torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.0, 6.0]])]  # squared distances 1 and 4


def test_euclidean_and_gaussian_with_a_number():
    assert euclidean(OBSERVED)(SIMULATED).tolist() == [5.0]
    plain = (1 - math.exp(-1 / 8)) + (1 - math.exp(-4 / 8)) / 2
    assert gaussian(OBSERVED, 8.0, scaled=False)(SIMULATED).item() == pytest.approx(plain, rel=1e-6)
    assert gaussian(OBSERVED, 8.0)(SIMULATED).item() == pytest.approx(8 * plain, rel=1e-6)


def test_gaussian_with_the_layers_variance():
    """Sample variances are 2 and 12; n times them 4 and 36."""
    sapag = (1 - math.exp(-1 / 2)) + (1 - math.exp(-4 / 12)) / 2
    adaptive = (1 - math.exp(-1 / 4)) + (1 - math.exp(-4 / 36)) / 2
    assert DISTANCES["sapag"](OBSERVED)(SIMULATED).item() == pytest.approx(sapag, rel=1e-6)
    assert DISTANCES["adaptive-gaussian"](OBSERVED)(SIMULATED).item() == pytest.approx(adaptive, rel=1e-6)


def test_one_kernel_for_the_whole_gradient():
    """The squared distance is 1 + 4 = 5, and the weight 1; of all five numbers (mean 2) the variance is 26 / 4."""
    plain = 1 - math.exp(-5 / 8)
    whole = {"kernel": "whole-gradient"}
    assert gaussian(OBSERVED, 8.0, scaled=False, **whole)(SIMULATED).item() == pytest.approx(plain, rel=1e-6)
    assert gaussian(OBSERVED, 8.0, **whole)(SIMULATED).item() == pytest.approx(8 * plain, rel=1e-6)
    spread = 26 / 4
    assert gaussian(OBSERVED, "var", **whole)(SIMULATED).item() == pytest.approx(1 - math.exp(-5 / spread), rel=1e-6)
    adaptive = gaussian(OBSERVED, "n-var", **whole)(SIMULATED).item()
    assert adaptive == pytest.approx(1 - math.exp(-5 / (5 * spread)), rel=1e-6)


def test_a_factor_of_lambda_squared():
    """Sample variances are 2 and 12; twice n times them 8 and 72."""
    adaptive = (1 - math.exp(-1 / 8)) + (1 - math.exp(-4 / 72)) / 2
    assert gaussian(OBSERVED, "n-var", factor=2)(SIMULATED).item() == pytest.approx(adaptive, rel=1e-6)
    sapag = (1 - math.exp(-1 / 4)) + (1 - math.exp(-4 / 24)) / 2
    assert gaussian(OBSERVED, "var", factor=2)(SIMULATED).item() == pytest.approx(sapag, rel=1e-6)


def test_settings_name_the_kernel_and_the_factor():
    found = GradientInversion(distance="gaussian", variance=8, scaled=False, kernel="whole-gradient").distance_from()
    assert found(OBSERVED)(SIMULATED).item() == pytest.approx(1 - math.exp(-5 / 8), rel=1e-6)
    found = GradientInversion(distance="adaptive-gaussian", variance_factor=2).distance_from()
    assert found(OBSERVED)(SIMULATED).item() == gaussian(OBSERVED, "n-var", factor=2)(SIMULATED).item()
    with pytest.raises(ValueError, match="kernel goes with"):
        GradientInversion(distance="cosine", kernel="whole-gradient")
    with pytest.raises(ValueError, match="variance_factor goes with"):
        GradientInversion(distance="gaussian", variance=8, variance_factor=2)


@pytest.mark.parametrize("name", ["sapag", "adaptive-gaussian"])
def test_layers_without_variance_do_no_harm(name):
    """A pruned layer, and a layer of one number."""
    observed = [torch.zeros(2, 4), torch.ones(2, 1)]
    simulated = [torch.ones(2, 4, requires_grad=True), torch.ones(2, 1, requires_grad=True)]
    loss = DISTANCES[name](observed)(simulated)
    gradients = torch.autograd.grad(loss.sum(), simulated)
    assert bool(loss.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_cosine():
    """Along all layers together, whatever their length."""
    lengths = math.sqrt(1 + 9 + 36), math.sqrt(1 + 4 + 4 + 36)
    expected = 1 - (1 + 6 + 36) / (lengths[0] * lengths[1])
    assert cosine(OBSERVED)(SIMULATED).item() == pytest.approx(expected, rel=1e-5)
    assert cosine(OBSERVED)([3 * layer for layer in OBSERVED]).item() == pytest.approx(0, abs=1e-6)


def test_targets_do_not_mix():
    observed = [torch.cat((layer, torch.full_like(layer, torch.nan))) for layer in OBSERVED]
    simulated = [torch.cat((layer, layer)).requires_grad_() for layer in SIMULATED]
    for distance in DISTANCES.values():
        loss = distance(observed)(simulated)
        assert loss[0].item() == distance(OBSERVED)(SIMULATED).item()
        first, second = (g for g in torch.autograd.grad(loss.sum(), simulated)[0])
        assert bool(first.isfinite().all())
        assert not bool(second.isfinite().any())


def test_slope_of_the_squared_distance():
    a = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad((squared_distance(a, b) * torch.tensor([1.0, 10.0])).sum(), a)
    assert slope.tolist() == [[2.0, 0.0], [40.0, 80.0]]


def test_total_variation():
    picture = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert total_variation(picture[None, None, None]).tolist() == [(0 + 2) / 2 + (1 + 3) / 2]


@pytest.mark.parametrize("scaled", [True, False])
def test_each_target_may_have_a_variance_of_its_own(scaled: bool):
    rng = torch_rng("variances")
    observed, simulated = ([torch.rand(3, n, generator=rng) for n in (4, 6)] for _ in range(2))
    together = gaussian(observed, torch.tensor([0.5, 8.0, 100.0]), scaled=scaled)(simulated)
    for row, variance in enumerate((0.5, 8.0, 100.0)):
        alone = gaussian([o[row : row + 1] for o in observed], variance, scaled=scaled)
        torch.testing.assert_close(together[row], alone([s[row : row + 1] for s in simulated])[0])
