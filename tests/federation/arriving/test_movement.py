"""How far rows move, by hand."""

import pytest
import torch

from polyclinic.federation.arriving import course
from polyclinic.federation.arriving.history import History
from polyclinic.federation.arriving.settings import Incoming
from polyclinic.federation.state import SiteState

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
