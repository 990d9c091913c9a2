"""The worth of sites from open sums: by hand, and the same as heads fitted for each coalition."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import analytic
from polyclinic.methods.shared.one_round import OneRound, moments
from polyclinic.runner.compare.worth import worth


def test_values_from_sums_add_up_to_what_all_sites_reach(study_of, cache):
    found = worth(study_of({"name": "analytic", "numbers": 6}), cache=cache)
    assert len(found["sites"]) == 3
    assert sum(one["shapley"] for one in found["sites"].values()) == pytest.approx(found["all"] - found["none"])
    assert found["none"] < found["all"] < 0
    assert "exact" in found["how"]


@pytest.mark.parametrize(
    ("name", "metric"), [("analytic", "accuracy"), ("analytic", "loss"), ("gaussian-heads", "auc")]
)
def test_other_metrics_come_from_the_sites_validation_scores(study_of, tiny_run, cache, name, metric):
    """All sites together are worth what a run of the study scores on validation images."""
    method = {"name": name, "numbers": 6}
    found = worth(study_of(method), metric=metric, cache=cache)
    assert metric in found["value"]
    assert sum(one["shapley"] for one in found["sites"].values()) == pytest.approx(found["all"] - found["none"])
    folder = tiny_run(method, evaluation={"every": 1}).folder
    line = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])
    scored = line["validation"]["pooled"][metric]
    assert found["all"] == pytest.approx(-scored if metric == "loss" else scored, abs=1e-4)


def test_a_metric_that_the_task_does_not_have_is_refused(study_of, cache):
    with pytest.raises(BadInput, match=r"evaluation\.metric"):
        worth(study_of({"name": "analytic", "numbers": 6}), metric="dice", cache=cache)


def test_a_run_that_is_asked_to_tells_the_worth_of_its_sites(study_of, tiny_run, cache):
    """As a deployed run does, from the sums that the coordinator gets."""
    method = {"name": "analytic", "numbers": 6}
    told = tiny_run({**method, "worth": True}).values["worth"]
    found = worth(study_of(method), cache=cache)
    assert told["sites"].keys() == found["sites"].keys()
    assert told["all"] == pytest.approx(found["all"])
    for site, one in told["sites"].items():
        assert one == pytest.approx(found["sites"][site])


@pytest.mark.parametrize("how", ["integer", "secure"])
def test_worth_wants_open_sums(study_of, how):
    with pytest.raises(BadInput, match=r"federation\.sum: the worth of a site \(method\.worth\)"):
        study_of({"name": "analytic", "worth": True}, federation={"sum": how})


def test_sums_over_validation_images_leave_only_where_the_study_asks_for_worth(study_of):
    with pytest.raises(ParcelRejected, match=r"the study has no method\.worth"):
        study_of({"name": "analytic"}).method.give_held_out_sums(None)


GO_ON = {"on_failure": "continue", "quorum": 0.5}


def lying(monkeypatch, operation, lie):
    """The first site that is asked multiplies or swaps what it sends."""
    honest, liars = OneRound.sums_at, []

    def sums_at(self, site, which="training"):
        sent = honest(self, site, which)
        liars.append(site.name)
        return lie(sent) if site.name == liars[0] and which == operation else sent

    monkeypatch.setattr(OneRound, "sums_at", sums_at)
    return liars


def times(factor):
    def lie(sent):
        tensors = {name: factor * tensor for name, tensor in sent.tensors.items()}
        return Parcel("statistics", tensors, {"samples": int(tensors["products"][0])})

    return lie


def count_only(sent):
    products = sent.tensors["products"].clone()
    products[0] = 2**24
    return Parcel("statistics", {**sent.tensors, "products": products}, sent.metadata)


@pytest.mark.parametrize(
    ("operation", "lie", "words"),
    [
        ("training", count_only, "and the limit is"),
        ("training", times(10**6), "and the limit is"),
        ("training", lambda sent: Parcel("statistics", sent.tensors, {"samples": 3}), "samples = 3"),
        ("validation", times(10**5), "validation images beside"),
    ],
    ids=["count", "multiplied", "samples", "held-out"],
)
def test_a_site_that_lies_in_its_sums_is_named_and_left_out(tiny_run, monkeypatch, operation, lie, words):
    liars = lying(monkeypatch, operation, lie)
    found = tiny_run({"name": "analytic", "numbers": 6, "worth": True}, engine=GO_ON)
    (failure,) = json.loads((found.folder / "result.json").read_text())["failures"]
    assert failure["site"] == liars[0]
    assert words in failure["reason"]
    assert found.values["worth"]["all"] > -1


# --- by hand ------------------------------------------------------------------------------------------


HELD_OUT = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.25, 0.0], [1.0, 3.0]])


GOALS = torch.tensor([[0.5, -0.5], [1.0, 0.0], [0.0, 0.25], [-1.0, 0.5]])


HEAD = torch.tensor([[0.5, 1.0], [-0.25, 0.5], [0.125, 2.0]]).double()


def test_the_value_of_sites_is_minus_the_mean_squared_error_by_hand():
    held_out = moments(HELD_OUT.numpy(), GOALS)
    solved = []

    def solve(sums):
        solved.append(sums.count)
        return HEAD

    train = {
        name: moments(np.ones((count, 2), np.float32), torch.zeros(count, 2)) for name, count in (("a", 2), ("b", 3))
    }
    said = torch.cat([torch.ones(4, 1), HELD_OUT], 1).double() @ HEAD
    error = float((said - GOALS).square().sum()) / 4
    value = analytic.squared_error_value
    assert value(train, held_out, solve, frozenset("ab")) == pytest.approx(-error, rel=1e-6)
    assert value(train, held_out, solve, frozenset("b")) == pytest.approx(-error, rel=1e-6)
    assert solved == [5, 3]
    nothing = float(GOALS.square().sum()) / 4  # zero is said
    assert value(train, held_out, solve, frozenset()) == pytest.approx(-nothing, rel=1e-6)
    assert solved == [5, 3]


def test_worth_wants_validation_images():
    sums = {"a": moments(HELD_OUT.numpy(), GOALS)}
    none = moments(HELD_OUT[:0].numpy(), GOALS[:0])
    with pytest.raises(BadInput, match=r"^data\.validation: no site has validation images to score"):
        analytic.worth_from_sums(sums, {"a": none}, lambda own: HEAD)
    found = analytic.worth_from_sums(sums, {"a": none, "b": sums["a"]}, lambda own: HEAD)
    assert found["how"] == "exact, from the sites' sums; all 2 coalitions"
    assert found["sites"]["a"]["shapley"] == pytest.approx(found["all"] - found["none"])


@pytest.mark.parametrize(("count", "orders", "asked"), [(10, None, None), (11, None, 200), (3, 7, 7)])
def test_shares_are_sampled_above_ten_sites_or_where_orders_are_given(monkeypatch, count, orders, asked):
    drawn = []

    def sampled(names, game, number, rng):
        drawn.append(number)
        return {name: SimpleNamespace(value=1.0, low=0.5, high=1.5) for name in names}

    monkeypatch.setattr(analytic, "sampled_shares", sampled)
    names = [f"s{number}" for number in range(count)]
    found = analytic.shares_of(names, lambda some: float(len(some)), "value", "how", orders)
    row = {"leave_one_out": 1.0, "shapley": 1.0} | ({} if asked is None else {"low": 0.5, "high": 1.5})
    assert found["sites"] == {name: pytest.approx(row) for name in names}
    assert (found["all"], found["none"]) == (count, 0)
    assert drawn == ([] if asked is None else [asked])
