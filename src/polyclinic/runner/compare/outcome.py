"""Outcome of a comparison: rows, means, intervals and tests against the baseline, `comparison.png`."""

import csv
import io
import json
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from polyclinic.errors import BadInput
from polyclinic.files import atomic_file, atomic_write
from polyclinic.json_types import JsonObject
from polyclinic.palette import LIGHT
from polyclinic.study import Study
from polyclinic.tasks.regression import IN_UNITS

if TYPE_CHECKING:
    from polyclinic.runner.compare.compare import Entry
    from polyclinic.tasks import Task


def summarise(planned: "list[Entry]", baseline: str) -> JsonObject:
    """`rows`, one for each finished run, `methods`, with mean and standard deviation over seeds and folds, and
    `statistics`, with intervals and tests against the baseline."""
    rows = [row_of(entry) for entry in planned if entry.result is not None]
    methods: JsonObject = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        named = [name for name, value in mine[0].items() if not isinstance(value, str) and name not in ("seed", "fold")]
        values = {name: [row[name] for row in mine if name in row] for name in named}
        spreads = {name: stdev(some) if len(some) > 1 else 0.0 for name, some in values.items()}
        methods[method] = {n: {"mean": fmean(v), "std": spreads[n], "n": len(v)} for n, v in values.items()}
    folds = max(entry.fold or 0 for entry in planned) or None
    tests = statistics_of(rows, baseline, folds)
    guessed = next((e.result["without_images"] for e in planned if e.result and "without_images" in e.result), None)
    about = {"without_images": guessed} if guessed else {}
    return {"methods": methods, "baseline": baseline, "statistics": tests, "rows": rows, **about}


def row_of(entry: "Entry") -> JsonObject:
    result = entry.result
    assert result is not None, "summarise only what is finished"
    row: JsonObject = {"method": entry.method, "seed": entry.seed, **({"fold": entry.fold} if entry.fold else {})}
    row |= {f"test_{name}": value for name, value in result["metrics"]["test"].items()}
    row |= {f"mean_{name}": value for name, value in result["metrics"]["mean"].items()}
    row |= {"total_bytes": result["communication"]["total_bytes"], "seconds": result["timing"]["seconds"]}
    return row | {"mean_ks": result["heterogeneity"]["mean_ks"], "weights_sha256": result["weights_sha256"]}


def write(summary: JsonObject, study: Study, out: Path) -> None:
    """`comparison.json`, `comparison.csv` with a line for each run, and `comparison_statistics.csv`."""
    content = {"study": study.as_tables(), "task": study.task.name, "metric": study.task.metric, **summary}
    atomic_write(out / "comparison.json", json.dumps(content, indent=2) + "\n")
    columns = dict.fromkeys(name for row in summary["rows"] for name in row)
    atomic_write(out / "comparison.csv", _csv(columns, summary["rows"]))
    atomic_write(out / "comparison_statistics.csv", as_csv(summary))


def _csv(columns: Iterable[str], rows: Iterable[JsonObject]) -> str:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(columns))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


