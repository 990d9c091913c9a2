"""Small rules of sites and their records, each by hand: mutants of them lived until these tests were written."""

from types import SimpleNamespace

import numpy as np
import pydantic
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import COORDINATOR
from polyclinic.federation.layers.cohort import fewest_patients, images_in_private_step
from polyclinic.federation.layers.defence_and_poisoning import Defence
from polyclinic.federation.layers.replies import _check_targets
from polyclinic.federation.ledger import verify as ledger_check
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.verify import Checked
from polyclinic.federation.operation import operation, signature_of
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums import arithmetic as fixed_point
from polyclinic.federation.sums.arithmetic import check_layout, check_open, parcels_of
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.task import Target


def row_of(numbers, weight=2, expected=0, sites=2):
    return np.array([*numbers, weight, expected, sites], dtype=np.int64).view(np.uint64)


def test_what_a_sum_says_by_hand():
    """Whole numbers of two bits: 6 and 8 are 1.5 and 2; of two images they are a mean of 0.75 and 1."""
    layout = [["weights", "w", "float32", [2]]]
    [mean] = parcels_of(row_of([6, 8], expected=12), layout, ["weights"], mean=True, bits=2, sites=2)
    assert mean.tensors["w"].tolist() == [0.75, 1.0]
    assert mean.metadata == {"samples": 2, "expected": 3.0, "sites": 2}
    [total] = parcels_of(row_of([6, 8], weight=1), layout, ["weights"], mean=False, bits=2, sites=2)
    assert total.tensors["w"].tolist() == [1.5, 2.0]
    for wrong in (row_of([6, 8], weight=0), row_of([6, 8], sites=3)):
        with pytest.raises(ParcelRejected, match="masks do not cancel"):
            parcels_of(wrong, layout, ["weights"], mean=False, bits=2, sites=2)


@pytest.mark.parametrize(
    "entry",
    [
        *("weights", ["weights", "w", "float32"], ["labels", "w", "float32", [2]], ["weights", 7, "float32", [2]]),
        *(["weights", "w", "save", [2]], ["weights", "w", 7, [2]], ["weights", "w", "float32", 2]),
        *(["weights", "w", "float32", [-1]], ["weights", "w", "float32", [True]], ["weights", "w", "float32", [2.0]]),
    ],
)
def test_a_layout_that_says_something_else_is_refused(entry):
    numbers = torch.zeros(5, dtype=torch.int64)
    check_layout([["weights", "w", "float32", [2]]], numbers, ["weights"])
    with pytest.raises(ParcelRejected, match="no list of kinds, names, dtypes and shapes"):
        check_layout([entry], numbers, ["weights"])


def test_a_row_in_the_clear_counts_as_one_site():
    row = torch.tensor([2**53, -(2**53), 3, 0, 1])
    check_open(row)
    check_open(torch.tensor([5, -5, 0, 0, 1]))  # a site without images
    for place, wrong in ((0, 2**53 + 1), (1, -(2**53) - 1), (2, -1), (3, -1), (4, 2), (4, 0)):
        changed = row.clone()
        changed[place] = wrong
        with pytest.raises(ParcelRejected, match="does not count as one site"):
            check_open(changed)


def test_a_defence_changes_gradients_and_what_weights_moved_by():
    gradients = Parcel("gradients", {"g": torch.tensor([1.0, -4.0, 2.0, 3.0])}, {"samples": 5})
    kept = Defence(name="sparsify", keep=0.5)(gradients, {})
    assert kept.tensors["g"].tolist() == [0.0, -4.0, 0.0, 3.0]
    assert kept.metadata == {"samples": 5}
    assert Defence(name="prune", fraction=0.25)(gradients, {}).tensors["g"].tolist() == [0.0, -4.0, 2.0, 3.0]
    start = Parcel("weights", {"w": torch.tensor([10.0, 10.0, 10.0])})
    sent = Parcel("weights", {"w": torch.tensor([11.0, 7.0, 12.0]), "n": torch.tensor(3), "own": torch.ones(1)})
    moved = Defence(name="sparsify", keep=1 / 3)(sent, {"weights": start})
    assert {name: one.tolist() for name, one in moved.tensors.items()} == {"w": [10.0, 7.0, 10.0], "n": 3, "own": [1.0]}
    levels = Defence(name="quantise", bits=2)(sent, {"weights": start}).tensors["w"]
    assert levels.tolist() == [10.0, 7.0, 13.0]  # steps of 3: plus and minus the largest, and nothing
    for other in (sent, Parcel("metrics", {"m": torch.ones(2)})):
        assert Defence(name="sparsify")(other, {}) is other


@pytest.mark.parametrize(
    ("cases", "batch", "patients"),
    [(None, 3, 3), (None, 9, 5), ([1, 1, 1, 2, 3], 3, 1), ([1, 1, 1, 2, 3], 4, 2), ([1, 1, 1, 2, 3], 99, 3)],
)
def test_the_fewest_patients_of_a_batch(cases, batch, patients):
    images = ImageSet(np.zeros((5, 1, 2, 2), np.uint8), np.zeros(5), cases=None if cases is None else np.array(cases))
    assert fewest_patients(images, batch) == patients


