"""Commands as they are typed: help, lists, privacy and bench."""

import csv
import json
import re
import shlex
import statistics
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
from json_schemas import errors
from processes import ForkedProgram

from polyclinic.cli import run_app
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.runner.compare import bench, compare
from polyclinic.runner.compare import outcome as comparison_figure
from polyclinic.study import parse_study
from polyclinic.study.study import VARIANTS

SMALL = """
data = { source = "fundus-phantom", size = 28, samples = 80 }
sites = { partition = "iid", count = 2 }
optimizer = { batch_size = 8 }
method = { name = "cwt", rounds = 2 }
engine = { workers = 1 }
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a small study in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(SMALL)
    return tmp_path


def fails_with(capsys, code: int, arguments: list[str]) -> str:
    """The one sentence a command printed on stderr when it failed as expected."""
    assert run_app(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_run_leaves_behind_what_the_contract_says(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "site-1" in printed
    assert "accuracy" in printed
    for name in ("study.toml", "history.jsonl", "model.safetensors", "result.json"):
        assert (here / "out" / name).stat().st_size > 0
    assert {path.name for path in (here / "out" / "ledger").iterdir()} == {"site-1.jsonl", "site-2.jsonl"}


def test_json_is_the_result_and_nothing_else(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((here / "out" / "result.json").read_text())
    assert captured.err == ""
    assert run_app(["run", "study.toml", "--out", "quiet", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_second_run_into_the_same_folder_is_refused_and_resume_returns_the_result(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--quiet"]) == 0
    before = (here / "out" / "result.json").read_bytes()
    assert "--resume" in fails_with(capsys, 2, ["run", "study.toml", "--out", "out"])
    assert run_app(["run", "--resume", "--out", "out", "--quiet"]) == 0
    assert (here / "out" / "result.json").read_bytes() == before


def test_failed_work_exits_with_1_and_names_the_site(here, capsys):
    arguments = ["run", "study.toml", "--out", "out", "--quiet", "--set", "optimizer.lr=1e30"]
    message = fails_with(capsys, 1, arguments)
    assert "site 'site-" in message
    assert "NaN or infinity" in message
    assert (here / "out" / "study.toml").exists()


def combinations() -> list[tuple[str, str]]:
    """Every source, partition and method once."""
    return [(table, name) for table in ("data", "sites", "method") for name in VARIANTS[table][0]]


@pytest.mark.parametrize(("table", "name"), combinations())
def test_a_new_study_is_a_valid_study(here, capsys, table, name):
    option = {"data": "--source", "sites": "--partition", "method": "--method"}[table]
    assert run_app(["study", "new", f"{name}.toml", option, name]) == 0
    import tomllib

    tables = tomllib.loads((here / f"{name}.toml").read_text())
    if table != "data":  # what a source needs beyond its defaults only its user knows
        if not tables["model"]["backbone"].startswith("efficientnet"):  # a method on a public encoder keeps it
            tables["model"]["backbone"] = "small-cnn"
        assert getattr(parse_study(tables), table) is not None
    assert tables[table][{"data": "source", "sites": "partition", "method": "name"}[table]] == name


def test_check_says_fine_and_what_the_study_is(here, capsys):
    assert run_app(["study", "check", "study.toml", "--set", "method.rounds=9"]) == 0
    assert "cwt for classification on fundus-phantom, sites: 2, rounds: 9" in capsys.readouterr().out


AT_SITES = """
data = { source = "at-sites", dataset = "scans", classes = ["clear", "ill"], channels = 1 }
sites = { partition = "column", names = ["graz", "linz", "wien"] }
"""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ('name = "fedreplay"', "'give_latents' of 'fedreplay' releases latents, which the policy keeps back"),
        ('name = "analytic"', "sends no sums of products of"),
        ('name = "analytic"\nnumbers = 16', "a class of fewer than 10 patients (min_cohort)"),
        ('name = "fedavg"', ""),
    ],
)
def test_check_says_what_the_first_policy_of_a_kit_will_refuse(here, capsys, method, words):
    network = 'backbone = "efficientnet-lite0-1024"' if "analytic" in method else ""
    (here / "sent.toml").write_text(f"{AT_SITES}[method]\n{method}\n[model]\n{network}\n")
    assert run_app(["study", "check", "sent.toml"]) == 0
    said = capsys.readouterr().out
    assert words in said
    assert ("a site with the first policy of its kit will refuse this study: " in said) == bool(words)


@pytest.fixture
def forked(monkeypatch):
    """The runs of a comparison are processes that start at once."""
    # in this module only: matplotlib starts programs, too
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(Popen=ForkedProgram, DEVNULL=subprocess.DEVNULL))


def test_compare_runs_all_writes_tables_and_goes_on_where_it_stopped(here, capsys, forked):
    arguments = ["compare", "study.toml", "--methods", "cwt,fedprox", "--seeds", "2", "--out", "all", "--quiet"]
    arguments += ["--set", "method.rounds=1", "--set", "fedprox:method.mu=0.5"]
    assert run_app(arguments) == 0
    printed = capsys.readouterr().out
    assert "cwt" in printed
    assert "±" in printed
    assert "Holm-corrected" in printed
    warned = json.loads((here / "all" / "cwt-seed1" / "result.json").read_text())["warnings"]  # the last of two seeds
    words = re.escape(f"warning: cwt: {warned[-1]}") + r" \(\d+ more in result\.json of its runs\)$"
    assert re.search(words, printed, re.MULTILINE)
    summary = json.loads((here / "all" / "comparison.json").read_text())
    assert errors("comparison", summary) == []
    assert summary["baseline"] == "cwt"
    assert summary["statistics"]["fedprox"]["test_accuracy"]["against_baseline"]["n"] == 2
    lines = list(csv.DictReader((here / "all" / "comparison_statistics.csv").open()))
    assert {(line["method"], line["baseline"]) for line in lines} == {("cwt", "cwt"), ("fedprox", "cwt")}
    assert summary["methods"]["cwt"]["test_accuracy"]["n"] == 2
    assert len({row["weights_sha256"] for row in summary["rows"]}) == 4
    rows = list(csv.DictReader((here / "all" / "comparison.csv").open()))
    assert [row["method"] + row["seed"] for row in rows] == ["cwt0", "cwt1", "fedprox0", "fedprox1"]
    fedprox = (here / "all" / "fedprox-seed0" / "study.toml").read_text()
    assert "mu = 0.5" in fedprox
    assert (here / "all" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    kept = (here / "all" / "cwt-seed0" / "result.json").read_bytes()
    (here / "all" / "cwt-seed1" / "result.json").unlink()
    assert run_app(arguments) == 0
    again = json.loads((here / "all" / "comparison.json").read_text())
    assert [row["weights_sha256"] for row in again["rows"]] == [row["weights_sha256"] for row in summary["rows"]]
    assert (here / "all" / "cwt-seed0" / "result.json").read_bytes() == kept


def test_compare_over_values_of_a_setting_has_a_comparison_for_each_and_one_figure(here, capsys, forked, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        comparison_figure, "draw", lambda found, task, file, _: drawn.append((found, task.metric, file))
    )
    arguments = ["compare", "study.toml", "--methods", "cwt,fedprox", "--out", "all", "--quiet"]
    arguments += ["--set", "method.rounds=1", "--over", "optimizer.lr=0.1,0.001"]
    assert run_app(arguments) == 0
    printed = capsys.readouterr().out
    assert "optimizer.lr=0.001" in printed
    found = {
        lr: json.loads((here / "all" / f"optimizer.lr={lr}" / "comparison.json").read_text()) for lr in (0.1, 0.001)
    }
    assert "lr = 0.001" in (here / "all" / "optimizer.lr=0.001" / "cwt-seed0" / "study.toml").read_text()
    assert len({row["weights_sha256"] for one in found.values() for row in one["rows"]}) == 4
    (groups, metric, file) = drawn[0]
    assert (metric, file) == ("accuracy", Path("all") / "comparison.png")
    assert [groups[f"optimizer.lr={lr}"]["methods"] for lr in found] == [one["methods"] for one in found.values()]


def test_compare_with_folds_tests_every_image_once_and_goes_on_where_it_stopped(here, capsys, forked):
    arguments = ["compare", "study.toml", "--methods", "cwt", "--folds", "3", "--out", "all", "--quiet"]
    arguments += ["--set", "method.rounds=1"]
    assert run_app(arguments) == 0
    assert "3 runs of 3 folds" in capsys.readouterr().out
    summary = json.loads((here / "all" / "comparison.json").read_text())
    assert errors("comparison", summary) == []
    rows = summary["rows"]
    assert [(row["seed"], row["fold"]) for row in rows] == [(0, 1), (0, 2), (0, 3)]
    values = [row["test_accuracy"] for row in rows]
    spread = {"mean": sum(values) / 3, "std": statistics.stdev(values), "n": 3}
    assert summary["methods"]["cwt"]["test_accuracy"] == pytest.approx(spread)
    results = [json.loads((here / "all" / f"cwt-seed0-fold{k}of3" / "result.json").read_text()) for k in (1, 2, 3)]
    assert sum(counts["test"] for found in results for counts in found["data"]["counts"].values()) == 80
    assert len({found["data"]["digests"]["test"] for found in results}) == 3
    (here / "all" / "cwt-seed0-fold2of3" / "result.json").unlink()
    assert run_app(arguments) == 0
    again = json.loads((here / "all" / "comparison.json").read_text())
    assert [row["weights_sha256"] for row in again["rows"]] == [row["weights_sha256"] for row in rows]
    # a run alone of one fold is the same run
    assert run_app(["run", "study.toml", "--set", "data.fold=2/3", "--set", "method.rounds=1", "--out", "alone"]) == 0
    alone = json.loads((here / "alone" / "result.json").read_text())
    assert alone["weights_sha256"] == rows[1]["weights_sha256"]


def test_forgetting_shows_a_site_by_site_matrix(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--quiet", "--set", "evaluation.handovers=all"]) == 0
    assert run_app(["forgetting", "out"]) == 0
    assert "data \\ model" in capsys.readouterr().out
    found = json.loads((here / "out" / "forgetting.json").read_text())
    assert set(found["rounds"]) == {"1", "2"}
    assert set(found["rounds"]["2"]["site-1"]) == {"site-1", "site-2"}
    assert (here / "out" / "forgetting.png").read_bytes().startswith(b"\x89PNG")


def test_forgetting_needs_a_serial_method(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--quiet", "--set", "method.name=fedavg"]) == 0
    assert "handed from site to site" in fails_with(capsys, 2, ["forgetting", "out"])


def test_a_failed_run_does_not_cost_the_comparison_of_the_others(here, capsys, forked):
    arguments = ["compare", "study.toml", "--methods", "cwt,fedavg", "--out", "all", "--quiet"]
    assert run_app([*arguments, "--set", "method.rounds=1", "--set", "fedavg:optimizer.lr=1e30"]) == 1
    captured = capsys.readouterr()
    assert "cwt" in captured.out
    assert "fedavg-seed0" in captured.err
    assert "NaN or infinity" in captured.err
    assert [row["method"] for row in json.loads((here / "all" / "comparison.json").read_text())["rows"]] == ["cwt"]


@pytest.mark.parametrize(
    ("command", "usage"), [("report", "[OPTIONS] {RUN|COMPARISON}"), ("ledger", "[OPTIONS] {run}")]
)
def test_a_command_without_a_name_is_shown_without_one(capsys, command, usage):
    assert run_app([command, "runs/first", "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Usage: polyclinic {command} {usage}"


def test_rounds_are_measured_and_written_as_json(monkeypatch, capsys, tmp_path):
    for name, value in {"SITES": 2, "STEPS": 1, "BATCH": 4, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)
    assert run_app(["bench", "--json", "--out", str(tmp_path / "b.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "b.json").read_text())
    names = ["overhead", "overhead, ratio", "engines", "engines, 2 workers"]
    assert [row["name"] for row in printed["rows"]] == names
    assert all(row["value"] > 0 for row in printed["rows"])


PAPER = ["privacy", "--samples", "1144", "--batch", "32", "--noise", "0.7", "--epochs", "225", "--delta", "8.7e-4"]


def test_privacy_prints_epsilon_with_either_accountant(capsys):
    assert run_app(PAPER) == 0
    printed = capsys.readouterr().out
    assert "epsilon 39.64 at delta 0.00087 (RDP) for 8044 steps: 225 epochs of 1144 images" in printed
    assert re.search("It covers .*DP-SGD.* It does not cover .*codes, latents, batch-norm statistics", printed)
    assert run_app([*PAPER, "--accountant", "prv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["epsilon"], 1) == 36.2
    assert (found["steps"], found["delta"], found["accountant"]) == (8044, 8.7e-4, "prv")
    assert run_app(["privacy", "--samples", "500", "--noise", "1", "--epochs", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["delta"], found["epsilon"]) == (1 / 500, compute_epsilon(32 / 500, 1.0, 157, 1 / 500))


def test_a_target_gives_the_noise_or_the_epochs_or_both(capsys):
    common = ["privacy", "--samples", "1144", "--delta", "8.7e-4", "--target-epsilon", "17.8"]
    assert run_app([*common, "--epochs", "225"]) == 0
    assert "noise 0.96" in capsys.readouterr().out
    assert run_app([*common, "--noise", "0.7"]) == 0
    assert "66.48 epochs (2377 steps)" in capsys.readouterr().out
    assert run_app([*common, "--noise", "0.7", "--epochs", "225", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("noise_for_target", "epochs_for_target"):
        one = found[key]
        assert compute_epsilon(found["sampling_rate"], one["noise"], one["steps"], 8.7e-4) <= 17.8


def test_the_curve_is_drawn(tmp_path, capsys):
    picture = tmp_path / "curve.png"
    assert run_app(["privacy", "--curve", str(picture), "--sizes", "200,1000", "--epochs", "20"]) == 0
    assert capsys.readouterr().out == f"drawn in {picture}\n"
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[1] > 500
    assert pixels[..., :3].std() > 0.05


GUIDE = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_the_guide_prints_what_the_command_does_and_its_tables_make_a_study(capsys):
    typed, printed = re.search(r"\$ polyclinic (privacy .*)\n(.*)\n", GUIDE.read_text(encoding="utf-8")).groups()
    assert run_app(shlex.split(typed)) == 0
    assert capsys.readouterr().out.splitlines()[0] == printed
    block = re.search(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    rest = {
        "data": {"source": "fundus-phantom"},
        "sites": {"partition": "iid", "count": 2},
        "method": {"name": "fedavg"},
    }
    assert parse_study({**rest, **tomllib.loads(block)}).privacy.target_epsilon == 8.0
