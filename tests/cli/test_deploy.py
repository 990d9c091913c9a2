"""`polyclinic deploy`, as its page has it typed: kits, a rehearsal of server and sites, a study, and the end."""

import json
import tomllib

import pytest
from processes import ForkedProgram, free_port, wait_for
from rehearsals import rehearsed
from run_folders import history_without_bytes, left, result

from polyclinic.audits.open_run import read_study
from polyclinic.cli import run_app
from polyclinic.data.own_images import find_kit
from polyclinic.engines.nvflare.job import CLASSES
from polyclinic.runner.predict.predict import load_predictor

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")


def two_sites(tiny, **method):
    return tiny("fedavg", {"sites.count": 2, "engine.silence": 600.0}, **{"rounds": 2, **method})


@pytest.fixture(scope="module")
def deployment(tiny, tmp_path_factory):
    """Kits for two sites, made from a study with images."""
    folder = tmp_path_factory.mktemp("deploy")
    (folder / "study.toml").write_text(two_sites(tiny).to_toml())
    out = folder / "deployment"
    flags = ["--out", str(out), "--port", str(free_port())]
    assert run_app(["deploy", "init", str(folder / "study.toml"), *flags]) == 0
    return out


def test_the_study_that_is_sent_knows_no_place_of_images(deployment):
    tables = tomllib.loads((deployment / "study.toml").read_text())
    assert tables["data"]["source"] == "at-sites"
    assert tables["data"]["dataset"] == "fundus-phantom"
    assert tables["data"]["classes"] == ["healthy", "diseased"]
    assert "samples" not in tables["data"]
    assert tables["sites"]["names"] == ["site-1", "site-2"]
    assert str(deployment) not in (deployment / "study.toml").read_text()


@pytest.mark.parametrize("kit", ["server", "sites/site-1", "sites/site-2"])
def test_kits_let_nobody_bring_code_or_read_files(deployment, kit):
    local = deployment / kit / "local"
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_allow_list"] == list(CLASSES)
    assert resources["class_list_enforcement_mode"] == "enforce"
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert rights["project_admin"]["byoc"] == rights["project_admin"]["shell_commands"] == "none"
    assert list(rights) == ["project_admin"]
    if kit != "server":  # its log, and the images of others, stay where they are
        assert resources["allow_log_streaming"] is False
        assert "site_log_streamer" not in {one["id"] for one in resources["components"]}
        assert {path.name for path in (deployment / kit / "data").iterdir()} == {kit.partition("/")[2]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "{study}", "--out", "{deployment}"], "is not empty; name a new folder"),
        (["init", "{study}", "--set", "sites.names=['a b']", "--set", "sites.count=1"], "sites"),
        (["up", "-d", "{deployment}"], "--here: only a rehearsal starts everybody"),
        (["up", "--here", "-d", "{empty}"], "is no deployment"),
        (["up", "--here", "nobody", "-d", "{deployment}"], "nobody: no such participant"),
        (["start", "{empty}"], "is no kit of a server or site"),
        (["submit", "{study}", "-d", "{empty}"], "is no deployment; `polyclinic deploy init {study}` makes one"),
        (["submit", "{empty}/study.toml", "-d", "{deployment}"], "{empty}/study.toml: no such file"),
        (["submit", "{study}", "--set", "data.size=32", "-d", "{deployment}"], "at 28 px"),
        (["logs", "site-1", "-d", "{deployment}"], "has it been started here?"),
        (["fetch", "--out", "{deployment}", "-d", "{deployment}"], "exists already"),
        (["stop", "-d", "{empty}"], "is no deployment with an admin's kit"),
    ],
)
def test_mistakes_are_one_sentence(deployment, tmp_path, capsys, arguments, words):
    places = {"study": deployment.parent / "study.toml", "deployment": deployment, "empty": tmp_path}
    assert run_app(["deploy", *(argument.format(**places) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert words.format(**places) in captured.err
    assert "Traceback" not in captured.err


def test_a_server_that_is_not_there_is_one_sentence(deployment, capsys):
    assert run_app(["deploy", "status", "-d", str(deployment), "--within", "1"]) == 1
    assert "no server answers within 1 seconds (--within)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rehearsal(deployment):
    """Server and sites, running; ended by their numbers whatever happens."""
    with rehearsed(deployment) as running:
        yield running


@pytest.mark.slow
def test_a_study_runs_at_the_sites_as_in_one_process(tiny, undisturbed, rehearsal, tmp_path, capsys):
    study = two_sites(tiny)
    submitted = ["deploy", "submit", str(rehearsal.parent / "study.toml"), "-d", str(rehearsal)]
    assert run_app([*submitted, "--within", "900", "--out", str(tmp_path / "run")]) == 0
    expected = undisturbed(study).folder
    assert result(tmp_path / "run")["weights_sha256"] == result(expected)["weights_sha256"]
    assert history_without_bytes(tmp_path / "run") == history_without_bytes(expected)
    deployed, simulated = result(tmp_path / "run")["metrics"], result(expected)["metrics"]
    # no score of a single image leaves a real site, so there is nothing to make intervals of
    assert deployed == {name: simulated[name] for name in ("test", "mean", "per_site")}
    assert simulated.keys() - deployed.keys() == {"intervals", "calibration"}
    assert not (tmp_path / "run" / "cases").exists()
    # what left a site is on record at the site, and nowhere else
    for site in ("site-1", "site-2"):
        there = rehearsal / "sites" / site / "runs" / "fedavg-seed0"
        assert left(there, site) == left(expected, site)
        assert [path.name for path in (there / "ledger").iterdir()] == [f"{site}.jsonl"]
        assert run_app(["ledger", "verify", str(there), "--against", str(tmp_path / "run")]) == 0
        # and the site can use the model, and audit what it sent
        assert load_predictor(there).card.weights_sha256 == result(expected)["weights_sha256"]
        assert read_study(there, find_kit(there)).method == study.method
    assert not (tmp_path / "run" / "ledger").exists()

    assert run_app(["deploy", "status", "-d", str(rehearsal), "--within", "900"]) == 0
    status = capsys.readouterr().out
    assert "connected: site-1, site-2" in status
    assert "FINISHED" in status
    assert run_app(["deploy", "logs", "site-1", "-d", str(rehearsal)]) == 0
    assert "site-1" in capsys.readouterr().out


@pytest.mark.slow  # without NVFlare in between: tests/deployment/test_coordination.py and test_watch.py
def test_a_run_is_stopped_by_its_owner(tiny, rehearsal, tmp_path, capsys):
    """One that would take days: stopped after the round it is in, and not submitted again by who watches over it."""
    (tmp_path / "long.toml").write_text(two_sites(tiny, rounds=10**6).to_toml())
    patient = ["-d", str(rehearsal), "--within", "900"]
    submit = ["polyclinic", "deploy", "submit", str(tmp_path / "long.toml"), "--name", "long", *patient]
    with (tmp_path / "words").open("w") as words:
        watching = ForkedProgram(submit, stdout=words)
    history_file = rehearsal / "server" / "runs" / "long" / "history.jsonl"
    wait_for(lambda: history_file.exists() and history_file.read_text())
    assert run_app(["deploy", "stop", *patient]) == 0
    assert "stops after the round it is in" in capsys.readouterr().out
    assert watching.wait() == 1
    told = (tmp_path / "words").read_text()
    assert "the run was stopped by its owner (deploy stop); finished rounds are kept, add --resume" in told
    assert run_app(["deploy", "stop", *patient]) == 2
    assert "has ended already" in capsys.readouterr().err
