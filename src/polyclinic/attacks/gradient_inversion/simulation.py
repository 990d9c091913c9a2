"""Simulation of a site: the gradient, or the weights after some local steps, that it would send for given images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

#: network outputs [B, ...] and labels [B, ...] to the mean loss
Loss = Callable[[Tensor, Tensor], Tensor]
Tensors = dict[str, Tensor]


def cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Mean cross-entropy [] of logits [B, K] against probabilities [B, K] (one-hot for a known class)."""
    return -(probabilities * logits.log_softmax(-1)).sum(-1).mean()


@dataclass(frozen=True)
class LocalTraining:
    """Steps of SGD that a site takes before it sends its weights, all of them known to the attacker.

    Step t sees images [t·b, (t+1)·b), counted anew after the last one: the order inside one pass cannot matter to an
    attacker who finds all images, that of later passes is taken to be the same. Without `batch_size`, all images.
    """

    lr: float
    steps: int = 1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0  #: FedProx's mu

    def batch(self, step: int, count: int) -> slice:
        size = self.batch_size or count
        first = step % max(1, count // size) * size
        return slice(first, first + size)


class Simulation:
    """`simulation(images [B, C, H, W], labels)` gives what the site sends: a tensor for each of `names`.

    A weight difference is divided by lr·steps, so that it has the size of a gradient; `observe` does the same to what
    was really sent. Built of torch.func, so `vmap` and further derivatives apply.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = cross_entropy,
        *,
        names: Sequence[str] | None = None,
        training: LocalTraining | None = None,
    ) -> None:
        """`model`: from `prepare_for_attack`. `names`: parameters whose gradients are sent; all if not given."""
        self.model = model
        self.loss = loss
        self.training = training
        every = dict(model.named_parameters())
        self.names = [name for name in every if names is None or name in names]
        self.weights = {name: every[name].detach() for name in self.names}
        self.fixed = {name: p.detach() for name, p in every.items() if name not in self.weights}
        self.fixed |= dict(model.named_buffers())

    def __call__(self, images: Tensor, labels: Tensor) -> Tensors:
        return self._send(self.weights, self.fixed, images, labels)

    def of_targets(self, images: Tensor, labels: Tensor) -> Tensors:
        """What the sites send for N targets: images [N, B, C, H, W] and labels [N, B, ...] to tensors [N, ...]."""
        return vmap(self)(images, labels)

    def select_rows(self, rows: Tensor) -> Simulation:
        """The same for some of the targets only."""
        return self

    def _send(self, weights: Tensors, fixed: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        if self.training is None:
            return self._gradient(weights, fixed, images, labels)
        return self._local_training(self.training, weights, fixed, images, labels)

    def _gradient(self, weights: Tensors, fixed: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        def loss(weights: Tensors) -> Tensor:
            return self.loss(functional_call(self.model, {**fixed, **weights}, (images,)), labels)

        return grad(loss)(weights)

    def _local_training(
        self, training: LocalTraining, start: Tensors, fixed: Tensors, images: Tensor, labels: Tensor
    ) -> Tensors:
        weights, velocity = start, {name: torch.zeros_like(w) for name, w in start.items()}
        for step in range(training.steps):
            batch = training.batch(step, len(images))
            gradients = self._gradient(weights, fixed, images[batch], labels[batch])
            for name in self.names:
                decayed = gradients[name] + training.weight_decay * weights[name]
                pulled = decayed + training.proximal * (weights[name] - start[name])
                velocity[name] = training.momentum * velocity[name] + pulled
            weights = {name: weights[name] - training.lr * velocity[name] for name in self.names}
        return self._mean_gradient(training, start, weights)

    def observe(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Gradients as they are; weights as the mean gradient that led from the known weights to them."""
        if self.training is None:
            return {name: sent[name] for name in self.names}
        return self._mean_gradient(self.training, self.weights, sent)

    def _mean_gradient(self, training: LocalTraining, start: Tensors, end: Mapping[str, Tensor]) -> Tensors:
        length = training.lr * training.steps
        return {name: (start[name] - end[name]) / length for name in self.names}


class StackedSimulation(Simulation):
    """N targets whose sites computed with N networks of one architecture, which differ in their weights."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss = cross_entropy,
        *,
        names: Sequence[str] | None = None,
        training: LocalTraining | None = None,
    ) -> None:
        """`models`: a network for each target, from `prepare_for_attack`."""
        super().__init__(models[0], loss, names=names, training=training)
        states = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
        self.weights, self.fixed = (
            {name: torch.stack([state[name].detach() for state in states]) for name in part}
            for part in (self.weights, self.fixed)
        )

    def __call__(self, images: Tensor, labels: Tensor) -> Tensors:
        raise TypeError("each target has a network of its own: use of_targets")

    def of_targets(self, images: Tensor, labels: Tensor) -> Tensors:
        return vmap(self._send)(self.weights, self.fixed, images, labels)

    def select_rows(self, rows: Tensor) -> StackedSimulation:
        chosen = copy.copy(self)
        chosen.weights = {name: tensor[rows] for name, tensor in self.weights.items()}
        chosen.fixed = {name: tensor[rows] for name, tensor in self.fixed.items()}
        return chosen
