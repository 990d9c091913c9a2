"""Scores with noise of their own: in the account of the site, in its record, and beside nothing exact."""

import pytest

from polyclinic.errors import BadInput
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon
from polyclinic.study import parse_study

AGES = {
    "data": {"source": "hand-phantom", "samples": 120, "size": 28},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "model": {"backbone": "lenet5"},
    "evaluation": {"every": 0, "select": "last"},
    "privacy": {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "delta": 1e-5, "score_noise": 4.0, "cover": "all"},
}
METHOD = {"name": "fedavg", "rounds": 2, "local_steps": 1}


def test_a_score_is_one_release_more_in_the_account(tiny_run):
    result = tiny_run(METHOD, **AGES)
    steps, scores = result["privacy"]["mechanisms"][:-1], result["privacy"]["mechanisms"][-1]
    assert scores == {"noise": 4.0, "sampling_rate": 1.0, "steps": 1}
    both = [Mechanism(**one) for one in (*steps, scores)]
    assert result["privacy"]["epsilon"] == pytest.approx(composed_epsilon(both, 1e-5, "rdp"))
    assert result["privacy"]["epsilon"] > composed_epsilon(both[:-1], 1e-5, "rdp")
    assert result["privacy"]["covers"] == ["everything released"]
    told = " ".join(result["privacy"]["does_not_cover"])
    assert "as they are" not in told
    assert "how many validation and test images" in told
    result = tiny_run(METHOD, **{**AGES, "evaluation": {"every": 1}})
    entered = [one for one in result["privacy"]["mechanisms"] if one["noise"] == 4.0]
    assert sum(one["steps"] for one in entered) == 3  # two rounds, and the end


def test_noised_scores_stand_beside_no_exact_ones(tiny_run):
    noised = tiny_run(METHOD, **AGES)
    privacy = {name: value for name, value in AGES["privacy"].items() if name not in ("score_noise", "cover")}
    exact = tiny_run(METHOD, **{**AGES, "privacy": privacy})
    assert noised["weights_sha256"] == exact["weights_sha256"]
    assert noised["metrics"]["test"]["mae"] != pytest.approx(exact["metrics"]["test"]["mae"], abs=1e-6)
    assert "intervals" in exact["metrics"]
    assert "intervals" not in noised["metrics"]
    assert not (noised.folder / "cases").exists()


def test_a_budget_that_is_spent_lets_no_score_out(tiny_run):
    result = tiny_run(METHOD, **AGES)
    only_steps = [Mechanism(**one) for one in result["privacy"]["mechanisms"][:-1]]
    target = composed_epsilon(only_steps, 1e-5, "rdp") * 1.001
    without = tiny_run(METHOD, **{**AGES, "privacy": {**AGES["privacy"], "target_epsilon": target}})
    assert without["metrics"]["test"] == {}
    assert without["privacy"]["epsilon"] <= target


def test_with_patients_one_image_of_each_is_scored(tiny_run):
    brains = {"source": "brain-phantom", "samples": 60, "size": 28}
    changed = {**AGES, "data": brains, "task": {"name": "classification"}}
    result = tiny_run(METHOD, **{**changed, "privacy": {**AGES["privacy"], "unit": "patient"}})
    assert result["privacy"]["covers"] == ["everything released"]
    assert result["privacy"]["unit"] == "patient"


@pytest.mark.parametrize(("changes", "words"), [
    ({"task": {"name": "segmentation"}, "model": {"backbone": "unet"}}, "cannot be noised"),
    ({"privacy": {**AGES["privacy"], "score_noise": 0.0}}, "score_noise"),
])  # fmt: skip
def test_what_cannot_be_noised_is_refused(changes, words):
    tables = {**AGES, "data": {"source": "brain-phantom", "samples": 60, "size": 28}, **changes}
    with pytest.raises(BadInput, match=words):
        parse_study({**tables, "method": METHOD})
