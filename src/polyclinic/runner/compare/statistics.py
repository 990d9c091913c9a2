"""Intervals and tests of a comparison: how sure each method's mean is, and whether it differs from the baseline's."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject

#: columns of `comparison_statistics.csv`
COLUMNS = (
    *("method", "metric", "mean", "std", "n", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p", "p_holm", "pairs"),
)


def choose_baseline(methods: list[str], baseline: str | None) -> str:
    """The method that the others are compared with: the first if none is named."""
    if baseline is not None and baseline not in methods:
        raise BadInput(f"--baseline {baseline}: is not among the methods compared; choose from {', '.join(methods)}")
    return baseline or methods[0]


def statistics_of(rows: list[JsonObject], baseline: str, folds: int | None = None) -> JsonObject:
    """By method and metric: the interval of the mean over runs, and the paired t test against the baseline.

    Runs of the same seed and fold are pairs. With folds, both are corrected for overlapping training images. Holm's
    correction is over the methods, for each metric. A metric that has fewer than two runs is left out.
    """
    from polyclinic.metrics.statistics import compare_with_baseline, mean_interval  # here: they import scipy

    overlap = 1 / (folds - 1) if folds else 0.0
    found: JsonObject = {}
    for metric in metrics_in(rows):
        values = _values(rows, metric)
        tests = compare_with_baseline({baseline: {}, **values}, baseline, overlap=overlap)
        for method, mine in values.items():
            if len(mine) > 1:
                interval = mean_interval(list(mine.values()), overlap=overlap)
                entry = {"low": interval.low, "high": interval.high, "confidence": interval.confidence}
                test = {"against_baseline": asdict(tests[method])} if method in tests else {}
                found.setdefault(method, {})[metric] = entry | test
    return found


def metrics_in(rows: Iterable[JsonObject]) -> list[str]:
    """The columns of rows that are metrics: on all test images together, and the mean over sites."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(("test_", "mean_")) and name != "mean_ks"]


def _values(rows: list[JsonObject], metric: str) -> dict[str, dict[Hashable, float]]:
    """Finite values of a metric, by method, and by seed and fold."""
    found: dict[str, dict[Hashable, float]] = {}
    for row in rows:
        if metric in row and math.isfinite(row[metric]):
            found.setdefault(row["method"], {})[row["seed"], row.get("fold", 0)] = row[metric]
    return found


def as_csv(summary: JsonObject) -> str:
    """`comparison_statistics.csv`: a line for each method and metric."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    for method, spreads in summary["methods"].items():
        for metric in metrics_in([spreads]):
            entry = summary["statistics"].get(method, {}).get(metric, {})
            test = entry.get("against_baseline", {})
            line = {"method": method, "metric": metric, **spreads[metric], "baseline": summary["baseline"]}
            line |= {name: entry[name] for name in ("low", "high") if entry}
            line |= {name: test[name] for name in ("difference", "p", "p_holm") if test}
            if test:
                line |= {"difference_low": test["low"], "difference_high": test["high"], "pairs": test["n"]}
            table.writerow(line)
    return text.getvalue()
