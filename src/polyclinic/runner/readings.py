"""What a model's outputs say, as rows of a table: class, probabilities, conformal set; or a value and its interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.runner.calibration import COVERAGES, Calibration, least_cases, share_key
from polyclinic.runner.model_file import Card
from polyclinic.tasks import Task

#: between the classes of a set, in a table
BETWEEN = " | "


def readings_of(
    card: Card,
    task: Task,
    calibration: Calibration | None,
    outputs: Tensor,
    coverage: float,
    specificity: float | None,
) -> list[dict[str, Any]]:
    """A row for each image of a batch; an empty one where the model draws masks."""
    _check(task, calibration, coverage, specificity)
    if task.dense:
        return [{} for _ in outputs]
    if task.like == "regression":
        return [_value(card, calibration, float(value), coverage) for value in outputs]
    return _classes(card, calibration, outputs.double().numpy(), coverage, specificity)


def why_no_set(
    task: Task, calibration: Calibration | None, coverage: float, cases: int | None, site: str | None
) -> str:
    """Why rows have no set or interval of this coverage, "" where they have one or need none; `cases` are the patients
    of the validation images, of a site where the model is its own, or None where that is not known."""
    if task.dense or (calibration and share_key(coverage) in calibration.quantiles):
        return ""
    percent, needed = _percent(coverage), least_cases(coverage)
    missing = f"set_{percent}" if task.like == "classification" else f"low_{percent} and high_{percent}"
    had = calibration.cases if calibration else cases
    if had is None or had >= needed:
        return f"no {missing}: the model has no calibration"
    return f"no {missing}: a calibration needs {needed} validation patients, {site or 'this run'} had {had}"


def _check(task: Task, calibration: Calibration | None, coverage: float, specificity: float | None) -> None:
    if coverage not in COVERAGES:
        known = ", ".join(share_key(share) for share in COVERAGES)
        raise BadInput(f"--coverage: {coverage:g} is not kept with the model; choose one of {known}")
    if specificity is None:
        return
    known = ", ".join(calibration.thresholds) if calibration else ""
    if not known:
        raise BadInput("--specificity: the model has no thresholds (two classes and a calibration); leave it out")
    if calibration and share_key(specificity) not in calibration.thresholds:
        raise BadInput(f"--specificity: {specificity:g} is not kept with the model; choose one of {known}")


def _value(card: Card, calibration: Calibration | None, value: float, coverage: float) -> dict[str, Any]:
    row = {card.unit or "value": round(value, 4)}
    reach = calibration.reach(coverage) if calibration else None
    if reach is None:
        return row
    # labels lie in this range, so that an interval without what is outside it holds the truth as often
    lowest, highest = card.label_range or (-math.inf, math.inf)
    low, high = (min(max(end, lowest), highest) for end in (value - reach, value + reach))
    return row | {f"low_{_percent(coverage)}": round(low, 4), f"high_{_percent(coverage)}": round(high, 4)}


def _classes(
    card: Card, calibration: Calibration | None, shares: np.ndarray, coverage: float, specificity: float | None
) -> list[dict[str, Any]]:
    shares = shares / shares.sum(1, keepdims=True)  # float32 sums to one only nearly
    sets = calibration.sets(shares, coverage) if calibration else None
    rows = []
    for number, of_image in enumerate(shares):
        named = {f"p({name})": round(float(p), 6) for name, p in zip(card.classes, of_image, strict=True)}
        row: dict[str, Any] = {"class": card.classes[int(of_image.argmax())], **named}
        if sets is not None:
            inside = [name for name, taken in zip(card.classes, sets[number], strict=True) if taken]
            row[f"set_{_percent(coverage)}"] = inside
        if specificity is not None and calibration is not None:
            cut = calibration.thresholds[share_key(specificity)]
            row[f"positive_{_percent(specificity)}"] = bool(of_image[1] > cut)
        rows.append(row)
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:g}"
