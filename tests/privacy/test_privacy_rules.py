"""Small rules of privacy, each by hand: mutants of them lived until these tests were written."""

import math
import warnings

import pytest
import torch
from torch import nn

from polyclinic.errors import BadInput
from polyclinic.privacy import clipped_sums
from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.privacy.dp_sgd import mixes_samples, try_gradients
from polyclinic.privacy.epsilon import (
    MOST_NOISE,
    MOST_STEPS,
    Mechanism,
    _gaussian,
    _prv,
    compute_epsilon,
    curves,
    noise_for,
    sampling_rate_for,
    steps_for,
)
from polyclinic.privacy.ghost_clipping import can_follow, laid_out_as
from polyclinic.privacy.settings import Facts, Privacy, check_facts

# --- settings and pictures ----------------------------------------------------------------------------


def test_a_primary_model_cannot_be_private_for_patients_and_others_can():
    facts = Facts("fedreplay", ("encoder", "primary", "classifier"))
    check_facts(Privacy(on=("classifier",), unit="patient"), facts)
    check_facts(Privacy(on=("encoder", "primary"), unit="image"), facts)
    with pytest.raises(BadInput, match=r"privacy\.unit: the coordinator does not know"):
        check_facts(Privacy(on=("encoder", "primary"), unit="patient"), facts)


@pytest.mark.parametrize(("size", "delta"), [(1, 1 / 2), (2, 1 / 2), (3, 1 / 3), (100, 1 / 100)])
def test_a_point_of_a_curve_is_the_accountants_at_delta_one_over_the_images(size, delta):
    [points] = curves((size,), epochs=2, batch_size=10, noise=2.0).values()
    rate = min(1.0, 10 / size)
    wanted = [(float(epochs), compute_epsilon(rate, 2.0, round(epochs / rate), delta)) for epochs in (1, 2)]
    assert points == wanted


def test_points_of_a_curve_are_even_and_begin_after_one_epoch():
    [points] = curves((500,), epochs=3, batch_size=32, noise=1.0).values()
    assert [epochs for epochs, _ in points] == [1.0, 2.0, 3.0]
    assert points[0][1] < points[1][1] < points[2][1]
    [points] = curves((500,), epochs=120, batch_size=32, noise=1.0).values()
    assert [epochs for epochs, _ in points] == [1.0, *range(2, 121, 2)]


# --- accounts -----------------------------------------------------------------------------------------


def test_searches_for_steps_and_noise_end():
    assert steps_for(math.inf, 1.0, 1.0, 1e-5) >= MOST_STEPS // 2
    assert (MOST_STEPS, MOST_NOISE) == (100_000_000, 1_000_000.0)
    with pytest.raises(BadInput, match="no noise reaches it"):
        noise_for(0.0, 1.0, 10**6, 1e-12)


@pytest.mark.parametrize("shift", [1e-3, 0.1, 2.0])
def test_epsilon_of_a_gaussian_is_the_smallest_that_covers_the_shift(shift):
    """Balle and Wang 2018, Theorem 8, to a thousandth of it."""

    def delta_of(epsilon):
        more, less = (0.5 * math.erfc(-(sign * shift / 2 - epsilon / shift) / math.sqrt(2)) for sign in (1, -1))
        return more - math.exp(epsilon) * less

    found = _gaussian(shift, 1e-5)
    assert delta_of(found * 1.0001) <= 1e-5 < delta_of(found * 0.999)


@pytest.mark.parametrize(("samples", "batch"), [(0, 8), (8, 0), (-1, 8)])
def test_rates_of_no_images_are_refused(samples, batch):
    with pytest.raises(BadInput, match="both must be at least 1"):
        sampling_rate_for(samples, batch)
    assert (sampling_rate_for(1, 1), sampling_rate_for(8, 2), sampling_rate_for(2, 8)) == (1.0, 0.25, 1.0)


def test_prv_is_asked_for_a_hundredth_of_an_epsilon(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant
    asked = []

    def get_epsilon(self, delta, *, eps_error):
        asked.append(eps_error)
        return 5.0

    monkeypatch.setattr(PRVAccountant, "get_epsilon", get_epsilon)
    weak, strong = (Mechanism(0.5, 0.02, 1003),), (Mechanism(20.0, 0.01, 103),)
    assert _prv.__wrapped__(weak, 1e-5) == 5.0
    assert _prv.__wrapped__(strong, 1e-5) < 5.0  # never above RDP's bound
    assert asked[0] == 0.01
    assert 0 < asked[1] < 0.002


@pytest.mark.parametrize(("noise", "asked"), [(0.09, False), (0.1, True)])
def test_prv_is_not_asked_for_an_epsilon_above_a_hundred(monkeypatch, noise, asked):
    """RDP's bound is 111 and 94 for one step of every second image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant
    seen = []
    monkeypatch.setattr(PRVAccountant, "get_epsilon", lambda self, delta, *, eps_error: seen.append(delta) or 1.0)
    bound = compute_epsilon(0.5, noise, 1, 1e-5)
    assert 90 < bound < 120
    assert _prv.__wrapped__((Mechanism(noise, 0.5, 1),), 1e-5) == (1.0 if asked else bound)
    assert bool(seen) is asked


# --- gradients of single images -----------------------------------------------------------------------


def of_rows(model):
    return lambda rows: model(rows).sum(1)


def test_stored_gradients_go_through_in_pieces_that_fit_the_memory(monkeypatch):
    model, seen = nn.Linear(8, 1, bias=False), []

    def losses(rows):
        seen.append(len(rows))
        return model(rows).sum(1)

    monkeypatch.setattr(clipped_sums, "ROOM", {"cpu": 3 * 8 * 4})  # three times eight numbers of four bytes
    sums = ClippedSums(model, "stored")
    with sums.following():
        sums.total(losses, [(torch.ones(7, 8),)], 1.0, list(model.parameters()))
    assert seen == [3, 3, 1]


@pytest.mark.parametrize(
    ("settings", "followed"), [({}, True), ({"padding_idx": 0}, False), ({"max_norm": 1.0}, False)]
)
def test_a_table_that_changes_its_rows_by_itself_is_not_followed(settings, followed):
    assert can_follow(nn.Embedding(5, 4, **settings)) is followed


def test_a_gradient_lies_in_memory_as_its_parameter():
    parameter, gradient = torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    assert laid_out_as(parameter, gradient) is gradient
    other = gradient.contiguous(memory_format=torch.channels_last)
    found = laid_out_as(parameter, other)
    assert found.stride() == parameter.stride() != other.stride()
    assert torch.equal(found, gradient)


def test_dropout_is_no_reason_against_gradients_of_single_images():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert try_gradients(model, torch.rand(4, 1, 4, 4)) is None


class Mixing(nn.Module):
    """A share of the batch's mean is in every row, in numbers of some size."""

    def __init__(self, share, size):
        super().__init__()
        self.share, self.size = share, size

    def forward(self, rows):
        return self.size * (rows + self.share * rows.mean(0))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_hundredth_of_other_rows_is_noticed_in_numbers_of_any_size(size):
    rows = torch.tensor([[1.0], [2.0], [-3.0], [5.0]])
    assert mixes_samples(Mixing(0.01, size), rows)
    assert not mixes_samples(Mixing(0.0, size), rows)
    assert not mixes_samples(Mixing(0.0, 0.0), rows)
