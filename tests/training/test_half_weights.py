"""Weights that are rounded all at once give the gradients that autocast gives, bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import nn

from polyclinic.training.graphs import GraphedGradients
from polyclinic.training.half_weights import HalfWeights


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False), nn.Flatten(), nn.Linear(36, 3)
    )


def loss_of(made: nn.Module):
    def loss(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made(images).float().square().mean()

    return loss


def gradients(made: nn.Module, *, half: bool) -> list[torch.Tensor | None]:
    graphed = GraphedGradients.__new__(GraphedGradients)  # without the recorder, which wants a GPU
    graphed.half = HalfWeights(made) if half else None
    graphed.parameters, graphed.loss = [one for one in made.parameters() if one.requires_grad], loss_of(made)
    return graphed._passes(torch.linspace(-1, 1, 100).reshape(2, 2, 5, 5))[1]


def test_gradients_and_statistics_are_those_of_autocast():
    made = network()
    made[3].weight.requires_grad_(False)  # a frozen layer
    other = copy.deepcopy(made)
    found, wanted = gradients(made, half=True), gradients(other, half=False)
    assert len(found) == 6
    assert all(torch.equal(one, same) and one.dtype == torch.float32 for one, same in zip(found, wanted, strict=True))
    assert torch.equal(made[1].running_mean, other[1].running_mean)


def test_the_weights_are_back_in_their_places_even_after_an_error():
    made = network()
    before = list(made.parameters())
    half = HalfWeights(made)
    try:
        with half.used():
            assert made[0].weight.dtype == torch.bfloat16
            assert made[1].weight.dtype == torch.float32  # batch norm computes with these
            raise ValueError
    except ValueError:
        pass
    assert all(one is other for one, other in zip(before, made.parameters(), strict=True))


def test_a_weight_that_two_layers_share_gets_the_gradients_of_both():
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        made[2].weight = made[0].weight
        return made

    rows = torch.linspace(-1, 1, 8).reshape(2, 4)
    found = []
    for half in (True, False):
        made = tied()
        copies = HalfWeights(made)
        with copies.used() if half else torch.enable_grad():
            loss = loss_of(made)(rows)
        loss.backward()
        weight = made[0].weight
        found.append(copies.gradients([weight])[0] if half else weight.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-2)
