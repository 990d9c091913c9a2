"""How claims read audits and generators: a number that is not there is an error, and generators are projected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyclinic.claims.measures import audited, forgetting
from polyclinic.claims.projection import DISTANCE, projected
from polyclinic.errors import WorkFailed
from polyclinic.runner.run import run
from polyclinic.study import parse_study


@pytest.fixture
def audited_run(tmp_path: Path) -> Path:
    findings = [{"attack": "learned-decoder", "evidence": {"picked": share}} for share in (0.5, 0.7)]
    parcels = [{"kind": "latents", "findings": findings}, {"kind": "weights", "findings": []}]
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "site-1.jsonl").write_text('{"kind": "latents"}\n')
    (tmp_path / "audit.json").write_text(json.dumps({"complete": True, "budget": "quick", "parcels": parcels}))
    return tmp_path


def test_a_number_of_an_audit_is_the_mean_of_its_findings(audited_run: Path) -> None:
    assert audited("latents", "picked", attack="decoder")(audited_run) == {"picked": pytest.approx(0.6)}
    assert audited("latents", "picked", attack="inversion")(audited_run) == {}


def test_a_run_without_such_parcels_is_not_audited(tmp_path: Path) -> None:
    assert audited("latents", "picked")(tmp_path) == {}  # an audit of this empty folder would be refused


def test_a_number_that_no_finding_has_is_an_error(audited_run: Path) -> None:
    with pytest.raises(WorkFailed, match="no number 'identified'"):
        audited("latents", "identified", attack="decoder")(audited_run)


def test_forgetting_is_measured_at_sites_that_have_trained(tmp_path: Path) -> None:
    """Sites trained in the order b, a, c; what b's model gets right at a, where it has not been yet, does not count."""
    table = {
        "a": {"b": 0.0, "a": 0.9, "c": 0.7},
        "b": {"b": 0.8, "a": 0.1, "c": 0.5},
        "c": {"b": 0.0, "a": 0.0, "c": 1.0},
    }
    (tmp_path / "forgetting.json").write_text(json.dumps({"better": "higher", "rounds": {"1": table}}))
    found = forgetting(tmp_path)
    assert found == pytest.approx({"just trained": 0.85, "after the last site": 0.6, "lost": 0.25})
    (tmp_path / "forgetting.json").write_text(json.dumps({"better": "lower", "rounds": {"1": table}}))
    assert forgetting(tmp_path)["lost"] == pytest.approx(-0.25)


def test_generators_of_feder_are_projected_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.claims.projection.PROJECTED", 4)
    tables = {
        "data": {"source": "chest-phantom", "size": 28, "samples": 60},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "model": {"backbone": "small-cnn"},
        "method": {"name": "feder", "rounds": 1, "buffer": 8},
        "generator": {"name": "dcgan", "steps": 2, "width": 8, "latent": 8},
        "tuning": {"on": False},
    }
    done = run(parse_study(tables), tmp_path / "run")
    found = projected(done.folder)
    assert 0 < found[DISTANCE] < 1  # a mean of squared differences of pixels in [0, 1]
    assert json.loads((done.folder / "projected.json").read_text()) == found
