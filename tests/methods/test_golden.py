"""One run per method whose metric is pinned: the mean absolute error, in months, of a small bone-age study.

An edit that changes what a method learns moves its number; a machine that rounds otherwise does not move it far.
"""

from __future__ import annotations

import pytest

from polyclinic.methods import METHODS

MONTHS = {
    "standalone": 21.84,
    "centralized": 19.89,
    "fedsgd": 27.29,
    "fedavg": 19.63,
    "fedprox": 19.88,
    "fedavgm": 37.16,
    "fedbn": 44.86,
    "scaffold": 20.82,
    "fedopt": 22.96,
    "moon": 25.02,
    "feddyn": 19.71,
    "ditto": 23.24,
    "fedrep": 22.14,
    "fedper": 23.63,
    "finetune": 20.29,
    "fedavg-share": 19.11,
    "cwt": 20.75,
    "splitnn": 20.75,
    "cwt-replay": 21.57,
    "fedavg-replay": 25.07,
    "fedreplay": 18.30,
    "feder": 29.61,
    "feder-a": 24.32,
    "feder-b": 33.55,
    "felicia": 26.60,
    "analytic": 19.35,
    "private-head": 31.40,
}
STUDY = {
    "data": {"source": "hand-phantom", "samples": 200},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "optimizer": {"name": "adam", "lr": 0.002, "augment": []},
}


#: what takes too long here by default
SETTINGS = {
    "fedrep": {"head_epochs": 1},
    "felicia": {"learner_steps": 100},
    "private-head": {"phantoms": 10},
}


@pytest.mark.parametrize("method", sorted(name for name in METHODS if "regression" in METHODS[name].traits.tasks))
def test_a_method_learns_what_it_learned(tiny_run, method):
    backbone = "small-cnn" if method == "fedbn" else "lenet5"
    result = tiny_run({"name": method, "rounds": 30, **SETTINGS.get(method, {})}, **STUDY, model={"backbone": backbone})
    assert result.metrics["test"]["mae"] == pytest.approx(MONTHS[method], abs=1.5)
