"""Which parcels differential privacy covers, and which it does not."""

import pytest
import torch

from polyclinic.federation.bookkeeping import Coverage
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.federation.ledger.parcel import Parcel

RECORD = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "covers": ["weights"], "does_not_cover": ["labels"]}
TENSORS = {"w": torch.ones(1)}


def noted(*parcels):
    coverage = Coverage()
    for parcel in parcels:
        coverage.note("a", parcel)
    return coverage


def test_the_last_record_of_a_site_with_what_all_together_cover():
    later = {**RECORD, "epsilon": 2, "covers": ["generator", "weights"], "does_not_cover": []}
    coverage = noted(*(Parcel("weights", TENSORS, privacy=one) for one in (RECORD, later)))
    joined = {"covers": ["weights", "generator"], "does_not_cover": ["labels"]}
    assert coverage.plain() == {"records": {"a": {**later, **joined}}, "uncovered": []}
    assert Coverage(coverage.plain()).plain() == coverage.plain()


@pytest.mark.parametrize(
    ("parcel", "uncovered"),
    [
        (Parcel("weights", TENSORS), True),
        (Parcel("weights", TENSORS, {"samples": 3}), True),
        (Parcel("metrics", {}, {"loss": 0.5}), True),
        (Parcel("metrics", {}, {"samples": 3, "steps": 9}), False),  # sizes count as public
        (Parcel("metrics", {}), False),
        (Parcel(min(OF_NO_IMAGE), TENSORS, {"anything": 1}), False),
    ],
)
def test_what_tells_something_of_images_without_a_record_is_uncovered(parcel, uncovered):
    assert noted(parcel).uncovered == ({parcel.kind} if uncovered else set())


@pytest.mark.parametrize("name", RECORD)
@pytest.mark.parametrize("value", [None, "a word"])
def test_a_record_that_is_none_covers_nothing(name, value):
    coverage = noted(Parcel("weights", TENSORS, privacy={**RECORD, name: value}))
    assert (coverage.records, coverage.uncovered) == ({}, {"weights"})
