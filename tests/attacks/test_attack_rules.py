"""Small rules of attacks, each by hand: mutants of them lived until these tests were written."""

import pytest
import torch

from polyclinic.attacks.attack import verdict_word
from polyclinic.attacks.coordinator.fishing import Fishing
from polyclinic.attacks.gradient_inversion.analytic import _sparse_columns
from polyclinic.attacks.near_copies import WEAKEST, WEAKEST_WORDS, View, _shifts, _shrink, _window, weakest_copies


def test_columns_with_one_more_zero_than_was_asked_for_are_found():
    columns = torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0, 0.0, 3.0, 5.0]], dtype=torch.float64).T
    basis = torch.linalg.qr(columns)[0]
    found = _sparse_columns(basis, draws=256, seed=0)
    assert found.shape == (6, 2)
    unit = columns / columns.norm(dim=0)
    assert sorted((found.T @ unit).abs().amax(1).tolist()) == pytest.approx([1.0, 1.0])


def test_shifts_go_as_far_as_each_side_allows():
    found = list(_shifts([1, 2]))
    assert len(set(found)) == len(found) == 3 * 5
    assert {down for down, _ in found} == {-1, 0, 1}
    assert {right for _, right in found} == {-2, -1, 0, 1, 2}


def test_images_are_compared_at_a_shorter_side_of_32_pixels():
    assert _shrink(torch.rand(1, 1, 64, 96)).shape[-2:] == (32, 48)
    assert _shrink(torch.rand(1, 1, 16, 20)).shape[-2:] == (16, 20)


def test_the_weakest_copy_is_the_one_that_its_words_say():
    assert WEAKEST == {"shifted": 0.03, "brighter": 0.1, "blurred": 0.01, "noisy": 0.02}
    for word in ("shifted by 3 %", "brighter by 0.1", "blurred over 1 %", "noise of 0.02"):
        assert word in WEAKEST_WORDS


def test_defaults_of_fishing():
    assert (Fishing().strength, Fishing().target_class) == (30.0, 0)


def test_a_window_leaves_out_what_shifts_may_reach():
    images = torch.arange(48.0).reshape(1, 1, 6, 8)
    assert torch.equal(_window(images, [1, 2], (0, 0), None), images[..., 1:5, 2:6])
    assert torch.equal(_window(images, [1, 2], (-1, 2), None), images[..., 0:4, 4:8])
    assert torch.equal(_window(images, [1, 2], (0, 0), (1, 0)), images[..., 3:5, 2:4])


def test_a_plain_view_changes_nothing():
    assert (View().before, View().after, View().quarter, View().blur) == (0.0, 0.0, None, 0.0)


def test_copies_are_planted_by_seed_zero_unless_another_is_given():
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weakest_copies(images), weakest_copies(images, 0))
    assert not torch.equal(weakest_copies(images), weakest_copies(images, 1))


@pytest.mark.parametrize(
    ("told", "word"),
    [
        *(({"verdict": "withstood"}, "withstood"), ({"verdict": "leaks"}, "leaks"), ({"leak": True}, "leaks")),
        *(({"leak": False}, "not tested"), ({"verdict": "no word", "leak": True}, "leaks"), ({}, "not tested")),
    ],
)
def test_the_word_of_a_verdict(told, word):
    assert verdict_word(told) == word
