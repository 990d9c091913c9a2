"""FedER where something is missing or wrong: sites that fail, what piles up meanwhile, and settings that cannot be."""

from __future__ import annotations

import pytest
import torch
from feder_studies import runner, study_of

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods.feder import FedER, queue_of
from polyclinic.methods.shared import site_generator
from polyclinic.study import parse_study


@pytest.fixture
def go(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(site_generator, "contact_sheet", lambda *_: None)
    return runner(tmp_path, cache)


def failing_once(monkeypatch, watch=lambda site: None):
    """Site 2 cannot adapt in round 1; `watch` sees every other site before it adapts."""
    adapt = FedER.adapt

    def failing(self, site, only_newest=False):
        if site.name == "site-2" and site.round == 1:
            raise RuntimeError("the scanner is on fire")
        watch(site)
        return adapt(self, site, only_newest)

    failing.operation = adapt.operation
    monkeypatch.setattr(FedER, "adapt", failing)


# --- sites that fail --------------------------------------------------------------------------------------


def test_a_site_that_fails_is_left_out_of_its_round(go, monkeypatch):
    failing_once(monkeypatch)
    found = go()
    assert [(f["round"], f["site"]) for f in found["failures"]] == [(1, "site-2")]
    with pytest.raises(WorkFailed):
        go(engine={"on_failure": "stop"})


def test_a_site_in_step_adapts_what_came_last_and_forgets_the_rest(go, monkeypatch):
    queued, newest, trained = [], [], []

    def watch(site):
        if site.name == "site-2":
            queued.append(len(queue_of(site)))
            newest.append(site.state.group(queue_of(site)[-1])["weights/conv1.weight"].clone())

    failing_once(monkeypatch, watch)
    train = FedER.train

    def noted(self, site, buffer):
        if site.name == "site-2" and site.round:
            trained.append(site.state.group("local")["conv1.weight"].clone())
        return train(self, site, buffer)

    monkeypatch.setattr(FedER, "train", noted)
    go(method={"rounds": 3})
    assert queued == [2, 1]  # round 2 finds what came in round 1, too; round 3 does not
    assert all(torch.equal(given, used) for given, used in zip(newest, trained, strict=True))


def test_without_work_at_any_site_the_round_is_over(go, monkeypatch):
    """Of two sites one fails: the other has handed its model to nobody, and waits in vain."""
    failing_once(monkeypatch)
    found = go(method={"mode": "asynchronous"}, sites={"count": 2, "target_ks": 0.29})
    assert [(f["round"], f["site"]) for f in found["failures"]] == [(1, "site-2")]
    assert found["rounds"] == 2
    assert found["asynchronous"]["turns"] < 4


def test_a_site_that_could_not_prepare_says_why_it_hands_over_nothing(go, monkeypatch):
    fit = site_generator.fit

    def failing(site, model):
        if site.name == "site-2":
            raise RuntimeError("the scanner is on fire")
        return fit(site, model)

    monkeypatch.setattr(site_generator, "fit", failing)
    found = go()
    assert [(f["round"], f["operation"]) for f in found["failures"]] == [
        (0, "prepare"),
        (1, "hand_over"),
        (2, "hand_over"),
    ]
    assert found["failures"][1]["reason"] == (
        "site 'site-2' has no buffer to hand over: it could not prepare one in round 0"
    )


# --- bad input ------------------------------------------------------------------------------------------


def test_one_site_has_nobody_to_hand_to():
    with pytest.raises(BadInput, match="give it two sites or more"):
        parse_study({**study_of().as_tables(), "sites": {"partition": "iid", "count": 1}})


def test_unknown_sites_are_named(go):
    with pytest.raises(BadInput, match=r"model.backbones: there is no site 'west'"):
        go(model={"backbones": {"west": "lenet5", "site-1": "small-cnn"}})
    with pytest.raises(BadInput, match=r"method.turn_takes: there is no site 'west'"):
        go(method={"turn_takes": {"west": 2.0}})


def test_sites_in_step_have_no_pace_of_their_own(go):
    with pytest.raises(BadInput, match=r"method.turn_takes: sites in step wait .* set method.mode = 'asynchronous'"):
        go(method={"turn_takes": {"site-1": 2.0}})


@pytest.mark.parametrize("takes", [0.0, -3.0, float("nan"), float("inf")])
def test_a_turn_takes_some_time(takes):
    """With one that is no number, or takes for ever, nobody would ever be next."""
    with pytest.raises(BadInput, match=r"method.turn_takes.site-1: must be (greater than 0|a finite number)"):
        study_of(method={"mode": "asynchronous", "turn_takes": {"site-1": takes}})
