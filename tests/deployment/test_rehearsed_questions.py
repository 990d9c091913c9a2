"""A rehearsal of three hospitals with real processes: they train in a secure sum and tell statistics, tell counts, and
score a model. What is told lies near what a simulation of the same cases finds."""

import json
import shutil
from pathlib import Path

import pytest
from processes import free_port
from rehearsals import rehearsed

from polyclinic.cli import run_app
from polyclinic.deployment.approval import TRUSTED_WEIGHTS
from polyclinic.federation.ledger.ledger import verify
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate.toml"
SHORT = {"method.rounds": 2, "evaluation.every": 0, "evaluation.select": "last", "engine.silence": 600.0}


def flags(settings):
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("questions") / "deployment"
    assert run_app(["deploy", "init", str(EXAMPLE), "--out", str(out), "--port", str(free_port())]) == 0
    with rehearsed(out) as running:
        yield running


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The same study in one process, with the whole numbers of the secure sum."""
    study = load_study(EXAMPLE).with_settings({**SHORT, "federation.sum": "integer"})
    return run(study, tmp_path_factory.mktemp("simulated") / "run")


@pytest.fixture(scope="module")
def submitted(rehearsal, tmp_path_factory):
    out = tmp_path_factory.mktemp("submitted") / "run"
    asked = ["deploy", "submit", str(EXAMPLE), "-d", str(rehearsal), "--name", "secret", "--within", "900"]
    assert run_app([*asked, *flags({**SHORT, "federation.sum": "secure"}), "--out", str(out)]) == 0
    return out


def test_statistics_of_a_secure_run_lie_near_those_of_a_simulation(rehearsal, simulated, submitted):
    told = json.loads((submitted / "result.json").read_text())
    assert told["weights_sha256"] == simulated.values["weights_sha256"]
    fine, coarse = simulated.metrics["intervals"]["per_site"], told["safe_statistics"]["per_site"]
    assert set(coarse) == set(fine) == {"north", "east", "south"}
    gaps = {}
    for site, metrics in coarse.items():
        for name in ("accuracy", "auc", "brier"):
            value, low, high, _ = metrics[name]
            exact = fine[site][name]
            gaps.setdefault(name, []).append(abs(value - exact["value"]))
            gaps.setdefault(f"ends of {name}", []).append(max(abs(low - exact["low"]), abs(high - exact["high"])))
        assert "auc by DeLong" in metrics
        assert "change of auc by DeLong" in metrics
    print({name: [round(one, 4) for one in some] for name, some in gaps.items()})
    assert max(max(gaps[name]) for name in ("accuracy", "brier")) <= 0.05  # a step of one of some 27 patients
    assert max(gaps["auc"]) <= 0.25  # half a step of one of the few patients of the smallest class
    for ledger in rehearsal.glob("sites/*/runs/secret/ledger/*.jsonl"):
        kinds = [line["kind"] for line in verify(ledger)]
        assert {"masked", "shares", "statistics"} <= set(kinds)
        assert "weights" not in kinds


def test_no_secret_of_a_sum_lies_in_a_sites_folder(rehearsal, submitted):
    for state in rehearsal.glob("sites/*/runs/secret/sites/*/state-*.safetensors"):
        assert b'"mask_key"' not in state.read_bytes()
        assert b'"own_seed"' not in state.read_bytes()


def test_sites_tell_counts(rehearsal, tmp_path, capsys):
    picture = tmp_path / "sites.png"
    asked = ["deploy", "inspect", str(EXAMPLE), "-d", str(rehearsal), "--within", "900", "--picture", str(picture)]
    assert run_app([*asked, *flags({"engine.silence": 600.0})]) == 0
    said = capsys.readouterr().out
    assert "distance of" in said
    assert "KS of the labels" in said
    assert picture.stat().st_size > 5000


def test_only_totals_come_out_of_a_secure_sum(rehearsal, capsys):
    settings = {"engine.silence": 600.0, "federation.sum": "secure"}
    asked = ["deploy", "inspect", str(EXAMPLE), "-d", str(rehearsal), "--name", "totals", "--within", "900"]
    assert run_app([*asked, *flags(settings)]) == 0
    said = capsys.readouterr().out
    assert "How the sites differ is not known from totals" in " ".join(said.split())
    for ledger in rehearsal.glob("sites/*/runs/totals/ledger/*.jsonl"):
        kinds = {line["kind"] for line in verify(ledger)}
        assert "masked" in kinds
        assert "statistics" not in kinds


def test_sites_score_a_model(rehearsal, simulated, tmp_path, capsys):
    model = simulated.folder / "model.safetensors"
    for kit in (rehearsal / "sites").iterdir():
        (kit / TRUSTED_WEIGHTS).mkdir(exist_ok=True)
        shutil.copy(model, kit / TRUSTED_WEIGHTS)
    asked = ["deploy", "evaluate", str(model), "--study", str(EXAMPLE), "-d", str(rehearsal), "--within", "900"]
    assert run_app([*asked, *flags({"engine.silence": 600.0}), "--out", str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["metrics"]["test"]["accuracy"] == pytest.approx(simulated.metrics["test"]["accuracy"], abs=1e-6)
    assert set(found["safe_statistics"]["per_site"]) == {"north", "east", "south"}
