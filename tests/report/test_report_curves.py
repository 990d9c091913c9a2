"""Sections: curves against scikit-learn, operating points and calibration by hand; sites with masks; summaries."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.palette import LIGHT
from polyclinic.report import classification as classes
from polyclinic.report.blocks import Chart, Table, Text, number, shown
from polyclinic.report.classification import average_precision, precision_recall, roc_curve
from polyclinic.report.comparison import _summary as comparison_summary
from polyclinic.report.evidence import ComparisonEvidence, Ledgers, SiteImages
from polyclinic.report.predictions import edge
from polyclinic.report.sites import sites_section
from polyclinic.report.write import figure_of
from polyclinic.runner.evaluate.calibration import calibrations_of
from polyclinic.runner.evaluate.case_scores import Cases

RNG = np.random.default_rng(1)
TRUTH = RNG.integers(0, 2, 60).astype(bool)
SCORES = (RNG.normal(size=60) + TRUTH).round(1)  # with ties


def test_the_roc_curve_is_scikit_learns():
    false, true = roc_curve(SCORES, TRUTH)
    expected = sklearn_metrics.roc_curve(TRUTH, SCORES, drop_intermediate=False)
    np.testing.assert_allclose(false, expected[0])
    np.testing.assert_allclose(true, expected[1])
    assert np.trapezoid(true, false) == pytest.approx(sklearn_metrics.roc_auc_score(TRUTH, SCORES))


def test_precision_and_recall_are_scikit_learns():
    recall, precision = precision_recall(SCORES, TRUTH)
    theirs = sklearn_metrics.precision_recall_curve(TRUTH, SCORES)
    points = {(round(r, 9), round(p, 9)) for r, p in zip(recall[1:], precision[1:], strict=True)}
    assert points == {(round(r, 9), round(p, 9)) for p, r in zip(theirs[0][:-1], theirs[1][:-1], strict=True)}
    assert average_precision(SCORES, TRUTH) == pytest.approx(sklearn_metrics.average_precision_score(TRUTH, SCORES))


def test_reliability_by_hand():
    probabilities = np.array([[0.35, 0.65], [0.32, 0.68], [0.05, 0.95], [0.91, 0.09]])
    first, second = classes.reliability(probabilities, np.array([1, 0, 1, 0]))
    assert first[:2] == [pytest.approx(0.665), 0.5]
    assert first[4] == 2
    assert second[:2] == [pytest.approx(0.93), 1.0]
    assert second[2] == pytest.approx(0.025 ** (1 / 2))  # Clopper-Pearson: both of two are right


def binary(scores: list[float], truth: list[int]) -> Cases:
    logits = np.stack([np.zeros(len(scores)), np.array(scores)], axis=1).astype(np.float32)
    shares = 1 / (1 + np.exp(-np.array(scores)))
    zeros = np.zeros(len(scores), np.int64)
    probabilities = np.stack([1 - shares, shares], axis=1)
    return Cases("classification", np.array(["a"]), zeros, np.array(truth), outputs=logits, predictions=probabilities)


def area_drawn(chart: Chart, label: str) -> float:
    """The area below a line of a chart as it is drawn, steps and all."""
    (line,) = [line for line in figure_of(chart, LIGHT).axes[0].get_lines() if label in str(line.get_label())]
    x, y = line.get_path().vertices.T
    return float(sklearn_metrics.auc(x, y))


def test_the_area_below_a_drawn_curve_is_the_figure_beside_it():
    cases = binary(SCORES.tolist(), TRUTH.astype(int).tolist())
    run = SimpleNamespace(
        split="test", judged=cases, validation=None, classes=["healthy", "ill"], personal=False, sites=["a"]
    )
    found = {block.key: block for block in classes.classes_section(run, cases, None).blocks if isinstance(block, Chart)}
    assert area_drawn(found["roc"], "AUC") == pytest.approx(sklearn_metrics.roc_auc_score(TRUTH, SCORES))
    expected = sklearn_metrics.average_precision_score(TRUTH, SCORES)
    assert area_drawn(found["pr"], "AP") == pytest.approx(expected)


def probabilities_of_calibration(run) -> list[str]:
    chart = classes._calibration(run, run.judged)
    return list(dict.fromkeys(row[0] for row in chart.table.rows))


def test_the_temperature_is_that_of_the_models_card():
    scores, truth = (4 * SCORES).tolist(), TRUTH.astype(int).tolist()
    held = binary(scores, truth)
    run = SimpleNamespace(split="test", judged=held, validation=held, personal=False, sites=["a"])
    kept = calibrations_of(held, [""])[""].temperature
    assert kept > 1.2
    used, raw = probabilities_of_calibration(run)
    assert (used, raw) == (f"with temperature {kept:.2f}, as predict says", "as the network says"), "the used one first"
    # the card of a model without a mistake has 1, and one of nine images has none
    run.validation = binary([-1.0, 1.0] * 6, [0, 1] * 6)
    assert probabilities_of_calibration(run)[0].startswith("with temperature 1.00")
    run.validation = binary(scores[:9], truth[:9])
    assert probabilities_of_calibration(run) == ["as the network says"]


def test_each_sites_own_temperature_is_used_where_it_has_a_model_of_its_own():
    cases = replace(binary([2.0, 2.0], [1, 0]), sites=np.array(["a", "b"]), site=np.array([0, 1]))
    found = classes._warmed(cases, cases.outputs, {"a": 2.0})
    np.testing.assert_allclose(found[:, 1], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-2))])


def test_operating_points_by_hand():
    # ten healthy images score 0 to 9, of which 90 % lie at or below 8; three of four ill ones lie above
    cases = binary([*range(10), 8.5, 9.5, 10, 3], [0] * 10 + [1] * 4)
    run = SimpleNamespace(split="test", validation=None, classes=["healthy", "ill"])
    table, words = classes.operating_points(run, cases, {1: "ill"}, 0.1)
    assert isinstance(table, Table)
    ninety = dict(zip(table.columns, table.rows[0], strict=True))
    assert ninety["threshold"] == pytest.approx(8)
    assert ninety["sensitivity"].startswith("0.750 [")
    assert ninety["specificity"].startswith("0.900 [")
    # Bayes: 0.75 * 0.1 / (0.75 * 0.1 + 0.1 * 0.9)
    assert ninety["PPV"] == pytest.approx(0.075 / 0.165)
    assert ninety["NPV"] == pytest.approx(0.81 / 0.835)
    assert "the given prevalence" in words.words


def test_a_threshold_of_validation_images_is_judged_on_test_images():
    test = binary([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])
    held = binary([0, 1, 2, 2.5, 9], [0, 0, 0, 0, 1])
    run = SimpleNamespace(split="test", validation=held, classes=["healthy", "ill"])
    table, _ = classes.operating_points(run, test, {1: "ill"}, None)
    row = next(row for row in table.rows if row[2] == "validation images")
    found = dict(zip(table.columns, row, strict=True))
    assert found["threshold"] == pytest.approx(2.5)
    assert found["sensitivity"].startswith("1.000")
    assert found["specificity"].startswith("0.667")
    assert found["prevalence"] == pytest.approx(0.4)


def test_an_edge_is_what_touches_the_outside():
    mask = np.zeros((5, 5), bool)
    mask[1:4, 1:4] = True
    expected = mask.copy()
    expected[2, 2] = False
    assert np.array_equal(edge(mask), expected)


def test_cells_and_csv():
    assert [shown(cell) for cell in (None, True, 1234, 0.12345, 0.00001, "a", float("nan"))] == [
        "–", "yes", "1,234", "0.123", "1.0e-05", "a", "–"
    ]  # fmt: skip
    assert number(12345.6) == "12,346"
    table = Table(("name", "n"), [["=1+1", -2], ['a "quoted", b', 3.5]])
    assert table.csv().splitlines() == ["name,n", "'=1+1,-2", '"a ""quoted"", b",3.5']


def site(name, inside):
    masks = np.zeros((4, 8, 8), np.uint8)
    masks[:, :inside] = 1
    images = ImageSet(np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64), masks)
    return SiteData(name, images, images, images)


def test_masks_without_labels_have_masked_pixels_and_no_distance_of_labels():
    found = {"a": site("a", 2), "b": site("b", 0)}
    heterogeneity = {"mean_ks": 0.0, "pairwise_ks": [[0, 0], [0, 0]], "labels": {"edges": None, "per_site": {}}}
    counts = {name: {"train": 4, "validation": 4, "test": 4} for name in found}
    result = {"heterogeneity": heterogeneity, "data": {"counts": counts, "classes": ["image"]}}
    run = SimpleNamespace(result=result, classes=["image"], sites=list(found), images=SiteImages(sites=found))
    blocks = sites_section(run).blocks
    words = " ".join(block.words for block in blocks if isinstance(block, Text))
    assert "Images have masks and no labels" in words
    assert "hardly differ" not in words
    assert not [block for block in blocks if isinstance(block, Chart)]
    assert [["a", "25.0%"], ["b", "0.0%"]] in [block.rows for block in blocks if isinstance(block, Table)]


def summary_of_one(method: str, audits: list) -> str:
    spread = {"test_accuracy": {"mean": 0.5, "n": 1}, "total_bytes": {"mean": 2000.0}}
    content = {"metric": "accuracy", "methods": {method: spread}, "rows": [{}]}
    runs = [SimpleNamespace(audit=audit, ledgers=Ledgers({}, {}), unit="") for audit in audits]
    found = ComparisonEvidence(Path("one"), content, {method: runs})
    return " ".join(comparison_summary(found))


def test_leaks_that_rebuild_no_image_are_told_and_one_method_is_not_compared():
    leak = {"verdicts": {"weights": {"verdict": "leaks"}, "scores": {"verdict": "withstood"}}, "parcels": []}
    words = summary_of_one("fedavg", [leak, None])
    assert (
        "No attack that rebuilds images was run; the reports of the runs have the verdicts: leaks in weights." in words
    )
    assert "fedavg has a mean accuracy of 0.500." in words
    assert "fedavg carried 2.0 kB a run." in words
    assert "all have the same" not in words
    assert "verdicts: nothing was shown to leak." in summary_of_one(
        "fedavg", [{"verdicts": {"weights": {"verdict": "withstood"}}}]
    )
    assert "No run was attacked" in summary_of_one("fedavg", [None])
