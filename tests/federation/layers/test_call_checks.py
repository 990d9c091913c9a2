"""What a site checks of a call before it opens an image, by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers.call_checks import OwnArguments, TakenByHospital, TakenCall
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Transaction, operation


class Method:
    @operation("weights")
    def train(self, site, weights, control=None, steps=1): ...

    @operation("weights", takes={"weights": "front", "control": "gradients"})
    def front(self, site, weights, control=None): ...

    @operation("metrics")
    def evaluate(self, site, split="validation"): ...

    @operation("real-images", partner="simulator")
    def pool(self, site): ...

    @operation("latents", partner="sites")
    def hand_on(self, site): ...

    @operation("weights")
    def begin(self, site, weights=None): ...


def check(name, deployed=True, to="coordinator", parcels=None, **arguments):
    work = getattr(Method(), name)
    call = Call("a", name, 1, parcels or {}, arguments, to)
    layer = TakenByHospital if deployed else TakenCall
    layer(SimpleNamespace(spec=None, sites=None)).arriving(Transaction(call, work, work.operation))


def test_receivers_and_splits_that_may_be_answered():
    check("hand_on", to="b")
    check("evaluate")
    with pytest.raises(ParcelRejected, match="releases to another site only"):
        check("hand_on", deployed=False)
    with pytest.raises(ParcelRejected, match="releases to the coordinator"):
        check("evaluate", to="b")
    for split in ("validation", "test"):
        check("evaluate", split=split)
    check("evaluate", deployed=False, split="train")
    with pytest.raises(GateRefused, match="scores of training images never leave"):
        check("evaluate", split="train")
    with pytest.raises(ParcelRejected, match="there is no split 'tests'; use train, validation, test"):
        check("evaluate", split="tests")
    check("train", parcels={"weights": Parcel("weights", {})})  # it scores nothing, and takes training images


def trainer(*sizes, local=()):
    model = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))
    return SimpleNamespace(model=model, local_names=frozenset(local), split=lambda whole: (whole[:1], whole[1:]))


def check_came(tensors, name="weights", operation="train", own=None, others=(), kind="weights"):
    site = SimpleNamespace(trainer=own or trainer(1, 2, 3, 4, 5), trainers=others)
    work = getattr(Method(), operation)
    transaction = Transaction(Call("a", operation, 1), work, work.operation)
    transaction.site, transaction.received = site, {name: Parcel(kind, dict.fromkeys(tensors, torch.ones(1)))}
    OwnArguments(SimpleNamespace(spec=None, sites=None)).arriving(transaction)


NAMES = [f"{number}.weight" for number in range(5)]


def test_the_kind_is_the_operations_to_say():
    check_came([], name="control", operation="front", kind="gradients")
    with pytest.raises(ParcelRejected, match="'front' takes gradients as 'control', and weights came in their place"):
        check_came([], name="control", operation="front")
    with pytest.raises(ParcelRejected, match="'train' takes weights as 'weights', and gradients came"):
        check_came([], kind="gradients")
    check_came(["whatever"], name="statistics", kind="statistics")  # names are those of weights alone


def test_weights_name_all_that_is_shared_of_a_network_or_its_front():
    check_came(NAMES)
    for names in (NAMES[1:], [*NAMES, "more"], []):
        with pytest.raises(ParcelRejected, match="the names are not those that the method shares"):
            check_came(names)
    with pytest.raises(ParcelRejected, match=r"left out: 0\.weight, 1\.weight, 2\.weight$"):
        check_came(NAMES[4:])
    with pytest.raises(ParcelRejected, match=r"left out: nothing$"):
        check_came([*NAMES, "more"])
    own = trainer(1, 2, 3, local=NAMES[:1])
    check_came(NAMES[:3], own=own)
    check_came(NAMES[1:3], own=own)
    with pytest.raises(ParcelRejected, match=r"left out: 1\.weight$"):
        check_came(NAMES[2:3], own=own)
    check_came(NAMES[:3], own=trainer(1, 2, 3, local=NAMES[:3]))  # all of it: then nothing is left out
    check_came(NAMES[:1], operation="front")
    check_came(NAMES, operation="front")
    with pytest.raises(ParcelRejected, match=r"left out: nothing$"):
        check_came(NAMES[:2], operation="front")
