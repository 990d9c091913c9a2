"""What a card keeps of validation images: temperature, conformal quantiles, thresholds, and what they look like.

They are fitted where the validation images are. All thresholds and sets are of calibrated probabilities. The same
images may have chosen the released round: figures on new patients are a little worse.
"""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.volume import are_volumes
from polyclinic.errors import BadInput
from polyclinic.metrics import statistics
from polyclinic.runner.evaluate.case_scores import Cases, read_cases
from polyclinic.settings import Settings
from polyclinic.training.loop import Trainer

COVERAGES = (0.8, 0.9, 0.95)
SPECIFICITIES = (0.9, 0.95)
#: images without which a temperature says more about chance than about the model
LEAST_CASES = 10
DIGITS = 6  # significant digits that are kept: the last bits differ between machines


class Calibration(Settings):
    """What is fitted on validation images. Keys of the tables are shares as text: "0.9"."""

    cases: int = Field(ge=1, description="patients of the validation images, or images where patients are not known")
    temperature: float | None = Field(None, gt=0, description="the network's outputs are divided by it; classification")
    quantiles: dict[str, float] = Field(
        {}, description="by coverage: of conformal scores (classification), or how far intervals reach (regression)"
    )
    thresholds: dict[str, float] = Field(
        {}, description="two classes, by specificity: a probability of the second class above it is called positive"
    )

    def sets(self, probabilities: np.ndarray, coverage: float) -> np.ndarray | None:
        """The conformal set of each case, bool [N, C], of calibrated probabilities; None where there is none."""
        quantile = self.quantiles.get(share_key(coverage))
        if quantile is None or self.temperature is None:
            return None
        return statistics.ConformalSets(quantile, "adaptive", coverage).sets(probabilities)

    def reach(self, coverage: float) -> float | None:
        """How far an interval reaches to both sides of a predicted value."""
        return None if self.temperature is not None else self.quantiles.get(share_key(coverage))


def least_cases(coverage: float) -> int:
    """Patients without which there are no sets or intervals of this coverage."""
    return max(LEAST_CASES, round(coverage / (1 - coverage)))  # n cases cover n / (n + 1) at most


def share_key(share: float) -> str:
    return f"{share:g}"


def calibrate(
    like: str, said: Tensor | np.ndarray, labels: Tensor | np.ndarray, cases: np.ndarray | None
) -> Calibration | None:
    """From what a model said about validation images, the logits of classes [N, C] or values [N] in the label's unit,
    and their labels [N]; `cases` [N] says which images are of one patient.

    None where there is nothing to fit: masks, too few images, numbers that are not finite.
    """
    found, truth = np.asarray(said, np.float64), np.asarray(labels)
    first = np.arange(len(found)) if cases is None else np.unique(np.asarray(cases), return_index=True)[1]
    if like == "segmentation" or len(first) < LEAST_CASES or not np.isfinite(found).all():
        return None
    if like == "classification":
        return _of_classes(found, truth.astype(np.int64), first)
    fits = {share: statistics.ConformalIntervals.fit(found[first], truth[first], coverage=share) for share in COVERAGES}
    return Calibration(cases=len(first), quantiles=_finite({share: fit.reach for share, fit in fits.items()}))


def calibrate_on(trainer: Trainer, part: ImageSet) -> Calibration | None:
    """From the validation images of a site, with the model that the trainer holds; nothing leaves the site."""
    task = trainer.task
    if task.dense or not len(part):
        return None
    outputs = torch.cat([output.cpu() for output, _ in trainer.outputs(part)]).double()
    said = outputs if task.like == "classification" else task.predictions(outputs, trainer.target)
    return calibrate(task.like, said, part.labels, part.cases)


def calibrations_of(cases: Cases | None, sites: Iterable[str]) -> dict[str, Calibration]:
    """Of the models of a simulated run, by the site that each belongs to, or "" for the one of all sites, from what
    they said about validation images."""
    if cases is None:
        return {}
    found = {}
    for site in sites:
        own = cases.of_site(site) if site else cases
        said = own.outputs if own.like == "classification" else own.predictions
        if said is not None:
            found[site] = calibrate(own.like, said, own.labels, _patients(own))
    return {site: one for site, one in found.items() if one is not None}


def case_count(folder: Path, site: str | None) -> int | None:
    """Patients of the validation images of a run folder, or of one site; images where patients are not known, and None
    where the run kept nothing that can be read."""
    try:
        cases = read_cases(folder, "validation")
    except BadInput:
        return None
    if cases is None:
        return None
    patients = _patients(own := cases.of_site(site) if site else cases)
    return len(own) if patients is None else len(np.unique(patients))


