"""The solver of gradient inversion: from parcels and public knowledge to reconstructed images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion import analytic, objective
from polyclinic.attacks.gradient_inversion.networks import prepare_for_attack
from polyclinic.attacks.gradient_inversion.priors import Prior
from polyclinic.attacks.solvers.search import allow_tf32, search
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.attacks.gradient_inversion.settings import GradientInversion
    from polyclinic.federation.ledger.parcel import Parcel


Scheme = Literal["uniform", "transformed-gaussian", "normal", "given"]
#: what is scaled to [0, 1] at once: an image, or each of its channels
Scaling = Literal["image", "channel"]


def draw(scheme: str, count: int, shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """[count, *shape]: images, or the labels of images. Of U(0, 1) ("uniform") or N(0, 1), then each scaled to [0, 1]
    by itself (images by channel if asked for); "normal" is N(0, 1) as it is (DLG)."""
    sampled = torch.rand if scheme == "uniform" else torch.randn
    made = [sampled(shape, generator=rng) for _ in range(count)]
    return torch.stack(made if scheme == "normal" else [_scale(one, scaling) for one in made])


def _scale(values: Tensor, scaling: Scaling) -> Tensor:
    """Moved and stretched so that the smallest value is 0 and the largest 1: of an image [C, H, W], or of each of its
    channels; labels have none."""
    if scaling == "channel" and values.dim() == 3:
        return torch.stack([_scale(channel, "image") for channel in values])
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)


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
    loss: objective.Loss | None = None
    label_shape: tuple[int, ...] = ()
    label_form: Literal["values", "masks"] = "values"
    training: objective.LocalTraining | None = None
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

    def __init__(self, settings: "GradientInversion", knowledge: Knowledge, *, seed: int, device: str) -> None:
        self.settings, self.knowledge = settings, knowledge
        self.seed, self.device = seed, device
        self.shape = (knowledge.batch_size, *knowledge.image_shape)
        #: the one network of all parcels, or one for each
        self.own_networks = not isinstance(knowledge.model, nn.Module)
        models = [knowledge.model] if isinstance(knowledge.model, nn.Module) else knowledge.model
        if not models:
            raise BadInput("attack: Knowledge.model is an empty list; give one network, or one for each parcel")
        self.networks = [
            prepare_for_attack(model, batch_norm=settings.batch_norm, device=device).to(settings.dtype)
            for model in models
        ]
        self._check_knowledge()

    def run(self, parcels: "Sequence[Parcel]") -> Reconstruction:
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

    def _attack_group(self, parcels: "Sequence[Parcel]", rows: range) -> dict[str, Tensor]:
        settings, known = self.settings, self.knowledge
        simulation = self._simulation(parcels, rows)
        if wrong := {parcel.kind for parcel in parcels} - {settings.kind}:
            raise BadInput(f"attack.kind: is '{settings.kind}', and there are parcels of kind '{wrong.pop()}'")
        stacked = {name: torch.stack([parcel.tensors[name] for parcel in parcels]) for name in simulation.names}
        there = {name: tensor.to(self.device, settings.dtype) for name, tensor in stacked.items()}
        observed = simulation.observe(there)
        priors = ((settings.image_prior, known.image_prior), (settings.batch_norm_prior, known.batch_norm_prior))
        problem = objective.Objective(
            simulation,
            observed,
            self._labels(observed, rows),
            image_shape=self.shape,
            distance=settings.distance_from(),
            smoothness=settings.total_variation,
            priors=[(w, prior.to(self.device, settings.dtype)) for w, prior in priors if w and prior is not None],
        )
        if settings.joined:
            return self._search(problem.of_one_point(), parcels[:1], rows[:1])
        return self._search(problem, parcels, rows)

    def _search(self, problem: objective.Objective, parcels: "Sequence[Parcel]", rows: range) -> dict[str, Tensor]:
        """The best of all restarts."""
        settings, best = self.settings, dict[str, Tensor]()
        for restart in range(settings.restarts):
            start = torch.stack([self._start(p, row, problem, restart) for p, row in zip(parcels, rows, strict=True)])
            start = start.to(self.device, settings.dtype)
            optimizer = settings.optimizer_at(start, math.prod(self.shape))
            found = search(problem, optimizer, returns=settings.returns, trajectory=settings.trajectory)
            images, label = problem.unpack(found.point)
            kept = found.trajectory
            path = kept.points[..., : math.prod(self.shape)].unflatten(2, self.shape)
            penalties = [problem.penalty(some) for some in path.unbind(1)]
            fields = {
                "images": images, "labels": label.argmax(-1) if self.knowledge.loss is None else label,
                "start": problem.unpack(start)[0], "loss": found.loss,
                "distance": found.loss - problem.penalty(images).detach(), "evaluations": found.evaluations,
                "converged": found.converged, "diverged": found.diverged, "trajectory_images": path,
                "trajectory_loss": kept.loss,
                "trajectory_distance": kept.loss - (torch.stack(penalties, 1) if penalties else 0.0),
            }  # fmt: skip
            best = _better(best, fields)
        return best

    # --- what is seen, and what is known or guessed -----------------------------------------------

    def _simulation(self, parcels: "Sequence[Parcel]", rows: range) -> objective.Simulation:
        """A site that sends what these parcels hold: gradients or weights of some of the network's parameters."""
        sent = {name for name in parcels[0].tensors if all(name in parcel.tensors for parcel in parcels)}
        shapes = {name: weight.shape for name, weight in self.networks[0].named_parameters() if name in sent}
        if not shapes:
            raise BadInput("attack: the parcels hold no parameter of the network; is it the one that the site trained?")
        for name, shape in shapes.items():
            if any(parcel.tensors[name].shape != shape for parcel in parcels):
                raise BadInput(f"attack: '{name}' has other shapes in the parcels than in the network, {tuple(shape)}")
        training = self.knowledge.training if self.settings.kind == "weights" else None
        loss = self.knowledge.loss or objective.cross_entropy
        if self.own_networks:
            models = [self.networks[row] for row in rows]
            return objective.StackedSimulation(models, loss, names=list(shapes), training=training)
        return objective.Simulation(self.networks[0], loss, names=list(shapes), training=training)

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
        if self.own_networks and len(self.networks) != count:
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

    def _labels(self, observed: dict[str, Tensor], rows: range) -> objective.FreeLabels | objective.FixedLabels:
        known, rule = self.knowledge, self.settings.label
        classes = known.classes if known.loss is None else None
        if rule == "joint":
            if classes is None:
                return objective.FreeLabels(known.label_shape, known.label_form)
            return objective.FreeLabels((classes,))
        if rule == "known":
            assert known.labels is not None  # checked before
            values = known.labels[rows.start : rows.stop].to(self.device)
        else:
            values = self._read_labels(observed, rows)
        one_hot = values if classes is None else F.one_hot(values.long(), classes).to(self.settings.dtype)
        return objective.FixedLabels(one_hot)

    def _read_labels(self, observed: dict[str, Tensor], rows: range) -> Tensor:
        """Labels [N, B] from the gradients of the last layer."""
        layer = analytic.last_linear(self.networks[0])
        if f"{layer}.weight" not in observed:
            raise BadInput(f"attack.label: the parcels lack '{layer}.weight', which gives labels away; use 'joint'")
        if self.settings.label == "sign":
            return analytic.label_by_sign(observed, layer)[:, None]
        size = self.knowledge.batch_size
        if not self.own_networks:
            return analytic.as_labels(analytic.counts(observed, self.networks[0], layer, size))
        singles = [{name: tensor[i : i + 1] for name, tensor in observed.items()} for i in range(len(rows))]
        pairs = zip(singles, rows, strict=True)
        counts = [analytic.counts(single, self.networks[row], layer, size) for single, row in pairs]
        return analytic.as_labels(torch.cat(counts))

    def _start(self, parcel: "Parcel", row: int, problem: objective.Objective, restart: int) -> Tensor:
        """A target's start [D]: its images, then its free labels."""
        rng = torch_rng(self.seed, "gradient inversion", parcel.digest, restart)
        given, scheme = self.knowledge.start_images, self.settings.start
        if scheme == "given" and given is not None:
            images, scheme = given[row], "transformed-gaussian"
        else:
            images = draw(scheme, self.shape[0], self.shape[1:], rng, self.settings.start_scaling)
        if isinstance(problem.labels, objective.FixedLabels):
            return images.flatten()
        free = draw(scheme, self.shape[0], problem.labels.shape, rng)
        return torch.cat((images.flatten(), free.flatten()))


def _better(best: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of two results, for each target the one with the lower loss; evaluations add up."""
    if not best:
        return other
    lower = (other["loss"] < best["loss"]) | (best["loss"].isnan() & ~other["loss"].isnan())
    where = {name: lower.view(-1, *(1,) * (values.dim() - 1)) for name, values in best.items()}
    chosen = {name: torch.where(where[name], other[name], values) for name, values in best.items()}
    return {**chosen, "evaluations": best["evaluations"] + other["evaluations"]}
