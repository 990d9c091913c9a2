"""Rounds and their recorder: which are run, by whom, which is released, and a method that raises."""

import json

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput, RunPaused, WorkFailed
from polyclinic.methods.fedavg import FedAvg
from polyclinic.runner.run import recorder as live
from polyclinic.runner.run.method import run_method
from polyclinic.runner.run.recorder import FILE, Display, LiveFile
from polyclinic.runner.run.run import run
from polyclinic.tasks import TASKS


class Watching(Display):
    """Reads the file whenever the run says something."""

    def __init__(self, folder):
        self.folder, self.seen, self.heard = folder, [], []

    def asking(self, operation, sites):
        self.heard.append(("asking", operation))

    def round_done(self, line, rounds):
        self.heard.append(("round", line["round"]))

    def finished(self, result):
        self.heard.append(("finished", (self.folder / FILE).exists()))


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", -1.0)


def test_the_file_says_who_works_and_is_gone_at_the_end(tiny, tmp_path, always, monkeypatch):
    folder, seen = tmp_path / "run", []
    write = LiveFile._write
    monkeypatch.setattr(LiveFile, "_write", lambda live, **news: (write(live, **news), seen.append(dict(live._known))))
    shown = Watching(folder)
    run(tiny("fedavg", {"sites.count": 2}, rounds=2), folder, display=LiveFile(folder, shown))
    assert seen[0]["sites"] == ["site-1", "site-2"]
    assert (seen[0]["round"], seen[0]["rounds"], seen[0]["metric"]) == (1, 2, "accuracy")
    assert {"operation": "train", "at_work": ["site-1", "site-2"], "round": 2}.items() <= {
        key: one[key] for one in seen if one["operation"] == "train" for key in ("operation", "at_work", "round")
    }.items()
    assert [what for what, _ in shown.heard].count("round") == 2
    assert shown.heard[-1] == ("finished", False)
    assert not (folder / FILE).exists()


def test_the_live_file_is_written_now_and_then_and_anothers_is_kept(tmp_path):
    shown = LiveFile(tmp_path, Display())
    shown._write(round=1)
    before = (tmp_path / FILE).read_text()
    for _ in range(50):
        shown.asking("train", ["site-1"])
    assert (tmp_path / FILE).read_text() == before
    (tmp_path / FILE).write_text("another run's")
    LiveFile(tmp_path, Display()).remove()
    assert (tmp_path / FILE).read_text() == "another run's"


def history(result) -> list[dict]:
    return [json.loads(line) for line in (result.folder / "history.jsonl").read_text().splitlines()]


def trained(result) -> dict[int, list[str]]:
    """The sites that trained in each round, by their ledgers."""
    found: dict[int, list[str]] = {}
    for path in sorted((result.folder / "ledger").glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["operation"] in ("train", "gradient"):
                found.setdefault(line["round"], []).append(path.stem)
    return {number: list(dict.fromkeys(found[number])) for number in sorted(found)}


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "auc", "loss"])
def test_the_metric_chooses_the_released_round(undisturbed, tiny, metric):
    result = undisturbed(tiny("fedavg", {"evaluation.select": "best", "evaluation.metric": metric}, rounds=5))
    scores = [line["validation"]["pooled"] for line in history(result)]
    sign = -1 if metric == "loss" else 1
    ranks = [(sign * one[metric], -one["loss"]) for one in scores]
    assert result["selected"]["round"] == ranks.index(max(ranks)) + 1


def test_an_unknown_metric_is_refused_with_those_of_the_task(tiny):
    with pytest.raises(BadInput, match=r"evaluation\.metric: no such choice: 'dice'.*accuracy, balanced_accuracy, auc"):
        tiny("fedavg", {"evaluation.metric": "dice"})


@pytest.mark.parametrize("method", ["fedavg", "cwt", "fedsgd"])
def test_a_share_of_the_sites_takes_part_in_a_round(undisturbed, tiny, method):
    result = undisturbed(tiny(method, {"sites.count": 4, "evaluation.every": 1}, fraction=0.5, rounds=6))
    sites = trained(result)
    assert {len(some) for some in sites.values()} == {2}
    assert len({tuple(some) for some in sites.values()}) > 1
    assert set(result.metrics["per_site"]) == {f"site-{number}" for number in (1, 2, 3, 4)}
    assert all(len(line["validation"]["per_site"]) == 4 for line in history(result))


def test_at_least_one_site_takes_part_and_all_sites_are_the_plain_run(undisturbed, tiny):
    assert {len(some) for some in trained(undisturbed(tiny("fedavg", fraction=0.01))).values()} == {1}
    plain = undisturbed(tiny("fedavg"))
    assert undisturbed(tiny("fedavg", fraction=0.9))["weights_sha256"] == plain["weights_sha256"]  # 2.7 of 3 sites
    assert undisturbed(tiny("fedavg", fraction=0.5))["weights_sha256"] != plain["weights_sha256"]


@pytest.mark.parametrize("method", ["centralized", "fedreplay", "felicia", "feder"])
def test_methods_that_need_all_sites_say_so(tiny, method):
    with pytest.raises(BadInput, match=r"method\.fraction"):
        tiny(method, fraction=0.5)


