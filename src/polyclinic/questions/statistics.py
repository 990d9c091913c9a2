"""Statistics that a site computes from its own cases, and tells coarsely: intervals, DeLong's and paired tests,
calibration, sub-groups (`metrics/statistics/disclosure.py`). Studies ask for them with `evaluation.statistics`."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefused
from polyclinic.federation.federation import Weights
from polyclinic.federation.layers.leaving import was_scored
from polyclinic.files import atomic_write
from polyclinic.json_types import JsonObject
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.method import Parcel, ParcelRejected, Reply, Site, operation
from polyclinic.metrics.statistics import disclosure, intervals
from polyclinic.metrics.statistics.significance import Difference, delong_interval, delong_test
from polyclinic.tasks.classification import margins
from polyclinic.tasks.segmentation import dice
from polyclinic.tasks.task import MOST_IMAGES

#: metrics whose rounding does not follow from one patient's share, and are not told
NOT_TOLD = ("loss",)
#: metrics that a class of few patients decides
OF_CLASSES = ("auc", "balanced_accuracy")
#: begins the name of a difference between the released model and the one that the study began with, or between two
#: models that were brought
CHANGE = "change of "
#: in a deployed site's folder: the model whose statistics were told
TOLD = "statistics_told.json"
#: histograms of counts; and whether a class has enough images to be told of
HISTOGRAMS, CLASSES = ("bins", "right"), "classes told"
#: metrics in the unit of labels, and what no figure of theirs exceeds; others are shares, whose rounded ends reach 10
OF_LABELS, MOST_OF_LABELS, MOST = ("mae", "rmse", "bias"), 1e9, 20.0
#: without a sign, so that chance widens it: all draws of its bootstrap may lie above it
UPWARDS = "calibration_error"
#: letters of a name that is told
LONGEST = 120


@dataclass(frozen=True)
class Scored:
    """Metrics of a model on images of a site. `ranks`: what a binary model ranks images by."""

    metrics: intervals.WeightedMetrics
    ranks: np.ndarray | None = None
    #: for the calibration
    probabilities: np.ndarray | None = None
    bounds: Mapping[str, float] | None = None


class SafeStatistics:
    """The operation, for studies that ask for it at the end of a run (`evaluation.statistics`)."""

    def __init__(self, first_weights: Callable[[str], Weights | None], rounds: int, *, ends_early: bool) -> None:
        self.first_weights, self.rounds, self.ends_early = first_weights, rounds, ends_early

    @operation("statistics", splits=("test",))
    def give_statistics(self, site: Site, weights: Weights, own: str = "none") -> Parcel:
        """Intervals, tests and a coarse calibration of the finished model on the site's test images; no score of an
        image."""
        part = site.data.test
        if not len(part):
            return Parcel("statistics", {})
        if site.secret and site.round != self.rounds and not self.ends_early:
            raise ParcelRejected(f"statistics are told after the last round, and round {site.round} came")
        if site.secret and self.ends_early and not was_scored(site):  # whose last round is not known before
            raise ParcelRejected("statistics are told of the finished model, after its test scores")
        tell_once(site, weights, own)
        model = local_training.assemble(site, weights, own)
        tensors = told_about(site, part, model)
        first = self.first_weights(site.name)
        if first is None or first.keys() != model.keys():
            return Parcel("statistics", tensors)
        if not all(torch.equal(first[name].cpu(), model[name].cpu()) for name in model):
            tensors |= changes_between(site, part, model, first)
        return Parcel("statistics", tensors)


def tell_once(site: Site, weights: Weights, *question: str) -> None:
    """A deployed site tells the statistics of one model, asked in one way, in a run: two could be subtracted."""
    if not site.secret:
        return
    asked = [Parcel("weights", dict(weights)).digest, *question]
    path = site.folder / TOLD
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else asked
    if before != asked:
        raise GateRefused("statistics of another model were told in this run; there is one of each run")
    atomic_write(path, json.dumps(asked), private=True, durable=True)


def told_about(site: Site, part: ImageSet, weights: Weights, by: Sequence[str] = ()) -> dict[str, Tensor]:
    """Intervals of all metrics, DeLong's of a binary AUC, the calibration, and the same metrics of sub-groups."""
    least, scored, labels = site.min_cohort, score(site, part, weights), np.asarray(part.labels)
    found = told_intervals(scored, part, least)
    if scored.probabilities is not None:
        bins, right = disclosure.calibration_counts(scored.probabilities, labels, least, part.cases)
        classes = [people_of(part)[labels == one] for one in range(scored.probabilities.shape[1])]
        enough = [int(len(np.unique(some)) >= max(least, 1)) for some in classes]
        found |= {"bins": torch.from_numpy(bins), "right": torch.from_numpy(right), CLASSES: torch.tensor(enough)}
    if scored.ranks is not None:
        found |= _delong("auc by DeLong", partial(delong_interval, scored.ranks, labels), scored, part, least)
    for column in by:
        found |= _subgroups(site, part, weights, column)
    return found


