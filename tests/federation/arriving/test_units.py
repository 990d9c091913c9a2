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
