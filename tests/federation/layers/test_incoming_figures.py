"""How far rows move, and what a site sees in weights alone, by hand: honest ones pass, crafted ones do not."""

import pytest
import torch

from polyclinic import attacks
from polyclinic.federation.layers import incoming_figures as course
from polyclinic.federation.layers.incoming_figures import History
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState
from polyclinic.models import build
from polyclinic.randomness import seeded, torch_rng

REFERENCE = {
    "fc.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
    "fc.bias": torch.tensor([4.0, 3.0]),
    "norm.running_mean": torch.zeros(2),
    "steps": torch.tensor(3),
}


def test_movement_of_rows_and_layers_by_hand():
    now = {**REFERENCE, "fc.bias": torch.tensor([4.0, 5.0]), "norm.running_mean": torch.full((2,), 100.0)}
    assert course.movement(now, REFERENCE) == pytest.approx({"fc": 2 / 5})
    history = History(SiteState())
    history.take_movement({"fc": 0.4}, lr=0.1)
    assert history.own(0.1) == {"fc": 0.4}
    assert history.own(0.01) == pytest.approx({"fc": 0.04})
    assert history.own(10.0) == {"fc": 0.4}
    history.take_movement({"fc": 0.05}, lr=0.01)  # more than is left of the earlier one at this rate
    assert history.own(0.01) == {"fc": 0.05}
    limits = Incoming(moved=0.15, times_own=8)
    found = {figure.where: figure.limit for figure in course.moved({"a": 1, "b": 1}, {"a": 0.4, "b": 0.2}, limits, "!")}
    assert found == pytest.approx({"a!": 3.2, "b!": 1.6})
    [other] = course.moved({"c": 1}, {"a": 0.4, "b": 0.01}, limits)
    assert other.limit == pytest.approx(8 * 0.25 * 0.4)
    [alone] = course.moved({"c": 1}, {}, limits)
    assert alone == ("moved", "c", 1, 0.15)
    weights = {
        "conv.weight": torch.ones(2, 3, 2, 2),
        "conv.bias": torch.zeros(2),
        "norm.weight": torch.tensor([1.0, 2.0, 3.0]),
        "norm.bias": torch.tensor([4.0, 5.0, 6.0]),
        "norm.running_var": torch.ones(3),
        "alone.bias": torch.ones(4),
        "odd.weight": torch.ones(2, 2),
        "odd.bias": torch.ones(5),
        "token": torch.ones(1, 7),
        "scale": torch.tensor(2.0),
    }
    found = course.layers(weights)
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {
        "conv": (2, 13),
        "norm": (3, 2),
        "alone.bias": (1, 4),
        "odd": (2, 2),
        "odd.bias": (1, 5),
        "token": (1, 7),
        "scale": (1, 1),
    }
    assert found["norm"].tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


@pytest.mark.parametrize(("before", "after", "moved"), [
    ([0.0, 0.0, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0], 0.4 / 0.2),  # a vector that begins at zero
    ([0.1, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], 0.4 / 0.2),  # a short one counts as no shorter
    ([0.8, 0.0, 0.0, 0.0], [1.2, 0.0, 0.0, 0.0], 0.4 / 0.8),
    ([[0.0] * 4] * 2, [[0.0] * 4, [0.4, 0.0, 0.0, 0.0]], 0.4 / 0.2),  # a layer that begins at zero
    ([[3.0] + [0.0] * 3, [1.0] + [0.0] * 3], [[3.0] + [0.0] * 3, [2.0] + [0.0] * 3], 1 / 2),
])  # fmt: skip
def test_how_far_a_short_row_moved(before, after, moved):
    found = course.movement({"x.other": torch.tensor(after)}, {"x.other": torch.tensor(before)})
    assert found == pytest.approx({"x.other": moved})


@pytest.mark.parametrize(("steps", "counted"), [(0, 0.11), (1, 0.11), (2, 0.22)])
def test_no_step_counts_as_one(steps, counted):
    assert course.counted({"fc": 1.0}, steps) == pytest.approx({"fc": counted})


def test_steps_and_weights_are_kept_where_they_fit():
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    gradients = {"a": torch.tensor([2.0, -4.0]), "b": torch.ones(2), "c": torch.ones(1)}
    assert {n: t.tolist() for n, t in course.stepped(weights, gradients, 0.5, by_sign=False).items()} == {"a": [0, 3]}
    assert course.stepped(weights, gradients, 0.5, by_sign=True)["a"].tolist() == [0.5, 1.5]
    history = History(SiteState())
    history.take({"w": torch.tensor([1.001]), "n": torch.tensor(3)}, 1)
    assert {name: one.dtype for name, one in history.last().items()} == {"w": torch.bfloat16}
    history.take({"v": torch.ones(1)}, 2)
    assert set(history.last()) == {"v", "w"}


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
        assert alarms([*course.largest(model.state_dict(), LIMITS), *course.rows(model.state_dict(), LIMITS)]) == []
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(PUBLIC[:8]), torch.arange(8) % 2).backward()
        optimizer.step()
    assert alarms([*course.largest(model.state_dict(), LIMITS), *course.rows(model.state_dict(), LIMITS)]) == []


