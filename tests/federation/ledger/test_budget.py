"""What a site's policy keeps back over all its runs: too many bytes, too much epsilon, too few patients."""

import numpy as np
import pytest
import torch

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.gate import Gate, RawImages
from polyclinic.federation.ledger.budget import Budget
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)


def gate_of(folder, run="a", earlier=(), resume_after=None, **policy):
    ledger = Ledger(folder / run / "ledger" / "north.jsonl")
    if resume_after is not None:
        ledger.expect_repeats_after(resume_after)
    runs = folder if earlier else None
    rules = Policy(kinds=tuple(KINDS), **policy)
    return Gate("north", rules, ledger, RawImages(IMAGES), Budget(rules, ledger.path, runs))


def weights(value=1.0, size=10, privacy=None):
    return Parcel("weights", {"w": torch.full((size,), value)}, {"samples": 4}, privacy)


def record(epsilon, steps, trained=0, after=0):
    named = {"trained": trained, "after": after}
    return {"epsilon": epsilon, "delta": 1e-5, "steps": steps, "covers": ["w"], "does_not_cover": [], **named}


def release(gate, *parcels, round=1, cohort=None):
    return gate.release(parcels, round=round, operation="train", to="coordinator", cohort=cohort)


def refusal(gate, *parcels, **how):
    lines = gate.ledger.position.lines
    with pytest.raises(GateRefused) as refused:
        release(gate, *parcels, **how)
    assert gate.ledger.position.lines == lines
    return str(refused.value)


SIZE = len(weights().encoded)


def test_the_parcels_of_one_operation_leave_together_or_not_at_all(tmp_path):
    gate = gate_of(tmp_path, max_bytes=SIZE)
    assert "kept back what 'train' made" in refusal(gate, weights(1.0), weights(2.0))
    release(gate, weights(1.0))


def test_a_resumed_run_may_send_the_same_again(tmp_path):
    """It is on record, and nothing new leaves."""
    release(gate_of(tmp_path, max_bytes=SIZE), weights(1.0))
    again = gate_of(tmp_path, max_bytes=SIZE, resume_after=0)
    release(again, weights(1.0))
    assert again.ledger.position.lines == 1
    assert "bytes would have left" in refusal(again, weights(1.0))  # a second time is new


def test_a_run_that_was_put_back_and_trained_as_long_or_longer_is_charged_for_both(tmp_path):
    """It has as many steps as the record before it, or more, and yet does not come from it."""
    gate = gate_of(tmp_path, max_epsilon=3.0)
    release(gate, weights(1.0, privacy=record(1.0, 10, trained=1)))
    release(gate, weights(2.0, privacy=record(1.0, 10, trained=1)))  # something else made of the same training
    release(gate, weights(3.0, privacy=record(1.5, 20, trained=2, after=1)))
    assert "epsilon 3.5 would be spent" in refusal(gate, weights(4.0, privacy=record(2.0, 30, trained=3, after=1)))
    assert "epsilon 3.1 would be spent" in refusal(gate, weights(5.0, privacy=record(1.6, 20, trained=4, after=1)))
    release(gate, weights(6.0, privacy=record(2.9, 40, trained=5, after=2)))
    reopened = gate_of(tmp_path, max_epsilon=3.0)
    assert "epsilon 3.1 would be spent" in refusal(reopened, weights(7.0, privacy=record(0.2, 41, trained=6, after=9)))


def test_with_an_epsilon_budget_only_what_is_covered_leaves(tmp_path):
    gate = gate_of(tmp_path, max_epsilon=3.0)
    assert "differential privacy does not cover this" in refusal(gate, weights(1.0))
    assert "differential privacy does not cover this" in refusal(gate, Parcel("metrics", {}, {"loss": 0.3}))
    release(gate, Parcel("statistics", {}, {"samples": 4}))  # sizes count as public
    assert "epsilon inf" in refusal(gate, weights(privacy={**record(0.0, 1), "epsilon": None}))
