"""A search of settings sees validation images only, gives methods the same budget, and goes on where it stopped."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_schemas import errors
from processes import ForkedProgram

import polyclinic
from polyclinic.cli import run_app
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.run_folder import is_held
from polyclinic.runner.compare import compare, tune
from polyclinic.runner.compare.compare import Entry, entries
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

LR = {"optimizer.lr": [0.001, 0.05]}


def test_values_are_read_as_toml_or_text():
    over = tune.parse_over(
        ["method.mu=0.1,0.01", "optimizer.name=sgd,adam", 'optimizer.augment=["flip"],[]', "m:a.b=true"]
    )
    assert over == {
        "method.mu": [0.1, 0.01],
        "optimizer.name": ["sgd", "adam"],
        "optimizer.augment": [["flip"], []],
        "m:a.b": [True],
    }


@given(sizes=st.lists(st.integers(1, 4), max_size=4), count=st.integers(1, 30), seed=st.integers(0, 3))
def test_all_combinations_or_a_draw_that_grows_with_the_budget(sizes, count, seed):
    space = {f"optimizer.{i}": list(range(size)) for i, size in enumerate(sizes)}
    everything = tune.choose(space, 256, seed)
    assert len(everything) == np.prod(sizes, dtype=int)
    assert all(everything.count(one) == 1 for one in everything)
    few, more = tune.choose(space, count, seed), tune.choose(space, count + 3, seed)
    assert len(few) == min(count, len(everything))
    assert few == tune.choose(space, count, seed)
    assert all(one in more for one in few)
    assert [one for one in everything if one in few] == few


def test_another_seed_draws_others():
    space = {"optimizer.lr": list(range(40))}
    assert tune.choose(space, 5, 0) != tune.choose(space, 5, 1)


def test_every_method_gets_the_same_budget_and_only_settings_that_it_has(tiny, tmp_path):
    over = {**LR, "method.mu": [0.1, 0.01, 0.001]}
    trials = tune.plan(tiny("fedprox"), over, tmp_path, budget=8, methods=["fedprox", "fedavg"], seeds=2)
    by_method = {name: [t for t in trials if t.method == name] for name in ("fedprox", "fedavg")}
    assert len(by_method["fedprox"]) == 4  # of six combinations, four times two seeds
    assert [t.settings for t in by_method["fedavg"]] == [{"optimizer.lr": 0.001}, {"optimizer.lr": 0.05}]
    assert {run.study.method.rounds for t in trials for run in t.runs} == {tiny("fedprox").method.rounds}
    assert len({run.folder for t in trials for run in t.runs}) == 12
    found = tune.summarise(tiny("fedprox"), over, trials, {}, budget=8, seeds=2)
    assert found["methods"]["fedprox"] == {"search": "random", "possible": 6, "tried": 4, "runs": 8}
    assert found["methods"]["fedavg"] == {"search": "all", "possible": 2, "tried": 2, "runs": 4}


def test_ties_go_by_the_loss_and_then_by_the_order(tiny):
    def row(name, score, loss):
        return {"settings": name, "score": score, "loss": loss}

    rows = [{"settings": "x", "failed": "NaN"}, row("a", 0.7, 0.4), row("b", 0.8, 0.5), row("c", 0.8, 0.3)]
    rows.append(row("d", 0.8, 0.3))
    assert tune.best_of(rows, tiny("fedavg"))["chosen"] == "c"
    ages = tiny("fedavg", {"data.source": "hand-phantom", "task.name": "regression"})
    assert tune.best_of(rows, ages)["chosen"] == "a"  # a lower error is better
    assert tune.best_of(rows[:1], ages) == {}


@pytest.mark.parametrize(("arguments", "message"), [
    (["--over", "optimizer.lrr=1,2"], "optimizer.lrr"),
    (["--over", "optimizer.lr=1,-2"], "optimizer.lr"),
    (["--over", "optimizer.lr="], "write it as table.setting=value,value"),
    (["--over", "optimizer.lr=1,1"], "each only once"),
    (["--over", "optimizer.lr=1", "--over", "optimizer.lr=2"], "given twice"),
    (["--over", "method.mu=1,2"], "none of the methods has this setting"),
    (["--over", "fedprox:method.mu=1,2"], "'fedprox' is not among the methods, fedavg"),
    (["--over", "data.seed=1,2"], "scores could not be compared"),
    (["--over", "method.name=cwt,fedavg"], "scores could not be compared"),
    (["--over", "optimizer.lr=1", "--methods", "cwtt"], "did you mean 'cwt'"),
    (["--over", "optimizer.lr=1", "--seeds", "5"], "5 seeds of one choice of settings need 5 runs"),
    (["--over", "optimizer.lr=1", "--set", "data.validation=0"], "needs validation images"),
    (["--over", "optimizer.lr=1", "--folds", "5"], "1 seeds and 5 folds of one choice of settings need 5 runs"),
    (["--over", "optimizer.lr=1", "--folds", "2", "--set", "data.tuning_fold=1/2"], "leave out one of the two"),
])  # fmt: skip
def test_bad_settings_are_one_sentence_before_the_first_run(tiny, tmp_path, capsys, arguments, message):
    file = tmp_path / "study.toml"
    file.write_text(tiny("fedavg").to_toml())
    assert run_app(["tune", str(file), "--budget", "4", "--out", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["fedavg", "standalone", "felicia"])
def test_with_final_validation_test_images_are_not_looked_at(method, tiny, tmp_path):
    """The run is the same to the last bit with other test images, and no file has a figure of them."""
    settings = {"evaluation.final": "validation", "data.seed": 77}
    few = {"steps": 2, "learner_steps": 4, "images": 8} if method == "felicia" else {}
    study = tiny(method, settings, rounds=1, **few)
    first = run(study, tmp_path / "first", cache=tmp_path / "cache")
    parts = prepare(study.data, study.sites, cache=tmp_path / "cache")
    for file in parts.folder.glob("*/test/*.npy"):
        array = np.load(file, mmap_mode="r+")
        array[:] = 0
        array.flush()
    again = run(study, tmp_path / "again", cache=tmp_path / "cache")
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again.metrics == first.metrics
    assert again.metrics["test"] == again.metrics["mean"] == again.metrics["per_site"] == {}
    assert again.metrics["validation"]["pooled"]["accuracy"] > 0
    figures = json.dumps([again.metrics["validation"], again.values.get("worth")])
    assert "test" not in figures


def test_a_search_chooses_by_validation_and_goes_on_where_it_stopped(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(Popen=ForkedProgram, DEVNULL=subprocess.DEVNULL))
    study = tiny("fedprox", rounds=1)
    file, out = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(study.to_toml())
    command = ["tune", str(file), "--over", "optimizer.lr=0.0001,0.05", "--over", "fedprox:method.mu=0.1"]
    command += ["--budget", "2", "--out", str(out), "--quiet"]
    over = {"optimizer.lr": [0.0001, 0.05], "fedprox:method.mu": [0.1]}
    first = tune.plan(study, over, out, budget=2)[0].runs[0]
    run(first.study, first.folder)  # a search that was stopped after its first trial
    before = (first.folder / "result.json").stat().st_mtime_ns
    assert run_app(command) == 0
    assert (first.folder / "result.json").stat().st_mtime_ns == before
    assert "validation images (higher is better)" in capsys.readouterr().out
    found = json.loads((out / "tuning.json").read_text())
    assert errors("tuning", found) == []
    assert found["budget"]["runs_of_each_method"] == 2
    assert [trial["settings"]["optimizer.lr"] for trial in found["trials"]] == [0.0001, 0.05]
    best = min(found["trials"], key=lambda trial: (-trial["score"], trial["loss"]))
    facts = found["methods"]["fedprox"]
    assert (facts["chosen"], facts["score"]) == (best["settings"], best["score"])
    for trial in found["trials"]:
        result = json.loads((out / trial["runs"][0]["folder"] / "result.json").read_text())
        assert result["metrics"]["test"] == {}
        assert result["metrics"]["validation"]["pooled"]["accuracy"] == trial["score"]
    chosen = load_study(out / "best.toml")
    assert chosen == load_study(out / "best-fedprox.toml")
    assert (chosen.optimizer.lr, chosen.method.mu) == (facts["chosen"]["optimizer.lr"], 0.1)
    assert chosen.evaluation.final == "test"
    # and `compare` takes what was chosen
    (entry,) = entries(study, ["fedprox"], 1, out, ["method.rounds=7"], tuned=tune.chosen_settings(out))
    assert entry.study == chosen.with_settings({"method.rounds": 7})
    with pytest.raises(BadInput, match="has no settings for 'cwt'"):
        entries(study, ["fedprox", "cwt"], 1, out, [], tuned=tune.chosen_settings(out))
    older = {"methods": {"fedavg": {"chosen": {"privacy.noise": 1.0}}}}
    (out / "older.json").write_text(json.dumps(older))
    with pytest.raises(BadInput, match=r"older\.json: privacy\.noise is now called 'noise_multiplier'"):
        tune.chosen_settings(out / "older.json")


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_beside_the_run_that_it_left(tiny, tmp_path):
    """kill -9 leaves a run without its search; the next search waits for that run and takes its result."""
    study = tiny("fedavg", rounds=12)
    (trial,) = tune.plan(study, {"optimizer.lr": [0.02]}, tmp_path / "out", budget=1)
    (tmp_path / "study.toml").write_text(study.to_toml())
    words = ["tune", tmp_path / "study.toml", "--over", "optimizer.lr=0.02", "--budget", "1", "--out", tmp_path / "out"]
    search = subprocess.Popen([sys.executable, "-m", "polyclinic", *map(str, words), "--quiet"])
    while not is_held(trial.runs[0].folder) and trial.runs[0].result is None:
        assert search.poll() is None
        time.sleep(0.02)
    search.kill()
    search.wait()
    found = polyclinic.tune(study, {"optimizer.lr": [0.02]}, tmp_path / "out", budget=1)
    again = run(trial.runs[0].study, tmp_path / "undisturbed")
    assert found["trials"][0]["score"] == again.metrics["validation"]["pooled"]["accuracy"]
    assert found["trials"][0]["loss"] == again.metrics["validation"]["pooled"]["loss"]


def test_the_function_is_the_command(tiny, tmp_path):
    """`polyclinic.tune` of settings that are finished runs nothing again."""
    study = tiny("fedavg", rounds=1)
    (trial,) = tune.plan(study, {"optimizer.lr": [0.02]}, tmp_path, budget=1)
    result = run(trial.runs[0].study, trial.runs[0].folder)
    found = polyclinic.tune(study, {"optimizer.lr": [0.02]}, tmp_path, budget=1)
    assert found["trials"][0]["score"] == result.metrics["validation"]["pooled"]["accuracy"]
    assert found == json.loads((tmp_path / "tuning.json").read_text())


def test_with_folds_a_choice_is_scored_on_all_images_that_are_not_for_testing(tiny, tmp_path):
    study = tiny("fedavg", {"data.validation": 0.0, "evaluation.every": 0, "evaluation.select": "last"}, rounds=1)
    trials = tune.plan(study, LR, tmp_path, budget=5, folds=2)
    assert [run.study.data.tuning_fold for trial in trials for run in trial.runs] == ["1/2", "2/2"] * 2
    scores = []
    for one in trials[0].runs:
        result = run(one.study, one.folder)
        scores.append(result.metrics["validation"]["pooled"]["accuracy"])
        assert result.metrics["test"] == {}
    found = tune.summarise(study, LR, trials[:1], {}, budget=5, seeds=1, folds=2)
    assert errors("tuning", found) == []
    assert found["trials"][0]["score"] == sum(scores) / 2
    assert found["methods"]["fedavg"]["runs"] == 2
    tune.write(found, study, tmp_path)
    assert load_study(tmp_path / "best.toml").data == study.data


def test_a_failed_trial_is_written_down_and_not_chosen(tiny, tmp_path):
    study = tiny("fedavg", rounds=1)
    trials = tune.plan(study, LR, tmp_path, budget=2)
    run(trials[0].runs[0].study, trials[0].runs[0].folder)
    failed = {trials[1].runs[0].folder: "site 'site-1' sent NaN"}
    found = tune.summarise(study, LR, trials, failed, budget=2, seeds=1)
    tune.write(found, study, tmp_path)
    assert errors("tuning", found) == []
    assert found["trials"][1]["failed"] == "site 'site-1' sent NaN"
    assert found["methods"]["fedavg"]["chosen"] == {"optimizer.lr": 0.001}
    nothing = tune.summarise(study, {}, trials[1:], failed, budget=2, seeds=1)
    with pytest.raises(WorkFailed, match="no trial of fedavg has a score: site 'site-1' sent NaN"):
        tune.write(nothing, study, tmp_path)
    assert "chosen" not in json.loads((tmp_path / "tuning.json").read_text())["methods"]["fedavg"]


@pytest.mark.parametrize("content", [None, "{}", "[1]", "{"])
def test_a_folder_without_a_search_is_refused(tiny, tmp_path, content):
    if content is not None:
        (tmp_path / "tuning.json").write_text(content)
    with pytest.raises(BadInput, match="name the folder that `polyclinic tune` wrote"):
        tune.chosen_settings(Path(tmp_path))


PRIVATE = {"privacy.noise_multiplier": 4.0, "privacy.delta": 1e-5, "optimizer.batch_size": 8}


@pytest.fixture
def entry_of(tiny, undisturbed, tmp_path):
    def finished(method: str, changes: dict) -> Entry:
        study = tiny(method, changes, rounds=1)
        return Entry(method, study.seed, study, undisturbed(study).folder)

    return finished


def test_private_runs_of_a_search_are_composed_and_others_cost_nothing(entry_of, tiny, tmp_path):
    runs = [entry_of("fedavg", {**PRIVATE, "optimizer.lr": lr}) for lr in (0.1, 0.01)]
    cost = tune.cost_of_search(runs)
    assert cost is not None
    (spent, _) = (run.result["privacy"] for run in runs)
    assert cost["runs"] == 2
    assert cost["delta"] == 1e-5
    assert spent["epsilon"] < cost["epsilon"] < 2 * spent["epsilon"]
    one = runs[0].result["data"]["counts"]
    most = max(
        compute_epsilon(8 / counts["train"], 4.0, 2 * max(1, counts["train"] // 8), 1e-5) for counts in one.values()
    )
    assert cost["epsilon"] == pytest.approx(most, rel=1e-6)
    assert tune.sentence(cost).startswith(f"privacy: the 2 private runs of this search have spent epsilon {most:.3g}")
    unfinished = Entry("fedavg", 0, tiny("fedavg", PRIVATE), tmp_path / "none")
    assert tune.cost_of_search([entry_of("fedavg", {}), unfinished]) is None
