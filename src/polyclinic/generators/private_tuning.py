"""Privacy-preserving training of a GAN (FedER, sections 3.2 and 4.2.2), in two phases.

The first trains as usual until the Fréchet distance to real images has not improved for a while. The second goes on
with a loss that drives made images away from real ones (Eq. 3 and 4), until the Fréchet distance has grown by a
factor. Any generator can be trained so that says it is `tunable` and whose model has `begin`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.generators.base import ExtraLoss, GeneratorModel, Progress, Steps, as_tensor, without_mask
from polyclinic.metrics.distribution import (
    Extractor,
    efficientnet_features,
    frechet_distance,
    inception_features,
    kernel_distance,
)
from polyclinic.metrics.networks import weights
from polyclinic.metrics.perceptual import NAMES, Distance, Pixels, perceptual_distance
from polyclinic.randomness import torch_rng
from polyclinic.settings import Settings

#: images whose pairs are compared at once, as in a batch of training
AT_ONCE = 32


#: sections 3.2 and 4.2.2 of the paper
PAPER = {
    "alpha": 1.0, "distance": "lpips-vgg", "features": "inception-fid", "scale": "sum", "patience": 10_000,
    "most_steps": 100_000, "most_tuning_steps": 100_000, "check_every": 500, "growth": 2.5,
}  # fmt: skip
#: steps of the first phase where neither [tuning] nor the generator says how many
USUAL_STEPS = 3000


class Lengths(NamedTuple):
    """Steps of the two phases, as the settings of the same names say."""

    patience: int
    most_steps: int
    most_tuning_steps: int
    check_every: int


class PrivateTuning(Settings):
    """The `[tuning]` table."""

    preset: Literal["ours", "paper"] = Field(
        "ours",
        description="paper: FedER's choices where this table does not say otherwise: distance lpips-vgg, features "
        "inception-fid, scale sum, alpha 1, patience 10,000, growth 2.5, most_steps and most_tuning_steps 100,000",
    )
    on: bool = Field(True, description="train in two phases; false: as long as the generator's own settings say")
    alpha: float = Field(1.0, ge=0, description="weight of the distance of made from real images; 0: no second phase")
    distance: Literal["efficientnet-lite0", "lpips-alex", "lpips-vgg", "pixels"] = Field(
        "efficientnet-lite0", description=f"the perceptual distance: {', '.join(NAMES)}, or pixels"
    )
    features: Literal["efficientnet-lite0", "inception-fid"] = Field(
        "efficientnet-lite0", description="network of the Fréchet distance that ends phases; inception-fid gives FID"
    )
    scale: Literal["mean", "sum"] = Field(
        "mean", description="mean over all pairs of a batch, or their sum over the batch size, as Eq. 3 is printed"
    )
    patience: int | None = Field(
        None, ge=1, description="steps without a better Fréchet distance that end phase 1; if not given, most_steps / 5"
    )
    most_steps: int | None = Field(None, ge=1, description="most steps of phase 1; generator.steps if not given")
    most_tuning_steps: int | None = Field(None, ge=1, description="most steps of phase 2; most_steps / 10 if not given")
    growth: float = Field(2.5, ge=1, description="phase 2 ends at so many times the Fréchet distance of phase 1")
    check_every: int | None = Field(
        None,
        ge=1,
        description="steps between two measurements of the Fréchet distance; the second phase is measured after 1, 2, "
        "5, 10, 20, 50, ... steps, too; a fifth of most_steps, and 500 at most, if not given",
    )
    measured: int = Field(1000, ge=20, description="images, at most, of which the Fréchet distance is measured")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return {**PAPER, **given} if isinstance(given, Mapping) and given.get("preset") == "paper" else given

    def for_steps(self, steps: int | None) -> "PrivateTuning":
        """The same for a generator with so many steps of its own, from which follows what the table does not say."""
        return self.model_copy(update={"most_steps": self.most_steps or steps})

    def lengths(self) -> Lengths:
        """How long the phases last."""
        most = self.most_steps or USUAL_STEPS
        return Lengths(
            patience=self.patience or max(1, most // 5),
            most_steps=most,
            most_tuning_steps=self.most_tuning_steps or max(1, most // 10),
            check_every=self.check_every or min(500, max(1, most // 5)),
        )

    def check_weights(self) -> None:
        """BadInput where weights are not on this machine that the distance or the features need."""
        for name in (self.distance, self.features) if self.on else ():
            if name in weights.NAMES:
                weights.find(name)


# --- the loss of Eq. 3 ----------------------------------------------------------------------------------


def mean_pairwise(real: Tensor, made: Tensor) -> Tensor:
    """The mean squared distance between vectors [N, D] and [M, D], over all pairs.

    From means alone: E|a - b|² = E|a|² + E|b|² - 2 E[a]·E[b]. Where vectors all have one length, as EffLite0's do,
    only the means of the two batches matter.
    """
    lengths = real.square().sum(1).mean() + made.square().sum(1).mean()
    return lengths - 2 * (real.mean(0) * made.mean(0)).sum()


def privacy_loss(settings: PrivateTuning, distance: Distance) -> ExtraLoss:
    """-alpha · L_PP of a batch (Eq. 4)."""

    def loss(real: Tensor, made: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = distance.embed(without_mask(real))
        apart = mean_pairwise(wanted, distance.embed(without_mask(made)))
        return -settings.alpha * apart * (len(real) if settings.scale == "sum" else 1)

    return loss


def features_named(name: str, device: torch.device) -> Extractor:
    """The features of the settings, on the device."""
    return inception_features(device=device) if name == "inception-fid" else efficientnet_features(device=device)


# --- the Fréchet distance by which phases end -----------------------------------------------------------


class Meter:
    """How far a model's images are from real ones, and from each other how far real ones are (the floor)."""

    def __init__(
        self, images: Tensor, labels: Tensor, settings: PrivateTuning, rng: torch.Generator, device: torch.device
    ) -> None:
        chosen = torch.randperm(len(images), generator=rng)[: settings.measured]
        self.extractor = features_named(settings.features, device)
        #: what the distance is called: fid with FID's own features, else fd
        self.figure = self.extractor.figure.lower()
        self.images, self.labels, self.device = without_mask(images[chosen]), labels[chosen], device
        self.real = self.extractor(self.images)
        # the same noise each time, so that a difference is the model's
        self.seed = int(torch.randint(2**62, (), generator=rng))

    def sample(self, model: GeneratorModel) -> Tensor:
        """As many made images, with the labels of the real ones."""
        return without_mask(model.sample(self.labels, torch_rng(self.seed)))

    def __call__(self, model: GeneratorModel) -> float:
        return frechet_distance(self.real, self.extractor(self.sample(model)))

    def summary(self, model: GeneratorModel) -> dict[str, float]:
        """Fréchet distance and KID, each with its floor: the same between two halves of the real images.

        Halves are smaller sets, so the floor of the Fréchet distance is compared with halves of the made ones.
        """
        made, half = self.extractor(self.sample(model)), len(self.real) // 2
        first, second = self.real[:half], self.real[half : 2 * half]
        return {
            self.figure: frechet_distance(self.real, made),
            f"{self.figure}_half": frechet_distance(first, made[half : 2 * half]),
            f"{self.figure}_floor": frechet_distance(first, second),
            "kid": kernel_distance(self.real, made),
            "kid_floor": kernel_distance(first, second),
        }

    @torch.no_grad()
    def mean_distance(self, model: GeneratorModel, distance: Distance) -> float:
        """The mean distance of pairs of real and made images: what the privacy loss raises, batch by batch."""
        total = 0.0
        for batch in zip(self.images.split(AT_ONCE), self.sample(model).split(AT_ONCE), strict=True):
            pair = [distance.embed(some.to(self.device).float() / 255) for some in batch]
            total += len(batch[0]) * float(mean_pairwise(*pair))
        return total / len(self.images)


