"""Attacks over many rounds whose steps are small: a coordinator that moves biases of a dense layer a little each round.

`sweep` subtracts the gradients of neighbouring rounds: what is left is the image that a threshold has passed. `span`
keeps the biases still and looks for the one direction that two rows have in common: random shares of images, which
stop `sweep`, give a new mixture of a row's images in each round. Images are named by their input of the layer.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from incoming_attacks import Victim, row
from incoming_honest import counted
from torch import Tensor

from polyclinic.attacks.coordinator.crafting import dense_layer, input_of

#: how near to an image's input of the layer, in units of the usual distance of two images, a finding is that image
NEAR = 0.1
#: how far biases move in all, in standard deviations of what the rows give
REACH = 2.0
#: a singular value counts from this share of the largest one; two directions are one from this cosine
SMALL, SAME = 1e-4, 1 - 1e-4
#: rows that are compared with each other
ROWS = 64


class Sweep:
    """What both attacks do: the dense layer of a site's network, and steps of its biases."""

    def __init__(self, victim: Victim, rounds: int) -> None:
        self.victim = victim
        self.host, self.weights, self.number = victim.host()
        model = victim.model_with(self.weights)
        self.name, _ = dense_layer(model)
        front = input_of(model, self.name)
        with torch.no_grad():
            self.own, self.others = front(victim.images), front(victim.others)
            spread = (front(victim.public) @ self.weights[f"{self.name}.weight"].T).std()
        self.step = float(REACH * spread / rounds)

    def gradient(self, steps: float, number: int) -> tuple[Tensor, Tensor]:
        """The layer's gradients, weight and bias, in the round `number`, where all biases are `steps` steps lower."""
        bias = self.weights[f"{self.name}.bias"] - self.step * steps
        update = self.victim.ask(self.host, {**self.weights, f"{self.name}.bias": bias}, self.number + number)
        return update[f"{self.name}.weight"], update[f"{self.name}.bias"]

    def scored(self, inputs: list[Tensor]) -> dict[str, Any]:
        """Images of the site, and others by chance, that are named by inputs [K, n]."""
        found = torch.cat(inputs) if inputs else self.own[:0]
        usual = torch.pdist(self.own).median()
        near = [
            set((torch.cdist(found, some) < NEAR * usual).nonzero()[:, 1].tolist()) for some in (self.own, self.others)
        ]
        return {"identified": len(near[0]), "of": len(self.own), "by_chance": len(near[1]), "psnr": None}


def sweep(victim: Victim, rounds: int) -> dict[str, Any]:
    attack, found = Sweep(victim, rounds), []
    with counted() as seen:
        gradients = [attack.gradient(number, number) for number in range(rounds)]
    for (weight, bias), (next_weight, next_bias) in itertools.pairwise(gradients):
        passed = (bias - next_bias).abs() > 1e-9
        found.append((weight - next_weight)[passed] / (bias - next_bias)[passed, None])
    return row(victim, f"bias sweep, {rounds} rounds", rounds, seen, attack.scored(found))


def span(victim: Victim, rounds: int) -> dict[str, Any]:
    """Half of the rounds lower the biases, the other half asks for the same thing again and again."""
    half, attack = rounds // 2, Sweep(victim, rounds // 2)
    with counted() as seen:
        for number in range(half):
            attack.gradient(number, number)
        # a change that is too small to matter makes it another call, with other shares
        same = [attack.gradient(half - 1 + 1e-5 * number, half + number) for number in range(half)]
    stacked = torch.stack([torch.cat([weight, bias[:, None]], 1) for weight, bias in same], 1)[:ROWS].double()
    spaces = [one for one in map(_space, stacked) if one is not None]
    common = [_common(a, b) for a, b in itertools.combinations(spaces, 2)]
    vectors = [one for one in common if one is not None and float(one[-1].abs()) > 1e-9]
    found = [(one[:-1] / one[-1]).float()[None] for one in vectors]
    return row(victim, f"common directions, {rounds} rounds", rounds, seen, attack.scored(found))


def _space(vectors: Tensor) -> Tensor | None:
    """An orthonormal basis [n, k] of what a row's gradients [R, n] span; None if there are too few of them to tell."""
    _, sizes, directions = torch.linalg.svd(vectors, full_matrices=False)
    rank = int((sizes > SMALL * sizes[0]).sum()) if float(sizes[0]) > 0 else 0
    return directions[:rank].T if 0 < rank < len(vectors) else None


def _common(a: Tensor, b: Tensor) -> Tensor | None:
    """The direction that two spaces [n, k], [n, l] share, if there is just one."""
    left, cosines, _ = torch.linalg.svd(a.T @ b)
    alike = int((cosines > SAME).sum())
    return a @ left[:, 0] if alike == 1 else None
