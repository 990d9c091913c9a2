"""What a record of differential privacy costs at a site, and what a run has spent of its study's target."""

import math

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.ledger.budget import EpsilonLimit, OverBudget, Price, price_at
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon, group_epsilon

#: every image takes part in every step, so that epsilon is known at once
MECHANISM = {"noise": 20.0, "sampling_rate": 1.0, "steps": 50}


def record(epsilon, steps=10, **more):
    return {"epsilon": epsilon, "delta": 1e-5, "steps": steps, **more}


def counted(delta=1e-5, accountant="prv", **more):
    return {**record(1.0), "delta": delta, "accountant": accountant, "mechanisms": [MECHANISM], **more}


def test_a_record_without_its_mechanisms_costs_what_it_says():
    assert Price()(record(3.0)) == 3.0
    assert Price()(record(None)) == math.inf


@pytest.mark.parametrize(("delta", "of_record", "counted_at"), [(1e-6, 1e-5, 1e-6), (1e-4, 1e-5, 1e-5)])
def test_epsilon_is_counted_at_the_smaller_delta(delta, of_record, counted_at):
    expected = composed_epsilon([Mechanism(**MECHANISM)], counted_at, "prv")
    assert Price(delta)(counted(of_record)) == expected
    assert Price()(counted(counted_at)) == expected  # a site without a delta of its own takes that of the record


@pytest.mark.parametrize(
    ("images", "unit", "counts_for"),
    [(1, None, 1), (3, None, 3), (3, "image", 3), (3, "patient", 1), (None, "patient", 1)],
)
def test_epsilon_of_a_patient_is_that_of_all_images(images, unit, counts_for):
    told = counted() if unit is None else counted(unit=unit)
    assert Price(1e-5, images=images)(told) == group_epsilon([Mechanism(**MECHANISM)], 1e-5, counts_for, "prv")


def test_epsilon_that_a_site_does_not_believe_is_refused():
    with pytest.raises(OverBudget, match="accepts the accountants rdp, not 'prv'"):
        Price(accountants=("rdp",))(counted())
    with pytest.raises(OverBudget, match=r"its images name no patients; set `patient` in site\.toml"):
        Price(images=None)(counted())


@pytest.mark.parametrize(
    ("cases", "unit", "images"),
    [
        *(([1, 1, 2, 1], "patient", 3), ([1, 2, 3, 4], "patient", 1), (None, "patient", None)),
        *(([1, 1, 2, 1], "image", 1), (None, "image", 1), ([], "patient", 1)),
    ],
)
def test_the_price_of_a_site(cases, unit, images):
    count = 4 if cases is None else len(cases)
    known = None if cases is None else np.array(cases, np.int64)
    train = ImageSet(np.zeros((count, 1, 2, 2), np.uint8), np.zeros(count), cases=known)
    price = price_at(Policy(unit=unit, accountants=("prv",)), train)
    assert price == Price(1 / max(count, 2), ("prv",), images)


def test_the_target_of_a_study_is_counted_from_the_ledger_of_its_run(tmp_path):
    """For one image, by whichever accountant the study has."""
    ledger = Ledger(tmp_path / "north.jsonl")
    for told in (record(1.0, steps=5), None):
        ledger.append(round=1, operation="a", kind="codes", bytes=1, digest="d", to="coordinator", privacy=told)
    target = EpsilonLimit(2.0, ledger.path, Price(1e-5, accountants=("rdp",), images=None))
    target.check([Parcel("weights", {"w": torch.ones(1)}), Parcel("weights", {}, privacy=record(2.0, steps=6))])
    put_back = Parcel("weights", {}, privacy=record(1.1, steps=4))
    sentence = r"^this run would have spent epsilon 2\.1, and its study sets privacy\.target_epsilon = 2$"
    with pytest.raises(OverBudget, match=sentence):
        target.check([put_back])
    told = counted()
    price = composed_epsilon([Mechanism(**MECHANISM)], 1e-5, "prv")
    fresh = EpsilonLimit(price, tmp_path / "none.jsonl", Price(1e-5, accountants=("rdp",), images=3))
    fresh.check([Parcel("weights", {}, privacy=told)])
    fresh.spend(told)
    fresh.spend(None)
    with pytest.raises(OverBudget):
        fresh.check([Parcel("weights", {}, privacy=record(0.1, steps=1))])
