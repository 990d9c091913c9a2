"""The incoming check: a site inspects what a coordinator sends before it works with it.

What depends on the weights alone is refused openly. What has looked at the site's images, or at what its own training
did, must not tell: it suspends the study, as any other failure does. The check draws no random number and changes
nothing but its own history in the site's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.data.parts import ImageSet
from polyclinic.federation.arriving import course, orders, units
from polyclinic.federation.arriving.history import History
from polyclinic.federation.arriving.settings import Figure, Incoming
from polyclinic.federation.leaving.parcel import SEALED, Parcel, ParcelRejected
from polyclinic.federation.leaving.suspension import DataDependentRefusal

if TYPE_CHECKING:
    from polyclinic.federation.call import Call
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.federation.site import Site

Weights = Mapping[str, Tensor]

#: parcels that are inspected
INSPECTED = ("weights", "gradients", "generator")
#: fewest images that weights are tried on
FEWEST_IMAGES = 4
#: fewest images of which one that stands out tells something: of five, one often has a unit for itself, and many
#: units measure the same thing
ENOUGH_IMAGES = 16


class Inspection:
    """The incoming check of a process. `first_weights` gives the weights that the study begins with at a site, or None
    where they follow from more than the study's seed. `has_course` is false for a method whose weights do not come
    nearer step by step: a head that is solved for at once is far from the first one, and no site has trained it."""

    def __init__(
        self, limits: Incoming, first_weights: Callable[[str], Weights | None], *, has_course: bool = True
    ) -> None:
        self.limits = limits
        self.has_course = has_course
        self._first_weights = first_weights
        self._twins: dict[int, nn.Module] = {}

    def arrived(self, site: Site, call: Call, parcels: Mapping[str, Parcel]) -> None:
        """Inspect what came with a call: ParcelRejected or DataDependentRefusal where a figure is above its limit."""
        for name, parcel in parcels.items() if self.limits.on else ():
            if parcel.kind in INSPECTED:
                self._inspect(site, parcel, sealed=call.parcels[name].kind == SEALED)

    def left(self, site: Site, released: Iterable[Parcel]) -> None:
        """Note how far the site's own training moves weights: what comes back may move farther, but not much."""
        history = History(site.state)
        last = history.last() if self.limits.on else {}
        if not last:
            return
        sent = {parcel.kind: parcel.tensors for parcel in released}
        trained = _on(site.trainer.device, {**site.state.group("local"), **sent.get("weights", {})})
        history.take_most("own", course.movement(trained, last))
        if "gradients" in sent:
            optimizer = site.trainer.optimizer
            by_sign = getattr(optimizer, "name", "sgd") != "sgd"
            lr = optimizer.lr_in(site.round)
            history.take_most("own", course.steps_of_gradients(sent["gradients"], last, lr, by_sign=by_sign))

    def _inspect(self, site: Site, parcel: Parcel, *, sealed: bool) -> None:
        history = History(site.state)
        if parcel.kind == "weights" and history.has_passed(parcel.digest):
            return
        tensors = _on(site.trainer.device, parcel.tensors)
        refuse(open_figures(parcel.kind, tensors, self.limits), ParcelRejected)
        if parcel.kind == "weights":
            self._inspect_weights(site, tensors, history, sealed=sealed)
            history.take_passed(parcel.digest)
        else:
            self._inspect_lengths(site, parcel, history)

    def _inspect_lengths(self, site: Site, parcel: Parcel, history: History) -> None:
        """Gradients and generators: how long they are beside those before; whether a gradient is of one image."""
        found = {name: float(t.double().norm()) for name, t in orders.floating(parcel.tensors).items()}
        before = history.most(parcel.kind)
        refuse(lengths(found, before, self.limits), DataDependentRefusal)
        if parcel.kind == "gradients":
            own = site.trainer.model.state_dict()  # of a parameter, rows are units and not images
            longer = [name for name in found if name not in own and found[name] > before.get(name, found[name])]
            refuse(dominances({name: parcel.tensors[name] for name in longer}, self.limits), DataDependentRefusal)
        history.take_most(parcel.kind, found)

    def _inspect_weights(self, site: Site, weights: Weights, history: History, *, sealed: bool) -> None:
        trainer = site.trainer_for(weights)
        if not _fits(weights, trainer) or len(site.data.train) < FEWEST_IMAGES:
            return
        own_network = trainer is site.trainer and not sealed and self.has_course
        if own_network and not history.last():
            self._begin(site, history)
        twin = self._twin(trainer)
        _load(twin, {**self._known(site, history), **weights} if own_network else weights)
        refuse(self._figures(site, twin, weights, history, own_network=own_network), DataDependentRefusal)
        if own_network:
            history.take(weights)

    def _begin(self, site: Site, history: History) -> None:
        """Remember the first weights, and what they do with the site's images."""
        first = self._first_weights(site.name)
        if first is None:
            return
        twin = self._twin(site.trainer)
        _load(twin, {**first, **site.state.group("local")})
        found, losses, _ = self._try(site, site.trainer, twin)
        history.take(first)
        history.take_most("own", course.movement(site.state.group("local"), first))
        history.take_beginning(found)
        history.take_most("loss", {"mean": float(losses.mean())})

    def _known(self, site: Site, history: History) -> dict[str, Tensor]:
        """Values of weights that do not arrive: as they arrived last, or the site's own part."""
        return {**history.last(), **site.trainer.initial_local, **site.state.group("local")}

    def _figures(
        self, site: Site, twin: nn.Module, weights: Weights, history: History, *, own_network: bool
    ) -> Iterator[Figure]:
        """Figures that look at the site's own training or images. Those of the course need a course."""
        last = history.last() if own_network else {}
        yield from course.moved(course.movement(weights, last), history.most("own"), self.limits)
        found, losses, gradients = self._try(site, site.trainer_for(weights), twin)
        if len(losses) >= ENOUGH_IMAGES:
            yield from units.graded(found, self.limits)
        if not own_network:
            return
        if last:
            yield from units.quiet(found, history.quiet(), self.limits)
            if len(losses) >= ENOUGH_IMAGES:
                yield from units.exposure(found, history.most("exposed"), self.limits)
            yield from self._losses(losses, gradients, history.most("loss").get("mean"))
        else:
            history.take_beginning(found)
        history.take_most("loss", {"mean": float(losses.mean())})

    def _losses(self, losses: Tensor, gradients: Tensor, before: float | None) -> Iterator[Figure]:
        """The loss beside the largest so far; one image's share in the gradient where the loss is larger than ever."""
        mean = float(losses.mean())
        if before is None:
            return
        yield Figure("loss", "images", mean / max(before, 1e-12), self.limits.loss)
        if mean > before and len(losses) >= ENOUGH_IMAGES:
            share = float(gradients.max() / gradients.sum().clamp(min=1e-30))
            yield Figure("dominance", "images", share, self.limits.dominance)

    def _try(
        self, site: Site, trainer: TrainerLike, twin: nn.Module
    ) -> tuple[dict[str, units.Responses], Tensor, Tensor]:
        """What a network does with some of the site's training images: responses, losses [N], and the length of each
        image's gradient w.r.t. the output [N]."""
        images, targets = self._images(site, trainer)
        with torch.no_grad(), trainer.autocast():
            found, output = units.watch(twin, images)
        output = output.float().requires_grad_()
        losses = trainer.task.losses(output, targets, trainer.target)
        (gradient,) = torch.autograd.grad(losses.sum(), output)
        return found, losses.detach(), gradient.flatten(1).norm(dim=1)

    def _images(self, site: Site, trainer: TrainerLike) -> tuple[Tensor, Tensor]:
        """Some training images, the same ones each time, spread evenly over all."""
        part = site.data.train
        places = np.unique(np.linspace(0, len(part) - 1, min(self.limits.images, len(part))).round().astype(int))
        masks = None if part.masks is None else part.masks[places]
        return next(trainer.in_order(ImageSet(part.images[places], part.labels[places], masks)))

    def _twin(self, trainer: TrainerLike) -> nn.Module:
        """A copy of the trainer's network to try weights in: batch norm by the images at hand, without dropout."""
        if id(trainer.model) not in self._twins:
            twin = copy.deepcopy(trainer.model).train().requires_grad_(False)
            for module in twin.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            self._twins[id(trainer.model)] = twin
        return self._twins[id(trainer.model)]


