"""Parcels that are handed over by reference in one process leave the same ledgers, counts and weights as bytes do."""

import json

import pytest

import polyclinic
from polyclinic.federation.layers import gate
from polyclinic.federation.ledger import background, parcel
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.runner.run.recorder import Recorder


@pytest.fixture
def make_soon(monkeypatch):
    """Call it, and every parcel counts as a large one: digests and lines are made beside training. Gives a list of the
    kinds of which lines were made so."""

    def make():
        waited, append_soon = [], Ledger.append_soon
        for module in (background, gate, parcel):
            monkeypatch.setattr(module, "PAYS_FROM", 0)

        def note(ledger, digest, **about):
            waited.append(about["kind"])
            append_soon(ledger, digest, **about)

        monkeypatch.setattr(Ledger, "append_soon", note)
        return waited

    return make


def content(folder):
    """Ledgers, communication, heads and weights of a run."""
    result = json.loads((folder / "result.json").read_text())
    ledgers = {path.name: path.read_bytes() for path in sorted((folder / "ledger").iterdir())}
    return ledgers, result["communication"], result["ledgers"], result["weights_sha256"]


@pytest.mark.parametrize("method", ["fedavg", "cwt"])
def test_the_run_folder_is_the_same(tiny, undisturbed, make_soon, tmp_path, method):
    expected = undisturbed(tiny(method))
    waited = make_soon()
    polyclinic.run(tiny(method), tmp_path / "run")
    assert "weights" in waited
    assert content(tmp_path / "run") == content(expected.folder)


def test_an_interrupted_run_ends_with_the_same_ledgers(tiny, undisturbed, make_soon, tmp_path, monkeypatch):
    expected, folder = undisturbed(tiny("fedavg")), tmp_path / "run"
    make_soon()
    with monkeypatch.context() as patch:
        rounds = iter([1, 0])
        patch.setattr(Recorder, "round_done", lambda *_: 1 / next(rounds))
        with pytest.raises(ZeroDivisionError):
            polyclinic.run(tiny("fedavg"), folder)
    polyclinic.run(tiny("fedavg"), folder, resume=True)
    assert content(folder) == content(expected.folder)