def test_a_private_step_takes_as_many_images_as_its_smallest_rate_says():
    private = {"steps": 1, "sampling_rate": 0.25}
    assert images_in_private_step({"mechanisms": [private, {"steps": 3, "sampling_rate": 0.5}]}, 40) == 10
    assert images_in_private_step({"mechanisms": [{"steps": 0, "sampling_rate": 0.01}]}, 40) == 40
    assert images_in_private_step({}, 40) == 0


@pytest.mark.parametrize(("weight", "mean"), [(1, 12), (2, 6), (3, 4), (8, 2)])
def test_means_of_whole_numbers(weight, mean):
    assert int(fixed_point.from_whole(np.array([12], dtype=np.uint64), weight, 24, torch.int64)) == mean


def test_what_the_coordinator_never_received_is_counted(monkeypatch, tmp_path):
    same = {"round": 1, "operation": "train", "kind": "weights", "digest": "d"}
    lines = [
        {**same, "index": 0, "to": COORDINATOR, "bytes": 5},
        {**same, "index": 1, "to": "site-2", "bytes": 5},
        {**same, "index": 2, "to": COORDINATOR, "bytes": 0},
        {**same, "index": 3, "to": COORDINATOR, "bytes": 7},
    ]
    came = {"site": "site-1", "number": 1, "round": 1, "operation": "train", "to": COORDINATOR}
    parcel = {"kind": "weights", "bytes": 5, "digest": "d"}
    told = [{**came, "parcels": [parcel]}, {**came, "site": "another", "parcels": [7]}]
    monkeypatch.setattr(ledger_check, "read_received", lambda folder: told)
    checked = Checked(lines, signatures_checked=True)
    ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    assert checked.not_received == [4]
    sealed = {**came, "to": "site-2", "parcels": [{**parcel, "digest": None}]}  # nobody but site 2 knows its content
    told.append(sealed)
    ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    sealed["to"] = COORDINATOR
    with pytest.raises(LedgerBroken, match="has no such line"):
        ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    told.pop()
    parcel["digest"] = "other"
    with pytest.raises(LedgerBroken, match=r"line 1: weights of 'train' in round 1 came, and .* has no such line"):
        ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)


def test_ages_are_no_classes():
    trainer = SimpleNamespace(task=Regression(), target=Target(label_range=(0.0, 200.0)))
    _check_targets(SimpleNamespace(trainer=trainer), Parcel("labels", {"t": torch.tensor([30.5, 120.0])}))


@pytest.mark.parametrize(
    ("name", "least", "refused"),
    [
        ("max_bytes", 0, -1),  # 0: nothing leaves
        ("max_scores", 0, -1),
        ("min_cohort", 0, -1),
        ("liars", 0, -1),
        ("min_sites", 3, 2),  # of two sites each knows the other's part of a sum
        ("max_epsilon", 1e-9, 0),
        ("max_delta", 1e-300, 0),
        ("max_delta", 0.999, 1),
        ("accountants", ("prv",), ()),
        ("kinds", (), ("no kind",)),
    ],
)
def test_the_last_value_that_a_policy_takes(name, least, refused):
    assert getattr(Policy(**{name: least}), name) == least
    with pytest.raises(pydantic.ValidationError, match=name):
        Policy(**{name: refused})


@pytest.mark.parametrize(("images", "delta"), [(0, 0.5), (1, 0.5), (2, 0.5), (3, 1 / 3), (1000, 0.001)])
def test_the_delta_of_a_site(images, delta):
    assert Policy().delta_for(images) == delta
    assert Policy(max_delta=1e-7).delta_for(images) == 1e-7


@pytest.fixture
def declared():
    class Declared:
        @operation("weights")
        def train(self, site, weights, steps=3):
            """Its draws have its own name."""

        @operation("metrics", address="before", takes={"front": "weights"}, splits=("test",))
        def renamed(self, site, front):
            """Its draws stay where they were."""

    return Declared


def test_where_the_draws_of_an_operation_lie_and_what_it_takes(declared):
    assert declared.train.operation.address == "train"
    assert declared.renamed.operation.address == "before"
    assert dict(declared.train.operation.takes) == {}
    assert declared.train.operation.kind_of("synthetic_images") == "synthetic-images"
    assert dict(declared.renamed.operation.takes) == {"front": "weights"}
    assert declared.renamed.operation.kind_of("front") == "weights"
    assert declared.renamed.operation.kind_of("weights") == "weights"
    assert list(signature_of(declared().train).parameters) == ["site", "weights", "steps"]
    assert list(signature_of(declared.train).parameters) == ["self", "site", "weights", "steps"]
    assert signature_of(declared().train).parameters["steps"].default == 3
    assert signature_of(declared().train) is signature_of(declared().train)