@pytest.mark.parametrize("backbone", ["lenet5", "cnn-32-64-128", "cnn-64-128-64-32"])
@pytest.mark.parametrize("attack", [attacks.Imprint(), attacks.CraftedSum(), attacks.Imprint(strength=0.1)])
def test_imprinted_layers_are_seen(backbone, attack):
    crafted = attack.craft(network(backbone), PUBLIC).state_dict()
    assert "fc1.weight" in [alarm.where for alarm in alarms(course.rows(crafted, LIMITS))]


def test_traps_and_overflowing_weights_are_seen():
    """The traps themselves look like random rows."""
    crafted = attacks.TrapWeights().craft(network("cnn-32-64-128"), PUBLIC)
    assert [alarm.where for alarm in alarms(course.rows(crafted.state_dict(), LIMITS))] == ["conv1.weight"]
    crafted = attacks.OverflowFilter().craft(network("lenet5"), PUBLIC[0], PUBLIC[1:])
    [alarm] = alarms(course.largest(crafted.state_dict(), LIMITS))
    assert str(alarm) == "largest of 'fc3.weight' is 3e+38, and 1e+06 is the limit"


@pytest.mark.parametrize(("shape", "seen"), [((3, 8), 0), ((4, 7), 0), ((4, 8), 2), ((4, 2, 2, 2), 2), ((32,), 0)])
def test_layers_that_are_looked_at_by_their_rows(shape, seen):
    weights = torch.randn(shape, generator=torch_rng("orders", "shape"))
    figures = list(course.rows({"w": weights, "n": torch.ones(9, 9, dtype=torch.int64)}, LIMITS))
    assert [figure.check for figure in figures] == ["empty", "alike"][:seen]


def test_rows_and_largest_numbers_are_counted_by_hand():
    one, other = (torch.randn(rows, 9, generator=torch_rng("orders", rows)) for rows in (8, 5))
    one[:2] = 0
    other[1:3] = other[0]
    found = {(figure.check, figure.where): figure for figure in course.rows({"a": one, "b": other}, LIMITS)}
    values = {key: figure.value for key, figure in found.items()}
    assert values == {("empty", "a"): 0.25, ("alike", "a"): 0.0, ("empty", "b"): 0.0, ("alike", "b"): 0.6}
    assert {check: figure.limit for (check, _), figure in found.items()} == {"empty": 0.2, "alike": 0.2}
    weights = {"a": torch.tensor([1.0, -3e6]), "b": torch.zeros(0), "c": torch.tensor([2.0, 1.0])}
    assert [(figure.where, figure.value) for figure in course.largest(weights, LIMITS)] == [("a", 3e6), ("c", 2.0)]
    assert course.numbers([]) == []
    rows = torch.eye(4)
    for share, empty in ((1e-5, 0), (1e-7, 1), (0.0, 1)):
        rows[3, 3] = share
        assert course.row_counts(rows) == (empty, 0)
    assert course.row_counts(torch.zeros(4, 8)) == (0, 0)
    rows = torch.randn(1200, 20, generator=torch_rng("orders", "many"))
    rows[1100], rows[600] = rows[3], -rows[700]
    assert course.row_counts(rows) == (0, 4)
    rng = torch_rng("orders", "rows")
    rows = torch.randn(6, 3 * course.FOLD + 5, generator=rng)
    rows[4], rows[5] = 2 * rows[0], -rows[1]
    assert course.row_counts(rows) == (0, 4)
    first, second, third, _ = rows[0].split(course.FOLD)
    torch.testing.assert_close(course.folded(rows)[0], first - second + third)


@pytest.mark.parametrize(("cosine", "alike"), [(0.9995, 2), (-0.9995, 2), (0.998, 0)])
def test_rows_are_alike_from_the_same_direction_on(cosine, alike):
    rows = torch.tensor([[1.0, 0.0, 0.0], [cosine, (1 - cosine**2) ** 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert course.row_counts(rows) == (0, alike)


@pytest.mark.parametrize(("width", "left"), [(255, 255), (511, 511), (512, 256), (767, 256), (2560, 256)])
def test_only_rows_of_two_pieces_or_more_are_folded(width, left):
    """To a tenth where a layer has 2,560 inputs."""
    assert course.folded(torch.ones(2, width)).shape == (2, left)
