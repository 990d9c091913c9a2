"""Sections of a classification: ROC and precision-recall curves, confusion matrix, calibration, operating points."""

from typing import Any

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics import statistics
from polyclinic.metrics.roc import auc, share_interval
from polyclinic.palette import Palette, heat_map, legend, plain, tidy
from polyclinic.report.blocks import Block, Cell, Chart, Section, Table, Text, number
from polyclinic.report.evidence import RunEvidence
from polyclinic.runner.evaluate.calibration import calibrations_of
from polyclinic.runner.evaluate.case_scores import Cases
from polyclinic.runner.evaluate.case_statistics import scores_of

#: classes that curves are drawn for
MOST_CLASSES = 8
SPECIFICITIES = (0.90, 0.95)
RELIABILITY_BINS = 10


def classes_section(run: RunEvidence, cases: Cases, prevalence: float | None) -> Section:
    # of two classes the second, of more each against all others, where both kinds occur
    asked = [1] if len(run.classes) == 2 else list(range(len(run.classes)))[:MOST_CLASSES]
    positives = {c: run.classes[c] for c in asked if 0 < (cases.labels == c).sum() < len(cases)}
    blocks: list[Block]
    if positives:
        blocks = [_roc(positives, run, cases), _precision_recall(positives, cases)]
    else:
        blocks = [Text("All judged images are of one class: there is no ROC curve.")]
    blocks += [_confusion(run, cases), _calibration(run, cases)]
    if positives:
        blocks += operating_points(run, cases, positives, prevalence)
    return Section("classes", "Curves, errors and operating points", [*blocks, Text(LIMITS, "note")])


LIMITS = (
    "DeLong's interval of the AUC and those of sensitivity and specificity count every image as independent; with "
    "several images of a patient they are too narrow. The same validation images choose the round and the temperature."
)


def _roc(positives: dict[int, str], run: RunEvidence, cases: Cases) -> Chart:
    scores, two = scores_of(cases), len(run.classes) == 2
    names = {c: f"{name} against {run.classes[0] if two else 'all others'}" for c, name in positives.items()}
    curves = {c: few_points(*roc_curve(scores[:, c], cases.labels == c)) for c in positives}
    areas = {c: _area(scores[:, c], cases.labels == c) for c in positives}

    def draw(axes: Any, theme: Palette) -> None:
        axes.plot([0, 1], [0, 1], color=theme.faint, linewidth=0.8, linestyle=":")
        for i, (c, (false, true)) in enumerate(curves.items()):
            # straight lines: images with the same score come together, and the area below is the AUC
            axes.plot(false, true, label=f"{plain(names[c])}\nAUC {areas[c]}", **theme.line(i))
        axes.set_aspect("equal")
        tidy(axes, theme, x="1 - specificity", y="sensitivity")
        legend(axes, theme)

    table = Table(("class", "1 - specificity", "sensitivity"), _points_of(curves, names))
    positive = f"Positive is '{run.classes[1]}'." if two else "Each class against all others."
    return Chart("roc", "ROC curve", draw, table, f"AUC with DeLong's 95 % interval. {positive}")


def _points_of(curves: dict[int, tuple[np.ndarray, np.ndarray]], names: dict[int, str]) -> list[list[Cell]]:
    return [[names[c], float(x), float(y)] for c, points in curves.items() for x, y in zip(*points, strict=True)]


def _area(scores: np.ndarray, truth: np.ndarray) -> str:
    try:
        found = statistics.delong_interval(scores, truth)
        return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
    except BadInput:  # one positive or negative image only
        return f"{auc(scores[truth], scores[~truth]):.3f}"


def _precision_recall(positives: dict[int, str], cases: Cases) -> Chart:
    scores = scores_of(cases)
    curves = {c: few_points(*precision_recall(scores[:, c], cases.labels == c)) for c in positives}
    shares = {c: float((cases.labels == c).mean()) for c in positives}
    points = {c: average_precision(scores[:, c], cases.labels == c) for c in positives}

    def draw(axes: Any, theme: Palette) -> None:
        for i, (c, (recall, precision)) in enumerate(curves.items()):
            label = f"{plain(positives[c])}\nAP {points[c]:.3f}"
            # a step up to each point: the area below is the average precision
            axes.step(recall, precision, where="pre", label=label, **theme.line(i))
            axes.axhline(shares[c], color=theme.colour(i), linewidth=0.8, linestyle=":")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.05))
        tidy(axes, theme, x="sensitivity (recall)", y="PPV (precision)")
        legend(axes, theme)

    note = "AP is the area under the curve. A dotted line is what chance gives: the share of the class in these images."
    table = Table(("class", "recall", "precision"), _points_of(curves, positives))
    return Chart("pr", "Precision-recall curve", draw, table, note)


