"""The worth of sites from open sums: by hand, and the same as heads fitted for each coalition."""

import json

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import analytic
from polyclinic.methods.shared.one_round import OneRound, moments
from polyclinic.runner.evaluate.inspect import worth


def test_values_from_sums_add_up_to_what_all_sites_reach(study_of, cache):
    found = worth(study_of({"name": "analytic", "numbers": 6}), cache=cache)
    assert len(found["sites"]) == 3
    assert sum(one["shapley"] for one in found["sites"].values()) == pytest.approx(found["all"] - found["none"])
    assert found["none"] < found["all"] < 0
    assert "exact" in found["how"]


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
def test_worth_wants_open_sums(study_of, cache, how):
    with pytest.raises(BadInput, match=r"federation\.sum: the worth of a site \(method\.worth\)"):
        study_of({"name": "analytic", "worth": True}, federation={"sum": how})
    with pytest.raises(BadInput, match=r"^method\.name: what a site adds follows from the sums of 'analytic'"):
        worth(study_of({"name": "fedavg"}), cache=cache)
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


@pytest.mark.parametrize(("operation", "lie", "words"), [
    ("training", count_only, "and the limit is"),
    ("training", times(10**6), "and the limit is"),
    ("training", lambda sent: Parcel("statistics", sent.tensors, {"samples": 3}), "samples = 3"),
    ("validation", times(10**5), "validation images beside"),
], ids=["count", "multiplied", "samples", "held-out"])  # fmt: skip
def test_a_site_that_lies_in_its_sums_is_named_and_left_out(tiny_run, monkeypatch, operation, lie, words):
    liars = lying(monkeypatch, operation, lie)
    found = tiny_run({"name": "analytic", "numbers": 6, "worth": True}, engine=GO_ON)
    (failure,) = json.loads((found.folder / "result.json").read_text())["failures"]
    assert failure["site"] == liars[0]
    assert words in failure["reason"]
    assert found.values["worth"]["all"] > -1


HELD_OUT = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.25, 0.0], [1.0, 3.0]])
GOALS = torch.tensor([[0.5, -0.5], [1.0, 0.0], [0.0, 0.25], [-1.0, 0.5]])
HEAD = torch.tensor([[0.5, 1.0], [-0.25, 0.5], [0.125, 2.0]]).double()


def test_the_value_of_sites_is_minus_the_mean_squared_error_on_validation_images():
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
    sums = {"a": moments(HELD_OUT.numpy(), GOALS)}
    none = moments(HELD_OUT[:0].numpy(), GOALS[:0])
    with pytest.raises(BadInput, match=r"^data\.validation: no site has validation images to score"):
        analytic.worth_from_sums(sums, {"a": none}, lambda own: HEAD)
    found = analytic.worth_from_sums(sums, {"a": none, "b": sums["a"]}, lambda own: HEAD)
    assert found["how"] == "exact, from the sites' sums; all 2 coalitions"
    assert found["sites"]["a"]["shapley"] == pytest.approx(found["all"] - found["none"])
