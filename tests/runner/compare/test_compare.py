"""Comparisons: the tables of each method, those that presets name in their first lines, intervals, tests and bars."""

import itertools
import json
import re
import shlex

import matplotlib.figure
import pytest
from scipy import stats

from polyclinic.errors import BadInput, Notice
from polyclinic.metrics.statistics import holm, mean_interval, paired_test
from polyclinic.runner.compare.compare import check_all, check_folders, compare, entries, for_method, tables_for
from polyclinic.runner.compare.outcome import draw, metrics_in, statistics_of
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.study.preset import SMALLEST, preset, preset_names
from polyclinic.study.reading import load_study
from polyclinic.tasks import TASKS

COMMAND = re.compile(r"polyclinic compare STUDY (--methods .*)")


def head_commands(name: str) -> list[list[str]]:
    """The options of the comparisons in the first lines of a preset; a line that goes on is joined."""
    head = re.sub(r"\n# {4,}--", " --", preset(name, scale=SMALLEST, phantom=True).split("\n\n")[0])
    found = [match.group(1) for line in head.splitlines() if (match := COMMAND.search(line))]
    return [shlex.split(re.sub(r"\(.*|, then.*", "", text)) for text in found]


@pytest.mark.parametrize(("of", "settings", "method", "table", "kept"), [
    ("cwt-replay", {"replay.ratio": 2}, "cwt", "replay", False),
    ("cwt-replay", {"replay.ratio": 2}, "centralized", "replay", False),
    ("cwt-replay", {"replay.ratio": 2}, "fedavg-replay", "replay", True),
    ("fedavg", {"replay.ratio": 2}, "cwt", "replay", True),  # a plain method with a table hands it on
    ("feder", {"tuning.alpha": 0.5}, "fedavg", "tuning", False),
    ("feder", {"tuning.alpha": 0.5}, "feder-a", "tuning", True),
])  # fmt: skip
def test_which_tables_another_method_gets(tiny, of, settings, method, table, kept):
    study = tiny(of, settings)
    assert getattr(for_method(study, method, {}), table) == (getattr(study, table) if kept else None)


@pytest.mark.parametrize("change", ["generator.name=dcgan", "felicia:generator.name=dcgan"])
def test_a_method_with_another_generator_gets_it_as_run_does(tiny, tmp_path, change):
    planned = entries(tiny("fedavg"), ["fedavg", "felicia"], 1, tmp_path, [change])
    assert planned[1].study.generator == tiny("felicia").generator
    assert entries(tiny("fedavg"), ["felicia"], 1, tmp_path, [])[0].study.generator == tiny("felicia").generator


def test_a_method_beside_one_of_one_round_has_its_own_number_of_rounds_and_says_so(tiny, tmp_path):
    study = tiny("analytic", {"model.backbone": "efficientnet-lite0-1024"})
    with pytest.warns(Notice, match="^fedavg: 20 rounds, its default, as 'analytic' of the study has one round only"):
        planned = entries(study, ["analytic", "fedavg"], 1, tmp_path, [])
    assert [entry.study.method.rounds for entry in planned] == [1, 20]


def test_seeds_count_up_and_misspelt_settings_are_refused(tiny, tmp_path):
    planned = entries(tiny("fedavg"), ["fedavg"], 2, tmp_path, ["seed=5"])
    assert [(entry.seed, entry.study.seed, entry.folder.name) for entry in planned] == [
        (5, 5, "fedavg-seed5"),
        (6, 6, "fedavg-seed6"),
    ]
    for wrong in ("seed=many", "seed=-1", "seed=true"):
        with pytest.raises(BadInput, match=r"^--set seed=.*: must be a whole number, 0 or more$"):
            entries(tiny("fedavg"), ["fedavg"], 1, tmp_path, [wrong])
    with pytest.raises(BadInput, match=r"'fedavg' has no setting 'round' \(did you mean 'rounds'\?\)"):
        entries(tiny("fedavg"), ["fedavg", "fedprox"], 1, tmp_path, ["fedavg:method.round=20"])
    with pytest.raises(BadInput, match="'fedavg' has no setting 'mu'"):
        entries(tiny("fedavg"), ["fedavg", "fedprox"], 1, tmp_path, ["fedavg:method.mu=0.1"])


