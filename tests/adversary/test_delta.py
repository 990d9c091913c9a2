"""Attack: choose a delta, an accountant or a unit with which next to no epsilon is recorded."""

import math

import pytest
from attacked_site import PRIVATE, ask, first_weights

from polyclinic.federation.call import GateRefused
from polyclinic.privacy import epsilon
from polyclinic.privacy.account import ONE_IMAGE
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon, group_epsilon


def test_epsilon_is_counted_at_the_sites_own_delta(kit):
    """At delta .999 a study has no epsilon at all; the site counts at 1 / n, or at what its policy says."""
    kit.policy(max_epsilon=0.1)
    study = {**PRIVATE, "delta": 0.999, "accountant": "prv"}
    host = kit.host(privacy=study)
    with pytest.raises(GateRefused, match=r"epsilon .* would be spent, and the site's policy allows 0\.1"):
        ask(host, "train", weights=first_weights(host))
    kit.policy(max_epsilon=1000.0, max_delta=1e-5)
    [parcel] = ask(kit.host("second", privacy=study), "train", weights=first_weights(host)).parcels
    assert parcel.privacy["delta"] == 1e-5
    known = [Mechanism(**one) for one in parcel.privacy["mechanisms"]]
    assert parcel.privacy["epsilon"] == pytest.approx(composed_epsilon(known, 1e-5, "prv"), rel=1e-6)


def test_what_earlier_runs_recorded_at_a_large_delta_is_counted_anew(kit):
    kit.policy(max_epsilon=1000.0, max_delta=0.9)
    host = kit.host("first", privacy={**PRIVATE, "delta": 0.9})
    [parcel] = ask(host, "train", weights=first_weights(host)).parcels
    assert parcel.privacy["epsilon"] < 0.1
    kit.policy(max_epsilon=1.0)
    with pytest.raises(GateRefused, match="is spent by other runs"):
        ask(kit.host("second", privacy={**PRIVATE, "noise_multiplier": 1000.0}), "train", weights=first_weights(host))


def test_an_accountant_that_the_policy_does_not_list_is_refused(kit):
    kit.policy(max_epsilon=1000.0, accountants=["rdp"])
    host = kit.host(privacy={**PRIVATE, "accountant": "prv"})
    with pytest.raises(GateRefused, match="accepts the accountants rdp, not 'prv'"):
        ask(host, "train", weights=first_weights(host))


def test_a_patient_with_several_images_costs_more():
    """Group privacy by hand: twice the epsilon, at a delta that is smaller by 1 + exp(epsilon)."""
    steps, delta = [Mechanism(4.0, 0.1, 10)], 1e-3
    assert group_epsilon(steps, delta, 1) == composed_epsilon(steps, delta)
    both = group_epsilon(steps, delta, 2)
    assert both > 2 * composed_epsilon(steps, delta / 2)
    one = both / 2
    smallest = delta / (1 + 2.718281828459045**one)
    assert composed_epsilon(steps, smallest) <= one * 1.1
    assert group_epsilon([Mechanism(0.5, 0.5, 1000)], delta, 50) == float("inf")


def test_delta_of_a_group_is_that_of_the_theorem(monkeypatch):
    """d (exp(k e) - 1) / (exp(e) - 1) for three images, with an epsilon of 0.5 at any delta."""
    asked, delta = [], 1e-3
    monkeypatch.setattr(epsilon, "composed_epsilon", lambda steps, single, accountant: asked.append(single) or 0.5)
    assert group_epsilon([], delta, 3) == 1.5
    assert asked == pytest.approx([delta / 3, delta * math.expm1(0.5) / math.expm1(1.5) / 2])
    monkeypatch.setattr(epsilon, "composed_epsilon", lambda steps, single, accountant: 0.0)
    assert group_epsilon([], delta, 3) == 0.0


def test_a_patient_whose_images_nobody_knows_is_not_priced_as_one_image(kit):
    kit.policy(max_epsilon=1e6, unit="patient")
    host = kit.host(privacy=PRIVATE)
    with pytest.raises(GateRefused, match="unit = 'patient', and its images name no patients; set `patient`"):
        ask(host, "train", weights=first_weights(host))
    file = kit.folder / "local" / "site.toml"
    file.write_text(file.read_text() + "patient = '([0-9])\\.png$'\n")
    host = kit.host("known", privacy=PRIVATE)
    assert ask(host, "train", weights=first_weights(host)).parcels


def test_a_study_that_protects_patients_is_priced_as_it_is_and_one_that_protects_images_by_group_privacy(kit):
    """Six training images or so of each patient: group privacy costs many times as much."""
    file = kit.folder / "local" / "site.toml"
    file.write_text(file.read_text() + "patient = '([0-9])\\.png$'\n")
    kit.policy(max_epsilon=1e6, unit="patient")
    spent = {}
    for unit in ("patient", "image"):
        host = kit.host(unit, privacy={**PRIVATE, "noise_multiplier": 4.0, "unit": unit})
        [parcel] = ask(host, "train", weights=first_weights(host)).parcels
        assert parcel.privacy.get("unit", "image") == unit
        assert (ONE_IMAGE in parcel.privacy["does_not_cover"]) == (unit == "image")
        spent[unit] = host.sites.gates["north"].budget._here.epsilon
        assert spent[unit] >= parcel.privacy["epsilon"] * 0.999
    assert spent["image"] > 5 * spent["patient"]
