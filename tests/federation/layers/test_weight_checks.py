"""What a site sees in weights alone: honest ones pass, crafted ones do not."""

import pytest
import torch

from polyclinic import attacks
from polyclinic.federation.layers import movement as orders
from polyclinic.federation.layers.movement import Figure
from polyclinic.federation.policy import Incoming
from polyclinic.models import build
from polyclinic.randomness import seeded, torch_rng

LIMITS = Incoming()
PUBLIC = torch.rand(20, 1, 16, 16, generator=torch_rng("orders", "public"))
BACKBONES = ("small-cnn", "lenet5", "cnn-32-64-128", "cnn-64-128-64-32", "resnet18")


def network(backbone, norm="batch"):
    with seeded(0, "orders"):
        return build(backbone, channels=1, outputs=2, size=16, norm=norm)


def alarms(figures):
    return [figure for figure in figures if figure.is_alarm]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_honest_weights_pass_before_and_after_training(backbone):
    model = network(backbone)
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
    for _ in range(2 if backbone != "resnet18" else 1):
        assert alarms([*orders.largest(model.state_dict(), LIMITS), *orders.rows(model.state_dict(), LIMITS)]) == []
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(PUBLIC[:8]), torch.arange(8) % 2).backward()
        optimizer.step()
    assert alarms([*orders.largest(model.state_dict(), LIMITS), *orders.rows(model.state_dict(), LIMITS)]) == []


@pytest.mark.parametrize("backbone", ["lenet5", "cnn-32-64-128", "cnn-64-128-64-32"])
@pytest.mark.parametrize("attack", [attacks.Imprint(), attacks.CraftedSum(), attacks.Imprint(strength=0.1)])
def test_imprinted_layers_are_seen(backbone, attack):
    crafted = attack.craft(network(backbone), PUBLIC).state_dict()
    assert "fc1.weight" in [alarm.where for alarm in alarms(orders.rows(crafted, LIMITS))]


def test_traps_are_seen_by_the_convolutions_that_they_open_alone():
    """The traps themselves look like random rows."""
    crafted = attacks.TrapWeights().craft(network("cnn-32-64-128"), PUBLIC)
    assert [alarm.where for alarm in alarms(orders.rows(crafted.state_dict(), LIMITS))] == ["conv1.weight"]


def test_weights_that_overflow_are_seen():
    crafted = attacks.OverflowFilter().craft(network("lenet5"), PUBLIC[0], PUBLIC[1:])
    [alarm] = alarms(orders.largest(crafted.state_dict(), LIMITS))
    assert str(alarm) == "largest of 'fc3.weight' is 3e+38, and 1e+06 is the limit"


def test_a_last_layer_of_two_classes_is_not_seen_by_its_rows():
    """Fishing needs the site's own images to be seen, or the course."""
    crafted = attacks.Fishing().craft(network("small-cnn"), PUBLIC).state_dict()
    assert alarms(orders.rows(crafted, LIMITS)) == []


def test_numbers_that_are_none_are_named():
    weights = {"a": torch.tensor([1.0, torch.nan]), "b": torch.tensor([torch.inf]), "n": torch.tensor(3)}
    assert [alarm.where for alarm in alarms(orders.largest(weights, LIMITS))] == ["a", "b"]


def test_rows_are_counted_by_hand():
    rows = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert orders.row_counts(rows) == (1, 2)


def test_a_figure_that_is_not_a_number_is_an_alarm():
    assert Figure("loss", "images", float("nan"), 10.0).is_alarm
    assert not Figure("loss", "images", 10.0, 10.0).is_alarm


def test_long_rows_are_folded_and_parallel_ones_stay_parallel():
    rng = torch_rng("orders", "rows")
    rows = torch.randn(6, 3 * orders.FOLD + 5, generator=rng)
    rows[4], rows[5] = 2 * rows[0], -rows[1]
    assert orders.row_counts(rows) == (0, 4)
    first, second, third, _ = rows[0].split(orders.FOLD)
    torch.testing.assert_close(orders.folded(rows)[0], first - second + third)


@pytest.mark.parametrize(("shape", "seen"), [((3, 8), 0), ((4, 7), 0), ((4, 8), 2), ((4, 2, 2, 2), 2), ((32,), 0)])
def test_layers_that_are_looked_at_by_their_rows(shape, seen):
    weights = torch.randn(shape, generator=torch_rng("orders", "shape"))
    figures = list(orders.rows({"w": weights, "n": torch.ones(9, 9, dtype=torch.int64)}, LIMITS))
    assert [figure.check for figure in figures] == ["empty", "alike"][:seen]


def test_shares_of_rows_are_those_of_their_own_layer():
    one, other = (torch.randn(rows, 9, generator=torch_rng("orders", rows)) for rows in (8, 5))
    one[:2] = 0
    other[1:3] = other[0]
    found = {(figure.check, figure.where): figure for figure in orders.rows({"a": one, "b": other}, LIMITS)}
    values = {key: figure.value for key, figure in found.items()}
    assert values == {("empty", "a"): 0.25, ("alike", "a"): 0.0, ("empty", "b"): 0.0, ("alike", "b"): 0.6}
    assert {check: figure.limit for (check, _), figure in found.items()} == {"empty": 0.2, "alike": 0.2}


def test_rows_of_next_to_nothing_are_empty_and_a_layer_of_zeros_is_not_crafted():
    rows = torch.eye(4)
    for share, empty in ((1e-5, 0), (1e-7, 1), (0.0, 1)):
        rows[3, 3] = share
        assert orders.row_counts(rows) == (empty, 0)
    assert orders.row_counts(torch.zeros(4, 8)) == (0, 0)


@pytest.mark.parametrize(("cosine", "alike"), [(0.9995, 2), (-0.9995, 2), (0.998, 0)])
def test_rows_are_alike_from_the_same_direction_on(cosine, alike):
    rows = torch.tensor([[1.0, 0.0, 0.0], [cosine, (1 - cosine**2) ** 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert orders.row_counts(rows) == (0, alike)


def test_rows_beyond_the_first_portion_are_compared_with_all():
    rows = torch.randn(1200, 20, generator=torch_rng("orders", "many"))
    rows[1100], rows[600] = rows[3], -rows[700]
    assert orders.row_counts(rows) == (0, 4)


@pytest.mark.parametrize(("width", "left"), [(255, 255), (511, 511), (512, 256), (767, 256), (2560, 256)])
def test_only_rows_of_two_pieces_or_more_are_folded(width, left):
    """To a tenth where a layer has 2,560 inputs."""
    assert orders.folded(torch.ones(2, width)).shape == (2, left)


def test_the_largest_number_may_be_negative_and_an_empty_tensor_has_none():
    weights = {"a": torch.tensor([1.0, -3e6]), "b": torch.zeros(0), "c": torch.tensor([2.0, 1.0])}
    assert [(figure.where, figure.value) for figure in orders.largest(weights, LIMITS)] == [("a", 3e6), ("c", 2.0)]
    assert orders.numbers([]) == []
