"""Exact batches of a first linear layer: images come back to rounding, and what cannot be told is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.analytic import exact_batch, input_of_linear
from polyclinic.randomness import torch_rng


def gradients(images: Tensor, *, width: int = 128) -> tuple[nn.Linear, Tensor, Tensor]:
    """The first layer of a network with one hidden layer, and its gradients [width, in] and [width]."""
    rng = torch_rng("exact batch", width)
    first, head = nn.Linear(images[0].numel(), width), nn.Linear(width, 4)
    with torch.no_grad():
        for one in (*first.parameters(), *head.parameters()):
            one.copy_(torch.randn(one.shape, generator=rng) / one.shape[-1] ** 0.5)
    loss = F.cross_entropy(head(first(images.flatten(1)).relu()), torch.arange(len(images)) % 4)
    weight, bias = torch.autograd.grad(loss, [first.weight, first.bias])
    return first, weight, bias


def some_images(count: int) -> Tensor:
    """Normalised pictures, so that each reaches other units."""
    return torch.randn(count, 1, 10, 10, generator=torch_rng("exact batch", "images", count))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_small_batch_comes_back(count):
    images = some_images(count)
    found = exact_batch(*gradients(images))
    assert found is not None
    assert found.agreement > 0.99
    far = torch.cdist(found.images, images.flatten(1))
    assert float(far.amin(0).max()) < 0.5  # of about 10, the length of an image


def test_images_that_share_their_units_are_not_taken_for_solved():
    images = some_images(1) + 0.01 * some_images(4)
    found = exact_batch(*gradients(images))
    exact = found is not None and float(torch.cdist(found.images, images.flatten(1)).amin(0).max()) < 0.5
    assert found is None or found.agreement < 0.95 or exact


def test_more_images_than_units_or_a_zero_gradient_give_nothing():
    assert exact_batch(*gradients(some_images(6), width=4)) is None
    assert exact_batch(nn.Linear(5, 8), torch.zeros(8, 5), torch.zeros(8)) is None


def test_a_zero_gradient_explains_no_image():
    found = input_of_linear(torch.zeros(1, 8, 5), torch.zeros(1, 8))
    assert found.residual.tolist() == [1.0]


def test_two_images_whose_gradients_are_proportional_look_like_one():
    """At a linear classifier that starts from zero, all images of one class have the same gradient of the outputs."""
    images, layer = some_images(2).flatten(1), nn.Linear(100, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    loss = F.cross_entropy(layer(images), torch.tensor([1, 1]))
    weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias])
    found = input_of_linear(weight[None], bias[None])
    assert float(found.residual) < 1e-6
    torch.testing.assert_close(found.inputs[0], images.mean(0))