def _patients(cases: Cases) -> np.ndarray | None:
    """A number for each patient of all sites, as each site counts its own."""
    if cases.patients is None:
        return None
    return np.unique(np.stack([cases.site, cases.patients], 1), axis=0, return_inverse=True)[1].ravel()


def _of_classes(logits: np.ndarray, labels: np.ndarray, first: np.ndarray) -> Calibration:
    # the best temperature of a model that makes no mistake is the coldest: it would never be in doubt again
    flawless = bool((logits.argmax(1) == labels).all())
    temperature = 1.0 if flawless else _rounded(statistics.fit_temperature(logits, labels))
    probabilities = statistics.apply_temperature(logits, temperature)
    fit, said = statistics.ConformalSets.fit, (probabilities[first], labels[first])
    sets = {share: fit(*said, coverage=share) for share in COVERAGES}
    thresholds: dict[float, float] = {}
    if probabilities.shape[1] == 2 == len(np.unique(labels)):  # of two classes that are both there
        ill = probabilities[:, 1]
        points = {share: statistics.sensitivity_at_specificity(ill, labels, share) for share in SPECIFICITIES}
        thresholds = {share: point.threshold for share, point in points.items()}
    quantiles = _finite({share: fit.quantile for share, fit in sets.items()})
    fitted = {"quantiles": quantiles, "thresholds": _finite(thresholds)}
    return Calibration(cases=len(first), temperature=temperature, **fitted)


def _finite(values: dict[float, float]) -> dict[str, float]:
    """By share, without those that so few cases cannot give; rounded up, so that coverage or specificity holds."""
    found = {}
    for share, value in values.items():
        if math.isfinite(value):
            nearest = _rounded(value)
            up = nearest if nearest >= value else _rounded(value + abs(value) * 10.0 ** (1 - DIGITS))
            found[share_key(share)] = up
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# --- what the images look like: three figures ---------------------------------------------------------
# By them `predict` finds a photograph among radiographs, or a black picture. They do not find a hand among chests.

#: images without which their range says little
FEWEST_LOOKED_AT = 10
#: images of a site that are looked at, and sites
MOST_IMAGES, MOST_SITES = 100, 64
#: grey levels by which an image may lie outside of the range, beside half of its width
MARGIN = 8.0
Range = tuple[int, int]


class Looks(Settings):
    """The lowest and highest figure of all images, in grey levels from 0 to 255."""

    images: int = Field(ge=1, description="validation images that were looked at")
    brightness: Range = Field(description="mean of the pixels")
    contrast: Range = Field(description="standard deviation of the pixels")
    colour: Range = Field(description="mean difference between the strongest and the weakest channel of a pixel")

    def unlike(self, image: np.ndarray, pixels: np.ndarray) -> str:
        """How an image differs, in words; nothing where it does not. `image` is prepared, uint8 [C, H, W]; `pixels` are
        those of the file, [H, W] or [H, W, 3], as preparation takes colours away."""
        found = figures(image)
        of_file = figures(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        found["colour"] = max(found["colour"], of_file["colour"])
        odd = []
        for name, value in found.items():
            low, high = getattr(self, name)
            room = MARGIN + (high - low) / 2
            if not low - room <= value <= high + room:
                odd.append(f"{name} {value:.0f}, and {low} to {high} there")
        return "; ".join(odd)


def figures(image: np.ndarray) -> dict[str, float]:
    """The figures of an image, uint8 [C, H, W]."""
    numbers = np.asarray(image, np.float32)
    spread = numbers.max(0) - numbers.min(0)
    return {"brightness": float(numbers.mean()), "contrast": float(numbers.std()), "colour": float(spread.mean())}


def looks_of(sets: Iterable[np.ndarray]) -> Looks | None:
    """The looks of the images of several sites, uint8 [N, C, H, W] each; None where there are too few, or
    they are volumes."""
    images = (one for one in itertools.islice(sets, MOST_SITES) if not are_volumes(one))
    some = (image for one in images for image in one[:MOST_IMAGES])
    found = [figures(image) for image in some]
    if len(found) < FEWEST_LOOKED_AT:
        return None
    # whole numbers: the last bits differ between machines, and tell about single images
    columns = {name: [one[name] for one in found] for name in found[0]}
    ranges = {name: (math.floor(min(some)), math.ceil(max(some))) for name, some in columns.items()}
    return Looks(images=len(found), **ranges)
