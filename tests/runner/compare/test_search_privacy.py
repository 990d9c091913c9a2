"""What a search of settings costs in privacy, by the ledgers of its runs."""

from __future__ import annotations

import pytest

from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.runner.compare.compare import Entry
from polyclinic.runner.compare.tune import cost_of_search, sentence

PRIVATE = {"privacy.noise_multiplier": 4.0, "privacy.delta": 1e-5, "optimizer.batch_size": 8}


@pytest.fixture
def entry_of(tiny, undisturbed, tmp_path):
    def finished(method: str, changes: dict) -> Entry:
        study = tiny(method, changes, rounds=1)
        return Entry(method, study.seed, study, undisturbed(study).folder)

    return finished


def test_two_private_runs_are_composed(entry_of):
    runs = [entry_of("fedavg", {**PRIVATE, "optimizer.lr": lr}) for lr in (0.1, 0.01)]
    cost = cost_of_search(runs)
    assert cost is not None
    (spent, _) = (run.result["privacy"] for run in runs)
    assert cost["runs"] == 2
    assert cost["delta"] == 1e-5
    assert spent["epsilon"] < cost["epsilon"] < 2 * spent["epsilon"]
    one = runs[0].result["data"]["counts"]
    most = max(
        compute_epsilon(8 / counts["train"], 4.0, 2 * max(1, counts["train"] // 8), 1e-5) for counts in one.values()
    )
    assert cost["epsilon"] == pytest.approx(most, rel=1e-6)
    assert sentence(cost).startswith(f"privacy: the 2 private runs of this search have spent epsilon {most:.3g}")


def test_a_search_without_privacy_costs_nothing(entry_of, tiny, tmp_path):
    unfinished = Entry("fedavg", 0, tiny("fedavg", PRIVATE), tmp_path / "none")
    assert cost_of_search([entry_of("fedavg", {}), unfinished]) is None
