"""Adaptive augmentation with draws that are known: each change is the one that the paper names."""

import math

import numpy as np
import pytest
import torch

from polyclinic.generators.stylegan2.ada import _colours, _moves, augmented, recoloured


class Known:
    """All draws of a kind are one number."""

    device = torch.device("cpu")

    def __init__(self, normal, uniform, integer):
        self.numbers = {"normal": float(normal), "uniform": float(uniform), "integer": int(integer)}
        self.bounds = []

    def normal(self, *shape):
        return torch.full(shape, self.numbers["normal"])

    def uniform(self, *shape):
        return torch.full(shape, self.numbers["uniform"])

    def integers(self, bound, *shape):
        self.bounds.append(bound)
        return torch.full(shape, self.numbers["integer"])


def scaled(x, y):
    return np.diag([x, y, 1.0])


def turned(quarters):
    cos, sin = math.cos(quarters * math.pi / 2), math.sin(quarters * math.pi / 2)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def moved(x, y):
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def test_all_moves_by_hand():
    """Flip, quarter turn, two of 32 pixels, larger by 2^0.2, a turn, stretched, a turn, a quarter of half a side."""
    known = Known(normal=1, uniform=0.75, integer=1)
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(1.0), known)
    assert known.bounds == [2, 4], "flipped or not; turned by none to three quarters"
    size = 2**0.2
    wanted = scaled(-1, 1) @ turned(1) @ moved(0.125, 0.125) @ scaled(size, size) @ turned(1)
    wanted = wanted @ scaled(size, 1 / size) @ turned(1) @ moved(0.25, 0.25)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def test_shifts_are_of_whole_pixels():
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(1.0), Known(normal=0, uniform=0.55, integer=0))
    turn = turned(0.2)
    np.testing.assert_allclose(found.numpy(), turn @ turn, atol=1e-5)  # 0.1 * 0.125 of a side is less than a pixel


def test_of_two_turns_one_happens_as_often_as_another_change():
    """With p = 1/2 each turn has 1 - sqrt(1/2) = 0.29: a draw of 0.4 makes all changes but turns by any angle."""
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(0.5), Known(normal=0, uniform=0.4, integer=1))
    shift = round(-0.2 * 0.125 * 32) * 2 / 32
    np.testing.assert_allclose(found.numpy(), scaled(-1, 1) @ turned(1) @ moved(shift, shift), atol=1e-5)
    [found] = _moves(torch.zeros(1, 1, 32, 32), torch.tensor(0.5), Known(normal=1, uniform=0.6, integer=1))
    np.testing.assert_allclose(found.numpy(), np.eye(3), atol=1e-6)


def test_all_colours_by_hand():
    """Brighter by 0.2, contrast 2^0.5, luma inverted, a quarter turn of hue, twice the saturation."""
    known = Known(normal=1, uniform=0.75, integer=1)
    [found] = _colours(torch.zeros(1, 3, 4, 4), torch.tensor(1.0), known).numpy()
    assert known.bounds == [2]
    grey = found @ [0.3, 0.3, 0.3, 1]
    np.testing.assert_allclose(grey, [*[-math.sqrt(2) * 0.5] * 3, 1], atol=1e-5)
    hue = found @ [1, -1, 0, 0]  # a quarter turn about the axis of greys
    np.testing.assert_allclose(hue, [*(2 * math.sqrt(2 / 3) * np.array([1, 1, -2])), 0], atol=1e-5)


def test_a_grey_image_has_no_hue_and_no_saturation():
    for channels in (1, 2):
        [found] = _colours(torch.zeros(1, channels, 4, 4), torch.tensor(1.0), Known(normal=1, uniform=0.75, integer=0))
        wanted = math.sqrt(2) * np.eye(4)[:3] + np.sqrt(2) * 0.2 * np.eye(4)[3]
        np.testing.assert_allclose(found.numpy(), [*wanted, [0, 0, 0, 1]], atol=1e-5)


def test_without_a_choice_colours_stay():
    [found] = _colours(torch.zeros(1, 3, 4, 4), torch.tensor(0.5), Known(normal=1, uniform=0.75, integer=1))
    np.testing.assert_allclose(found.numpy(), np.eye(4), atol=1e-6)


def test_a_mask_stays_and_grey_takes_the_mean_of_the_colours():
    matrix = torch.tensor([[[1.0, 2, 3, 0.1], [0, 1, 0, 0.2], [0, 0, 1, 0.3], [0, 0, 0, 1]]])
    images = torch.rand(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    colour = recoloured(images, matrix)
    torch.testing.assert_close(colour[:, 3], images[:, 3])
    torch.testing.assert_close(colour[0, 0], images[0, 0] + 2 * images[0, 1] + 3 * images[0, 2] + 0.1)
    torch.testing.assert_close(colour[0, 2], images[0, 2] + 0.3)
    grey = recoloured(images[:, :2], matrix)
    torch.testing.assert_close(grey[:, 1], images[:, 1])
    torch.testing.assert_close(grey[:, 0], images[:, 0] * (6 + 1 + 1) / 3 + 0.2)


@pytest.mark.parametrize(("p", "changed"), [(0.0, False), (1.0, True)])
def test_nothing_happens_without_a_chance(p, changed):
    images = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    found = augmented(images, torch.tensor(p), Known(normal=0, uniform=0.5, integer=1))
    assert torch.equal(found, images) is not changed
    if changed:  # flipped, a quarter turned, and with inverted luma
        torch.testing.assert_close(found[0, 0], -images[0, 0].T, atol=1e-4, rtol=0)
