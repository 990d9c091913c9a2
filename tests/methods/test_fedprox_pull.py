"""FedProx's penalty by hand: mu (w - w_start) is added to gradients that are there, and to no others."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyclinic.methods.fedprox import FedProx


def test_the_pull_is_added_to_gradients_that_are_there():
    model = nn.Linear(2, 1)
    start = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.weight.data = torch.tensor([[3.0, -1.0]])
    model.weight.grad = torch.ones(1, 2)
    site = SimpleNamespace(trainer=SimpleNamespace(device="cpu"))
    FedProx(rounds=1, mu=0.5)._pull_back(site, start)(model)  # the bias has no gradient: it is frozen, say
    assert model.weight.grad.tolist() == [[1 + 0.5 * 3, 1 - 0.5]]
    assert model.bias.grad is None


def test_a_layer_that_stays_at_the_site_is_not_pulled():
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    site = SimpleNamespace(trainer=SimpleNamespace(device="cpu"))
    FedProx(rounds=1, mu=0.5)._pull_back(site, {"bias": model.bias.detach() - 2})(model)
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert model.bias.grad.tolist() == [2.0]


def test_one_site_may_be_together_with_nobody(monkeypatch):
    """All sites have the round's weights, so the first ones pull."""
    given = {}

    def train_together(sites, weights, spec, *, correct_for):
        given.update(correct=correct_for([0], True))
        return ["parcel"]

    monkeypatch.setattr("polyclinic.methods.fedprox.local_training.train_together", train_together)
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones(1, 1)
    site = SimpleNamespace(trainer=SimpleNamespace(device="cpu"))
    start = {"weight": model.weight.detach() - 4}
    assert FedProx(rounds=1, mu=0.5).train_together([site], [start]) == ["parcel"]
    given["correct"](model)
    assert model.weight.grad.tolist() == [[pytest.approx(1 + 0.5 * 4)]]