def test_partitions_and_folds_that_cannot_be_are_refused_before_any_run(tiny, tmp_path):
    """Every problem at once; one that all the runs share is said once, another with the method that has it."""
    impossible = tiny("fedavg", {"sites.count": 90})
    with pytest.raises(BadInput, match=r"^sites\.partition: [^\n]*without training images[^\n]*$"):
        compare(impossible, ["fedavg", "cwt"], tmp_path, seeds=2)
    planned = entries(tiny("fedavg"), ["fedavg", "cwt"], 2, tmp_path, ["cwt:sites.count=90"])
    with pytest.raises(BadInput, match=r"^cwt, seed [01]: sites\.partition: [^\n]*$"):
        check_all(planned)
    assert not list(tmp_path.iterdir())
    study = tiny("fedavg")
    with pytest.raises(BadInput, match=r"^--folds 1000: a cross-validation has 2 to 100 folds$"):
        entries(study, ["fedavg"], 1, tmp_path, [], 1000)
    with pytest.raises(BadInput, match=r"97 folds need as many patients, and there are 96"):
        compare(study, ["fedavg"], tmp_path, folds=97)
    for sets in (["data.fold=1/2"], ["cwt:data.fold=1/2"]):
        with pytest.raises(BadInput, match=r"--set data\.fold: --folds 2 sets the fold of every run"):
            entries(study, ["fedavg", "cwt"], 1, tmp_path, sets, 2)
    planned = entries(study, ["fedavg"], 1, tmp_path, [], 2)
    assert [(entry.study.data.fold, entry.words) for entry in planned] == [
        ("1/2", "fedavg, seed 0, fold 1"),
        ("2/2", "fedavg, seed 0, fold 2"),
    ]