#: columns of `comparison_statistics.csv`
COLUMNS = (
    *("method", "metric", "mean", "std", "n", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p", "p_holm", "pairs"),
)


#: metrics that lie between 0 and 1
SHARES = ("accuracy", "balanced_accuracy", "auc", "dice", "brier", "calibration_error")


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
        values: dict[str, dict[Hashable, float]] = {}  # the finite ones, by method, and by seed and fold
        for row in rows:
            if math.isfinite(row.get(metric, math.nan)):
                values.setdefault(row["method"], {})[row["seed"], row.get("fold", 0)] = row[metric]
        tests = compare_with_baseline({baseline: {}, **values}, baseline, overlap=overlap)
        for method, mine in values.items():
            if len(mine) > 1:
                interval = mean_interval(list(mine.values()), overlap=overlap)
                low, high = interval.low, interval.high
                if metric.partition("_")[2] in SHARES:  # Student's t knows nothing of the ends
                    low, high = max(0.0, low), min(1.0, high)
                entry = {"low": low, "high": high, "confidence": interval.confidence}
                test = {"against_baseline": asdict(tests[method])} if method in tests else {}
                found.setdefault(method, {})[metric] = entry | test
    return found


def metrics_in(rows: Iterable[JsonObject]) -> list[str]:
    """The columns of rows that are metrics: on all test images together, and the mean over sites."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(("test_", "mean_")) and name != "mean_ks"]


def as_csv(summary: JsonObject) -> str:
    """`comparison_statistics.csv`: a line for each method and metric."""
    lines = []
    for method, spreads in summary["methods"].items():
        for metric in metrics_in([spreads]):
            entry = summary["statistics"].get(method, {}).get(metric, {})
            test = entry.get("against_baseline", {})
            line = {"method": method, "metric": metric, **spreads[metric], "baseline": summary["baseline"]}
            line |= {name: entry[name] for name in ("low", "high") if entry}
            line |= {name: test[name] for name in ("difference", "p", "p_holm") if test}
            if test:
                line |= {"difference_low": test["low"], "difference_high": test["high"], "pairs": test["n"]}
            lines.append(line)
    return _csv(COLUMNS, lines)


#: how much of the width from one group of bars to the next the bars take
FILLED = 0.8


def draw(summaries: Mapping[str, JsonObject], task: "Task", file: Path, unit: str = "") -> None:
    """Draw the task's metric on the test images of all sites, mean and standard deviation over runs.

    `summaries` are those of comparisons, by the name of their group of bars; `unit` is that of the label.
    """
    from matplotlib.figure import Figure  # here: a command that draws nothing need not wait for it

    groups = {name: summary["methods"] for name, summary in summaries.items() if summary["methods"]}
    methods = list(dict.fromkeys(method for group in groups.values() for method in group))
    figure = Figure(figsize=(max(5.0, 1.5 + 0.5 * len(methods) * len(groups)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = FILLED / len(methods)
    for place, method in enumerate(methods):
        at = [number + (place - (len(methods) - 1) / 2) * width for number in range(len(groups))]
        found = [group.get(method, {}).get(f"test_{task.metric}") for group in groups.values()]
        bars = [(x, value) for x, value in zip(at, found, strict=True) if value]
        if bars:
            axes.bar(
                [x for x, _ in bars],
                [value["mean"] for _, value in bars],
                width,
                label=method,
                color=LIGHT.colour(place),
                edgecolor="white",
            )
        lines = [(x, value["mean"], value["std"]) for x, value in bars if value["n"] > 1]
        if lines:
            x, mean, std = zip(*lines, strict=True)
            axes.errorbar(x, mean, std, fmt="none", ecolor="black", capsize=3)
    # what somebody reaches who has seen no image; nothing where comparisons differ in it
    known = {(one.get("without_images") or {}).get(task.metric) for one in summaries.values()}
    value = known.pop() if len(known) == 1 else None
    if value is not None:
        axes.axhline(value, color=LIGHT.ink, linestyle="--", linewidth=1)
        words: Any = {"xycoords": "axes fraction", "ha": "right", "va": "bottom", "fontsize": 8}
        axes.annotate("dashed: a guess without images", (1, 1.01), **words)
    if len(groups) == 1:  # the names of methods stand under their bars, and no legend is needed
        places = [(place - (len(methods) - 1) / 2) * width for place in range(len(methods))]
        axes.set_xticks(places, methods, rotation=20 if len(methods) > 4 else 0)
    else:
        axes.set_xticks(range(len(groups)), list(groups))
        figure.legend(loc="outside right upper", frameon=False)
    measured = task.metric.replace("_", " ") + (f", {unit}," if unit and task.metric in IN_UNITS else "")
    axes.set_ylabel(f"{measured} on test images ({task.better} is better)")
    axes.set_title(_title(groups, task.metric), fontsize=9, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")


def _title(groups: Mapping[str, JsonObject], metric: str) -> str:
    """What the bars are, and how many runs they stand for."""
    key = f"test_{metric}"
    counts = sorted({group[method][key]["n"] for group in groups.values() for method in group if key in group[method]})
    if counts in ([], [1]):
        return "One run of each method"
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean of {runs} runs of each method\nlines: ± standard deviation"
