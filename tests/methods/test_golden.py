"""One run per method whose metric is pinned: the mean absolute error, in months, of a small bone-age study.

An edit that changes what a method learns moves its number; a machine that rounds otherwise does not move it far.
"""

from __future__ import annotations

import pytest

from polyclinic.methods import METHODS

MONTHS = {
    "standalone": 23.45,
    "centralized": 18.50,
    "fedsgd": 34.78,
    "fedavg": 19.21,
    "fedprox": 21.01,
    "fedavgm": 28.12,
    "fedbn": 18.31,
    "fedavg-share": 22.36,
    "cwt": 20.22,
    "splitnn": 20.22,
    "cwt-replay": 21.76,
    "fedavg-replay": 22.51,
    "fedreplay": 19.62,
    "feder": 23.57,
    "feder-a": 22.52,
    "feder-b": 36.52,
    "felicia": 24.29,
}
STUDY = {
    "data": {"source": "hand-phantom", "samples": 200},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "optimizer": {"name": "adam", "lr": 0.002, "augment": []},
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_learns_what_it_learned(tiny_run, method):
    backbone = "small-cnn" if method == "fedbn" else "lenet5"
    result = tiny_run({"name": method, "rounds": 30}, **STUDY, model={"backbone": backbone})
    assert result.metrics["test"]["mae"] == pytest.approx(MONTHS[method], abs=1.5)
