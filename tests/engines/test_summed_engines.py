"""Secure sums on every engine end in the weights of one process, and at deployed sites as in a simulation; so does
what travels in fewer bytes (`engine.wire`)."""

import pytest
from processes import free_port
from rehearsals import rehearsed
from run_folders import assert_same_run, result

from polyclinic.cli import run_app
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
