"""How far rows move, by hand."""

import pytest
import torch

from polyclinic.federation.layers import movement as course
from polyclinic.federation.layers.movement import History
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState

REFERENCE = {
    "fc.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
    "fc.bias": torch.tensor([4.0, 3.0]),
    "norm.running_mean": torch.zeros(2),
    "steps": torch.tensor(3),
}


def test_a_row_is_a_units_weights_and_its_bias():
    assert course.layers(REFERENCE).keys() == {"fc"}
    torch.testing.assert_close(course.layers(REFERENCE)["fc"], torch.tensor([[3.0, 0.0, 4.0], [0.0, 4.0, 3.0]]))


def test_movement_is_that_of_the_row_that_moved_farthest():
    now = {**REFERENCE, "fc.bias": torch.tensor([4.0, 5.0]), "norm.running_mean": torch.full((2,), 100.0)}
    assert course.movement(now, REFERENCE) == pytest.approx({"fc": 2 / 5})


def test_a_short_row_counts_by_the_mean_length_of_its_layer():
    reference = {"fc.weight": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    now = {"fc.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    assert course.movement(now, reference) == pytest.approx({"fc": 1 / 0.5})


def test_weights_that_are_no_part_of_the_reference_do_not_count():
    assert course.movement({"other.weight": torch.ones(2, 2)}, REFERENCE) == {}


def test_the_limit_grows_with_what_the_sites_own_training_does():
    limits = Incoming(moved=0.5, times_own=10)
    [quiet] = course.moved({"fc": 0.6}, {"fc": 0.01}, limits)
    [lively] = course.moved({"fc": 0.6}, {"fc": 0.2}, limits)
    assert (quiet.is_alarm, lively.is_alarm, lively.limit) == (True, False, 2.0)


@pytest.mark.parametrize(("by_sign", "moved"), [(False, 0.1 * 5 / 5), (True, 0.1 * 2**0.5 / 5)])
def test_a_step_along_gradients(by_sign, moved):
    weights = {"fc.weight": torch.tensor([[3.0, 4.0]])}
    gradients = {"fc.weight": torch.tensor([[3.0, 4.0]]), "gone": torch.ones(3)}
    found = course.movement(course.stepped(weights, gradients, 0.1, by_sign=by_sign), weights)
    assert found == pytest.approx({"fc": moved})


def test_a_step_counts_as_no_longer_than_the_longest_one():
    assert course.counted({"fc": 100.0, "conv": 0.01}, steps=3) == {"fc": 3 * course.LONGEST_STEP, "conv": 0.01}


def test_own_movement_falls_with_the_learning_rate_and_does_not_grow_with_it():
    history = History(SiteState())
    history.take_movement({"fc": 0.4}, lr=0.1)
    assert history.own(0.1) == {"fc": 0.4}
    assert history.own(0.01) == pytest.approx({"fc": 0.04})
    assert history.own(10.0) == {"fc": 0.4}
    history.take_movement({"fc": 0.05}, lr=0.01)  # more than is left of the earlier one at this rate
    assert history.own(0.01) == {"fc": 0.05}


def test_rows_of_all_sorts_of_layers():
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


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0], 0.4 / 0.2),  # a vector that begins at zero
        ([0.1, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], 0.4 / 0.2),  # a short one counts as no shorter
        ([0.8, 0.0, 0.0, 0.0], [1.2, 0.0, 0.0, 0.0], 0.4 / 0.8),
        ([[0.0] * 4] * 2, [[0.0] * 4, [0.4, 0.0, 0.0, 0.0]], 0.4 / 0.2),  # a layer that begins at zero
        ([[3.0] + [0.0] * 3, [1.0] + [0.0] * 3], [[3.0] + [0.0] * 3, [2.0] + [0.0] * 3], 1 / 2),
    ],
)
def test_how_far_a_short_row_moved(before, after, moved):
    found = course.movement({"x.other": torch.tensor(after)}, {"x.other": torch.tensor(before)})
    assert found == pytest.approx({"x.other": moved})


def test_a_layer_may_move_a_quarter_as_far_as_the_one_that_moved_farthest():
    limits = Incoming(moved=0.15, times_own=8)
    found = {figure.where: figure.limit for figure in course.moved({"a": 1, "b": 1}, {"a": 0.4, "b": 0.2}, limits, "!")}
    assert found == pytest.approx({"a!": 3.2, "b!": 1.6})
    [other] = course.moved({"c": 1}, {"a": 0.4, "b": 0.01}, limits)
    assert other.limit == pytest.approx(8 * 0.25 * 0.4)
    [alone] = course.moved({"c": 1}, {}, limits)
    assert alone == ("moved", "c", 1, 0.15)


@pytest.mark.parametrize(("steps", "counted"), [(0, 0.11), (1, 0.11), (2, 0.22)])
def test_no_step_counts_as_one(steps, counted):
    assert course.counted({"fc": 1.0}, steps) == pytest.approx({"fc": counted})


def test_a_step_is_taken_where_weights_and_gradients_fit():
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    gradients = {"a": torch.tensor([2.0, -4.0]), "b": torch.ones(2), "c": torch.ones(1)}
    assert {n: t.tolist() for n, t in course.stepped(weights, gradients, 0.5, by_sign=False).items()} == {"a": [0, 3]}
    assert course.stepped(weights, gradients, 0.5, by_sign=True)["a"].tolist() == [0.5, 1.5]


def test_only_larger_figures_are_remembered():
    history = History(SiteState())
    history.take_most("loss", {"mean": 2.0, "none": 0.0})
    assert history.most("loss") == {"mean": 2.0}
    history.take_most("loss", {"mean": 1.0, "less": 0.25})
    assert history.most("loss") == {"mean": 2.0, "less": 0.25}
    history.take_movement({"fc": 0.0}, lr=0.1)
    assert history.most("own") == {}
    history.take_movement({"fc": 0.25}, lr=0.1)
    history.take_movement({"fc": 0.125}, lr=0.1)
    assert history.own(0.1) == {"fc": 0.25}


def test_weights_are_remembered_with_half_of_their_digits():
    history = History(SiteState())
    history.take({"w": torch.tensor([1.001]), "n": torch.tensor(3)}, 1)
    assert {name: one.dtype for name, one in history.last().items()} == {"w": torch.bfloat16}
    history.take({"v": torch.ones(1)}, 2)
    assert set(history.last()) == {"v", "w"}
