"""The report of a comparison, and the command."""

import json
import shutil

import pytest
from report_page import Page, change, charts

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.palette import LIGHT
from polyclinic.report.blocks import mean_of
from polyclinic.report.comparison import _spread, name_points, report_of_comparison
from polyclinic.report.evidence import open_comparison
from polyclinic.report.write import build_report, html_of, svg_of
from polyclinic.runner.compare import compare
from polyclinic.runner.compare.outcome import statistics_of


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
    for number, run in enumerate(run for runs in found.runs.values() for run in runs):
        said = [f"the model is weak (accuracy 0.{number})", *(["few steps"] if number == 0 else [])]
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
