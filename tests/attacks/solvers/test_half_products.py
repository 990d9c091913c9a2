"""Products with factors of 16 bits, tried on the CPU: as exact as 11 significant bits allow, each target for itself."""

from __future__ import annotations

import pytest
import torch

from polyclinic.attacks.gradient_inversion.networks import LeNet, UnstridedResNet18, prepare_for_attack
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining, Simulation
from polyclinic.attacks.solvers import columns, half_convolutions, half_products, vmap_convolution
from polyclinic.attacks.solvers.half_products import Factor, product, scaled, undo_of
from polyclinic.attacks.solvers.vmap_convolution import ManyTargetsConv2d
from polyclinic.randomness import torch_rng


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e6, 1e20])
def test_a_power_of_two_brings_any_number_into_range(size):
    numbers = size * torch.randn(3, 50, generator=torch_rng("numbers"))
    small, undo = scaled(numbers, undo_of(numbers))
    assert small.dtype == torch.float16
    assert undo is not None
    large = numbers.abs() > numbers.abs().amax() / 1000
    found = small.float() * undo[:, None]
    assert float(((found - numbers) / numbers)[large].abs().max()) <= 2.0**-11


def test_a_target_that_is_no_number_leaves_the_others_alone():
    a, b = torch.randn(3, 4, 5, generator=torch_rng("a")), torch.randn(3, 5, 2, generator=torch_rng("b"))
    a[1, 0, 0] = torch.nan
    found = product(scaled(a, undo_of(a)), scaled(b, undo_of(b)))
    assert bool(found[1].isnan().any())
    torch.testing.assert_close(found[[0, 2]], (a @ b)[[0, 2]], rtol=0, atol=2e-2)


def test_without_tf32_nothing_is_rounded():
    numbers = torch.randn(2, 3, 3)
    assert half_products.factor(numbers) == Factor(numbers)


def gradient_of(twin, training, batch):
    """Of a sum of squares of what sites send, w.r.t. the images of three targets."""
    rng = torch_rng("second derivatives in half")
    images = torch.rand(3, batch, 3, 8, 8, generator=rng).requires_grad_()
    labels = torch.rand(3, batch, 4, generator=rng).softmax(-1)
    sent = torch.vmap(Simulation(twin, training=training))(images, labels)
    return torch.autograd.grad(sum((g * g).sum() for g in sent.values()), images)[0]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("make", "training"),
    [
        (lambda: UnstridedResNet18(3, 4, 8, widths=(4, 6, 6, 8)), None),
        (lambda: LeNet(3, 4, 8), None),
        (lambda: LeNet(3, 4, 8), LocalTraining(lr=0.1, steps=2)),
    ],
)
def test_second_derivatives_are_those_of_float32_up_to_rounding(make, training, batch, monkeypatch):
    """With local steps every target soon has weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = prepare_for_attack(make())
    for layer in twin.modules():
        if ManyTargetsConv2d.can_replace(layer):
            layer.__class__ = ManyTargetsConv2d
    exact = gradient_of(twin, training, batch)
    for module in (half_products, columns, vmap_convolution):
        monkeypatch.setattr(module, "in_half", lambda tensor: True)
    rounded = gradient_of(twin, training, batch)
    away = float((rounded - exact).norm() / exact.norm())
    assert 0 < away < 0.02


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_largest_sum_of_products_has_room_in_sixteen_bits(size):
    images, weight = torch.full((2, 4, 3, 3), size), torch.full((5, 4, 3, 3), 3.0)
    kernel, terms = half_convolutions.kernel_of(weight), weight[0].numel()
    small, undo = half_convolutions._operand(images, undo_of(images), kernel, terms)
    most = small.float() * kernel.values.float().max()
    assert 2.0**11 < float(most.max()) * terms <= 2.0**15
    assert torch.allclose(most * undo[:, None, None, None], torch.tensor(3 * size), rtol=1e-3)
