"""Secure sums on every engine end in the weights of one process, and at deployed sites as in a simulation; so does
what travels in fewer bytes (`engine.wire`)."""

import json
import shutil

import pytest
from processes import free_port
from rehearsals import rehearsed
from run_folders import assert_same_run, result

from polyclinic.cli import run_app
from polyclinic.deployment.approval import TRUSTED_WEIGHTS
from polyclinic.federation.ledger.ledger import verify
from polyclinic.runner.run.run import run


@pytest.fixture(scope="module")
def study(tiny):
    return tiny("fedavg", {"federation.sum": "secure"}, rounds=2, local_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "ray", "workers": 1}, {"name": "nvflare"}], ids=str)
def test_same_secure_run_on_every_engine(study, undisturbed, tmp_path, engine):
    if "name" in engine:
        pytest.importorskip(engine["name"])
    run(study.with_settings({f"engine.{name}": value for name, value in engine.items()}), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.fixture(scope="module")
def rehearsal(tiny, tmp_path_factory):
    """A server and three sites on this machine."""
    pytest.importorskip("nvflare")
    folder = tmp_path_factory.mktemp("summed")
    plain = tiny("fedavg", {"engine.silence": 600.0}, rounds=1, local_steps=2)
    (folder / "study.toml").write_text(plain.to_toml())
    out = folder / "deployment"
    assert run_app(["deploy", "init", str(folder / "study.toml"), "--out", str(out), "--port", str(free_port())]) == 0
    with rehearsed(out) as running:
        yield running


@pytest.mark.slow
def test_deployed_sites_add_up_in_secret(rehearsal, undisturbed, tiny, tmp_path):
    simulated = undisturbed(
        tiny("fedavg", {"engine.silence": 600.0, "federation.sum": "integer"}, rounds=1, local_steps=2)
    )
    sent = ["deploy", "submit", str(rehearsal.parent / "study.toml"), "-d", str(rehearsal), "--name", "secret"]
    assert run_app([*sent, "--set", "federation.sum=secure", "--within", "900", "--out", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run")["weights_sha256"] == simulated.values["weights_sha256"]
    ledgers = sorted(rehearsal.glob("sites/*/runs/secret/ledger/*.jsonl"))
    assert len(ledgers) == 3
    for ledger in ledgers:
        kinds = [line["kind"] for line in verify(ledger)]
        assert "masked" in kinds
        assert "weights" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp16", "int8", "delta"])
def test_deployed_sites_send_fewer_bytes_and_end_as_in_a_simulation(rehearsal, undisturbed, tiny, tmp_path, wire):
    settings = {"engine.silence": 600.0, "engine.wire": wire}
    simulated = undisturbed(tiny("fedavg", settings, rounds=2, local_steps=2))
    sent = ["deploy", "submit", str(rehearsal.parent / "study.toml"), "-d", str(rehearsal), "--name", f"wire-{wire}"]
    changes = ["--set", f"engine.wire={wire}", "--set", "method.rounds=2", "--within", "900"]
    assert run_app([*sent, *changes, "--out", str(tmp_path / "run")]) == 0
    deployed = result(tmp_path / "run")
    assert deployed["weights_sha256"] == simulated.values["weights_sha256"]
    travelled, expected = (one["communication"]["by_kind"]["weights"] for one in (deployed, simulated.values))
    assert travelled == pytest.approx(expected, rel=0.001), "but for counts that a deployed site does not tell"
    ledgers = sorted(rehearsal.glob(f"sites/*/runs/wire-{wire}/ledger/*.jsonl"))
    assert len(ledgers) == 3
    for ledger in ledgers:
        assert {line["wire"] for line in verify(ledger) if line["kind"] == "weights"} == {wire}


@pytest.mark.slow
def test_deployed_sites_tell_counts_and_score_a_model(rehearsal, undisturbed, tiny, tmp_path, capsys):
    study = str(rehearsal.parent / "study.toml")
    flags = ["-d", str(rehearsal), "--within", "900"]
    assert run_app(["deploy", "inspect", study, *flags, "--picture", str(tmp_path / "sites.png")]) == 0
    assert "what the sites tell" in capsys.readouterr().out
    assert (tmp_path / "sites.png").stat().st_size > 5000
    ours = undisturbed(tiny("fedavg", {"engine.silence": 600.0}, rounds=1, local_steps=2))
    model = str(ours.folder / "model.safetensors")
    for kit in (rehearsal / "sites").iterdir():  # the people of each site trust this file
        (kit / TRUSTED_WEIGHTS).mkdir()
        shutil.copy(model, kit / TRUSTED_WEIGHTS)
    assert run_app(["deploy", "evaluate", model, "--study", study, *flags, "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["metrics"]["test"]["accuracy"] == pytest.approx(ours.metrics["test"]["accuracy"], abs=1e-6)
