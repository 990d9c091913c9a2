"""The worth of sites from open sums: exact, and the same as heads fitted for each coalition."""

import json

import pytest

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.one_round import OneRound
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
