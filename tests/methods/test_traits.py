"""What a method says of itself, and a method from outside: it gets the truth without saying anything, and trains."""

from typing import ClassVar, Literal

import pytest
import torch

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.methods import METHODS, Method
from polyclinic.methods.shared import aggregation, local_training
from polyclinic.methods.shared.method import Traits

PRIVATE = {"model": {"backbone": "small-cnn", "norm": "group"}, "privacy": {"noise_multiplier": 1.0}}


class Toy(Method):
    """A method from outside, as short as one can be."""

    name: Literal["toy"] = "toy"
    summary: ClassVar[str] = "a mean of weights"

    def run(self, federation):
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            state.weights = aggregation.average(federation.ask_each("train", weights=state.weights))
        return state.weights

    @operation("weights")
    def train(self, site, weights):
        return local_training.train(site, weights)


class Careless(Toy):
    """Trains in a way of its own, which no accountant knows of."""

    name: Literal["careless"] = "careless"  # type: ignore[assignment]

    @operation("weights")
    def train(self, site, weights):
        return Parcel("weights", {name: tensor + 0 for name, tensor in weights.items()}, {"samples": 1})


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", Toy)
    monkeypatch.setitem(METHODS, "careless", Careless)


def test_private_methods_are_private_as_fedavg_is_and_others_send_nothing(tiny_run):
    toy, fedavg = (tiny_run({"name": name, "rounds": 1}, **PRIVATE) for name in ("toy", "fedavg"))
    assert toy["privacy"] == fedavg["privacy"]
    assert toy["privacy"]["epsilon"] > 0
    assert toy["weights_sha256"] == fedavg["weights_sha256"]
    with pytest.raises(WorkFailed, match="'train' trained weights without differential privacy"):
        tiny_run({"name": "careless"}, **PRIVATE)
    assert torch.isfinite(next(iter(tiny_run({"name": "careless"}).weights().values()))).all()


def test_methods_keep_the_batch_norm_that_they_say(tiny_run, monkeypatch):
    assert METHODS["fedsgd"].traits.batch_norm == "average"
    with pytest.raises(BadInput, match=r"model\.batch_norm: 'fedsgd' cannot keep it local"):
        tiny_run({"name": "fedsgd"}, model={"batch_norm": "local"})

    class Keeper(Toy):
        name: Literal["keeper"] = "keeper"  # type: ignore[assignment]
        traits: ClassVar[Traits] = Traits(batch_norm="local")

    monkeypatch.setitem(METHODS, "keeper", Keeper)
    for name in ("fedbn", "keeper"):
        with pytest.raises(BadInput, match=rf"method\.name: {name} keeps batch-norm layers at the sites"):
            tiny_run({"name": name}, model={"norm": "group"})
