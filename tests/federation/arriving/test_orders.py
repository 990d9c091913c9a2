"""What a site sees in weights alone: honest ones pass, crafted ones do not."""

import pytest
import torch

from polyclinic import attacks
from polyclinic.federation.arriving import orders
from polyclinic.models import build
from polyclinic.randomness import seeded, torch_rng

PUBLIC = torch.rand(20, 1, 16, 16, generator=torch_rng("orders", "public"))
BACKBONES = ("small-cnn", "lenet5", "cnn-32-64-128", "cnn-64-128-64-32", "resnet18")


def network(backbone, norm="batch"):
    with seeded(0, "orders"):
        return build(backbone, channels=1, outputs=2, size=16, norm=norm)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_honest_weights_pass_before_and_after_training(backbone):
    model = network(backbone)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert orders.inspect(first, first) == []
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
    for _ in range(2 if backbone != "resnet18" else 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(PUBLIC[:8]), torch.arange(8) % 2).backward()
        optimizer.step()
    assert orders.inspect(model.state_dict(), first) == []


@pytest.mark.parametrize("backbone", ["lenet5", "cnn-32-64-128", "cnn-64-128-64-32"])
@pytest.mark.parametrize("attack", [attacks.Imprint(), attacks.CraftedSum(), attacks.Imprint(strength=0.1)])
def test_imprinted_layers_are_seen(backbone, attack):
    model = network(backbone)
    alarms = orders.check_rows(attack.craft(model, PUBLIC).state_dict())
    assert any(alarm.startswith("'fc1.weight'") for alarm in alarms)


def test_traps_are_seen_by_the_convolutions_that_they_open_alone():
    """The traps themselves look like random rows."""
    crafted = attacks.TrapWeights().craft(network("cnn-32-64-128"), PUBLIC)
    alarms = orders.check_rows(crafted.state_dict())
    assert [alarm.split(":")[0] for alarm in alarms] == ["'conv1.weight'"]


def test_weights_that_overflow_are_seen():
    crafted = attacks.OverflowFilter().craft(network("lenet5"), PUBLIC[0], PUBLIC[1:])
    assert orders.check_finite(crafted.state_dict()) == ["'fc3.weight' holds 3.0e+38; 1e+06 is the bound"]


def test_a_last_layer_of_two_classes_is_not_seen_by_its_rows():
    """Fishing needs the site's own images to be seen, or a slope beyond the usual length."""
    model = network("small-cnn")
    crafted = attacks.Fishing().craft(model, PUBLIC).state_dict()
    assert orders.check_rows(crafted) == []


def test_numbers_that_are_none_are_named():
    weights = {"a": torch.tensor([1.0, torch.nan]), "b": torch.tensor([torch.inf]), "n": torch.tensor(3)}
    assert orders.check_finite(weights) == ["'a' holds NaN or infinity", "'b' holds NaN or infinity"]


def test_length_and_distance_by_hand():
    reference = {"w": torch.tensor([[3.0, 4.0]]), "bias": torch.zeros(2)}
    assert orders.check_course({"w": torch.tensor([[6.0, 8.0]]), "bias": torch.ones(2)}, reference) == []
    assert orders.check_course({"w": torch.tensor([[60.0, 80.0]])}, reference) == [
        "'w' is 20 times as long as expected; 10 is the bound",
        "'w' is 19 times its length away from the expected course",
    ]
    assert orders.check_course({"w": torch.tensor([[0.03, 0.04]])}, reference) == [
        "'w' is 0.01 times as long as expected; 10 is the bound"
    ]


def test_shares_of_rows_by_hand():
    rows = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert orders.row_shares(rows, 0.999) == (0.25, 0.5)


def test_another_shape_is_told_alone():
    reference = {"w": torch.ones(2, 2)}
    [alarm] = orders.inspect({"w": torch.full((3, 2), torch.nan)}, reference)
    assert "expected torch.float32 (2, 2)" in alarm
