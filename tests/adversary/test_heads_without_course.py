"""The incoming check of methods whose head is solved for at once: honest runs end, and numbers are still looked at."""

import pytest
from attacked_site import SITE, ask

import polyclinic
from polyclinic import Study
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.policy import DEFAULT_KINDS, Incoming, Policy
from polyclinic.methods import METHODS
from polyclinic.runner.run.assembly import Assembly

ENCODER = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
METHOD = {
    "private-head": {"rounds": 3, "phantoms": 40},
    "analytic": {"numbers": 16},
    "gaussian-heads": {"numbers": 8},
    "fedpft": {},
}


def test_these_are_all_methods_without_a_course():
    assert {name for name in METHODS.builtin if not METHODS[name].traits.gradual} == set(METHOD)


@pytest.mark.parametrize("name", METHOD)
def test_an_honest_run_at_deployed_sites_ends(monkeypatch, tmp_path, name):
    policy = Policy(kinds=DEFAULT_KINDS, min_cohort=10, scores="coarse", deployed=True, incoming=Incoming(on=True))
    monkeypatch.setattr(Assembly, "_simulated_policy", lambda _: policy)
    private = {"privacy": {"noise_multiplier": 1.0}} if name == "private-head" else {}
    study = Study(
        data={"source": "chest-phantom", "size": 28, "samples": 160},
        sites={"partition": "iid", "count": 2},
        model=ENCODER,
        method={"name": name, **METHOD[name]},
        engine={"device": "cpu", "workers": 1, "on_failure": "stop"},
        **private,
    )
    assert polyclinic.run(study, tmp_path / "run").metrics["test"]


def test_numbers_of_a_head_are_still_looked_at(kit):
    kit.policy(incoming="on = true")
    host = kit.host(model=ENCODER, method={"name": "analytic", "numbers": 8})
    weights = dict(host.spec.first_weights(SITE))
    weights["fc.weight"] = weights["fc.weight"] + 1e30
    with pytest.raises(ParcelRejected, match=r"largest of 'fc\.weight'"):
        ask(host, "evaluate", weights=weights)
