"""Simulation of a site: the gradient, or the weights after some local steps, that it would send for given images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

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
        if self.training is None:
            return self._gradient(self.weights, images, labels)
        return self._local_training(self.training, images, labels)

    def _gradient(self, weights: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        def loss(weights: Tensors) -> Tensor:
            return self.loss(functional_call(self.model, {**self.fixed, **weights}, (images,)), labels)

        return grad(loss)(weights)

    def _local_training(self, training: LocalTraining, images: Tensor, labels: Tensor) -> Tensors:
        weights, velocity = self.weights, {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for step in range(training.steps):
            batch = training.batch(step, len(images))
            gradients = self._gradient(weights, images[batch], labels[batch])
            for name in self.names:
                decayed = gradients[name] + training.weight_decay * weights[name]
                pulled = decayed + training.proximal * (weights[name] - self.weights[name])
                velocity[name] = training.momentum * velocity[name] + pulled
            weights = {name: weights[name] - training.lr * velocity[name] for name in self.names}
        return self.observe(weights)

    def observe(self, sent: Mapping[str, Tensor]) -> Tensors:
        """Gradients as they are; weights as the mean gradient that led from the known weights to them."""
        if self.training is None:
            return {name: sent[name] for name in self.names}
        length = self.training.lr * self.training.steps
        return {name: (self.weights[name] - sent[name]) / length for name in self.names}
