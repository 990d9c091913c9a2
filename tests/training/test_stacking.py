"""Stacked networks against the same networks one by one, in double precision."""

from __future__ import annotations

import contextlib

import pytest
import torch
from pretended_gpu import pretend_gpu
from torch.nn import functional as F

from polyclinic.models import build
from polyclinic.training.graphs import WARM_UP
from polyclinic.training.stacked_convolutions import convolve
from polyclinic.training.stacking import StackedGradients, StackedModel


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


SHAPES = [(3, 1, 1, 6), (5, 2, 2, 9), (1, 2, 0, 7), (3, 3, 0, 8)]


@pytest.mark.parametrize(("kernel", "stride", "padding", "side"), SHAPES)
def test_products_are_the_convolutions_of_each_network_and_their_gradients(kernel, stride, padding, side):
    images = torch.rand(3, 2, 4, side, side, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, 5, 4, kernel, kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([F.conv2d(*one, stride, padding) for one in zip(images, weight, bias, strict=True)])
    found = convolve(images, weight, bias, (stride, stride), (padding, padding))
    assert torch.allclose(found, wanted)
    back = torch.rand_like(wanted)
    for a, b in zip(*(torch.autograd.grad(one, (images, weight, bias), back) for one in (found, wanted)), strict=True):
        assert torch.allclose(a, b)


def loss(output, targets):
    return F.cross_entropy(output, targets)


CASES = [
    ("small-cnn", False, False),
    ("small-cnn", True, False),
    ("small-cnn", True, True),
    ("lenet5", True, False),
    ("resnet18", True, False),
]


@pytest.mark.parametrize(("name", "products", "graphs"), CASES)
def test_stacked_networks_learn_what_they_learn_one_by_one(name, products, graphs, monkeypatch):
    """Networks with weights of their own and batch norm take some steps of SGD with momentum."""
    if graphs:
        pretend_gpu(monkeypatch)
    members, size = (2, 16) if name == "resnet18" else (3, 32)
    alone = [build(name, channels=1, outputs=3, size=size).double().train() for _ in range(members)]
    stacked = StackedModel(alone[0], members, products=products)
    for place, network in enumerate(alone):
        stacked.load(place, network.state_dict())
    learn = StackedGradients(stacked, loss, contextlib.nullcontext, graphs=graphs)
    together = torch.optim.SGD(stacked.parameters.values(), 0.01, 0.9)
    each = [torch.optim.SGD(network.parameters(), 0.01, 0.9) for network in alone]
    for _ in range(WARM_UP + 2 if graphs else 2):
        images, targets = torch.rand(members, 4, 1, size, size).double(), torch.randint(3, (members, 4))
        losses = learn(images, targets)
        together.step()
        for place, (network, optimizer) in enumerate(zip(alone, each, strict=True)):
            optimizer.zero_grad()
            own = loss(network(images[place]), targets[place])
            own.backward()
            optimizer.step()
            assert float(losses[place]) == pytest.approx(own.item(), rel=1e-8)
    for place, network in enumerate(alone):
        for key, value in stacked.state(place).items():
            assert torch.allclose(value, network.state_dict()[key], atol=1e-7), (place, key)
