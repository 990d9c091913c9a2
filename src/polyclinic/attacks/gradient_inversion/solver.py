"""The solver of gradient inversion: from parcels and public knowledge to reconstructed images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion import initialisation
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.objective import FixedLabels, FreeLabels, Objective
from polyclinic.attacks.gradient_inversion.priors import Prior
from polyclinic.attacks.gradient_inversion.simulation import (
    LocalTraining,
    Loss,
    Simulation,
    StackedSimulation,
    cross_entropy,
)
from polyclinic.attacks.solvers.search import SearchResult, Trajectory, allow_tf32, search
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.attacks.gradient_inversion.settings import GradientInversion
    from polyclinic.federation.ledger.parcel import Parcel

#: a search for smaller images has so many times fewer steps
COARSE = 4


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows besides the parcels. An attack uses nothing that it does not declare in `needs`.

    `model` holds the weights (and batch-norm statistics) that the site computed with; where the sites of the parcels
    computed with different weights, it is a list with a network for each parcel, all of one architecture. The task is
    classification into `classes`; another one gives a `loss` of its own, (outputs, labels) -> mean, and the
    `label_shape` of one image (`label_form` "masks" if labels lie between 0 and 1).
    """

    model: nn.Module | Sequence[nn.Module]
    image_shape: tuple[int, int, int]
    batch_size: int = 1
    classes: int | None = None
    loss: Loss | None = None
    label_shape: tuple[int, ...] = ()
    label_form: Literal["values", "masks"] = "values"
    training: LocalTraining | None = None
    labels: Tensor | None = None  #: [N, B]: classes; or [N, B, *label_shape] for another loss
    start_images: Tensor | None = None  #: [N, B, C, H, W]: images to start from
    image_prior: Prior | None = None  #: what images of this kind look like
    batch_norm_prior: Prior | None = None  #: statistics that were sent of the very batch


@dataclass(frozen=True)
class ImageTrajectory:
    """Images on their way, at K steps: [N, K, B, C, H, W], and [N, K] each: the loss that is minimised, and the
    distance of the gradients alone, which is the loss without the weight of the images' roughness. A target that had
    finished before a step is where it ended."""

    steps: tuple[int, ...]
    images: Tensor
    loss: Tensor
    distance: Tensor


@dataclass(frozen=True)
class Reconstruction:
    """What came back, by target and on the CPU: images [N, B, C, H, W] with their labels [N, B] (of the same point),
    the images that the search started from, and [N] each: the loss it ended with, how often it was evaluated, whether
    it converged or diverged (neither: its iterations were used up), and the distance of the gradients alone."""

    images: Tensor
    labels: Tensor
    start: Tensor
    loss: Tensor
    evaluations: Tensor
    converged: Tensor
    diverged: Tensor
    threat_model: str
    trajectory: ImageTrajectory | None = None  #: where the settings name steps to keep
    distance: Tensor | None = None  #: the loss without what is added for roughness and priors


