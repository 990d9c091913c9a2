"""The objective of gradient inversion: what a site would send for some images, and how far that is from what it sent.

A distance is built once from the observed gradients, a list with a tensor [N, n_i] for each layer (a weight and a bias
count as two), and then maps simulated gradients of the same shapes to [N]. N targets never mix.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from polyclinic.attacks.gradient_inversion.priors import Prior

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

    def select_rows(self, rows: Tensor) -> "Simulation":
        """The same for some of the targets only."""
        return self

    def _send(self, weights: Tensors, fixed: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        training, start = self.training, weights
        if training is None:
            return self._gradient(weights, fixed, images, labels)
        velocity = {name: torch.zeros_like(w) for name, w in start.items()}
        for step in range(training.steps):
            batch = training.batch(step, len(images))
            gradients = self._gradient(weights, fixed, images[batch], labels[batch])
            for name in self.names:
                decayed = gradients[name] + training.weight_decay * weights[name]
                pulled = decayed + training.proximal * (weights[name] - start[name])
                velocity[name] = training.momentum * velocity[name] + pulled
            weights = {name: weights[name] - training.lr * velocity[name] for name in self.names}
        return self._mean_gradient(training, start, weights)

    def _gradient(self, weights: Tensors, fixed: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        def loss(weights: Tensors) -> Tensor:
            return self.loss(functional_call(self.model, {**fixed, **weights}, (images,)), labels)

        return grad(loss)(weights)

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

    def select_rows(self, rows: Tensor) -> "StackedSimulation":
        chosen = copy.copy(self)
        chosen.weights = {name: tensor[rows] for name, tensor in self.weights.items()}
        chosen.fixed = {name: tensor[rows] for name, tensor in self.fixed.items()}
        return chosen


# --- distances ------------------------------------------------------------------------------------------------


Distance = Callable[[Sequence[Tensor]], Tensor]
#: observed gradients to a distance from them
DistanceFrom = Callable[[Sequence[Tensor]], Distance]
#: of a Gaussian distance: one exponential for each layer, or one for the gradients of all layers together
Kernel = Literal["per-layer", "whole-gradient"]


class _SquaredDistance(torch.autograd.Function):
    """[N] from a [N, n] and b [N, n], of which `a` may be differentiated once; few passes over memory, where autograd's
    own takes five each way."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        difference = a - b
        ctx.save_for_backward(difference)
        return torch.linalg.vector_norm(difference, dim=1).square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors  # in place: these are the largest tensors of all
        return difference.mul_(2 * gradients[0][:, None]), None


squared_distance: Callable[[Tensor, Tensor], Tensor] = _SquaredDistance.apply


def euclidean(observed: Sequence[Tensor]) -> Distance:
    """DLG: the squared Euclidean distance over all layers."""

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        return sum_of(squared_distance(s, o) for s, o in zip(simulated, observed, strict=True))

    return distance


def gaussian(
    observed: Sequence[Tensor],
    variance: float | Tensor | str = "n-var",
    *,
    kernel: Kernel = "per-layer",
    factor: float = 1.0,
    scaled: bool = True,
) -> Distance:
    """Sum over layers i = 1, 2, ... of Q_i (1 - exp(-D_i / lambda²)), Q_i = 1/i.

    `variance` is lambda²: a number (or one for each target, [N]), "var" (the variance of the layer's gradients, SAPAG),
    or "n-var" (n times it, the adaptive Gaussian), the last two multiplied by `factor`. With a number, the sum is
    multiplied by it (unless not `scaled`): the minimum is the same, but the plain form is so flat that L-BFGS stops at
    its tolerances far from it.

    `kernel` "whole-gradient" takes the gradients of all layers for one layer: 1 - exp(-sum of D_i / lambda²).
    """
    layers = observed if kernel == "per-layer" else [torch.cat(tuple(observed), 1)]
    spreads = [_lambda_squared(layer, variance, factor) for layer in layers]
    height = spreads[0] if scaled and not isinstance(variance, str) else 1.0

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        squares = [squared_distance(s, o) for s, o in zip(simulated, observed, strict=True)]
        squares = squares if kernel == "per-layer" else [sum_of(squares)]
        pairs = enumerate(zip(squares, spreads, strict=True), 1)
        return sum_of(-(height / i) * torch.expm1(-square / spread) for i, (square, spread) in pairs)

    return distance


def _lambda_squared(layer: Tensor, variance: float | Tensor | str, factor: float) -> Tensor:
    """[N]; 1 where a layer's gradients are all alike (pruned away, or only one)."""
    if not isinstance(variance, str):
        return torch.as_tensor(variance).to(layer).expand(len(layer))
    count = layer.shape[1]
    spread = layer.var(1) if count > 1 else torch.zeros_like(layer[:, 0])
    spread = spread * factor * count if variance == "n-var" else spread * factor
    return torch.where(spread > 0, spread, 1.0)