# --- the two phases -------------------------------------------------------------------------------------


def fit(
    model: GeneratorModel,
    images: Any,
    labels: Any,
    rng: torch.Generator,
    settings: PrivateTuning,
    progress: Progress = lambda *_: None,
) -> dict[str, float]:
    """Train `model` in both phases; how long they took and how far its images are from real ones after each.

    `kept_step` is the step of phase 2 whose generator was kept: 0 where the first one measured was beyond the limit.
    `phase1_distance` and `phase2_distance` are the mean distance that the privacy loss raises.
    """
    images, labels = model.accept_images(images), as_tensor(labels)
    meter = Meter(images, labels, settings, rng, model.device)
    phases = Phases(model, model.begin(images, labels, rng), meter, settings.lengths(), progress)
    first = phases.until_it_stays()
    found = {"phase1_steps": first, **{f"phase1_{name}": value for name, value in meter.summary(model).items()}}
    if settings.alpha == 0:
        return found
    pixels = settings.distance == "pixels"
    distance = Pixels() if pixels else perceptual_distance(settings.distance, device=model.device)
    found["phase1_distance"] = meter.mean_distance(model, distance)
    limit = settings.growth * found[f"phase1_{meter.figure}"]
    found["phase2_steps"], found["kept_step"] = phases.until_it_grows(privacy_loss(settings, distance), limit)
    found |= {f"phase2_{name}": value for name, value in meter.summary(model).items()}
    return found | {"phase2_distance": meter.mean_distance(model, distance)}


