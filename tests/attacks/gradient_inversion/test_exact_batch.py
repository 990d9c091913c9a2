"""Exact batches of a first linear layer: images come back to rounding, and what cannot be told is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.analytic import input_of_linear
from polyclinic.attacks.gradient_inversion.exact_batch import exact_batch
from polyclinic.randomness import torch_rng


def gradients(images: Tensor, labels: Tensor, *, width: int = 64, zero_head: bool = False) -> tuple[Tensor, Tensor]:
    """Of the first layer of a network with one hidden layer, [width, in] and [width]."""
    rng = torch_rng("exact batch", width)
    first, head = nn.Linear(images[0].numel(), width), nn.Linear(width, 4)
    with torch.no_grad():
        for one in (*first.parameters(), *head.parameters()):
            one.copy_(torch.randn(one.shape, generator=rng) / one.shape[-1] ** 0.5)
        if zero_head:
            head.weight.copy_(torch.ones_like(head.weight) * torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    loss = F.cross_entropy(head(first(images.flatten(1)).relu()), labels)
    weight, bias = torch.autograd.grad(loss, [first.weight, first.bias])
    return weight, bias


def some_images(count: int) -> Tensor:
    return torch.rand(count, 1, 10, 10, generator=torch_rng("exact batch", "images", count))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_small_batch_comes_back(count):
    images = some_images(count)
    found = exact_batch(*gradients(images, torch.arange(count) % 4))
    assert found is not None
    assert found.residual < 1e-2
    far = torch.cdist(found.images, images.flatten(1))
    assert float(far.amin(0).max()) < 0.1  # of about 5.8, the length of an image


def test_more_images_than_units_or_a_zero_gradient_give_nothing():
    assert exact_batch(*gradients(some_images(6), torch.arange(6) % 4, width=4)) is None
    assert exact_batch(torch.zeros(8, 5), torch.zeros(8)) is None


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
    torch.testing.assert_close(
        found.inputs[0], images.mean(0)
    )  # a mean, though the residual is 0: no proof of one image