def cosine(observed: Sequence[Tensor]) -> Distance:
    """Geiping et al.: one minus the cosine of the angle between the gradients of all layers together."""
    tiny = torch.finfo(observed[0].dtype).tiny
    length = sum_of((o * o).sum(1) for o in observed).clamp(min=tiny).sqrt()

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        along = sum_of((s * o).sum(1) for s, o in zip(simulated, observed, strict=True))
        own = sum_of((s * s).sum(1) for s in simulated).clamp(min=tiny).sqrt()
        return 1 - along / (own * length)

    return distance


#: Gaussian distances whose lambda² follows from the gradients that were sent
ADAPTED = {"sapag": "var", "adaptive-gaussian": "n-var"}
DISTANCES: dict[str, DistanceFrom] = {
    "euclidean": euclidean,
    **{name: partial(gaussian, variance=spread) for name, spread in ADAPTED.items()},
    "cosine": cosine,
}


def total_variation(images: Tensor) -> Tensor:
    """[N] from images [N, B, C, H, W]: the mean step between neighbouring pixels, down plus across."""
    down = images.diff(dim=-2).abs().flatten(1).mean(1)
    across = images.diff(dim=-1).abs().flatten(1).mean(1)
    return down + across


def sum_of(terms: Any) -> Tensor:
    """The sum of tensors; torch's stubs take Python's `sum` for a number."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    if total is None:
        raise ValueError("a distance needs at least one layer")
    return total


@dataclass(frozen=True)
class FreeLabels:
    """Labels that are searched for together with the images, `shape` per image: probabilities of classes and masks
    between 0 and 1, both as logits, or plain numbers."""

    shape: tuple[int, ...]
    form: Literal["classes", "values", "masks"] = "classes"


@dataclass(frozen=True)
class FixedLabels:
    """Labels that are known or were read off the gradients: [N, B, ...], as the loss takes them."""

    values: Tensor


class Objective:
    """`objective(point [N, D])` gives the loss [N] and its gradient [N, D].

    A point holds one target per row: its images [B, C, H, W], then its free labels, flattened. Joined, one point [1, D]
    must explain what was sent in each of N rounds.
    """

    joined = False

    def __init__(
        self,
        simulation: Simulation,
        observed: Mapping[str, Tensor],
        labels: FreeLabels | FixedLabels,
        *,
        image_shape: tuple[int, int, int, int],
        distance: DistanceFrom = euclidean,
        smoothness: float = 0.0,
        priors: Sequence[tuple[float, Prior]] = (),
    ) -> None:
        """`observed`: what the sites sent, [N, ...] by name. `smoothness`: weight of the total variation. `priors`:
        each with its weight."""
        self.simulation = simulation
        self.observed = {name: observed[name] for name in simulation.names}
        self.labels = labels
        self.image_shape = image_shape
        self.smoothness = smoothness
        self.priors = tuple(priors)
        self._distance_from = distance
        self._distance: Distance = distance([tensor.flatten(1) for tensor in self.observed.values()])

    def of_one_point(self) -> "Objective":
        """The same of rounds of the same images, whose labels are those of the first."""
        found = copy.copy(self)
        found.joined = True
        if isinstance(self.labels, FixedLabels):
            found.labels = FixedLabels(self.labels.values[:1].expand_as(self.labels.values))
        return found

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        if self.joined:
            point = point.expand(len(next(iter(self.observed.values()))), -1)
        point = point.detach().requires_grad_()
        images, labels = self.unpack(point)
        sent = self.simulation.of_targets(images, labels)
        loss = self._distance([sent[name].flatten(1) for name in self.observed])
        loss = loss + self.penalty(images)
        (gradient,) = torch.autograd.grad(loss.sum(), point)  # no target's loss depends on another's row
        if self.joined:
            return loss.detach().mean(0, keepdim=True), gradient.mean(0, keepdim=True)
        return loss.detach(), gradient

    def penalty(self, images: Tensor) -> Tensor:
        """What is added to the distance [N], whatever was sent: roughness, and priors, of images [N, B, C, H, W]."""
        found = self.smoothness * total_variation(images) if self.smoothness else images.new_zeros(len(images))
        for weight, prior in self.priors:
            found = found + weight * prior(images)
        return found

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, B, C, H, W] and labels [N, B, ...] of a point [N, D]."""
        size = math.prod(self.image_shape)
        images = point[:, :size].reshape(-1, *self.image_shape)
        if isinstance(self.labels, FixedLabels):
            return images, self.labels.values[: len(images)]
        free = point[:, size:].reshape(-1, self.image_shape[0], *self.labels.shape)
        if self.labels.form == "values":
            return images, free
        return images, free.softmax(-1) if self.labels.form == "classes" else free.sigmoid()

    def select_rows(self, rows: Tensor) -> "Objective":
        """The same for some of the targets only; of a single point there are none to leave out."""
        if self.joined:
            return self
        labels = self.labels
        return Objective(
            self.simulation.select_rows(rows),
            {name: tensor[rows] for name, tensor in self.observed.items()},
            FixedLabels(labels.values[rows]) if isinstance(labels, FixedLabels) else labels,
            image_shape=self.image_shape,
            distance=self._distance_from,
            smoothness=self.smoothness,
            priors=[(weight, prior.select_rows(rows)) for weight, prior in self.priors],
        )
