"""Scores of several sites in one pass, and the best round that a site alone selects: by hand."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.operation import carry_out
from polyclinic.federation.site import SiteState
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Method
from polyclinic.methods.standalone import Standalone
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
