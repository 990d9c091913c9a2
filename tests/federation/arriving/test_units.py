"""What units do with images: quiet ones, images with a unit for themselves, graded thresholds."""

import pytest
import torch
from torch import nn

from polyclinic.federation.arriving import units
from polyclinic.federation.arriving.settings import Incoming

LIMITS = Incoming()
VALUES = torch.arange(8.0)[:, None]  # one number for each of 8 images


def dense(weights, biases, kind=nn.ReLU):
    layer = nn.Linear(1, len(weights))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights)[:, None])
        layer.bias.copy_(torch.tensor(biases))
    return nn.Sequential(layer, kind())


def responses(model, images=VALUES):
    found, _ = units.watch(model, images)
    [one] = found.values()
    return one


def test_relu_is_alive_above_zero_and_tanh_near_it():
    assert responses(dense([1.0], [-5.5])).alive[:, 0].tolist() == [False] * 6 + [True] * 2
    assert responses(dense([1.0], [-5.0], nn.Tanh)).alive[:, 0].tolist() == [False] * 3 + [True] * 5


def test_a_channel_of_a_convolution_is_alive_at_any_place():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(-0.5)
    images = torch.zeros(2, 1, 4, 4)
    images[1, 0, 3, 3] = 1
    found = responses(model, images)
    assert found.alive.tolist() == [[False], [True]]
    assert found.level is None


@pytest.mark.parametrize(
    ("biases", "quiet"),
    [
        ([-35.0, -45.0, -35.0, 5.0], [False, False, False, True]),  # saturated for all images, on either side
        ([-65.0, -75.0, -55.0, -80.0], [True, True, False, True]),  # on one side for all images but one, or for all
    ],
)
def test_a_saturated_tanh_is_quiet_where_its_output_is_constant(biases, quiet):
    found = responses(dense([10.0] * 4, biases, nn.Tanh))
    assert not found.alive.any()
    assert units.quiet_units(found).tolist() == quiet


def test_a_saturated_channel_answers_where_any_place_of_an_image_is_on_its_rarer_side():
    z = torch.full((8, 2, 2, 2), 5.0)
    z[:, :, 0, 0] = -5.0  # the same place of all images: constant
    z[:2, 0, 1, 1] = -5.0
    found = units.responses_to(z, rectifier=False)
    assert found.answers.sum(0).tolist() == [2, 0]


def test_a_channel_that_is_constant_for_all_images_shows_none_and_is_not_quiet():
    z = torch.full((8, 3, 2, 2), -1.0)
    z[0, 1] = 1.0
    z[:2, 2] = 1.0
    assert units.quiet_units(units.responses_to(z, rectifier=True)).tolist() == [False, True, False]


def test_quiet_units_are_those_of_one_image_in_eight_and_only_new_ones_count():
    found = responses(dense([1.0, 1.0, 1.0, 1.0], [-6.5, -9.0, -5.5, 1.0]))
    assert units.quiet_units(found).tolist() == [True, True, False, False]
    [figure] = units.quiet({"relu": found}, {"relu": torch.tensor([True, False, False, False])}, LIMITS)
    assert figure.value == 0.25


def test_an_image_that_has_a_unit_for_itself_is_exposed():
    found = responses(dense([1.0, -1.0, 1.0, 1.0], [-6.5, 0.5, -5.5, 1.0]))
    assert units.exposed(found) == 2 / 8
    [figure] = units.exposure({"relu": found}, {"relu": 0.125}, LIMITS)
    assert figure.value == 0.125


@pytest.mark.parametrize(
    ("biases", "thresholds"),
    [
        ([-0.5, -2.5, -4.5, -6.5], 4),
        ([-2.5, -2.6, -2.7, -6.5], 2),  # the first three separate the same images
        ([1.0, 1.5, 2.0, 2.5], 0),  # all images are above
    ],
)
def test_thresholds_of_one_direction_are_counted_where_they_separate_images_differently(biases, thresholds):
    assert units.thresholds(responses(dense([1.0, 1.0, 1.0, 1.0], biases)).level) == thresholds


def test_a_direction_may_be_turned_around_and_longer():
    level = responses(dense([1.0, -2.0, 3.0, -1.0], [-0.5, 5.0, -13.5, 6.5])).level
    assert units.thresholds(level) == 4


def test_units_that_measure_different_things_have_no_common_thresholds():
    rng = torch.Generator().manual_seed(0)
    assert units.thresholds(torch.randn(32, 64, generator=rng)) == 0


