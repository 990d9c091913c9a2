"""Stacked networks: the networks of several simulated sites train as one, with `torch.func.vmap`.

Their weights are stacked, and their images have an axis in front. Each network computes what it would compute alone, up
to rounding: batch norm has each network's own statistics, and an optimiser works on each number by itself.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd

from polyclinic.federation.collaborators import Batch
from polyclinic.models import split
from polyclinic.tasks import Classification, Regression
from polyclinic.training.batches import shuffled_indices
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.gpu.stacked_layers import all_at_once

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.collaborators import TrainerLike as Trainer
    from polyclinic.models import Backbone
    from polyclinic.training.batches import ReplayedBatches
    from polyclinic.training.plans import Correction, Reference


#: measured on an H200 with bf16 and Adam, in graphs one after the other against stacked: from so many networks on all
#: were faster in a stack (a step of 64 small CNNs: 17.8 against 8.2 ms, of 16 ResNet-18, 64 px: 25.7 against 18.5), the
#: largest with so many weights, on batches of so many pixels in all; what is larger is not stacked by itself
FEWEST_NETWORKS, MOST_WEIGHTS, MOST_PIXELS = 16, 12_000_000, 2**21
#: nine DCGANs of 32 px took 53.9 steps a second one after the other, and 189.7 as one stack; nobody has measured fewer
FEWEST_GANS, LARGEST_GAN_SIDE = 9, 32
#: stacks that a trainer keeps, each of another number of networks: sites that are drawn anew in every round, with
#: batches of several sizes, would need ever more memory
MOST_STACKS = 4
#: images [M, B, ...] and targets [M, B] to the losses [M] of a stack's networks
Losses = Callable[[Tensor, Tensor], Tensor]


class StackedModel:
    """M networks of the shape of `network`; `parameters` and `buffers` by name, [M, ...], on its device."""

    def __init__(self, network: nn.Module, members: int) -> None:
        self.members = members
        self.layout = copy.deepcopy(network).train()  # only its layers are used: the weights are those of the stack
        self.parameters = {
            name: nn.Parameter(_repeated(one, members), requires_grad=one.requires_grad)
            for name, one in network.named_parameters()
        }
        self.buffers = {name: _repeated(one, members) for name, one in network.named_buffers()}
        self._forward = vmap(self._one, randomness="different")

    def _one(self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(self.layout, (dict(parameters), buffers), (images,))

    def __call__(self, images: Tensor) -> Tensor:
        """Images [M, B, C, H, W]: network m gets entry m of them."""
        with all_at_once(self.layout):
            return self._forward(self.parameters, self.buffers, images)

    def parts(self, cut: str) -> list[Callable[[Tensor], Tensor]]:
        """The networks up to the stage `cut`, and from there on."""
        return [functools.partial(self._through, part) for part in split(cast("Backbone", self.layout), cut)]

    def _through(self, part: nn.Module, images: Tensor) -> Tensor:
        names = set(part.state_dict())

        def compute(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor) -> Tensor:
            own = ({name: one for name, one in some.items() if name in names} for some in (parameters, buffers))
            return functional_call(part, tuple(own), (images,))

        with all_at_once(self.layout):
            return vmap(compute, randomness="different")(self.parameters, self.buffers, images)

    @torch.no_grad()
    def load(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Each network's weights; the same names for all, and names that are left out keep their values."""
        own = {**self.parameters, **self.buffers}
        for name in weights[0]:
            values = [one[name] for one in weights]
            same = all(value is values[0] for value in values)
            # what a site has kept on disk lies on the CPU
            together = values[0] if same else torch.stack([value.to(own[name].device) for value in values])
            own[name].copy_(together, non_blocking=True)

    def states(self, device: torch.device | str | None = None) -> list[dict[str, Tensor]]:
        """A copy of each network's state dict, on the device if none is named."""
        own = {**self.parameters, **self.buffers}
        names = self.layout.state_dict()
        copied = {name: own[name].detach().clone().to(device or own[name].device) for name in names}
        return [{name: value[member] for name, value in copied.items()} for member in range(self.members)]


def _repeated(one: Tensor, members: int) -> Tensor:
    return one.detach()[None].repeat(members, *(1 for _ in one.shape))


