"""Records: what ledger lines and results say was compute_epsilon, what it covers and what it does not."""

import json

import pytest

from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.privacy import account as records
from polyclinic.privacy.account import Account
from polyclinic.privacy.epsilon import compute_epsilon


def account(steps: int = 10, noise: float = 1.0) -> Account:
    made = Account(1e-2)
    made.add(noise, 0.1, steps)
    return made


def test_a_record_holds_what_was_spent_in_all_and_names_the_unit():
    one = account()
    one.add(2.0, 0.2, 5)
    found = records.record(one, ["a"], ["b"])
    assert found["epsilon"] == one.epsilon > compute_epsilon(0.1, 1.0, 10, 1e-2)
    assert (found["steps"], found["noise"], found["sampling_rate"]) == (15, 2.0, 0.2)
    assert found["mechanisms"][0] == {"noise": 1.0, "sampling_rate": 0.1, "steps": 10}
    assert json.loads(json.dumps(found)) == found
    assert "unit" not in records.record(account(), [], [])
    assert "unit" not in records.record(account(), [], [], unit="image")
    assert records.record(account(), [], [], unit="patient")["unit"] == "patient"


def test_a_record_names_what_was_trained_and_what_the_record_before_it_was_of():
    one = account()
    one.trained = 7
    one.put_on_record()
    first = records.record(one, [], [])
    one.put_on_record()  # nothing was trained since
    one.trained = 9
    assert records.record(one, [], []) == first
    one.put_on_record()
    second = records.record(one, [], [])
    assert [(found["trained"], found["after"]) for found in (first, second)] == [(7, 0), (9, 7)]


def test_before_the_first_step_nothing_was_spent_and_without_an_account_nothing_is_said():
    found = records.record(Account(1e-2), [], [])
    assert (found["epsilon"], found["steps"], found["noise"]) == (0.0, 0, None)
    assert records.summary({}, ["weights"]) is None


@pytest.mark.parametrize(("on", "parts", "covered"), [
    (["classifier"], ["classifier"], True),
    (["generator"], ["classifier"], False),
    (["generator"], ["generator"], True),
    (["generator"], ["generator", "prior"], False),
    (["prior"], ["prior"], False),  # it has learnt codes of a generator that saw everything
    (["generator", "prior"], ["generator", "prior"], True),
])  # fmt: skip
def test_a_parcel_is_covered_if_all_that_is_in_it_was_trained_privately(on, parts, covered):
    assert records.covered_parts(on, parts) is covered


def test_samples_are_covered_by_generator_and_prior_and_every_kind_has_words():
    assert records.SAMPLED in records.names(["generator", "prior"])
    assert records.SAMPLED not in records.names(["generator"])
    both = ["weights of the generator", "weights of the prior"]
    assert records.names(["generator", "prior"]) == [*both, "images sampled through generator and prior"]
    assert set(records.UNCOVERED) == set(KINDS) - {"keys", "shares"}  # which tell nothing of patients


def test_a_result_states_the_worst_site():
    sites = {"a": records.record(account(10), ["w"], ["x"]), "b": records.record(account(30), ["w"], ["x"])}
    found = records.summary(sites, [])
    assert found["site"] == "b"
    assert found["epsilon"] == compute_epsilon(0.1, 1.0, 30, 1e-2)
    assert found["covers"] == [records.EVERYTHING]
    assert found["does_not_cover"] == ["x"]
    assert found["per_site"]["a"]["epsilon"] == compute_epsilon(0.1, 1.0, 10, 1e-2)


@pytest.mark.parametrize("kind", ["codes", "latents", "labels", "statistics", "weights"])
def test_one_uncovered_kind_and_it_is_not_everything_any_more(kind):
    found = records.summary({"a": records.record(account(), ["weights of the generator"], [])}, [kind])
    assert found["covers"] == ["weights of the generator"]
    assert found["does_not_cover"] == [records.UNCOVERED[kind]]
