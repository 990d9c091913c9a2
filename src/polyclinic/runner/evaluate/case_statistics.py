"""Intervals and calibration of a run's test metrics, for `result.json`, from what it kept of each image."""

import contextlib

import numpy as np
import torch

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.metrics import statistics
from polyclinic.metrics.roc import CONFIDENCE
from polyclinic.metrics.statistics.intervals import WeightedMetrics
from polyclinic.metrics.statistics.significance import delong_test
from polyclinic.runner.evaluate.case_scores import Cases, mean_over_structures
from polyclinic.tasks.classification import margins
from polyclinic.tasks.segmentation import dice
from polyclinic.tasks.volume_segmentation import SCORES

DRAWS = 1000
#: patients below which an interval would say little, and none is given
FEWEST = 10
#: patients above which the correction for skewness (BCa) takes longer than it is worth
MOST_CORRECTED = 1000
CALIBRATION = ("calibration_error", "brier")


def statistics_of_cases(cases: Cases, split: str) -> JsonObject:
    """`intervals` and, for classes, `calibration`: tables of `metrics` in `result.json`."""
    parts = {"": cases} | {name: cases.of_site(name) for name in cases.sites.tolist()}
    found = {name: intervals_of(part, (split, name)) for name, part in parts.items() if len(part)}
    plain = {name: metrics_of(part) for name, part in parts.items() if len(part)}
    tables: JsonObject = {
        "intervals": {
            "split": split,
            "confidence": CONFIDENCE,
            "draws": DRAWS,
            "unit": "image" if cases.patients is None else "patient",
            "pooled": _plain(found.pop("", {})),
            "per_site": {name: _plain(some) for name, some in found.items() if some},
        }
    }
    if cases.like == "classification":
        chosen = {name: {metric: some[metric] for metric in CALIBRATION} for name, some in plain.items()}
        tables["calibration"] = {"split": split, "pooled": chosen.pop("", {}), "per_site": chosen}
    return tables


def _plain(intervals: dict[str, statistics.Interval]) -> JsonObject:
    return {name: {"value": one.value, "low": one.low, "high": one.high} for name, one in intervals.items()}


def intervals_of(cases: Cases, address: tuple[str | int, ...], draws: int = DRAWS) -> dict[str, statistics.Interval]:
    """The metrics of cases with bootstrap intervals by patient; none where there are fewer than ten patients.

    `address` names the draws. Up to 1,000 patients intervals are BCa, with more of them percentiles.
    """
    patients = len(cases) if cases.patients is None else len(np.unique(cases.patients))
    if patients < FEWEST:
        return {}
    return statistics.weighted_bootstrap(
        weighted_metrics(cases),
        len(cases),
        patients=cases.patients,
        address=("cases", *address),
        draws=draws,
        kind="bca" if patients <= MOST_CORRECTED else "percentile",
    )


def changes_of(cases: Cases, before: Cases, address: tuple[str | int, ...], draws: int = DRAWS) -> JsonObject:
    """How much larger each metric of one model is than that of another one on the same cases: paired, by patient, and
    DeLong's test of two binary AUCs. Nothing where there are fewer than ten patients."""
    if len(cases) != len(before) or not np.array_equal(cases.labels, before.labels):
        raise BadInput("statistics: two models are compared on the same cases, with the same classes")
    now, then = weighted_metrics(cases), weighted_metrics(before)

    def differences(weights: np.ndarray) -> dict[str, np.ndarray]:
        first, second = now(weights), then(weights)
        return {name: first[name] - second[name] for name in first if name in second}

    patients = len(cases) if cases.patients is None else len(np.unique(cases.patients))
    if patients < FEWEST:
        return {}
    where = ("cases", "changes", *address)
    found = _plain(
        statistics.weighted_bootstrap(differences, len(cases), patients=cases.patients, address=where, draws=draws)
    )
    if cases.like == "classification" and cases.predictions is not None and cases.predictions.shape[1] == 2:
        with contextlib.suppress(BadInput):  # too few of a class
            test = delong_test(scores_of(cases)[:, 1], scores_of(before)[:, 1], cases.labels)
            found["auc by DeLong"] = {"value": test.difference, "low": test.low, "high": test.high, "p": test.p}
    return found


def metrics_of(cases: Cases) -> dict[str, float]:
    """The metrics of cases; those that these cases do not define are left out."""
    found = {name: float(values[0]) for name, values in weighted_metrics(cases)(np.ones((1, len(cases)))).items()}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def weighted_metrics(cases: Cases) -> WeightedMetrics:
    """The metrics of the cases' task, of many draws at once."""
    if cases.like == "classification":
        assert cases.predictions is not None
        return statistics.classification_metrics(cases.predictions, cases.labels, scores_of(cases))
    if cases.like == "regression":
        assert cases.predictions is not None
        return statistics.regression_metrics(cases.predictions, cases.labels)
    return statistics.mean_metrics(_of_masks(cases))


def scores_of(cases: Cases) -> np.ndarray:
    """What ranks images for each class, float64 [N, C]: the margins of the logits, which do not round to 1."""
    if cases.outputs is None or cases.outputs.shape[1] < 2:
        if cases.predictions is None:
            raise BadInput("cases: there are no probabilities to rank images by")
        return cases.predictions
    return margins(torch.from_numpy(cases.outputs.astype(np.float64))).numpy()


def _of_masks(cases: Cases) -> dict[str, np.ndarray]:
    """Dice of each patient, at the patient's first image; distances between outlines of each image."""
    if cases.scores is not None and cases.structures is not None:
        whole, named = mean_over_structures(cases.scores), enumerate(cases.structures.tolist())
        parts = {f"_{name}": cases.scores[:, number] for number, name in named}
        columns = {
            f"{score}{end}": rows[:, i] for end, rows in {"": whole, **parts}.items() for i, score in enumerate(SCORES)
        }
        return {name: values for name, values in columns.items() if np.isfinite(values).any()}
    assert cases.areas is not None
    patients = np.arange(len(cases)) if cases.patients is None else cases.patients
    _, first, member = np.unique(patients, return_index=True, return_inverse=True)
    areas = np.zeros((len(first), 3))
    np.add.at(areas, member.reshape(-1), cases.areas)
    found = np.full(len(cases), np.nan)
    found[first] = dice(torch.from_numpy(areas)).numpy()
    values = {"dice": found}
    if cases.distances is not None and np.isfinite(cases.distances).any():
        values |= {"hausdorff95": cases.distances[:, 0], "average_surface_distance": cases.distances[:, 1]}
    return values
