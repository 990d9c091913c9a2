"""Parcels that an audit attacks: which are chosen, the released model, damaged runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from json_schemas import assert_valid

from polyclinic.audits import ATTACKS, attack_membership
from polyclinic.audits.audit import audit
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import best_round, by_expected_leak, parcels_to_audit, released_models
from polyclinic.errors import BadInput, WorkFailed


@pytest.fixture(autouse=True)
def _hurried(hurry) -> None:
    hurry(images=2, update_steps=1, latent_steps=1)


@pytest.fixture
def folder(tiny, undisturbed, tmp_path: Path) -> Path:
    done = undisturbed(tiny("fedavg", {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    return tmp_path / "run"


def kept(folder: Path, name: str) -> Path:
    (file,) = folder.glob(f"sites/site-1/kept/*-train-*/{name}")
    return file


def untouched(folder: Path) -> bool:
    return not (folder / "audit.json").exists() and not list(folder.glob("sites/*/audit"))  # nor any picture


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:500])


@pytest.mark.parametrize(("name", "damage", "sentence"), [
    ("0-weights.safetensors", cut_short, "is not what its ledger says left"),
    ("0-weights.safetensors", lambda file: file.write_bytes(b""), "is not what its ledger says left"),
    ("0-weights.safetensors", Path.unlink, "lacks a parcel that was kept"),
    ("context.safetensors", cut_short, "so no attack can be scored"),
    ("context.safetensors", Path.unlink, "so no attack can be scored"),
    ("note.json", lambda file: file.write_text("{"), "a note of what was kept cannot be read"),
    ("note.json", lambda file: file.write_text("{}"), "a note of what was kept cannot be read"),
])  # fmt: skip
def test_a_damaged_kept_file_is_named(folder: Path, name: str, damage: Callable[[Path], object], sentence: str):
    damage(kept(folder, name))
    with pytest.raises(WorkFailed, match=sentence):
        audit(folder)
    assert untouched(folder)


def test_a_ledger_that_is_gone_is_named(folder: Path):
    (folder / "ledger" / "site-1.jsonl").unlink()
    with pytest.raises(WorkFailed, match=r"site 'site-1': there is no ledger .* restore ledger/site-1.jsonl"):
        audit(folder)
    assert untouched(folder)


@pytest.mark.parametrize(("asked", "sentence"), [
    ({"kinds": ["latents"]}, "--kinds: no parcel of kind latents .* kept metrics, weights"),
    ({"kinds": ["weihgts"]}, "--kinds: no such choice: 'weihgts' .did you mean"),
    ({"sites": ["site-9"]}, "--sites: no such choice: 'site-9' .did you mean"),
    ({"device": "nonsense"}, "--device: there is no 'nonsense' here"),
    ({"features": "pixel"}, "--features: no such choice: 'pixel' .did you mean 'pixels'"),
])  # fmt: skip
def test_what_is_not_there_is_said_before_anything_is_written(folder: Path, asked: dict, sentence: str):
    with pytest.raises(BadInput, match=sentence):
        audit(folder, **asked)
    assert untouched(folder)


def test_a_place_that_cannot_be_written_is_named(folder: Path):
    (folder / "sites" / "site-1" / "audit").write_text("in the way")
    with pytest.raises(BadInput, match=r"gradient-inversion\.png: cannot be written"):
        audit(folder)
    (folder / "sites" / "site-1" / "audit").unlink()
    (folder / "audit.json").mkdir()
    with pytest.raises(BadInput, match=r"audit\.json: cannot be written"):
        audit(folder)


def test_a_device_that_is_too_small_is_said_and_the_rest_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def too_much(*_: object) -> list:
        raise torch.OutOfMemoryError("no room")

    for name in ("gradient-inversion", "loss-threshold", "reference-models", "site-inference"):
        monkeypatch.setattr(ATTACKS[name], "attack", too_much)
    report = audit(folder, sites=["site-1", "site-2"])
    assert len([one for one in report["parcels"] if one["kind"] == "weights"]) == 2
    assert report["complete"]
    assert report["verdicts"]["weights"]["verdict"] == "not tested"
    assert "memory of cpu is too small" in report["verdicts"]["weights"]["words"]


def test_an_audit_that_was_stopped_at_once_leaves_everything_as_it_was(folder: Path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(folder, progress=stop)
    assert untouched(folder)
    assert audit(folder)["complete"]
    with pytest.raises(KeyboardInterrupt):
        audit(folder, progress=stop)
    assert json.loads((folder / "audit.json").read_text())["complete"]  # the earlier one
    assert not list(folder.rglob("*.partial"))


STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}


@pytest.fixture
def released(tiny, undisturbed, tmp_path, hurry, monkeypatch):
    """A run of three rounds, of which sites kept the first and the last; the model is said to be of the second."""
    hurry(releases=2, candidates=25)
    monkeypatch.setattr(attack_membership, "PASSES", 2)
    monkeypatch.setattr("polyclinic.audits.audit.draw_plot", lambda draw, path: False)
    shutil.copytree(undisturbed(tiny("fedavg", STUDY, rounds=3)).folder, tmp_path / "run")
    return tmp_path / "run"


def say_best(released, round: int) -> None:
    found = json.loads((released / "result.json").read_text())
    (released / "result.json").write_text(json.dumps({**found, "selected": {**found["selected"], "round": round}}))


def test_the_model_of_a_round_in_between_is_asked_about_members(released):
    say_best(released, 2)
    report = audit(released, kinds=["weights"])
    assert_valid(released)
    assert [one["round"] for one in report["parcels"]] == [1, 3, 2]
    released = report["parcels"][-1]
    assert (released["operation"], released["site"], released["digests"]) == ("released model", "site-1", [])
    assert {one["attack"] for one in released["findings"]} == {"loss-threshold", "rmia", "lira"}
    assert {one["question"] for one in released["findings"]} == {"membership"}
    weights = report["verdicts"]["weights"]
    assert weights["questions"]["membership"]["parcels"] == 3
    assert (weights["attacked"], weights["released"]) == (2, 1)  # the model is no parcel that left
    assert report["level"] == pytest.approx(0.01 / (2 * 7 + 3))  # its tests have their part of the level


def test_a_round_that_is_attacked_anyway_is_not_asked_twice_and_a_damaged_result_names_none(released):
    assembly, lines = open_run(released)
    chosen = parcels_to_audit(released, assembly.study, lines, "quick", ("weights",), ())
    for round, asked in ((1, 0), (2, 1), (3, 0)):
        say_best(released, round)
        assert len(released_models(released, assembly, chosen)) == asked
    assert best_round(released) is not None
    (released / "result.json").write_text("{")
    assert best_round(released) is None


@pytest.mark.parametrize(("kind", "rounds"), [("weights", [1, 10, 7, 4]), ("generator", [10, 7, 4, 1])])
def test_of_updates_the_first_and_then_the_last_are_attacked_of_generators_the_last(kind, rounds):
    kept = [SimpleNamespace(kinds=(kind,), round=number) for number in (1, 4, 7, 10)]
    assert [one.round for one in by_expected_leak(kept)] == rounds