def _confusion(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.predictions is not None
    names, guess = run.classes, cases.predictions.argmax(1)
    counts = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(counts, (cases.labels, guess), 1)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    side = min(6.2, 2.2 + 0.6 * len(names))

    def draw(axes: Any, theme: Palette) -> None:
        heat_map(axes, theme, shares, (names, names), form=".0%")
        axes.set_xlabel("predicted", color=theme.ink, fontsize=9)
        axes.set_ylabel("true", color=theme.ink, fontsize=9)

    rows = [[name, *map(int, row)] for name, row in zip(names, counts, strict=True)]
    table, note = Table(("true \\ predicted", *names), rows), "Shares of each true class; counts are in the table."
    return Chart("confusion", "Confusion matrix", draw, table, note, (side, side))


def _calibration(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.predictions is not None
    # temperatures of the models' cards, by site, or "" for the model of all sites
    calibrations = calibrations_of(run.validation, run.sites if run.personal else [""])
    temperatures = {site: one.temperature for site, one in calibrations.items() if one.temperature is not None}
    kinds = {"as the network says": cases.predictions}
    if temperatures and cases.outputs is not None and run.split == "test":
        common = temperatures.get("")
        name = "with each site's temperature" if common is None else f"with temperature {common:.2f}"
        kinds = {f"{name}, as predict says": _warmed(cases, cases.outputs, temperatures), **kinds}
    found = {name: reliability(p, cases.labels) for name, p in kinds.items()}
    errors = {name: statistics.calibration_error(p, cases.labels) for name, p in kinds.items()}

    def draw(axes: Any, theme: Palette) -> None:
        axes.plot([0, 1], [0, 1], color=theme.faint, linewidth=0.8, linestyle=":")
        for i, (name, bins) in enumerate(found.items()):
            said, came, low, high = (np.array([row[k] for row in bins], dtype=float) for k in (0, 1, 2, 3))
            axes.errorbar(said, came, [came - low, high - came], color=theme.colour(i), fmt=theme.marker(i), capsize=2,
                          markersize=5, linewidth=1.2, label=f"{name}\nECE {errors[name]:.3f}")  # fmt: skip
        axes.set(aspect="equal", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        tidy(axes, theme, x="confidence", y="share that is right")
        legend(axes, theme)

    rows = [[name, *bin_] for name, bins in found.items() for bin_ in bins]
    table = Table(("probabilities", "mean confidence", "share right", "low", "high", "images"), rows)
    note = "Confidence is the probability of the class predicted. On the dotted line it means what it says."
    if not temperatures:
        note += " No temperature could be fitted: there are too few validation images with outputs."
    return Chart("calibration", "Calibration", draw, table, note)


def _warmed(cases: Cases, outputs: np.ndarray, temperatures: dict[str, float]) -> np.ndarray:
    """Probabilities of each image by the temperature of its model; a model without one is left as it is."""
    of_site = np.array([temperatures.get(str(site), temperatures.get("", 1.0)) for site in cases.sites])
    return statistics.apply_temperature(outputs / of_site[cases.site][:, None], 1.0)


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> list[list[Cell]]:
    """Ten bins of confidence: mean confidence, share right with its exact interval, images; filled bins only."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    place = np.clip(np.ceil(confidence * RELIABILITY_BINS).astype(int) - 1, 0, RELIABILITY_BINS - 1)
    rows: list[list[Cell]] = []
    for bin_ in np.unique(place):
        inside = place == bin_
        count, hits = int(inside.sum()), int(right[inside].sum())
        rows.append([float(confidence[inside].mean()), hits / count, *share_interval(hits, count), count])
    return rows


def operating_points(run: RunEvidence, cases: Cases, names: dict[int, str], prevalence: float | None) -> list[Block]:
    """Sensitivity at 90 and 95 % specificity, and what a result then means at a prevalence."""
    scores, rows = scores_of(cases), []
    held = run.validation if run.split == "test" else None
    for c, name in names.items():
        truth = cases.labels == c
        share = prevalence if prevalence is not None else float(truth.mean())
        choices = {f"{run.split} images": (scores[:, c], truth)}  # images that the threshold is chosen on
        if held is not None and 0 < (held.labels == c).sum() < len(held):
            choices["validation images"] = (scores_of(held)[:, c], held.labels == c)
        for wanted in SPECIFICITIES:
            for how, chosen in choices.items():
                cut = float(statistics.sensitivity_at_specificity(*chosen, wanted).threshold)
                called = scores[:, c] > cut
                sensitivity, specificity = called[truth], ~called[~truth]
                values = statistics.predictive_values(float(sensitivity.mean()), float(specificity.mean()), share)
                shares = []
                for right in (sensitivity, specificity):
                    low, high = share_interval(int(right.sum()), len(right))
                    shares.append(f"{number(right.mean())} [{number(low)}, {number(high)}]")
                rows.append([name, f"{wanted:.0%}", how, cut, *shares, float(share), *map(float, values)])
    columns = ("positive class", "wanted specificity", "threshold chosen on", "threshold", "sensitivity", "specificity",
               "prevalence", "PPV", "NPV")  # fmt: skip
    own = "the share of the class in these images (--prevalence sets another)"
    words = (
        "A threshold is on the log-odds of the class. One that is chosen on the judged images themselves is a little "
        "too good; the one to use is chosen on validation images. PPV and NPV are at "
        f"{own if prevalence is None else 'the given prevalence'}. Intervals take the threshold as given."
    )
    return [Table(columns, rows, "Operating points"), Text(words, "note")]


def _counts(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True and false positives at or above each score that occurs, from the highest down."""
    order = np.argsort(-scores, kind="stable")
    ordered, positive = scores[order], np.asarray(truth, dtype=bool)[order]
    last = np.r_[np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1]  # of each group of equal scores
    return np.cumsum(positive)[last], np.cumsum(~positive)[last]


def roc_curve(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 - specificity and sensitivity, from (0, 0) to (1, 1)."""
    true, false = _counts(scores, truth)
    return np.r_[0.0, false / false[-1]], np.r_[0.0, true / true[-1]]


def precision_recall(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision, from recall 0 up; the first point has the precision of the highest score."""
    true, false = _counts(scores, truth)
    precision = true / (true + false)
    return np.r_[0.0, true / true[-1]], np.r_[precision[0], precision]


def few_points(x: np.ndarray, y: np.ndarray, most: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points of a curve, evenly chosen, its ends among them: a page need not hold a million."""
    if len(x) <= most:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[chosen], y[chosen]


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The area under the precision-recall curve, a sum of steps (as scikit-learn has it)."""
    recall, precision = precision_recall(scores, truth)
    return float(np.sum(np.diff(recall) * precision[1:]))
