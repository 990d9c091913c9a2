"""NVFlare's simulator, secure sums over every engine, and what a job and a call are for NVFlare."""

from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import free_port
from rehearsals import rehearsed
from run_folders import assert_same_run, history, result

from polyclinic.cli import run_app
from polyclinic.engines.nvflare.engine import Kept, pieces
from polyclinic.engines.nvflare.job import decode_property, encode_property, site_names, write_job
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.run import run

SMALL_GAN = {
    "generator.name": "dcgan",
    "generator.steps": 2,
    "generator.batch_size": 8,
    "generator.width": 2,
    "generator.latent": 4,
    "tuning.on": False,
}
SKIN = {
    "data.source": "skin-phantom",
    "data.samples": 120,
    "sites.count": 2,
    "generator.name": "gan",
    "generator.batch_size": 8,
    "generator.width": 2,
    "generator.latent": 4,
}
QUICK = {"steps": 2, "learner_steps": 2, "images": 12}
#: name of the case: method, settings of tables, settings of the method
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "cwt": ("cwt", {}, {}),
    "fedreplay": ("fedreplay", {}, {}),
    "ditto": ("ditto", {"sites.count": 2}, {}),
    "feder": ("feder", SMALL_GAN, {"buffer": 16}),
    "felicia, step by step": ("felicia", SKIN, {**QUICK, "schedule": "synchronous"}),
    "felicia, local steps": ("felicia", SKIN, {**QUICK, "schedule": "local", "exchange_every": 1}),
}


def check_same_run(study, undisturbed, folder):
    pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
    before = set(psutil.Process().children(recursive=True))  # other tests may have left some of theirs
    run(study.with_settings({"engine.name": "nvflare"}), folder)
    expected = undisturbed(study).folder
    if study.method.name == "feder":  # its ledgers hold the sites' public keys, which are drawn anew in every run
        assert result(folder)["weights_sha256"] == result(expected)["weights_sha256"]
        assert history(folder) == history(expected)
    else:
        assert_same_run(folder, expected)
    assert not (folder / ".nvflare").exists()
    left = set(psutil.Process().children(recursive=True)) - before
    names = [" ".join(child.cmdline()) for child in left]
    assert not [name for name in names if "nvflare" in name or "polyclinic.runner.run.worker" in name]


@pytest.mark.slow
def test_splitnn_sends_every_mini_batch_and_ends_in_the_same_weights(tiny, undisturbed, tmp_path):
    """Names of sites that NVFlare cannot take, too, and what a site holds in memory from call to call."""
    study = tiny("splitnn", {"sites.count": None, "sites.names": ["Graz (A)", "wien"]}, rounds=1, local_steps=3)
    check_same_run(study, undisturbed, tmp_path / "run")


@pytest.mark.slow
def test_a_plugin_reaches_server_and_sites(tiny, undisturbed, tmp_path):
    plugin = Path(__file__).parents[1] / "faulty_method.py"
    (tmp_path / "trouble").mkdir()
    settings = {"plugins": [str(plugin)], "sites.count": 2}
    study = tiny("faulty", settings, rounds=1, trouble=str(tmp_path / "trouble"))
    check_same_run(study, undisturbed, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_same_run_as_in_one_process(tiny, undisturbed, tmp_path, case):
    method, settings, of_method = CASES[case]
    check_same_run(tiny(method, settings, rounds=2, **of_method), undisturbed, tmp_path / "run")


@pytest.fixture(scope="module")
def summed(tiny):
    return tiny("fedavg", {"federation.sum": "secure"}, rounds=2, local_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "ray", "workers": 1}, {"name": "nvflare"}], ids=str)
def test_same_secure_run_on_every_engine(summed, undisturbed, tmp_path, engine):
    if "name" in engine:
        pytest.importorskip(engine["name"])
    run(summed.with_settings({f"engine.{name}": value for name, value in engine.items()}), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(summed).folder)


@pytest.fixture(scope="module")
def rehearsal(tiny, tmp_path_factory):
    """A server and three sites on this machine."""
    pytest.importorskip("nvflare")
    folder = tmp_path_factory.mktemp("summed")
    plain = tiny("fedavg", {"engine.silence": 600.0}, rounds=1, local_steps=2)
    (folder / "summed.toml").write_text(plain.to_toml())
    out = folder / "deployment"
    assert run_app(["deploy", "init", str(folder / "summed.toml"), "--out", str(out), "--port", str(free_port())]) == 0
    with rehearsed(out) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp16", "int8", "delta"])
def test_deployed_sites_send_fewer_bytes_and_end_as_in_a_simulation(rehearsal, undisturbed, tiny, tmp_path, wire):
    settings = {"engine.silence": 600.0, "engine.wire": wire}
    simulated = undisturbed(tiny("fedavg", settings, rounds=2, local_steps=2))
    sent = ["deploy", "submit", str(rehearsal.parent / "summed.toml"), "-d", str(rehearsal), "--name", f"wire-{wire}"]
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


def test_a_job_brings_no_code(tmp_path):
    job = write_job(tmp_path, "polyclinic", spec={"study": {"x": "{y}"}}, least=2)
    files = sorted(str(path.relative_to(job)) for path in job.rglob("*") if path.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]


def test_a_job_spec_is_not_mistaken_for_variables():
    job_spec = {"study": {"classes": ["{workspace}", "$x"]}}
    assert decode_property(encode_property(job_spec)) == job_spec
    assert not set("{}$") & set(encode_property(job_spec))


def test_names_that_nvflare_cannot_take_are_translated():
    assert site_names(("Graz (A)", "wien")) == {"Graz--A-": "Graz (A)", "wien": "wien"}
    with pytest.raises(BadInput, match="rename some"):
        site_names(("a b", "a.b"))


def test_a_call_that_does_not_fit_what_is_kept_is_refused(monkeypatch):
    kept = Kept()
    call = Call("a", "train", 1, {"weights": Parcel("weights", {"w": torch.arange(5000.0)})})
    whole = call.to_bytes()
    assert kept.whole(whole, {}) == whole
    first, text, _ = call.chunks()
    assert kept.whole(first + text, {"0": call.parcels["weights"].digest}) == whole
    assert kept.whole(first + text, {"0": "0" * 64}) is None
    with pytest.raises(ValueError, match="not as long"):
        kept.whole(whole + b"more", {})
    monkeypatch.setattr("polyclinic.engines.nvflare.engine.LARGEST", len(whole) - 1)
    with pytest.raises(ValueError, match="with what did not travel"):
        kept.whole(first + text, {"0": call.parcels["weights"].digest})


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 40))
def test_pieces_are_the_whole(buffers, size):
    cut = list(pieces(buffers, size))
    assert b"".join(cut) == b"".join(buffers)
    assert all(len(piece) == size for piece in cut[:-1])
    assert all(cut)