# --- where figures begin and end ------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "figures"), [(3, 0), (4, 1)])
def test_layers_of_a_few_units_are_not_looked_at(size, figures):
    found = {"relu": responses(dense([1.0] * size, [-1.5] * size))}
    assert len(list(units.quiet(found, {}, LIMITS))) == figures
    assert len(list(units.graded(found, {}, LIMITS))) == figures


@pytest.mark.parametrize(("own", "limit"), [({}, 9), ({"relu": 5.0}, 9), ({"relu": 6.0}, 9), ({"relu": 10.0}, 15.0)])
def test_units_may_measure_the_same_thing_half_as_often_again_as_after_own_training(own, limit):
    found = {"relu": responses(dense([1.0] * 4, [-0.5, -2.5, -4.5, -6.5]))}
    assert list(units.graded(found, own, LIMITS)) == [("graded", "relu", 4.0, limit)]


def test_channels_of_a_convolution_have_no_thresholds_and_no_image_for_themselves():
    z = torch.full((8, 4, 2, 2), -1.0)
    z[0, 0] = 1.0
    found = {"relu": units.responses_to(z, rectifier=True)}
    assert units.exposed(found["relu"]) == 0.0
    assert list(units.exposure(found, {}, LIMITS)) == []
    assert list(units.graded(found, {}, LIMITS)) == []
    assert list(units.quiet(found, {}, LIMITS)) == [("quiet", "relu", 0.25, LIMITS.quiet)]


def test_what_was_not_known_before_counts_from_nothing():
    found = {"relu": responses(dense([1.0] * 4, [-6.5] * 4))}
    assert list(units.exposure(found, {}, LIMITS)) == [("exposed", "relu", 0.125, LIMITS.exposed)]
    assert list(units.quiet(found, {}, LIMITS)) == [("quiet", "relu", 1.0, LIMITS.quiet)]


@pytest.mark.parametrize(
    ("biases", "thresholds"),
    [
        ([-0.5, -2.5], 0),  # two that point the same way may be an accident
        ([-0.5, -2.5, -4.5], 3),
        ([-7.5, -8.0, -8.5, -9.0], 0),  # all images are below
        ([0.5, -0.5, -6.5, -7.5], 2),  # the first is below all images, and the last above all
    ],
)
def test_thresholds_count_from_three_units_on_and_between_the_images(biases, thresholds):
    assert units.thresholds(responses(dense([1.0] * len(biases), biases)).level) == thresholds


def test_a_unit_that_is_the_same_for_all_images_measures_nothing():
    level = torch.cat([responses(dense([1.0] * 4, [-0.5, -2.5, -4.5, -6.5])).level, torch.full((8, 2), 3.0)], 1)
    assert units.thresholds(level) == 4
    barely = torch.cat([level[:, :4], 1e-5 * level[:, :1]], 1)  # next to nothing is not nothing
    assert units.thresholds(barely) == 4
    assert units.thresholds(torch.cat([level[:, :2], 1e-5 * (VALUES - 4.5)], 1)) == 3
    next_to_nothing = torch.cat([level[:, :2], 1e-7 * (VALUES - 4.5)], 1)
    assert units.thresholds(next_to_nothing) == units.thresholds(1e4 * next_to_nothing) == 0  # beside the others


@pytest.mark.parametrize(("crossing", "thresholds"), [(2.9, 3), (3.1, 2)])
def test_thresholds_far_out_separate_no_images(crossing, thresholds):
    """Of 40 images one lies 6 standard deviations from the mean: a threshold before it separates that one alone."""
    values = torch.zeros(40)
    values[:20], values[39] = torch.linspace(-0.5, 0.5, 20), 10.0
    standard = (values - values.mean()) / values.std(correction=0)
    level = torch.stack([standard - at for at in (-0.1, 0.0, crossing)], 1)
    assert units.thresholds(level) == thresholds


def test_an_activation_that_a_network_uses_twice_is_watched_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, images):
            return self.relu(self.relu(images) - 5)

    model = Twice()
    found, output = units.watch(model, VALUES)
    assert {name: int(one.alive.sum()) for name, one in found.items()} == {"relu": 7, "relu, 1": 2}
    assert output.flatten().tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    assert not model.relu._forward_pre_hooks


def test_saturation_begins_at_three():
    z = torch.tensor([[2.9], [3.0], [-2.9], [-3.1]])
    assert units.responses_to(z, rectifier=False).alive.flatten().tolist() == [True, False, True, False]
    assert units.responses_to(torch.tensor([[0.0], [1e-9]]), rectifier=True).alive.flatten().tolist() == [False, True]
