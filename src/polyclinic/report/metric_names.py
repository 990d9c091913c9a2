"""Names and definitions of metrics and other terms, and numbers with units."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from polyclinic.report.blocks import number

METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "loss": "loss",
    "brier": "Brier score",
    "calibration_error": "calibration error (ECE)",
    "mae": "mean absolute error",
    "rmse": "root mean square error",
    "bias": "bias",
    "dice": "Dice",
    "hausdorff95": "Hausdorff distance (95 %)",
    "average_surface_distance": "average surface distance",
}
#: metrics of which a lower value is better
LOWER = {"loss", "brier", "calibration_error", "mae", "rmse", "hausdorff95", "average_surface_distance"}
#: metrics in the unit of the label
IN_UNIT = {"mae", "rmse", "bias"}
IN_PIXELS = {"hausdorff95", "average_surface_distance"}

#: terms that are explained on hover and focus, longest first where one is in another
DEFINITIONS = {
    "balanced accuracy": "The mean over classes of the share of that class's images that the model gets right.",
    "AUC": "The probability that an ill patient's image gets a higher score than a healthy one's. 0.5 is chance.",
    "AP": "Average precision: the area under the precision-recall curve.",
    "Brier score": "The mean squared error of probabilities. 0 is perfect.",
    "calibration error": "How far stated probabilities lie from how often they come true, on average over bins.",
    "ECE": "Expected calibration error: how far stated probabilities lie from how often they come true, over 15 bins.",
    "temperature": "One number by which all outputs are divided so that probabilities fit the validation images.",
    "sensitivity": "The share of ill patients' images that the model calls ill.",
    "specificity": "The share of healthy patients' images that the model calls healthy.",
    "PPV": "Positive predictive value: the share of positive results that are right, at a given prevalence.",
    "NPV": "Negative predictive value: the share of negative results that are right, at a given prevalence.",
    "prevalence": "The share of all patients who have the disease.",
    "Dice": "Twice the overlap of predicted and true mask, divided by the sum of both areas. 1 is perfect.",
    "Hausdorff distance": "How far the outlines lie apart at most, without the worst 5 % of points.",
    "average surface distance": "The mean distance between the two outlines.",
    "KS": "Kolmogorov-Smirnov statistic of two sites' labels. 0: same distribution; 1: they do not overlap.",
    "Bland-Altman": "Differences of predicted and true values against their mean, with bias and limits of agreement.",
    "limits of agreement": "Between them lie 95 % of all differences, if differences are normal.",
    "bootstrap": "Patients are drawn again and again with replacement; the spread of the results is the interval.",
    "95 % interval": "Made so that 95 of 100 such intervals hold the true value.",
    "epsilon": "What differential privacy spends: the smaller, the less any one image can change what left.",
    "delta": "The small probability with which the promise of epsilon may fail.",
    "ledger": "A site's own record of everything that left it; each line is chained to the one before it.",
    "parcel": "One thing that left or reached a site, of a declared kind, such as weights or metrics.",
    "PSNR": "Likeness of two images in decibels: the higher, the more alike.",
    "membership inference": "An attack that tells whether a given image was among the training images.",
    "McNemar": "A test of whether two classifiers are right equally often on the same images.",
    "DeLong": "A test of whether two models have the same AUC on the same images.",
    "Holm": "A correction of p values for the number of tests.",
}


def name_of_images(data: object, source: str) -> str:
    """Name of a study's images in a title: the name of their file or folder, else of their source."""
    path = data.get("path") if isinstance(data, Mapping) else None
    return (PurePath(path).name if isinstance(path, str) else "") or source


def metric_name(name: str) -> str:
    """The name of a metric for people."""
    return METRICS.get(name, name.replace("_", " "))


def with_unit(name: str, value: float, unit: str = "") -> str:
    """A metric's value, with the unit where it has one."""
    found = unit if name in IN_UNIT else "pixels" if name in IN_PIXELS else ""
    return f"{number(value)} {found}".rstrip()


def with_interval(name: str, entry: Mapping[str, float], unit: str = "") -> str:
    """`0.912 (95 % interval 0.87 to 0.94)`; a bootstrap without width says nothing about new images."""
    if entry["low"] == entry["high"]:
        return f"{with_unit(name, entry['value'], unit)} (too few images for an interval)"
    return f"{with_unit(name, entry['value'], unit)} (95 % interval {number(entry['low'])} to {number(entry['high'])})"


def listed(names: list[str], most: int = 8) -> str:
    """`a, b and c`; of many names the first few and how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 site`, `3 sites`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
