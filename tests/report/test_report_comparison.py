"""Reports: curves, and comparisons of runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from report_page import Page, change, charts
from sklearn import metrics as sklearn_metrics

from polyclinic.cli import run_app
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput
from polyclinic.palette import LIGHT
from polyclinic.report import classification as classes
from polyclinic.report.blocks import Chart, Table, Text, mean_of, number, shown
from polyclinic.report.classification import average_precision, precision_recall, roc_curve
from polyclinic.report.comparison import _spread, name_points, report_of_comparison
from polyclinic.report.comparison import _summary as comparison_summary
from polyclinic.report.evidence import ComparisonEvidence, Ledgers, SiteImages, open_comparison
from polyclinic.report.predictions import edge
from polyclinic.report.sites import sites_section
from polyclinic.report.write import build_report, figure_of, html_of, svg_of
from polyclinic.runner.compare import compare
from polyclinic.runner.compare.outcome import statistics_of
from polyclinic.runner.evaluate.calibration import calibrations_of
from polyclinic.runner.evaluate.case_scores import Cases


@pytest.fixture(scope="module")
def comparison(tiny, undisturbed, tmp_path_factory):
    """Two methods, two seeds; the first run of each was audited."""
    out = tmp_path_factory.mktemp("comparison")
    planned = compare.entries(tiny("fedavg", rounds=1), ["fedavg", "standalone"], 2, out, [])
    for entry in planned:
        shutil.copytree(undisturbed(entry.study).folder, entry.folder)
    for method, count in (("fedavg", 2), ("standalone", 0)):
        verdict = "leaks" if count else "withstood"
        finding = {"attack": "a", "verdict": verdict, "evidence": {"images": 8, "recovered": count}}
        audit = {"verdicts": {}, "parcels": [{"findings": [finding]}]}
        (out / f"{method}-seed0" / "audit.json").write_text(json.dumps(audit))
    compare.write(compare.summarise(planned, "fedavg"), planned[0].study, out)
    return out


def test_one_picture_has_error_recovered_images_and_bytes(comparison):
    report = build_report(comparison)
    content = json.loads((comparison / "comparison.json").read_text())
    rows = {row[0]: row[1:] for row in charts(report)["picture"].table.rows}
    for method in ("fedavg", "standalone"):
        assert rows[method][0] == pytest.approx(content["methods"][method]["test_accuracy"]["mean"])
        assert rows[method][1] == content["methods"][method]["total_bytes"]["mean"]
    assert rows["fedavg"][2] == pytest.approx(0.25)
    assert rows["standalone"][2] == 0
    drawn = svg_of(charts(report)["picture"])
    assert "fedavg (25%)" in drawn
    assert "mathdefault" not in drawn
    assert {section.key for section in report.sections} >= {"methods", "by-site", "paired", "again"}
    assert "25%" in " ".join(report.summary)
    page = Page(html_of(report))
    assert page.count("svg") == len(report.charts()) >= 5
    assert page.count("script") == 0


def test_a_model_of_each_site_is_told_from_one_of_all(comparison):
    """Each site's own images, and those of all sites; beside them what a guess reaches."""
    content = json.loads((comparison / "comparison.json").read_text())
    report = build_report(comparison)
    sections = {section.key: section for section in report.sections}
    table = sections["methods"].blocks[0]
    rows = {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    for method, own in content["methods"].items():
        assert rows[method]["accuracy, own site"].startswith(f"{own['mean_accuracy']['mean']:.3f}")
    assert rows["a guess without images"]["accuracy"] == f"{content['without_images']['accuracy']:.3f}"
    assert [row[0] for row in sections["by-site"].blocks[0].rows] == ["fedavg", "standalone (own site)"]
    assert sections["paired"].blocks[0].title == "On the same test images as fedavg"
    assert [row[0] for row in sections["paired"].blocks[0].rows] == ["standalone (own site)"]
    assert {row[0] for row in charts(report)["curves"].table.rows} == {"fedavg", "standalone (own site)"}


def test_a_warning_stands_once_whatever_its_figures(comparison):
    found = open_comparison(comparison)
    for place, run in enumerate(run for runs in found.runs.values() for run in runs):
        said = [f"the model is weak (accuracy 0.{place})", *(["few steps"] if place == 0 else [])]
        run.result["warnings"] = said
    words = report_of_comparison(found).warnings
    assert words == ["fedavg and standalone: the model is weak (accuracy 0.0)", "fedavg: few steps"]


@pytest.mark.parametrize(
    ("mean", "std", "said"),
    [(0.575, 8e-17, "0.575 ± 0.000"), (0.0002, 0.0001, "2.0e-04 ± 1.0e-04"), (15.31, 2.04, "15.3 ± 2.0")],
)
def test_a_deviation_has_the_digits_of_its_mean(mean, std, said):
    assert _spread({"mean": mean, "std": std, "n": 2}) == said


def test_names_of_points_overlap_nowhere():
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(1e3, 1e8)
    axes.set_ylim(0.4, 1.0)
    names = ("fedavg", "fedprox", "scaffold", "moon", "cwt", "analytic", "private-head", "fedreplay")
    points = {f"{name} (not attacked)": (2e6 * 1.1**n, 0.8 + 0.003 * n) for n, name in enumerate(names)}
    name_points(axes, LIGHT, {**points, "a long name of a method (100%)": (9e7, 0.8), "alone": (2e3, 0.5)})
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text).padded(-1) for text in axes.texts]  # without the lines to the points
    assert len(boxes) == len(names) + 2
    for place, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[place + 1 :])
        assert one.x1 <= figure.bbox.x1
        centres = axes.transData.transform([*points.values()])
        assert not any(one.contains(*centre) for centre in centres)
    plt.close(figure)


