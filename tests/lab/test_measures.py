"""How run folders become numbers: results, audits, generators, models after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyclinic.errors import WorkFailed
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic_lab.claim import CLAIMS
from polyclinic_lab.judge import plan
from polyclinic_lab.measures import Row, audited, carried_each_round, curve, forgetting, measure, projected


@pytest.fixture
def audited_run(tmp_path: Path) -> Path:
    findings = [{"attack": "learned-decoder", "evidence": {"picked": share}} for share in (0.5, 0.7)]
    parcels = [{"kind": "latents", "findings": findings}, {"kind": "weights", "findings": []}]
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "site-1.jsonl").write_text('{"kind": "latents"}\n')
    (tmp_path / "audit.json").write_text(json.dumps({"complete": True, "budget": "quick", "parcels": parcels}))
    return tmp_path


def test_a_number_of_an_audit_is_the_mean_of_its_findings(audited_run: Path) -> None:
    assert audited(audited_run, "latents", "picked", "decoder") == {"picked": pytest.approx(0.6)}
    assert audited(audited_run, "latents", "picked", "inversion") == {}


def test_a_number_that_no_finding_has_is_an_error(audited_run: Path) -> None:
    with pytest.raises(WorkFailed, match="no number 'identified'"):
        audited(audited_run, "latents", "identified", "decoder")


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
    monkeypatch.setattr("polyclinic_lab.generators.PROJECTED", 4)
    tables = {
        "data": {"source": "chest-phantom", "size": 28, "samples": 60},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "model": {"backbone": "small-cnn"},
        "method": {"name": "feder", "rounds": 1, "buffer": 8},
        "generator": {"name": "dcgan", "steps": 2, "width": 8, "latent": 8},
        "tuning": {"distance": "pixels", "most_steps": 2, "most_tuning_steps": 2, "measured": 20},
    }
    plain, private = (
        run(parse_study({**tables, "tuning": {**tables["tuning"], "alpha": alpha}}), tmp_path / f"{alpha}").folder
        for alpha in (0.0, 1.0)
    )
    found = projected({"without": [plain], "with": [private]}, "quick")
    for label in ("without", "with"):
        ((distances,),) = [found[label, "distance"]]
        assert len(distances) == 8  # four images at each of two sites
        assert all(0 < value < 1 for value in distances)  # mean squared differences of pixels in [0, 1]
    assert found["without", "distance"] != found["with", "distance"]
    assert (plain / "projected.png").exists()
    assert projected({"without": [plain]}, "quick") == {}


def test_a_claim_s_measures_make_a_row_for_each_arm_and_metric(tmp_path: Path) -> None:
    for name, mae in (("a", 3.0), ("b", 5.0)):
        (tmp_path / name).mkdir()
        told = {"metrics": {"test": {"mae": mae}}, "communication": {"total_bytes": 2_000_000}}
        (tmp_path / name / "result.json").write_text(json.dumps(told))
    found = measure(["test mae", "carried"], {"one": [tmp_path / "a", tmp_path / "b"]}, "quick")
    assert found == [Row("one", "mae", (3.0, 5.0)), Row("one", "MB", (2.0, 2.0))]
    assert (found[0].mean, found[0].std) == (4.0, pytest.approx(2**0.5))


def test_models_of_all_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    folders: dict[str, list[Path]] = {"a": [], "b": []}
    for label, digests in (("a", "xy"), ("b", "xz")):
        for seed, digest in enumerate(digests):
            run = tmp_path / f"{label}{seed}"
            run.mkdir()
            (run / "result.json").write_text(json.dumps({"weights_sha256": digest}))
            folders[label].append(run)
    assert measure(["one_digest"], folders, "quick") == [Row("all arms", "different models", (1.0, 2.0))]


def test_epsilon_falls_with_noise_and_rises_with_epochs() -> None:
    plain, noisy = (
        {(row.label, row.metric): row.mean for row in measure([words], {}, "quick")}
        for words in ("epsilons", "epsilons noise=1.2")
    )
    assert all(noisy[key] < plain[key] for key in plain)
    assert plain["1144 images", "epsilon after 50 epochs"] < plain["1144 images", "epsilon after 300 epochs"]


def test_bytes_of_a_site_and_round_are_those_that_sites_send(tmp_path: Path) -> None:
    told = {"total_bytes": 90, "sent_bytes": 48_000_000, "per_site": {"a": 1, "b": 2}}
    (tmp_path / "result.json").write_text(json.dumps({"communication": told, "rounds": 4}))
    assert carried_each_round(tmp_path) == {"MB a site and round": 6.0}


def test_a_curve_has_a_point_for_each_weighing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = plan(CLAIMS["felicia-figure10-lambda"], tmp_path, "quick", 1, phantom=True)["1"][0].study
    monkeypatch.setattr("polyclinic_lab.measures.load_run_study", lambda run: study)
    worth = [{"round": n, "sites": {"hospital-1": {"test_synthetic": 0.5 + n / 10}}} for n in (1, 2, 3)]
    (tmp_path / "result.json").write_text(json.dumps({"metrics": {"diets": {"hospital-1": {}}}, "worth": worth}))
    assert curve(tmp_path, "synthetic") == {
        "first auc at own site, synthetic": 0.6,
        "rise of auc at own site, synthetic": pytest.approx(0.2),
        "auc at own site, synthetic after 100 steps": 0.6,
        "auc at own site, synthetic after 200 steps": 0.7,
        "auc at own site, synthetic after 300 steps": 0.8,
    }
    assert curve(tmp_path, "augmented") == {}


@pytest.mark.slow  # two processes that import torch
def test_a_killed_run_is_resumed_and_compared(tmp_path: Path) -> None:
    tables = {
        "data": {"source": "hand-phantom", "size": 28, "samples": 60},
        "task": {"name": "regression"},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "method": {"name": "fedavg", "rounds": 40},
    }
    done = run(parse_study(tables), tmp_path / "fedavg-seed0")
    assert measure(["same_after_kill"], {"fedavg": [done.folder]}, "quick") == [
        Row("fedavg", "different models", (1.0,))
    ]
    assert (tmp_path / "fedavg-seed0-killed" / "result.json").exists()
