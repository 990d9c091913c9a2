"""Small rules of sites and their records, each by hand: mutants of them lived until these tests were written."""

from pathlib import Path

import pytest
import torch

from polyclinic.federation.leaving.anchor_file import LedgerBroken
from polyclinic.federation.leaving.budget import OverBudget, Price
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.leaving.target import EpsilonTarget
from polyclinic.federation.ledger_check import _unsigned

RECORD = {"epsilon": 3.0, "delta": 1e-5, "steps": 10}


def test_a_line_without_a_signature_after_signed_ones_is_named_by_its_number():
    signed, unsigned = {"signature": "s"}, {}
    assert _unsigned(Path("ledger"), [unsigned, unsigned, signed]) == 2
    assert _unsigned(Path("ledger"), [unsigned]) == 1
    with pytest.raises(LedgerBroken, match="ledger, line 4: is not signed"):
        _unsigned(Path("ledger"), [unsigned, signed, signed, unsigned])


def test_a_run_may_spend_its_target_up_to_rounding_and_no_more(tmp_path):
    target = EpsilonTarget(3.0, tmp_path / "none.jsonl", Price())
    parcel = Parcel("weights", {"w": torch.zeros(1)}, privacy=RECORD)
    target.check([parcel])
    target.epsilon = 3.0 * (1 - 1e-7)  # a sum of floats may differ by so much
    target.check([parcel])
    target.epsilon = 3.0 * (1 - 1e-5)
    with pytest.raises(OverBudget, match=r"privacy\.target_epsilon"):
        target.check([parcel])
    assert target._spent.epsilon == 0.0  # what was only asked for is not spent


def test_norms_of_tensors_of_several_precisions():
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([6.0, 8.0], dtype=torch.float64)}
    tensors["c"] = torch.full((10_000,), 60_000.0, dtype=torch.float16)  # their norm is beyond half precision
    assert Parcel("weights", tensors).norms == pytest.approx({"a": 5.0, "b": 10.0, "c": 59_968 * 100}, rel=1e-3)