class StackedGradients:
    """The losses of all networks on their batches, and their gradients; recorded as a CUDA graph where `graphs`."""

    def __init__(self, model: StackedModel, losses: Losses, *, graphs: bool) -> None:
        self.losses = losses
        self.trained = [one for one in model.parameters.values() if one.requires_grad]
        self.passes: Any = self._passes
        if graphs:
            self.passes = GraphedFunction(self._passes, "engine.graphs: a training step of stacked sites")

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """The losses [M] of batches [M, B, ...]; gradients are left in the parameters' `grad`."""
        losses, gradients = self.passes(images, targets)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        return losses

    def _passes(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        losses = self.losses(images, targets)
        gradients = torch.autograd.grad(losses.sum(), self.trained)
        return losses.detach(), [one.contiguous() for one in gradients]  # as fused optimisers want them


class StackedTrainer:
    """Trains the networks of several sites, of one shape and one batch size, as one. With a `reference` its loss, which
    looks at networks that stay `fixed`, is added to the task's."""

    def __init__(self, trainer: Trainer, members: int, reference: Reference | None = None) -> None:
        self.model = model = StackedModel(trainer.model, members)
        self.fixed = [StackedModel(trainer.model, members) for _ in (reference.weights if reference else ())]
        for one in self.fixed:
            one.layout.eval()

        fronts = [one.parts(reference.cut)[0] for one in self.fixed] if reference else []
        front, rest = model.parts(reference.cut) if reference else (model, None)
        of_task = vmap(lambda output, targets: trainer.task.loss(output, targets, trainer.target))

        def losses(images: Tensor, targets: Tensor) -> Tensor:
            with trainer.autocast():
                own = front(images)
                output = rest(own) if rest else own
                with torch.no_grad():
                    others = [one(images) for one in fronts]
            found = of_task(output.to(torch.promote_types(output.dtype, torch.float32)), targets)
            return found + vmap(reference.loss)(own, *others) if reference else found

        self.gradients = StackedGradients(model, losses, graphs=trainer.graphs)

    def load_references(self, weights: Sequence[Sequence[Mapping[str, Tensor]]]) -> None:
        """The weights of each site's fixed networks."""
        for network, of_sites in zip(self.fixed, zip(*weights, strict=True), strict=True):
            network.load(of_sites)

    def train(
        self,
        batches: Iterator[Batch],
        steps: Sequence[int],
        optimizer: torch.optim.Optimizer,
        *,
        correct: Callable[[Any], None] | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[list[float], list[dict[str, Tensor]]]:
        """Each network takes its own number of steps; the mean loss and the state dict of each, on `device`.

        A network that is through goes on with the others, and what it learns then is not used.
        """
        most, totals = max(steps), torch.zeros(len(steps), device=self.gradients.trained[0].device)
        taking_part = torch.tensor([[step < own for own in steps] for step in range(most)]).to(totals)
        found: dict[int, dict[str, Tensor]] = {}
        for step, (images, targets) in enumerate(itertools.islice(batches, most)):
            losses = self.gradients(images, targets)
            if correct is not None:
                correct(self.model)
            optimizer.step()
            totals += losses * taking_part[step]
            through = [place for place, own in enumerate(steps) if own == step + 1]
            if through:
                states = self.model.states(device)
                found |= {place: states[place] for place in through}
        means = [total / own for total, own in zip(totals.tolist(), steps, strict=True)]
        return means, [found[place] for place in range(len(steps))]


def stacked_trainer(trainer: Trainer, members: int, reference: Reference | None = None) -> StackedTrainer:
    """The stack of so many networks of a trainer's: made once, with its graphs. The `MOST_STACKS` that were used last
    are kept; all references of a run have the same cut and loss."""
    stacks: dict[tuple[int, bool], StackedTrainer] = trainer.kept.setdefault("stacks", {})
    key = (members, reference is not None)
    found = stacks.pop(key, None)
    while found is None and len(stacks) >= MOST_STACKS:
        del stacks[next(iter(stacks))]
    stacks[key] = found or StackedTrainer(trainer, members, reference)  # the newest is last
    return stacks[key]


class StackedCorrector:
    """The corrections of several sites on the gradients of their stacked networks: one function, mapped over them."""

    def __init__(self, corrections: Sequence[Correction], steps: Sequence[int], device: torch.device) -> None:
        keys = corrections[0].given
        given = {key: _together([one.given[key] for one in corrections], device) for key in keys}
        self.given = {key: tensors for key, (tensors, _) in given.items()}
        places = {key: where for key, (_, where) in given.items()}
        self.change = vmap(corrections[0].change, in_dims=(0, 0, places, 0))
        self.state: dict[str, Tensor] = {
            name: torch.stack([one.state[name] for one in corrections]).to(device) for name in corrections[0].state
        }
        self.steps, self.taken = torch.tensor(list(steps), device=device), 0

    def __call__(self, model: StackedModel) -> None:
        gradients = {name: one.grad for name, one in model.parameters.items() if one.grad is not None}
        weights = {name: one.detach() for name, one in model.parameters.items()}
        changed, state = self.change(gradients, weights, self.given, self.state)
        for name, one in model.parameters.items():
            one.grad = changed.get(name)
        active = self.taken < self.steps  # the others are through, and what they do now is not used
        for name, new in state.items():
            self.state[name] = torch.where(active.reshape(-1, *(1 for _ in new.shape[1:])), new, self.state[name])
        self.taken += 1

    def state_of(self, member: int) -> dict[str, Tensor]:
        return {name: tensor[member] for name, tensor in self.state.items()}


def _together(
    sites: Sequence[Mapping[str, Tensor]], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Tensors of several sites by name, stacked, and the axis of the sites; None where all have the very same."""
    tensors: dict[str, Tensor] = {}
    axes: dict[str, int | None] = {}
    for name, first in sites[0].items():
        same = all(one[name] is first for one in sites)
        tensors[name] = (first if same else torch.stack([one[name] for one in sites])).to(device)
        axes[name] = None if same else 0
    return tensors, axes


@dataclass(frozen=True)
class Member:
    """A site's part of a stack: what it trains with, on which images, by which draws, and what joins its batches."""

    trainer: Trainer
    part: ImageSet
    rng: torch.Generator
    replayed: ReplayedBatches | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """Images of a mini-batch: the site's own, and replayed ones."""
        own = min(self.trainer.optimizer.batch_size, len(self.part))
        return own, self.replayed.size if self.replayed else 0


def stacked_batches(members: Sequence[Member]) -> Iterator[Batch]:
    """Endless mini-batches of all sites, [M, B, ...]: those that each site would draw alone."""
    indices = [shuffled_indices(one.part, one.trainer.optimizer, one.rng) for one in members]
    while True:
        own = [one.trainer.batch(one.part, next(some), one.rng) for one, some in zip(members, indices, strict=True)]
        images, targets = map(torch.stack, zip(*own, strict=True))
        if members[0].replayed is not None:
            drawn = [next(one.replayed.stream) for one in members if one.replayed]
            more, others = map(torch.stack, zip(*drawn, strict=True))
            images, targets = torch.cat([images, more], 1), torch.cat([targets, others], 1)
        yield images, targets


def can_stack(trainer: Trainer, members: int) -> bool:
    """Whether the study wants it, and networks learn in a stack what they learn alone, up to rounding."""
    if trainer.stacked == "never" or (trainer.stacked == "auto" and members < FEWEST_NETWORKS):
        return False
    known = type(trainer.task) in (Classification, Regression)
    plain = trainer.privacy is None and not trainer.optimizer.keep_state and "mixup" not in trainer.optimizer.augment
    return known and plain and not has_dropout(trainer.model)


def has_dropout(model: nn.Module) -> bool:
    """Then a network draws from torch's global state, which sites that work together would share."""
    return any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules())


def is_worthwhile(members: Sequence[Member]) -> bool:
    """Whether these sites, with batches of one size, are faster as a stack, or the study wants it in any case."""
    trainer, part = members[0].trainer, members[0].part
    weights = sum(one.numel() for one in trainer.model.parameters())
    pixels = len(members) * sum(members[0].rows) * part.images.shape[-1] * part.images.shape[-2]
    return trainer.stacked == "always" or stacking_pays(weights, len(members), pixels)


def stacking_pays(weights: int, networks: int, pixels: int) -> bool:
    """Whether networks are faster in a stack than in graphs one after the other. `weights` of one network, `pixels` of
    all batches of a step."""
    return networks >= FEWEST_NETWORKS and weights <= MOST_WEIGHTS and pixels <= MOST_PIXELS


def stacking_gans_pays(gans: int, side: int) -> bool:
    """Whether GANs of so many sites, for images of this side, are faster in a stack than each in a graph."""
    return gans >= FEWEST_GANS and side <= LARGEST_GAN_SIDE
