"""Scores of sites: theirs, noised, and their worth from sums."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import carry_out
from polyclinic.federation.site import SiteState
from polyclinic.methods import analytic
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Method
from polyclinic.methods.shared.one_round import OneRound, moments
from polyclinic.methods.standalone import Standalone
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon
from polyclinic.runner.evaluate.inspect import worth
from polyclinic.study import parse_study
from polyclinic.training.plans import Score

WHOLE = {"w": torch.ones(1)}


def scoring_sites(monkeypatch, counts, **states):
    """Sites with so many validation images, one trainer for all."""
    monkeypatch.setattr(Method, "score", lambda self, site, part, weights, own: {"alone": torch.tensor(len(part))})
    loaded = []
    trainer = SimpleNamespace(
        privacy=None,
        state=lambda: WHOLE,
        load=loaded.append,
        evaluate_parts=lambda parts: [{"images": torch.tensor(len(part))} for part in parts],
    )
    sites = []
    for name, count in counts.items():
        data, state = SimpleNamespace(validation=range(count), test=range(7)), SiteState(states.get(name, {}))
        sites.append(SimpleNamespace(name=name, data=data, trainer=trainer, state=state))
    return sites, loaded


def scores(sites, weights=None, split="validation"):
    """What each site releases when all are asked at once."""
    weights = [WHOLE] * len(sites) if weights is None else weights
    asked = zip(sites, weights, strict=True)
    found = carry_out([FedAvg().evaluate(site, weights=own, split=split) for site, own in asked])
    return [{name: int(one) for name, one in parcel.tensors.items()} if parcel else None for parcel in found]


@pytest.mark.parametrize("counts", [{"a": 3, "d": 2}, {"a": 3, "b": 0, "c": 5}, {"a": 0, "b": 0}])
def test_sites_that_score_the_same_weights_do_so_in_one_pass(monkeypatch, counts):
    sites, loaded = scoring_sites(monkeypatch, counts)
    assert scores(sites) == [{"images": n} if n else None for n in counts.values()]
    assert loaded == [WHOLE]
    assert scores(sites, split="test")[0] == {"images": 7}


@pytest.mark.parametrize(("weights", "states"), [
    ([WHOLE, dict(WHOLE)], {}),
    ([{}, {}], {}),
    ([None, None], {}),
    ([{"other": torch.ones(1)}] * 2, {}),
    ([WHOLE, WHOLE], {"b": {"local/w": torch.ones(1)}}),
    ([WHOLE, WHOLE], {"a": {"best/w": torch.ones(1)}}),
])  # fmt: skip
def test_otherwise_each_is_scored_alone(monkeypatch, weights, states):
    sites, loaded = scoring_sites(monkeypatch, {"a": 1, "b": 2}, **states)
    assert scores(sites, weights) == [{"alone": 1}, {"alone": 2}]
    assert loaded == []


@pytest.mark.parametrize(("method", "changes", "may"), [
    (FedAvg(), {}, True),
    (FedAvg(), {"stacked": "auto"}, True),
    (FedAvg(), {"stacked": "never"}, False),
    (FedAvg(), {"local_names": frozenset({"w"})}, False),
    (FedAvg(), {"task": SimpleNamespace(dense=True)}, False),
    (Standalone(), {}, False),
])  # fmt: skip
def test_one_model_without_masks_is_scored_for_all_sites(method, changes, may):
    given = {"stacked": "always", "local_names": frozenset(), "task": SimpleNamespace(dense=False), **changes}
    assert Score.may_group(method, SimpleNamespace(**given), 3, noted=False) is may
    assert not Score.may_group(method, SimpleNamespace(**given), 3, noted=True)


def site_alone():
    """A site of which a round has the rank (score, minus loss); a round without a score has none."""
    task = SimpleNamespace(
        finish=lambda sums: sums,
        rank=lambda found, metric: None if metric not in found else (found[metric], -found["loss"]),
    )
    data = SimpleNamespace(validation="validation images", test="test images")
    return SimpleNamespace(trainer=SimpleNamespace(task=task, metric="auc"), state=SiteState(), data=data)


def score(monkeypatch, site, number, sums, part="validation images", own="current"):
    """The site has the weights of a round, and is scored."""
    monkeypatch.setattr(Method, "score", lambda self, *given: sums)
    site.state.put("local", {"round": torch.tensor(number)})
    assert Standalone().score(site, part, {}, own) is sums


@pytest.mark.parametrize(("rounds", "best"), [
    ([(0.5, 1.0), (0.7, 1.0), (0.6, 1.0)], 2),
    ([(0.7, 1.0), (0.7, 1.0)], 1),
    ([(0.7, 1.0), (0.7, 0.5)], 2),
    ([(0.7, 1.0), (0.6, 0.1)], 1),
    ([None, (0.2, 1.0), None], 2),
])  # fmt: skip
def test_the_best_round_is_the_first_of_the_highest_rank(monkeypatch, rounds, best):
    site = site_alone()
    for number, found in enumerate(rounds, 1):
        sums = {"loss": 1.0} if found is None else {"auc": found[0], "loss": found[1]}
        score(monkeypatch, site, number, sums)
    assert site.state.group("best") == {"round": best}
    assert site.state["best_score"].dtype == torch.float64


def test_what_selects_no_round(monkeypatch):
    site = site_alone()
    for number in (1, 2):
        score(monkeypatch, site, number, {})
    assert site.state.group("best") == {"round": 2}
    assert "best_score" not in site.state
    site = site_alone()
    score(monkeypatch, site, 1, {"auc": 0.9, "loss": 1.0}, part="test images")
    score(monkeypatch, site, 1, {"auc": 0.9, "loss": 1.0}, own="best")
    assert site.state.group("best") == {}


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


def test_noised_scores_stand_alone_until_the_budget_is_spent(tiny_run):
    noised = tiny_run(METHOD, **AGES)
    privacy = {name: value for name, value in AGES["privacy"].items() if name not in ("score_noise", "cover")}
    exact = tiny_run(METHOD, **{**AGES, "privacy": privacy})
    assert noised["weights_sha256"] == exact["weights_sha256"]
    assert noised["metrics"]["test"]["mae"] != pytest.approx(exact["metrics"]["test"]["mae"], abs=1e-6)
    assert "intervals" in exact["metrics"]
    assert "intervals" not in noised["metrics"]
    assert not (noised.folder / "cases").exists()
    result = tiny_run(METHOD, **AGES)
    only_steps = [Mechanism(**one) for one in result["privacy"]["mechanisms"][:-1]]
    target = composed_epsilon(only_steps, 1e-5, "rdp") * 1.001
    without = tiny_run(METHOD, **{**AGES, "privacy": {**AGES["privacy"], "target_epsilon": target}})
    assert without["metrics"]["test"] == {}
    assert without["privacy"]["epsilon"] <= target
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


def test_values_from_sums_add_up_and_a_run_tells_them(study_of, cache, tiny_run):
    found = worth(study_of({"name": "analytic", "numbers": 6}), cache=cache)
    assert len(found["sites"]) == 3
    assert sum(one["shapley"] for one in found["sites"].values()) == pytest.approx(found["all"] - found["none"])
    assert found["none"] < found["all"] < 0
    assert "exact" in found["how"]
    # As a deployed run does, from the sums that the coordinator gets.
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