def open_figures(kind: str, tensors: Weights, limits: Incoming) -> Iterator[Figure]:
    """Figures of what arrived alone: nobody's images are in them."""
    yield from orders.largest(tensors, limits)
    if kind == "weights":
        yield from orders.rows(tensors, limits)


def lengths(found: Mapping[str, float], before: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    for name, length in found.items():
        if before.get(name):
            yield Figure("longer", name, length / before[name], limits.longer)


def dominances(gradients: Weights, limits: Incoming) -> Iterator[Figure]:
    """The share of one image in gradients [N, ...] of a batch's activations."""
    for name, gradient in gradients.items():
        if gradient.dim() > 1 and len(gradient) >= FEWEST_IMAGES:
            each = gradient.float().flatten(1).norm(dim=1)
            yield Figure("dominance", name, float(each.max() / each.sum().clamp(min=1e-30)), limits.dominance)


def refuse(figures: Iterable[Figure], error: type[Exception]) -> None:
    """Raise the error with the first alarm, if there is one."""
    for figure in figures:
        if figure.is_alarm:
            raise error(f"incoming check: {figure}")


def _on(device: torch.device, tensors: Weights) -> dict[str, Tensor]:
    """What arrived, on the device of the site's network: brought there once, all figures are computed there."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _fits(weights: Weights, trainer: TrainerLike) -> bool:
    own = trainer.model.state_dict()
    return all(name in own and own[name].shape == tensor.shape for name, tensor in weights.items())


def _load(model: nn.Module, weights: Weights) -> None:
    own = model.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