def told_intervals(scored: Scored, part: ImageSet, least: int, prefix: str = "") -> dict[str, Tensor]:
    paired = prefix == CHANGE
    told = disclosure.safe_intervals(scored.metrics, len(part), part.cases, least, scored.bounds, paired=paired)
    small = scored.probabilities is not None and disclosure.smallest_class(np.asarray(part.labels), part.cases) < least
    left_out = (*NOT_TOLD, *OF_CLASSES) if small else NOT_TOLD
    return {prefix + name: _row(one) for name, one in told.items() if name not in left_out}


def changes_between(site: Site, part: ImageSet, weights: Weights, before: Weights) -> dict[str, Tensor]:
    """Each metric less that of the model before, on the same cases (paired, by patient), and
    DeLong's paired test of two binary AUCs."""
    least, now, then = site.min_cohort, score(site, part, weights), score(site, part, before)

    def differences(draws: np.ndarray) -> dict[str, np.ndarray]:
        first, second = now.metrics(draws), then.metrics(draws)
        return {name: first[name] - second[name] for name in first}

    bounds = {name: 2 * (now.bounds or {}).get(name, 1.0) for name in now.metrics(np.ones((1, len(part))))}
    both = replace(now, metrics=differences, bounds=bounds)
    found = told_intervals(both, part, least, CHANGE)
    if now.ranks is not None and then.ranks is not None:
        ranks, labels = (now.ranks, then.ranks), np.asarray(part.labels)
        found |= _delong(f"{CHANGE}auc by DeLong", partial(delong_test, *ranks, labels), both, part, least)
    return found


def score(site: Site, part: ImageSet, weights: Weights) -> Scored:
    """Metrics of a model on a part of the site's images."""
    trainer: Any = site.trainer
    trainer.load(weights)
    if trainer.task.dense:
        return Scored(intervals.mean_metrics({"dice": _dice_of_patients(trainer, part)}))
    outputs = torch.cat([output.cpu() for output, _ in trainer.outputs(part)]).double()
    if site.min_cohort:  # a brought model may say numbers that no label has, of which one image's would fill the mean
        outputs = trainer.task.bounded(outputs, trainer.target)
    said, labels = trainer.task.predictions(outputs, trainer.target).numpy(), np.asarray(part.labels)
    if trainer.task.like == "classification":
        ranks = margins(outputs).numpy()
        two = ranks[:, 1] if ranks.shape[1] == 2 else None
        bounds = disclosure.bounds_of_classes(labels, part.cases, said.shape[1])
        return Scored(intervals.classification_metrics(said, labels, ranks), two, said, bounds)
    low, high = trainer.target.label_range or (float(labels.min()), float(labels.max()))
    most = (high - low) * disclosure.largest_share(part.cases, len(part))
    bounds = {"mae": most, "bias": most, "rmse": most * len(part) ** 0.5}
    return Scored(intervals.regression_metrics(said, labels), bounds=bounds)


def _dice_of_patients(trainer: Any, part: ImageSet) -> np.ndarray:
    """Dice of each patient, at the patient's first image; NaN at the others."""
    areas = []
    for output, target in trainer.outputs(part):
        predicted, true = trainer.task.predictions(output, trainer.target)[:, None] > 0.5, target > 0.5
        areas.append(torch.stack([mask.sum((1, 2, 3)) for mask in (predicted & true, predicted, true)], 1).cpu())
    _, first, member = np.unique(people_of(part), return_index=True, return_inverse=True)
    sums = np.zeros((len(first), 3))
    np.add.at(sums, member.reshape(-1), torch.cat(areas).numpy())
    found = np.full(len(part), np.nan)
    found[first] = dice(torch.from_numpy(sums)).numpy()
    return found


def _delong(
    name: str, find: Callable[[], intervals.Interval | Difference], scored: Scored, part: ImageSet, least: int
) -> dict[str, Tensor]:
    """The value and ends that `find` gives, rounded; nothing of too few patients."""
    patients, bounds = len(np.unique(people_of(part))), scored.bounds or {}
    in_class, paired = disclosure.smallest_class(np.asarray(part.labels), part.cases), name.startswith(CHANGE)
    if patients < max(disclosure.FEWEST, least) or in_class < least:
        return {}
    try:
        told = disclosure.rounded_interval(astuple(find())[:3], bounds["auc"], patients, least, paired=paired)
    except BadInput:  # too few of a class
        return {}
    return {name: _row(told)} if np.isfinite(told).all() else {}


