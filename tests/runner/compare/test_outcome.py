"""Intervals and tests of a comparison, from rows written by hand."""

import matplotlib.figure
import pytest
from scipy import stats

from polyclinic.metrics.statistics import holm, mean_interval, paired_test
from polyclinic.runner.compare.outcome import draw, metrics_in, statistics_of
from polyclinic.tasks import TASKS

ACCURACY = {"fedavg": [0.80, 0.82, 0.79], "cwt": [0.85, 0.84, 0.86], "moon": [0.81, 0.80, 0.82]}


def rows(values: dict[str, list[float]], **more) -> list[dict]:
    return [
        {"method": method, "seed": seed, "test_accuracy": value, "mean_ks": 0.5, "seconds": 3.0, **more}
        for method, found in values.items()
        for seed, value in enumerate(found)
    ]


def test_intervals_and_tests_over_seeds():
    found = statistics_of(rows(ACCURACY), "fedavg")
    interval = mean_interval(ACCURACY["cwt"])
    cwt = found["cwt"]["test_accuracy"]
    assert (cwt["low"], cwt["high"], cwt["confidence"]) == (interval.low, interval.high, 0.95)
    plain = [stats.ttest_rel(ACCURACY[name], ACCURACY["fedavg"]).pvalue for name in ("cwt", "moon")]
    tests = [found[name]["test_accuracy"]["against_baseline"] for name in ("cwt", "moon")]
    assert [test["p"] for test in tests] == pytest.approx(plain)
    assert [test["p_holm"] for test in tests] == pytest.approx(holm(plain))
    assert tests[0]["difference"] == pytest.approx(0.14 / 3)
    assert "against_baseline" not in found["fedavg"]["test_accuracy"]
    assert list(found["cwt"]) == ["test_accuracy"]  # neither seconds nor KS


def test_runs_of_the_same_seed_are_pairs_wherever_they_stand():
    some = rows(ACCURACY)
    shuffled = [some[i] for i in (5, 0, 4, 8, 2, 6, 1, 3, 7)]
    again, once = (statistics_of(each, "fedavg")["cwt"]["test_accuracy"] for each in (shuffled, some))
    assert again["against_baseline"] == pytest.approx(once["against_baseline"])
    # without seed 0 of fedavg two pairs are left
    left = statistics_of(some[1:], "fedavg")["cwt"]["test_accuracy"]["against_baseline"]
    assert (left["n"], left["p"]) == (2, pytest.approx(paired_test([0.84, 0.86], [0.82, 0.79]).p))


def test_folds_are_corrected_for_their_overlap():
    folds = [{**row, "seed": 0, "fold": row["seed"] + 1} for row in rows(ACCURACY)]
    found = statistics_of(folds, "fedavg", 3)["cwt"]["test_accuracy"]
    expected = paired_test(ACCURACY["cwt"], ACCURACY["fedavg"], overlap=1 / 2)
    assert found["against_baseline"]["p"] == pytest.approx(expected.p)
    assert found["high"] == pytest.approx(mean_interval(ACCURACY["cwt"], overlap=1 / 2).high)


def test_one_run_a_missing_metric_or_a_failed_baseline_give_no_test():
    assert statistics_of(rows({"fedavg": [0.8], "cwt": [0.9]}), "fedavg") == {}
    alone = statistics_of(rows({"cwt": [0.9, 0.8]}), "fedavg")
    assert list(alone["cwt"]["test_accuracy"]) == ["low", "high", "confidence"]
    infinite = rows({"fedavg": [0.8, 0.7], "cwt": [0.9, float("inf")]})
    assert list(statistics_of(infinite, "fedavg")) == ["fedavg"]
    assert metrics_in([{"test_auc": 1, "mean_ks": 1, "mean_auc": 1, "seed": 0}]) == ["test_auc", "mean_auc"]


def summary(**means: float) -> dict:
    spread = {"std": 0.5, "n": 3}
    return {"methods": {name: {"test_mae": {"mean": mean, **spread}} for name, mean in means.items()}, "rows": []}


@pytest.fixture
def axes(monkeypatch):
    """The axes of what is drawn."""
    found = []
    subplots = matplotlib.figure.Figure.subplots
    monkeypatch.setattr(matplotlib.figure.Figure, "subplots", lambda self: found.append(subplots(self)) or found[-1])
    return found


def test_bars_are_the_means_and_groups_stand_side_by_side(tmp_path, axes):
    groups = {"KS 0.02": summary(fedavg=18.0, cwt=16.0), "KS 0.97": summary(fedavg=32.0), "failed": summary()}
    draw(groups, TASKS["regression"](name="regression"), tmp_path / "comparison.png", "months")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    bars = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes[0].patches)
    assert [height for _, height in bars] == [18.0, 16.0, 32.0]
    assert [place for place, _ in bars] == pytest.approx([-0.2, 0.2, 0.8])
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["KS 0.02", "KS 0.97"]
    assert axes[0].get_ylabel() == "mae, months, on test images (lower is better)"
    assert axes[0].get_title(loc="left") == "Mean of 3 runs of each method\nlines: ± standard deviation"
