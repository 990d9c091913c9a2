"""Classification: ROC and precision-recall curves, confusion matrix, calibration, operating points."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import auc, share_interval
from polyclinic.metrics.statistics import (
    apply_temperature,
    calibration_error,
    delong_interval,
    predictive_values,
    sensitivity_at_specificity,
)
from polyclinic.palette import Palette
from polyclinic.report.blocks import Block, Cell, Chart, Section, Table, Text, number
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.theme import heat_map, legend, plain, tidy
from polyclinic.runner.evaluate.calibration import calibrations_of
from polyclinic.runner.evaluate.case_scores import Cases
from polyclinic.runner.evaluate.case_statistics import scores_of

#: classes of which curves show each
MOST_CLASSES = 8
SPECIFICITIES = (0.90, 0.95)
RELIABILITY_BINS = 10


def section(run: RunEvidence, prevalence: float | None) -> Section:
    cases = run.judged
    assert cases is not None, "asked for only where cases were kept"
    positives = _positives(run, cases)
    blocks: list[Block] = []
    if positives:
        blocks += [_roc(positives, run, cases), _precision_recall(positives, run, cases)]
    else:
        blocks.append(Text("All judged images are of one class: there is no ROC curve."))
    blocks += [_confusion(run, cases), *_calibration(run, cases)]
    if positives:
        blocks += operating_points(run, cases, positives, prevalence)
    blocks.append(Text(LIMITS, "note"))
    return Section("classes", "Curves, errors and operating points", blocks)


LIMITS = (
    "DeLong's interval of the AUC and those of sensitivity and specificity count every image as independent; with "
    "several images of a patient they are too narrow. The same validation images choose the round and the temperature."
)


def _positives(run: RunEvidence, cases: Cases) -> dict[int, str]:
    """Classes to draw a curve for: of two the second, of more each against all others, where both kinds occur."""
    classes = run.classes
    asked = [1] if len(classes) == 2 else list(range(len(classes)))[:MOST_CLASSES]
    return {c: classes[c] for c in asked if 0 < (cases.labels == c).sum() < len(cases)}


def _against(name: str, run: RunEvidence) -> str:
    other = run.classes[0] if len(run.classes) == 2 else "all others"
    return f"{name} against {other}"


def _roc(positives: dict[int, str], run: RunEvidence, cases: Cases) -> Chart:
    scores = scores_of(cases)
    curves = {c: few_points(*roc_curve(scores[:, c], cases.labels == c)) for c in positives}
    areas = {c: _area(scores[:, c], cases.labels == c) for c in positives}
    rows = [[_against(positives[c], run), float(f), float(t)] for c, (f, t) in curves.items()
            for f, t in zip(f, t, strict=True)]  # fmt: skip

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=theme.faint, linewidth=0.8, linestyle=":")
        for i, (c, (false, true)) in enumerate(curves.items()):
            # straight lines: images with the same score come together, and the area below is the AUC
            axes.plot(false, true, label=f"{plain(_against(positives[c], run))}\nAUC {areas[c]}", **theme.line(i))
        axes.set_aspect("equal")
        tidy(axes, theme, x="1 - specificity", y="sensitivity")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    table = Table(("class", "1 - specificity", "sensitivity"), rows)
    return Chart("roc", "ROC curve", draw, table, f"AUC with DeLong's 95 % interval. {_positive_words(run)}")


def _positive_words(run: RunEvidence) -> str:
    return f"Positive is '{run.classes[1]}'." if len(run.classes) == 2 else "Each class against all others."


def _area(scores: np.ndarray, truth: np.ndarray) -> str:
    try:
        found = delong_interval(scores, truth)
        return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
    except BadInput:  # one positive or negative image only
        return f"{auc(scores[truth], scores[~truth]):.3f}"


def _precision_recall(positives: dict[int, str], run: RunEvidence, cases: Cases) -> Chart:
    scores = scores_of(cases)
    curves = {c: few_points(*precision_recall(scores[:, c], cases.labels == c)) for c in positives}
    shares = {c: float((cases.labels == c).mean()) for c in positives}
    points = {c: average_precision(scores[:, c], cases.labels == c) for c in positives}
    rows = [[positives[c], float(r), float(p)] for c, (r, p) in curves.items() for r, p in zip(r, p, strict=True)]

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        for i, (c, (recall, precision)) in enumerate(curves.items()):
            # a step up to each point: the area below is the average precision
            axes.step(
                recall, precision, where="pre", label=f"{plain(positives[c])}\nAP {points[c]:.3f}", **theme.line(i)
            )
            axes.axhline(shares[c], color=theme.colour(i), linewidth=0.8, linestyle=":")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.05)
        tidy(axes, theme, x="sensitivity (recall)", y="PPV (precision)")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    note = (
        "AP is the area under the curve. A dotted line is what chance gives: the share of that class in these images."
    )
    return Chart("pr", "Precision-recall curve", draw, Table(("class", "recall", "precision"), rows), note)


def _confusion(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.predictions is not None
    names, guess = run.classes, cases.predictions.argmax(1)
    counts = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(counts, (cases.labels, guess), 1)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    rows: list[list[Cell]] = [[name, *map(int, row)] for name, row in zip(names, counts, strict=True)]
    side = min(6.2, 2.2 + 0.6 * len(names))

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        heat_map(axes, theme, shares, names, names, low=0, high=1, form=".0%")
        axes.set_xlabel("predicted", color=theme.ink, fontsize=9)
        axes.set_ylabel("true", color=theme.ink, fontsize=9)

    table = Table(("true \\ predicted", *names), rows)
    return Chart("confusion", "Confusion matrix", draw, table, "Shares of each true class; counts are in the table.",
                 (side, side))  # fmt: skip


def _calibration(run: RunEvidence, cases: Cases) -> list[Block]:
    assert cases.predictions is not None
    temperatures = _temperatures(run)
    kinds = {"as the model says": cases.predictions}
    if temperatures and cases.outputs is not None and run.split == "test":
        kinds[_temperature_words(temperatures)] = _warmed(cases, cases.outputs, temperatures)
    found = {name: reliability(p, cases.labels) for name, p in kinds.items()}
    errors = {name: calibration_error(p, cases.labels) for name, p in kinds.items()}
    rows = [[name, *bin_] for name, bins in found.items() for bin_ in bins]

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=theme.faint, linewidth=0.8, linestyle=":")
        for i, (name, bins) in enumerate(found.items()):
            said, came, low, high = (np.array([row[k] for row in bins], dtype=float) for k in (0, 1, 2, 3))
            axes.errorbar(said, came, [came - low, high - came], color=theme.colour(i), fmt=theme.marker(i), capsize=2,
                          markersize=5, linewidth=1.2, label=f"{name}\nECE {errors[name]:.3f}")  # fmt: skip
        axes.set_aspect("equal")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        tidy(axes, theme, x="confidence", y="share that is right")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    table = Table(("probabilities", "mean confidence", "share right", "low", "high", "images"), rows)
    note = "Confidence is the probability of the class predicted. On the dotted line it means what it says."
    if not temperatures:
        note += " No temperature could be fitted: there are too few validation images with outputs."
    return [Chart("calibration", "Calibration", draw, table, note)]


def _temperatures(run: RunEvidence) -> dict[str, float]:
    """Those of the models' cards, by site, or "" for the model of all sites."""
    found = calibrations_of(run.validation, run.sites if run.personal else [""])
    return {site: one.temperature for site, one in found.items() if one.temperature is not None}