def test_a_mean_is_called_so_once_and_an_interval_of_shares_ends_at_1():
    assert (mean_of("mae"), mean_of("auc")) == ("mean absolute error", "mean AUC")
    rows = [{"method": "a", "seed": n, "test_auc": value, "test_mae": value} for n, value in enumerate((0.98, 1.0))]
    found = statistics_of(rows, "a")["a"]
    assert found["test_auc"]["high"] == 1.0 < found["test_mae"]["high"]
    assert found["test_auc"]["low"] == found["test_mae"]["low"] > 0.8


def test_a_comparison_whose_rows_lead_elsewhere_is_refused(comparison, tmp_path):
    content = json.loads((comparison / "comparison.json").read_text())
    content["rows"][0]["method"] = "../../etc"
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"comparison\.json: is damaged or empty"):
        build_report(tmp_path)


def fails_with(capsys, arguments: list[str]) -> str:
    assert run_app(arguments) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1, sentence
    return sentence


def test_the_command_writes_into_the_folder(copied, capsys):
    assert run_app(["report", str(copied), "--by", "subgroup", "--prevalence", "0.1", "--no-images"]) == 0
    assert str(copied / "report.html") in capsys.readouterr().out
    assert (copied / "report.html").stat().st_size > 50_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no such folder"),
        (["empty"], "is neither a run nor a comparison"),
        (["run", "--by", "age"], "--by age: the run kept no such column; choose from subgroup, site"),
        (["run", "--prevalence", "7"], "--prevalence 7.0: choose a share between 0 and 1"),
        (["run", "--out", "nowhere/page.html"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, copied, monkeypatch, capsys):
    monkeypatch.chdir(copied.parent)
    (copied.parent / "empty").mkdir()
    assert words in fails_with(capsys, ["report", *arguments])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("result.json", None),
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", '{"metrics": 3}'),
        ("study.toml", "= ="),
        ("cases/test.npz", "PK"),
        ("audit.json", '{"verdicts": 3}'),
        ("format.json", '{"format": 99}'),
    ],
)
def test_a_damaged_folder_is_one_sentence_and_nothing_is_written(file, content, copied, capsys):
    (copied / file).unlink() if content is None else (copied / file).write_text(content)
    fails_with(capsys, ["report", str(copied)])
    assert not (copied / "report.html").exists()


def test_what_fails_while_charts_are_drawn_is_one_sentence_and_nothing_is_written(copied, capsys):
    # a site without the count of a class: a table takes it, its drawing does not
    change(copied, lambda values: values["heterogeneity"]["labels"]["per_site"]["site-1"].pop())
    build_report(copied, images=False)
    assert "is damaged or was changed" in fails_with(capsys, ["report", str(copied), "--pdf", "--no-images"])
    assert not list(copied.glob("report.*"))


RNG = np.random.default_rng(1)
TRUTH = RNG.integers(0, 2, 60).astype(bool)
SCORES = (RNG.normal(size=60) + TRUTH).round(1)  # with ties


def test_curves_are_scikit_learns():
    false, true = roc_curve(SCORES, TRUTH)
    expected = sklearn_metrics.roc_curve(TRUTH, SCORES, drop_intermediate=False)
    np.testing.assert_allclose(false, expected[0])
    np.testing.assert_allclose(true, expected[1])
    assert np.trapezoid(true, false) == pytest.approx(sklearn_metrics.roc_auc_score(TRUTH, SCORES))
    recall, precision = precision_recall(SCORES, TRUTH)
    theirs = sklearn_metrics.precision_recall_curve(TRUTH, SCORES)
    points = {(round(r, 9), round(p, 9)) for r, p in zip(recall[1:], precision[1:], strict=True)}
    assert points == {(round(r, 9), round(p, 9)) for p, r in zip(theirs[0][:-1], theirs[1][:-1], strict=True)}
    assert average_precision(SCORES, TRUTH) == pytest.approx(sklearn_metrics.average_precision_score(TRUTH, SCORES))


def test_reliability_and_operating_points_by_hand():
    probabilities = np.array([[0.35, 0.65], [0.32, 0.68], [0.05, 0.95], [0.91, 0.09]])
    first, second = classes.reliability(probabilities, np.array([1, 0, 1, 0]))
    assert first[:2] == [pytest.approx(0.665), 0.5]
    assert first[4] == 2
    assert second[:2] == [pytest.approx(0.93), 1.0]
    assert second[2] == pytest.approx(0.025 ** (1 / 2))  # Clopper-Pearson: both of two are right
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
    of_run = {"split": "test", "judged": cases, "validation": None, "personal": False, "sites": ["a"]}
    run = SimpleNamespace(classes=["healthy", "ill"], **of_run)
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


def test_edges_and_cells():
    mask = np.zeros((5, 5), bool)
    mask[1:4, 1:4] = True
    expected = mask.copy()
    expected[2, 2] = False
    assert np.array_equal(edge(mask), expected)
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
    assert "No attack that rebuilds images was run; " in words
    assert "the reports of the runs have the verdicts: leaks in weights." in words
    assert "fedavg has a mean accuracy of 0.500." in words
    assert "fedavg carried 2.0 kB a run." in words
    assert "all have the same" not in words
    assert "verdicts: nothing was shown to leak." in summary_of_one(
        "fedavg", [{"verdicts": {"weights": {"verdict": "withstood"}}}]
    )
    assert "No run was attacked" in summary_of_one("fedavg", [None])
