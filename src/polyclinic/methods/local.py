"""Work at a site that several methods share: put the model together, train it on the site's images, average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.privacy import at_site

if TYPE_CHECKING:
    from polyclinic.data.parts import Part
    from polyclinic.training import Batch


def assemble(site: Site, weights: Weights, own: str = "current") -> dict[str, Tensor]:
    """The whole model at a site: shared weights, and the part that is the site's own (`current` or `best`)."""
    if own == "none":
        return dict(weights)
    kept = site.state.group("best" if own == "best" else "local")
    return {**site.bench.initial_local, **weights, **kept}


def train(
    site: Site,
    weights: Weights,
    *,
    steps: int | None = None,
    part: Part | None = None,
    class_weights: Tensor | None = None,
    correct: Callable[[nn.Module], None] | None = None,
) -> Parcel:
    """Train from `weights` on the site's images (or on `part`) for floor(|D| / b) steps, or as many as given.

    What stays at the site goes into its state; the rest is the parcel of weights.
    """
    bench = site.bench
    part = part or site.data.train
    steps = steps or bench.steps_in(part)
    model = bench.load(assemble(site, weights))
    optimizer = start_optimizer(site, model)
    told: dict[str, float] = {}
    if at_site.is_private(site, "classifier"):
        steps = at_site.train(site, steps, optimizer, correct=correct)  # its loss would tell about the images
    else:
        told["loss"] = bench.train(batches(site, part), steps, optimizer, class_weights=class_weights, correct=correct)
    keep_optimizer(site, optimizer)
    trained = bench.weights()
    if bench.local_names:
        site.state.put("local", {name: trained.pop(name) for name in sorted(bench.local_names)})
    counted = {"samples": len(part), "steps": steps, **told}
    return Parcel("weights", trained, counted, at_site.record_of(site, "classifier"))


def batches(site: Site, part: Part) -> Iterator[Batch]:
    """Mini-batches of the site's images for this round, joined by replayed ones where the study replays."""
    real = site.bench.batches(part, site.rng("batches"))
    return site.replay.mix(site, real) if site.replay else real


def average(replies: Iterable[Reply], weighting: str = "samples", kind: str = "weights") -> dict[str, Tensor]:
    """The mean of what the sites sent, weighted by their numbers of images or all alike."""
    [mean] = averages(replies, weighting, kind)
    return mean


def averages(replies: Iterable[Reply], weighting: str, *kinds: str) -> list[dict[str, Tensor]]:
    """The means of several kinds. Replies are taken one by one, so only one of them need be in memory."""
    means = {kind: WeightedMean() for kind in kinds}
    for reply in replies:
        weight = reply.metadata["samples"] if weighting == "samples" else 1
        for kind, mean in means.items():
            mean.add(reply.parcel(kind).tensors, weight)
    return [mean.tensors() for mean in means.values()]


class WeightedMean:
    """The mean of sets of tensors that come one after the other.

    Sums run in float64 and in the order of the sites, so that the result is the same every time; whole numbers
    (batch norm's counter) are rounded back.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> None:
        if not self._dtypes:
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors.items()}
        if tensors.keys() != self._sums.keys():
            raise WorkFailed(f"the sites sent different tensors: {sorted(tensors.keys() ^ self._sums.keys())[:3]}")
        for name, tensor in tensors.items():
            self._sums[name].add_(tensor.double(), alpha=weight)
        self._weight += weight

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._mean(name, dtype) for name, dtype in self._dtypes.items()}

    def _mean(self, name: str, dtype: torch.dtype) -> Tensor:
        mean = self._sums[name] / self._weight
        return mean.to(dtype) if dtype.is_floating_point else mean.round().to(dtype)


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Weights that let every class a site has count alike: inverse to its frequency there, 0 where it is absent."""
    counts = torch.bincount(labels.long(), minlength=classes).float()
    return torch.where(counts > 0, counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)


# --- the optimiser's state, kept from round to round where the study says so --------------------------


def start_optimizer(site: Site, model: nn.Module) -> torch.optim.Optimizer:
    """A fresh optimiser for the site's round, with the state of its last one where that is kept."""
    optimizer = site.bench.optimizer.make(model.parameters(), site.round)
    if site.bench.optimizer.keep_state:
        restore_optimizer(optimizer, site.state.group("optimizer"))
    return optimizer


def keep_optimizer(site: Site, optimizer: torch.optim.Optimizer) -> None:
    if site.bench.optimizer.keep_state:
        site.state.put("optimizer", optimizer_tensors(optimizer))


def coordinator_optimizer(
    federation: Federation, state: State, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same for a coordinator that trains; its optimiser's state is kept in the method's."""
    optimizer = federation.bench.optimizer.make(iter(parameters), federation.round)
    if federation.bench.optimizer.keep_state:
        restore_optimizer(optimizer, getattr(state, "optimizer", {}))
    return optimizer


def keep_coordinator_optimizer(federation: Federation, state: State, optimizer: torch.optim.Optimizer) -> None:
    if federation.bench.optimizer.keep_state:
        state.optimizer = optimizer_tensors(optimizer)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as named tensors (`3/momentum_buffer`)."""
    state = optimizer.state_dict()["state"]
    kept = {f"{index}/{key}": value for index, values in state.items() for key, value in values.items()}
    return {name: value.detach().cpu().clone() for name, value in kept.items() if isinstance(value, Tensor)}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; the learning rate stays as it is now."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value.clone()
    if state:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