def test_a_run_stops_when_its_patience_is_at_an_end(undisturbed, tiny):
    whole = undisturbed(tiny("fedavg", {"optimizer.lr": 0.5}, rounds=8))
    ranks = [TASKS["classification"]().rank(line["validation"]["pooled"]) for line in history(whole)]
    best, stop = 0, len(ranks)
    for number in range(1, len(ranks)):
        best = number if ranks[number] > ranks[best] else best
        if number - best >= 2:
            stop = number + 1
            break
    assert stop < 8, "choose a study whose score falls"
    short = undisturbed(tiny("fedavg", {"optimizer.lr": 0.5}, rounds=8, patience=2))
    assert short["rounds"] == stop == len(history(short))
    assert [line["validation"] for line in history(short)] == [line["validation"] for line in history(whole)][:stop]
    rare = {"optimizer.lr": 0.5, "evaluation.every": 3}
    result = undisturbed(tiny("fedavg", rare, rounds=8, patience=1))
    whole = history(undisturbed(tiny("fedavg", rare, rounds=8)))
    ranks = {n: TASKS["classification"]().rank(whole[n - 1]["validation"]["pooled"]) for n in (3, 6)}
    assert result["rounds"] == (8 if ranks[6] > ranks[3] else 6)


def test_patience_needs_scores(tiny):
    with pytest.raises(BadInput, match=r"method\.patience: nothing is scored.*evaluation\.every = 1"):
        tiny("fedavg", {"evaluation.every": 0}, patience=2)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_draws_the_same_sites_and_stops_at_the_same_round(undisturbed, tiny, tmp_path, monkeypatch, stop):
    """It stops after `stop` rounds as if killed, and goes on."""
    from polyclinic.runner.run.recorder import Recorder

    study = tiny("fedavg", {"optimizer.lr": 0.5, "sites.count": 4}, rounds=9, patience=3, fraction=0.5)
    whole = undisturbed(study)

    class Killed(BaseException):
        pass

    done = Recorder.round_done

    def die(self, federation, rounds, seconds):
        if federation.round > stop:
            raise Killed
        done(self, federation, rounds, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "round_done", die)
        with pytest.raises(Killed):
            run(study, tmp_path / "run")
    result = run(study, tmp_path / "run", resume=True)
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert result["rounds"] == whole["rounds"]
    assert trained(result) == trained(whole)


@pytest.mark.parametrize(("method", "settings", "sentence"), [
    ("splitnn", {"optimizer.augment": ["mixup"]}, r"optimizer\.augment: 'splitnn' cannot mix images"),
    (
        "fedavg",
        {"optimizer.augment": ["mixup"], "privacy": {"noise_multiplier": 1.0}},
        r"optimizer\.augment: 'mixup' puts two images into one.*take 'mixup' out",
    ),
    (
        "fedavg",
        {"optimizer.balanced_batches": True, "privacy": {"noise_multiplier": 1.0}},
        r"optimizer\.balanced_batches: .* set it to false under differential privacy",
    ),
    (
        "fedavg",
        {"optimizer.balanced_batches": True, "data.source": "hand-phantom", "task": {"name": "regression"}},
        r"optimizer\.balanced_batches: regression has no classes",
    ),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_cure(tiny, method, settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        tiny(method, settings)


def test_augmentation_goes_with_differential_privacy(undisturbed, tiny):
    every = ["flip", "turn", "crop", "rotate", "brightness", "contrast", "noise"]
    result = undisturbed(tiny("fedavg", {"optimizer.augment": every, "privacy": {"noise_multiplier": 1.0}}, rounds=1))
    assert result["privacy"]["epsilon"] > 0


PLUGIN = """
from typing import Literal

from polyclinic import FedAvg


class Careless(FedAvg):
    name: Literal["careless"] = "careless"

    def combine(self, federation, state, replies):
        return forgotten({})["weights"]


def forgotten(found):
    return found["weights"]


METHODS = {"careless": Careless}
"""


def test_the_sentence_names_method_file_and_line(tiny, tmp_path, capsys, monkeypatch):
    plugin = tmp_path / "careless.py"
    plugin.write_text(PLUGIN)
    file = tmp_path / "study.toml"
    file.write_text(
        f'plugins = ["careless.py"]\n{tiny("fedavg", rounds=1).to_toml()}'.replace('"fedavg"', '"careless"')
    )
    assert run_app(["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 1
    (said,) = capsys.readouterr().err.strip().splitlines()
    line = PLUGIN.splitlines().index('    return found["weights"]') + 1
    assert said == (
        f"method 'careless' failed at the coordinator in {plugin}, line {line}: KeyError: 'weights'; mend it, or set "
        "POLYCLINIC_TRACEBACK=1 to see all calls"
    )
    monkeypatch.setenv("POLYCLINIC_TRACEBACK", "1")
    assert run_app(["run", "--resume", "--out", str(tmp_path / "run"), "--quiet"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "in forgotten" in told
    assert said in told


class Raises(FedAvg):
    """A method of this test."""

    def run(self, federation):
        raise federation


@pytest.mark.parametrize("error", [BadInput("no"), WorkFailed("no"), RunPaused("later"), KeyboardInterrupt("stop")])
def test_what_is_meant_for_the_user_or_for_a_pause_passes(error):
    with pytest.raises(type(error), match=str(error)):
        run_method(Raises(), error)


def test_a_failure_outside_the_plugin_names_the_innermost_line():
    with pytest.raises(WorkFailed, match=r"method 'fedavg' failed at the coordinator in .*test_recorder\.py, line"):
        run_method(Raises(), ValueError("x"))


def test_an_error_of_our_own_method_keeps_its_traceback():
    with pytest.raises(AttributeError):
        run_method(FedAvg(), None)
