"""One run per method whose metric is pinned: the mean absolute error, in months, of a small bone-age study.

An edit that changes what a method learns moves its number; a machine that rounds otherwise does not move it far.
"""

import pytest

from polyclinic.methods import METHODS

MONTHS = {
    "standalone": 28.73,
    "centralized": 23.26,
    "fedsgd": 30.31,
    "fedavg": 23.77,
    "fedprox": 23.30,
    "fedavgm": 33.70,
    "fedbn": 55.11,
    "scaffold": 22.52,
    "fedopt": 23.72,
    "moon": 27.16,
    "feddyn": 24.57,
    "ditto": 25.30,
    "fedrep": 26.36,
    "fedper": 24.71,
    "finetune": 24.61,
    "fedavg-share": 21.53,
    "cwt": 25.29,
    "splitnn": 25.29,
    "cwt-replay": 31.05,
    "fedavg-replay": 29.69,
    "fedreplay": 23.18,
    "feder": 32.26,
    "feder-a": 35.78,
    "feder-b": 34.07,
    "felicia": 26.62,
    "analytic": 19.35,
    "private-head": 24.29,
}
STUDY = {
    "data": {"source": "hand-phantom", "samples": 200},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "optimizer": {"name": "adam", "lr": 0.002, "augment": []},
}
#: what takes too long here by default
SETTINGS = {"fedrep": {"head_epochs": 1}, "felicia": {"learner_steps": 100}, "private-head": {"phantoms": 10}}
#: the papers' methods and one plain one; of all others no bit changes unnoticed (`test_recorded_digests.py`)
QUICK = {"analytic", "cwt-replay", "fedavg", "feder", "fedreplay", "felicia"}
REGRESSION = sorted(name for name in METHODS if "regression" in METHODS[name].traits.tasks)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in REGRESSION]
)
@pytest.mark.slow
def test_a_method_learns_what_it_learned(tiny_run, method):
    backbone = "small-cnn" if method == "fedbn" else "lenet5"
    result = tiny_run({"name": method, "rounds": 15, **SETTINGS.get(method, {})}, **STUDY, model={"backbone": backbone})
    assert result.metrics["test"]["mae"] == pytest.approx(MONTHS[method], abs=1.5)