def _temperature_words(temperatures: dict[str, float]) -> str:
    return f"with temperature {temperatures['']:.2f}" if "" in temperatures else "with each site's temperature"


def _warmed(cases: Cases, outputs: np.ndarray, temperatures: dict[str, float]) -> np.ndarray:
    """Probabilities of each image by the temperature of its model; a model without one is left as it is."""
    of_site = np.array([temperatures.get(str(site), temperatures.get("", 1.0)) for site in cases.sites])
    return apply_temperature(outputs / of_site[cases.site][:, None], 1.0)


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> list[list[Cell]]:
    """Of ten bins of confidence: mean confidence, share right with its exact interval, images; filled bins only."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    place = np.clip(np.ceil(confidence * RELIABILITY_BINS).astype(int) - 1, 0, RELIABILITY_BINS - 1)
    rows: list[list[Cell]] = []
    for bin_ in np.unique(place):
        inside = place == bin_
        count, hits = int(inside.sum()), int(right[inside].sum())
        rows.append([float(confidence[inside].mean()), hits / count, *share_interval(hits, count), count])
    return rows


def operating_points(
    run: RunEvidence, cases: Cases, positives: dict[int, str], prevalence: float | None
) -> list[Block]:
    """Sensitivity at 90 and 95 % specificity, and what a result then means at a prevalence."""
    scores, rows = scores_of(cases), []
    for c, name in positives.items():
        share = prevalence if prevalence is not None else float((cases.labels == c).mean())
        for wanted in SPECIFICITIES:
            for how, (cut, sens, spec) in _points(run, cases, scores, c, wanted).items():
                ppv, npv = predictive_values(sens[0], spec[0], share)
                rows.append(
                    [name, f"{wanted:.0%}", how, cut, _ci(sens), _ci(spec), float(share), float(ppv), float(npv)]
                )
    columns = ("positive class", "wanted specificity", "threshold chosen on", "threshold", "sensitivity", "specificity",
               "prevalence", "PPV", "NPV")  # fmt: skip
    given = (
        "the given prevalence"
        if prevalence is not None
        else "the share of the class in these images (--prevalence sets another)"
    )
    words = (
        "A threshold is on the log-odds of the class. One that is chosen on the judged images themselves is a little "
        f"too good; the one to use is chosen on validation images. PPV and NPV are at {given}. "
        "Intervals take the threshold as given."
    )
    return [Table(columns, rows, "Operating points"), Text(words, "note")]


Share = tuple[float, float, float]


def _points(
    run: RunEvidence, cases: Cases, scores: np.ndarray, c: int, wanted: float
) -> dict[str, tuple[float, Share, Share]]:
    """Threshold, sensitivity and specificity, by the images that the threshold was chosen on."""
    truth, found = cases.labels == c, {}
    held = run.validation if run.split == "test" else None
    choices = {f"{run.split} images": (scores[:, c], truth)}
    if held is not None and 0 < (held.labels == c).sum() < len(held):
        choices["validation images"] = (scores_of(held)[:, c], held.labels == c)
    for how, (chosen, chosen_truth) in choices.items():
        cut = sensitivity_at_specificity(chosen, chosen_truth, wanted).threshold
        called = scores[:, c] > cut
        found[how] = (
            float(cut),
            _share(int(called[truth].sum()), int(truth.sum())),
            _share(int((~called[~truth]).sum()), int((~truth).sum())),
        )
    return found


def _share(count: int, total: int) -> Share:
    return (count / total, *share_interval(count, total))


def _ci(share: Share) -> str:
    return f"{number(share[0])} [{number(share[1])}, {number(share[2])}]"


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
    """So many points of a curve at most, evenly chosen, its ends among them: a page need not hold a million."""
    if len(x) <= most:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[chosen], y[chosen]


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The area under the precision-recall curve, a sum of steps (as scikit-learn has it)."""
    true, false = _counts(scores, truth)
    return float(np.sum(np.diff(np.r_[0, true]) / true[-1] * true / (true + false)))