def warning_about(figures: Mapping[str, float]) -> str | None:
    """What is wrong with a tuning of these figures, in a sentence with the cure; None where it did what it should."""
    if "kept_step" not in figures:
        return None
    if figures["kept_step"] == 0:
        return (
            "private tuning kept the generator of phase 1: its Fréchet distance was beyond the limit after the first "
            "step; lower tuning.alpha, or raise tuning.growth"
        )
    if figures["phase2_distance"] <= figures["phase1_distance"]:
        return (
            f"private tuning brought made images no farther from real ones (mean distance "
            f"{figures['phase1_distance']:.4g} before and {figures['phase2_distance']:.4g} after it); raise "
            "tuning.alpha or tuning.most_tuning_steps"
        )
    return None


@dataclass
class Phases:
    """The two phases of a model's training; `meter(model)` is the distance by which they end."""

    model: GeneratorModel
    steps: Steps
    meter: Callable[[GeneratorModel], float]
    lengths: Lengths
    progress: Progress = lambda *_: None

    def until_it_stays(self) -> int:
        """Phase 1: until `patience` steps brought no better distance; the model is then the best one."""
        best, best_at, kept = float("inf"), 0, self.model.state()
        taken, most = 0, self.lengths.most_steps
        while taken < most and taken - best_at < self.lengths.patience:
            count = min(self.lengths.check_every, most - taken)
            taken += count
            found = self._measured(None, count, ("generator, phase 1", taken, most))
            if found < best:
                best, best_at, kept = found, taken, self.model.state()
        self.model.load(kept)
        return taken

    def until_it_grows(self, loss: ExtraLoss, limit: float) -> tuple[int, int]:
        """Phase 2: until the distance is beyond `limit`; the model is then the last one measured within it. Steps that
        were taken, and the one whose generator was kept; 0 is the generator of phase 1."""
        kept, kept_step, taken = self.model.state(), 0, 0
        most = self.lengths.most_tuning_steps
        for wanted in measured_steps(self.lengths.check_every, most):
            found = self._measured(loss, wanted - taken, ("generator, phase 2", wanted, most))
            taken = wanted
            if found > limit:
                self.model.load(kept)
                break
            kept, kept_step = self.model.state(), taken
        return taken, kept_step

    def _measured(self, loss: ExtraLoss | None, count: int, done: tuple[str, int, int]) -> float:
        """The distance after so many steps."""
        for _ in range(count):
            self.steps.step(loss)
        found = self.meter(self.model)
        self.progress(*done, found)
        return found


def measured_steps(every: int, most: int) -> Iterator[int]:
    """Steps after which phase 2 is measured: 1, 2, 5, 10, 20, 50, ... below `every`, its multiples, and `most`.

    The privacy loss may bring a generator beyond the limit within a few steps.
    """
    early = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    yield from itertools.takewhile(lambda step: step < min(every, most), early)
    yield from range(every, most, every)
    yield most
