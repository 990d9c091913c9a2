"""Runs that begin with the weights of a file (`model.weights`): noted, used by workers, compared at a resume."""

import hashlib
import json

import pytest
import torch
from processes import ForkedWorker

from polyclinic.cli import run_app
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput
from polyclinic.federation.policy import Policy
from polyclinic.runner.run import engines
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run


@pytest.fixture
def file(tiny, undisturbed, tmp_path):
    """The weights of a run, all but two of them, as torch writes them."""
    weights = undisturbed(tiny("fedavg", rounds=1)).weights()
    del weights["fc3.weight"], weights["fc3.bias"]
    torch.save(weights, tmp_path / "first.pt")
    return tmp_path / "first.pt"


def assembly_of(study, folder, **more):
    return Assembly(study, prepare(study.data, study.sites), folder, **more)


def test_a_run_begins_with_the_weights_of_the_file_and_notes_which(tiny, file, tmp_path, monkeypatch):
    study = tiny("fedavg", {"model.weights": str(file)}, rounds=1)
    result = run(study, tmp_path / "run")
    noted = json.loads((result.folder / "weights.json").read_text())
    assert noted["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (noted["file"], noted["missing"]) == ("first.pt", ["fc3.weight", "fc3.bias"])
    assert (len(noted["loaded"]), noted["unused"], noted["other_shape"]) == (8, [], [])
    first, saved = assembly_of(study, tmp_path / "run").initial_weights(), torch.load(file, weights_only=True)
    assert all(torch.equal(first[name], tensor) for name, tensor in saved.items())
    drawn = assembly_of(tiny("fedavg", rounds=1), tmp_path).initial_weights()
    assert torch.equal(first["fc3.weight"], drawn["fc3.weight"])
    # by worker processes the same
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)
    workers = tiny("fedavg", {"model.weights": str(file), "engine.workers": 2}, rounds=1)
    assert run(workers, tmp_path / "workers")["weights_sha256"] == result["weights_sha256"]
    assert run(tiny("fedavg", rounds=1), tmp_path / "drawn")["weights_sha256"] != result["weights_sha256"]


def test_a_resumed_run_takes_the_same_file_wherever_it_lies_now(tiny, file, tmp_path):
    study = tiny("fedavg", {"model.weights": str(file)}, rounds=1)
    result = run(study, tmp_path / "run")
    (result.folder / "result.json").unlink()
    moved = file.rename(tmp_path / "moved.pt")
    with pytest.raises(BadInput, match=r"model\.weights: '.*first\.pt' cannot be read"):
        run(None, tmp_path / "run", resume=True)
    again = run(study.with_settings({"model.weights": str(moved)}), tmp_path / "run", resume=True)
    assert again["weights_sha256"] == result["weights_sha256"]
    (result.folder / "result.json").unlink()
    weights = torch.load(moved, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, file)
    with pytest.raises(BadInput, match=r"first\.pt' is not the file that .* was begun with"):
        run(study, tmp_path / "run", resume=True)
    with pytest.raises(BadInput, match="model: differs from the study"):
        run(tiny("fedavg", rounds=1), tmp_path / "run", resume=True)


def test_a_file_that_does_not_fit_is_refused_before_anything_is_written(tiny, tmp_path, capsys):
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "other.pt")
    study = tiny("fedavg", {"model.weights": str(tmp_path / "other.pt")})
    with pytest.raises(BadInput, match=r"no tensor of .*other\.pt' fits lenet5"):
        run(study, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "study.toml").write_text(study.with_settings({"model.weights": "nowhere.pt"}).to_toml())
    assert run_app(["study", "check", str(tmp_path / "study.toml")]) == 2
    assert "model.weights: 'nowhere.pt' cannot be read" in capsys.readouterr().err


def test_a_deployed_site_reads_no_file_that_a_study_names(tiny, tmp_path):
    study = tiny("fedavg", {"model.weights": "/etc/hostname"})
    site = assembly_of(study, tmp_path, policy=Policy())
    drawn = assembly_of(tiny("fedavg"), tmp_path).initial_weights()
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in site.initial_weights().items())
    at_sites = {"source": "at-sites", "dataset": "scans", "size": 28, "classes": ["clear", "ill"]}
    sites = {"partition": "iid", "names": ["north", "south"]}
    with pytest.raises(BadInput, match=r"model\.weights: sites of 'fedbn' keep a part of the network"):
        tiny("fedbn", {"data": at_sites, "sites": sites, "model.backbone": "small-cnn", "model.weights": "first.pt"})