@pytest.mark.parametrize("name", [name for name in preset_names() if head_commands(name)])
def test_the_comparisons_in_a_presets_first_lines_can_run(name, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(preset(name, scale=SMALLEST, phantom=True), encoding="utf-8")
    study = load_study(file, [])
    for options in head_commands(name):
        methods = options[options.index("--methods") + 1].split(",")
        sets = [value for flag, value in itertools.pairwise(options) if flag == "--set"]
        folds = int(options[options.index("--folds") + 1]) if "--folds" in options else None
        planned = entries(study, methods, 1, tmp_path / "runs", sets, folds)
        assert [entry.method for entry in planned] == [name for name in methods for _ in range(folds or 1)]
        assert all((entry.study.replay is not None) == entry.method.endswith("-replay") for entry in planned)
        assert all(parse_study(entry.study.as_tables()) == entry.study for entry in planned)


def test_a_private_method_beside_one_without_privacy_gets_its_table_from_the_changes(tiny):
    study = tiny("analytic", {"model.backbone": "efficientnet-lite0-1024"})
    found = for_method(study, "private-head", {"privacy.noise_multiplier": 2.0})
    assert found.privacy is not None
    assert found.privacy.noise_multiplier == 2.0


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_default_of_the_studys_method_is_not_carried_to_another(tiny, method):
    """FedAvg weighs sites by their images, and these two count them alike, as their papers do."""
    tables = tables_for(tiny("fedavg", rounds=7, local_steps=3), method)
    assert tables["method"] == {"name": method, "rounds": 7, "local_steps": 3}
    assert tables_for(tiny("fedavg", weighting="uniform"), "fedprox")["method"]["weighting"] == "uniform"


MEDIAN = """from typing import Literal

from polyclinic import FedAvg


class Mine(FedAvg):
    name: Literal["mine"] = "mine"
    summary = "FedAvg"


METHODS = {"mine": Mine}
"""


def test_a_mended_plugin_makes_only_its_own_runs_anew(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(MEDIAN)
    study, out = tiny("fedavg", rounds=1).with_settings({"plugins": [str(tmp_path / "mine.py")]}), tmp_path / "out"
    planned = entries(study, ["fedavg", "mine"], 1, out, [])
    for entry in planned:
        run(entry.study, entry.folder)
        check_folders(planned, out)
        noted = json.loads((entry.folder / "plugins.json").read_text())
        noted["plugins"] = dict.fromkeys(noted["plugins"], "0" * 64)  # it was another one then
        (entry.folder / "plugins.json").write_text(json.dumps(noted))
        with pytest.raises(BadInput, match=r"has changed|was begun with"):
            run(entry.study, entry.folder, resume=True)
    with pytest.warns(Notice, match=r"^mine, seed 0: made anew, as .*mine\.py has changed"):
        check_folders(planned, out)
    assert [entry.result is not None for entry in planned] == [True, False]
    assert len(list(out.glob("outdated/mine-seed0-*/result.json"))) == 1


def test_long_work_within_a_round_is_told_from_the_runs_log(tiny, tmp_path):
    (entry,) = entries(tiny("cwt-replay"), ["cwt-replay"], 1, tmp_path, [])
    assert entry.inner_work == ""
    (tmp_path / "studies").mkdir()
    log = tmp_path / "studies" / f"{entry.folder.name}.log"
    log.write_text("cwt-replay, 3 sites: 0 of 3\n  autoencoder of site-1: 3 of 30, about 54 s left\n")
    assert entry.inner_work == "autoencoder of site-1: 3 of 30, about 54 s left"
    log.write_text(log.read_text() + "rounds: 1 of 3\n")
    assert entry.inner_work == ""


ACCURACY = {"fedavg": [0.80, 0.82, 0.79], "cwt": [0.85, 0.84, 0.86], "moon": [0.81, 0.80, 0.82]}


def rows(values: dict[str, list[float]], **more) -> list[dict]:
    return [
        {"method": method, "seed": seed, "test_accuracy": value, "mean_ks": 0.5, "seconds": 3.0, **more}
        for method, found in values.items()
        for seed, value in enumerate(found)
    ]


def test_statistics_over_seeds_and_folds_by_hand():
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
    some = rows(ACCURACY)
    shuffled = [some[i] for i in (5, 0, 4, 8, 2, 6, 1, 3, 7)]
    again, once = (statistics_of(each, "fedavg")["cwt"]["test_accuracy"] for each in (shuffled, some))
    assert again["against_baseline"] == pytest.approx(once["against_baseline"])
    # without seed 0 of fedavg two pairs are left
    left = statistics_of(some[1:], "fedavg")["cwt"]["test_accuracy"]["against_baseline"]
    assert (left["n"], left["p"]) == (2, pytest.approx(paired_test([0.84, 0.86], [0.82, 0.79]).p))
    folds = [{**row, "seed": 0, "fold": row["seed"] + 1} for row in rows(ACCURACY)]
    found = statistics_of(folds, "fedavg", 3)["cwt"]["test_accuracy"]
    expected = paired_test(ACCURACY["cwt"], ACCURACY["fedavg"], overlap=1 / 2)
    assert found["against_baseline"]["p"] == pytest.approx(expected.p)
    assert found["high"] == pytest.approx(mean_interval(ACCURACY["cwt"], overlap=1 / 2).high)
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


def test_a_method_that_nothing_can_add_up_leaves_the_secure_sum_out(tiny):
    """As the studies that `study new --for` writes, and the one that comes with polyclinic, have one."""
    secure = tiny("fedavg", {"federation.sum": "secure", "sites.count": 3})
    with pytest.warns(Notice, match=r"standalone: federation\.sum of the study is left out"):
        assert for_method(secure, "standalone", {}).federation.sum == "float"
    assert for_method(secure, "fedprox", {}).federation.sum == "secure"
    with pytest.raises(BadInput, match=r"federation\.sum"):
        for_method(secure, "cwt", {"federation.sum": "secure"})