def _subgroups(site: Site, part: ImageSet, weights: Weights, column: str) -> dict[str, Tensor]:
    """Metrics of each value of a column that enough patients have. Where those that are left out have too few patients
    together, so is the smallest of the others: what all images together say would give them away."""
    names = list(site.data.column_names)
    if part.columns is None or column not in names:
        return {}
    values = np.asarray(part.columns)[:, names.index(column)]
    groups = {str(value): part.take(values == value) for value in np.unique(values)}
    people = [people_of(some) for some in groups.values()]
    enough = [len(np.unique(some)) >= disclosure.FEWEST for some in people]
    if site.min_cohort:
        enough = disclosure.told_cells(people, max(disclosure.FEWEST, site.min_cohort)).tolist()
    found: dict[str, Tensor] = {}
    for value, some in itertools.compress(groups.items(), enough):
        found |= told_intervals(score(site, some, weights), some, site.min_cohort, f"{column} = {value}: "[:LONGEST])
    return found


def people_of(part: ImageSet) -> np.ndarray:
    """The patient of each image; where nobody says, each is of a patient of its own."""
    return np.arange(len(part)) if part.cases is None else np.asarray(part.cases)


def _row(one: Sequence[float]) -> Tensor:
    return torch.tensor(one, dtype=torch.float64)


# --- what the coordinator makes of it -------------------------------------------------------------------


def check_told(tensors: Mapping[str, Tensor], classes: int) -> None:
    """ParcelRejected for what is no interval and no histogram."""
    for name, tensor in tensors.items():
        if name == CLASSES:
            wanted: tuple[Any, tuple[int, ...]] = (torch.int64, (classes,))
        else:
            wanted = (torch.int64, (disclosure.BINS,)) if name in HISTOGRAMS else (torch.float64, (4,))
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        if (tensor.dtype, tuple(tensor.shape)) != wanted or not finite or len(name) > 2 * LONGEST:
            raise ParcelRejected(f"statistics: '{name[:40]}' is no interval and no histogram")
        if not (_plausible(name, tensor.tolist()) if tensor.is_floating_point() else _counted(name, tensors)):
            raise ParcelRejected(f"statistics: '{name[:40]}' has numbers that no images have")


def _plausible(name: str, interval: Sequence[float]) -> bool:
    """True where images can have this interval: ends around the value, a variance that their distance allows."""
    value, low, high, variance = interval
    most = MOST_OF_LABELS if name.endswith(OF_LABELS) else MOST
    if not max(abs(value), abs(low), abs(high)) <= most:
        return False
    slack = 1e-6 * max(1.0, abs(value))
    around = low - slack <= value <= high + slack or name.endswith(UPWARDS)
    return around and low <= high and 0 <= variance <= (high - low) ** 2 + slack**2


def _counted(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """True where whole numbers are 0 or 1 of each class, or counts of images: all of a bin, and those right."""
    if name == CLASSES:
        return bool(((tensors[name] == 0) | (tensors[name] == 1)).all())
    bins, right = (tensors.get(one) for one in HISTOGRAMS)
    if bins is None or right is None or bins.shape != right.shape:
        return False
    return bool(((right >= 0) & (right <= bins) & (bins <= MOST_IMAGES)).all())


def joined(replies: Sequence[Reply], classes: Sequence[str] = ()) -> JsonObject:
    """Statistics of the sites, of each and of the mean over them, with p values of what differs from zero."""
    told = {reply.site: dict(reply.parcel("statistics").tensors) for reply in replies}
    per_site = {site: {n: t.tolist() for n, t in one.items() if t.is_floating_point()} for site, one in told.items()}
    mean = {
        name: disclosure.mean_of_sites({site: one[name] for site, one in per_site.items() if name in one})
        for name in sorted({name for one in per_site.values() for name in one})
    }
    counts = {site: {n: one[n].tolist() for n in HISTOGRAMS if n in one} for site, one in told.items()}
    notes = []
    for site, one in told.items():
        known = one[CLASSES].tolist() if CLASSES in one else []
        if gone := [name for name, enough in zip(classes, known, strict=False) if not enough]:
            notes.append(f"site '{site}' has no test image of {', '.join(gone)}, or too few")
    return {
        "columns": ["value", "low", "high", "variance"],
        "per_site": per_site,
        "mean": mean,
        "p_of_change": {name: _p(one) for name, one in mean.items() if name.startswith(CHANGE)},
        "calibration": counts,
        "notes": notes,
    }


def _p(interval: Sequence[float]) -> float:
    """Two-sided, by the normal distribution; 1 where nothing varies and nothing differs."""
    if interval[3] <= 0:
        return 1.0 if interval[0] == 0 else 0.0
    return math.erfc(abs(interval[0]) / math.sqrt(2 * interval[3]))
