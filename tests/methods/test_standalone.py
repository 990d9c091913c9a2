"""A site alone selects its best round alone, by hand."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.methods.shared.method import Method
from polyclinic.methods.standalone import Standalone


class State(dict):
    def group(self, name):
        return self.get(f"group {name}", {})

    def put(self, name, tensors):
        self[f"group {name}"] = dict(tensors)


def site_alone():
    """A site of which a round has the rank (score, minus loss); a round without a score has none."""
    task = SimpleNamespace(
        finish=lambda sums: sums,
        rank=lambda found, metric: None if metric not in found else (found[metric], -found["loss"]),
    )
    data = SimpleNamespace(validation="validation images", test="test images")
    return SimpleNamespace(trainer=SimpleNamespace(task=task, metric="auc"), state=State(), data=data)


def score(monkeypatch, site, number, sums, part="validation images", own="current"):
    """The site has the weights of a round, and is scored."""
    monkeypatch.setattr(Method, "score", lambda self, *given: sums)
    site.state.put("local", {"round": number})
    assert Standalone().score(site, part, {}, own) is sums


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([(0.5, 1.0), (0.7, 1.0), (0.6, 1.0)], 2),
        ([(0.7, 1.0), (0.7, 1.0)], 1),
        ([(0.7, 1.0), (0.7, 0.5)], 2),
        ([(0.7, 1.0), (0.6, 0.1)], 1),
        ([None, (0.2, 1.0), None], 2),
    ],
)
def test_the_best_round_is_the_first_of_the_highest_rank(monkeypatch, rounds, best):
    site = site_alone()
    for number, found in enumerate(rounds, 1):
        sums = {"loss": 1.0} if found is None else {"auc": found[0], "loss": found[1]}
        score(monkeypatch, site, number, sums)
    assert site.state.group("best") == {"round": best}
    assert site.state["best_score"].dtype == torch.float64


def test_without_validation_images_the_last_round_is_kept(monkeypatch):
    site = site_alone()
    for number in (1, 2):
        score(monkeypatch, site, number, {})
    assert site.state.group("best") == {"round": 2}
    assert "best_score" not in site.state


def test_other_images_and_other_weights_select_nothing(monkeypatch):
    site = site_alone()
    score(monkeypatch, site, 1, {"auc": 0.9, "loss": 1.0}, part="test images")
    score(monkeypatch, site, 1, {"auc": 0.9, "loss": 1.0}, own="best")
    assert site.state.group("best") == {}
