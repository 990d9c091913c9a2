"""FedER where something is missing or wrong: sites that fail, what piles up meanwhile, and settings that cannot be."""

import pytest
from feder_studies import TABLES, study_of

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods.feder import FedER
from polyclinic.methods.shared import site_generator
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

pytestmark = pytest.mark.usefixtures("no_contact_sheets")


def failing_once(monkeypatch):
    """Site 2 cannot adapt in round 1."""
    adapt = FedER.adapt

    def failing(self, site, only_newest=False):
        if site.name == "site-2" and site.round == 1:
            raise RuntimeError("the scanner is on fire")
        return adapt(self, site, only_newest)

    failing.operation = adapt.operation
    monkeypatch.setattr(FedER, "adapt", failing)


def test_a_site_that_fails_is_left_out_of_its_round(go, monkeypatch):
    failing_once(monkeypatch)
    found = go()
    assert [(f["round"], f["site"]) for f in found["failures"]] == [(1, "site-2")]
    with pytest.raises(WorkFailed):
        go(engine={"on_failure": "stop"})


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


ASYNCHRONOUS = {"mode": "asynchronous"}
TAKES = r"method.turn_takes.site-1: must be (greater than 0|a finite number)"


@pytest.mark.parametrize(
    ("name", "method", "changes", "message"),
    [
        ("feder", {"real_share": 0}, {}, "method.real_share"),
        ("feder-b", {"buffer": 0}, {}, "method.buffer"),
        ("feder", {}, {"sites": {"partition": "iid", "count": 1}}, "give it two sites or more"),
        ("feder", {}, {"model": {"backbones": {"site-1": "unet"}}}, "model.backbones: 'unet' of site 'site-1' cannot"),
        ("feder", {}, {"model": {"backbones": {"west": "lenet5"}}}, "model.backbones: there is no site 'west'"),
        ("feder", {}, {"generator": {"name": "gann"}}, "generator.name: no such choice"),
        ("feder", {}, {"privacy": {"on": ["classifier"]}}, "chooses when to stop training a generator by real images"),
        (
            "feder",
            {},
            {"generator": {"name": "vqvae2"}, "tuning": {"alpha": 1}},
            "'vqvae2' is not trained step by step",
        ),
        ("feder", {"turn_takes": {"west": 2.0}}, {}, "method.turn_takes: there is no site 'west'"),
        ("feder", {"turn_takes": {"site-1": 2.0}}, {}, r"method.turn_takes: sites in step wait .* set method.mode ="),
        # with a turn that is no number, or takes for ever, nobody would ever be next
        *(
            ("feder", {**ASYNCHRONOUS, "turn_takes": {"site-1": takes}}, {}, TAKES)
            for takes in (0.0, -3.0, float("nan"), float("inf"))
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(name, method, changes, message, tmp_path, cache):
    tables = {**study_of().as_tables(), "method": {"name": name, "rounds": 2, **method}, **changes}
    with pytest.raises(BadInput, match=message):
        run(parse_study(tables), tmp_path, cache=cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"backbones": {"site-1": "lenet5"}}}, "model.backbones: 'fedavg' needs the same network at every"),
        ({"tuning": {"alpha": 1}}, "tuning: 'fedavg' trains no generator"),
    ],
)
def test_what_is_feders_is_not_fedavgs(changes, message):
    tables = {name: table for name, table in TABLES.items() if name not in ("tuning", "generator")}
    with pytest.raises(BadInput, match=message):
        parse_study({**tables, "method": {"name": "fedavg"}, **changes})