class Inversion:
    """One attack with its settings, ready to be run on parcels."""

    def __init__(self, settings: GradientInversion, knowledge: Knowledge, *, seed: int, device: str) -> None:
        self.settings, self.knowledge = settings, knowledge
        self.seed, self.device = seed, device
        self.shape = (knowledge.batch_size, *knowledge.image_shape)
        self.networks = self._prepare(knowledge.model)
        self.model = self.networks[0]
        self._check_knowledge()

    def run(self, parcels: Sequence[Parcel]) -> Reconstruction:
        """The reconstruction of all parcels, `at_once` of them in a batch."""
        self._check_counts(len(parcels))
        size = len(parcels) if self.settings.joined else self.settings.at_once
        groups = [range(i, min(i + size, len(parcels))) for i in range(0, len(parcels), size)]
        with allow_tf32(self.settings.precision == "tf32"):
            parts = [self._attack_group([parcels[row] for row in rows], rows) for rows in groups]
        fields = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        kept = {name: fields.pop(f"trajectory_{name}") for name in ("images", "loss", "distance")}
        steps = self.settings.trajectory
        trajectory = ImageTrajectory(steps, **kept) if steps else None
        return Reconstruction(**fields, threat_model=str(self.settings), trajectory=trajectory)

    def _prepare(self, given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
        """The one network of all parcels, or one for each."""
        models: Sequence[nn.Module] = [given] if isinstance(given, nn.Module) else given
        if not models:
            raise BadInput("attack: Knowledge.model is an empty list; give one network, or one for each parcel")
        return [
            prepare_for_attack(model, batch_norm=self.settings.batch_norm, device=self.device).to(self.settings.dtype)
            for model in models
        ]

    @property
    def _own_networks(self) -> bool:
        return not isinstance(self.knowledge.model, nn.Module)

    def _attack_group(self, parcels: Sequence[Parcel], rows: range) -> dict[str, Tensor]:
        simulation = self._simulation(parcels, rows)
        observed = self._observed(simulation, parcels)
        objective = Objective(
            simulation,
            observed,
            self._labels(observed, rows),
            image_shape=self.shape,
            distance=self.settings.distance_from(),
            smoothness=self.settings.total_variation,
            priors=self._priors(),
        )
        if self.settings.joined:
            return self._search(objective.of_one_point(), parcels[:1], rows[:1])
        return self._search(objective, parcels, rows)

    def _priors(self) -> list[tuple[float, Prior]]:
        settings, known = self.settings, self.knowledge
        pairs = ((settings.image_prior, known.image_prior), (settings.batch_norm_prior, known.batch_norm_prior))
        return [
            (weight, prior.to(self.device, settings.dtype)) for weight, prior in pairs if weight and prior is not None
        ]

    def _search(self, objective: Objective, parcels: Sequence[Parcel], rows: range) -> dict[str, Tensor]:
        """The best of all restarts; each begins with small images where the settings name scales."""
        best: dict[str, Tensor] = {}
        for restart in range(self.settings.restarts):
            start = torch.stack([self._start(p, row, objective, restart) for p, row in zip(parcels, rows, strict=True)])
            start = start.to(self.device, self.settings.dtype)
            for scale in self.settings.scales:
                start = self._coarse(objective, start, scale)
            optimizer = self.settings.optimizer_at(start, math.prod(self.shape))
            steps = self.settings.trajectory
            found = search(objective, optimizer, returns=self.settings.returns, trajectory=steps)
            best = _better(best, self._fields(objective, start, found))
        return best

    def _coarse(self, objective: Objective, start: Tensor, scale: int) -> Tensor:
        """A better start [N, D]: the result of a shorter search for images that are `scale` times smaller."""
        coarse = objective.at_scale(scale)
        settings = self.settings.model_copy(update={"iterations": max(1, self.settings.iterations // COARSE)})
        optimizer = settings.optimizer_at(objective.point_at(start, scale), math.prod(coarse.point_shape))
        return coarse.point_at(search(coarse, optimizer).point, 1).detach()

    def _fields(self, objective: Objective, start: Tensor, found: SearchResult) -> dict[str, Tensor]:
        images, label = objective.unpack(found.point)
        classification = self.knowledge.loss is None
        return {
            "images": images,
            "labels": label.argmax(-1) if classification else label,
            "start": objective.unpack(start)[0],
            "loss": found.loss,
            "distance": found.loss - objective.penalty(images).detach(),
            "evaluations": found.evaluations,
            "converged": found.converged,
            "diverged": found.diverged,
            **self._trajectory_fields(objective, found.trajectory),
        }

    def _trajectory_fields(self, objective: Objective, kept: Trajectory) -> dict[str, Tensor]:
        size = math.prod(self.shape)
        images = kept.points[..., :size].unflatten(2, self.shape)
        at_steps = [objective.penalty(some) for some in images.unbind(1)]
        distance = kept.loss - (torch.stack(at_steps, 1) if at_steps else 0.0)
        return {"trajectory_images": images, "trajectory_loss": kept.loss, "trajectory_distance": distance}

    # --- what is seen -----------------------------------------------------------------------------

    def _simulation(self, parcels: Sequence[Parcel], rows: range) -> Simulation:
        """A site that sends what these parcels hold: gradients or weights of some of the network's parameters."""
        sent = {name for name in parcels[0].tensors if all(name in parcel.tensors for parcel in parcels)}
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters() if name in sent}
        if not shapes:
            raise BadInput("attack: the parcels hold no parameter of the network; is it the one that the site trained?")
        for name, shape in shapes.items():
            if any(parcel.tensors[name].shape != shape for parcel in parcels):
                raise BadInput(f"attack: '{name}' has other shapes in the parcels than in the network, {tuple(shape)}")
        training = self.knowledge.training if self.settings.kind == "weights" else None
        loss = self.knowledge.loss or cross_entropy
        if self._own_networks:
            return StackedSimulation([self.networks[row] for row in rows], loss, names=list(shapes), training=training)
        return Simulation(self.model, loss, names=list(shapes), training=training)

    def _observed(self, simulation: Simulation, parcels: Sequence[Parcel]) -> dict[str, Tensor]:
        """What the sites sent, [N, ...] by name."""
        wrong = {parcel.kind for parcel in parcels} - {self.settings.kind}
        if wrong:
            raise BadInput(f"attack.kind: is '{self.settings.kind}', and there are parcels of kind '{wrong.pop()}'")
        stacked = {name: torch.stack([parcel.tensors[name] for parcel in parcels]) for name in simulation.names}
        there = {name: tensor.to(self.device, self.settings.dtype) for name, tensor in stacked.items()}
        return simulation.observe(there)

    # --- what is known or guessed -----------------------------------------------------------------

    def _check_knowledge(self) -> None:
        settings, known = self.settings, self.knowledge
        if known.loss is None and known.classes is None:
            raise BadInput("attack: classification needs Knowledge.classes; another task needs Knowledge.loss")
        if settings.label == "known" and known.labels is None:
            raise BadInput("attack.label: 'known' needs Knowledge.labels; without them use 'joint', 'sign' or 'counts'")
        if settings.start == "given" and known.start_images is None:
            raise BadInput("attack.start: 'given' needs Knowledge.start_images, the images to start from")
        if settings.kind == "weights" and known.training is None:
            raise BadInput("attack.kind: 'weights' needs Knowledge.training, the site's learning rate and steps")
        for name in ("image_prior", "batch_norm_prior"):
            if getattr(settings, name) and getattr(known, name) is None:
                raise BadInput(f"attack.{name}: has a weight, and needs Knowledge.{name}; set it to 0")
        if settings.label == "sign" and known.batch_size > 1:
            raise BadInput("attack.label: the sign rule is for one image; use 'counts' for a batch")
        if settings.label in ("sign", "counts") and known.loss is not None:
            raise BadInput(f"attack.label: '{settings.label}' reads classes; use 'joint' or 'known' for other tasks")

    def _check_counts(self, count: int) -> None:
        """One row of labels and of start images for each parcel, with one for each of its images."""
        if not count:
            raise BadInput("attack: there are no parcels to attack; give one or more")
        if self._own_networks and len(self.networks) != count:
            raise BadInput(
                f"attack: Knowledge.model has {len(self.networks)} networks, and there are {count} parcels; give one "
                "network for all, or one for each"
            )
        images = self.knowledge.batch_size
        given = {"labels": self.settings.label == "known", "start_images": self.settings.start == "given"}
        for name in (name for name, used in given.items() if used):
            found = tuple(getattr(self.knowledge, name).shape[:2])
            if found != (count, images):
                raise BadInput(
                    f"attack: Knowledge.{name} is for {' x '.join(map(str, found))} images, and there are {count} "
                    f"parcels of {images}; give [{count}, {images}, ...]"
                )

    def _labels(self, observed: dict[str, Tensor], rows: range) -> FreeLabels | FixedLabels:
        known, rule = self.knowledge, self.settings.label
        classes = known.classes if known.loss is None else None
        if rule == "joint":
            return FreeLabels(known.label_shape, known.label_form) if classes is None else FreeLabels((classes,))
        if rule == "known":
            assert known.labels is not None  # checked before
            values = known.labels[rows.start : rows.stop].to(self.device)
        else:
            values = self._read_labels(observed, rows)
        return FixedLabels(values if classes is None else F.one_hot(values.long(), classes).to(self.settings.dtype))

    def _read_labels(self, observed: dict[str, Tensor], rows: range) -> Tensor:
        """Labels [N, B] from the gradients of the last layer."""
        layer = initialisation.last_linear(self.model)
        if f"{layer}.weight" not in observed:
            raise BadInput(f"attack.label: the parcels lack '{layer}.weight', which gives labels away; use 'joint'")
        if self.settings.label == "sign":
            return initialisation.label_by_sign(observed, layer)[:, None]
        size = self.knowledge.batch_size
        if not self._own_networks:
            return initialisation.as_labels(initialisation.counts(observed, self.model, layer, size))
        singles = [{name: tensor[i : i + 1] for name, tensor in observed.items()} for i in range(len(rows))]
        pairs = zip(singles, rows, strict=True)
        counts = [initialisation.counts(single, self.networks[row], layer, size) for single, row in pairs]
        return initialisation.as_labels(torch.cat(counts))

    def _start(self, parcel: Parcel, row: int, objective: Objective, restart: int) -> Tensor:
        """A target's start [D]: its images, then its free labels."""
        rng = torch_rng(self.seed, "gradient inversion", parcel.digest, restart)
        given, scheme = self.knowledge.start_images, self.settings.start
        if scheme == "given" and given is not None:
            images, scheme = given[row], "transformed-gaussian"
        else:
            scaling = self.settings.start_scaling
            images = initialisation.draw(scheme, self.shape[0], self.shape[1:], rng, scaling)
        if isinstance(objective.labels, FixedLabels):
            return images.flatten()
        free = initialisation.draw(scheme, self.shape[0], objective.labels.shape, rng)
        return torch.cat((images.flatten(), free.flatten()))


def _better(best: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of two results, for each target the one with the lower loss; evaluations add up."""
    if not best:
        return other
    lower = (other["loss"] < best["loss"]) | (best["loss"].isnan() & ~other["loss"].isnan())
    chosen = {
        name: torch.where(lower.view(-1, *(1,) * (values.dim() - 1)), other[name], values)
        for name, values in best.items()
    }
    return {**chosen, "evaluations": best["evaluations"] + other["evaluations"]}
