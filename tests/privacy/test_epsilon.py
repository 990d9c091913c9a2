"""Accounting: known figures, Google's library, composition, searches, curves, the laws that any accountant obeys."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from polyclinic.errors import BadInput
from polyclinic.privacy import epsilon
from polyclinic.privacy.account import Account
from polyclinic.privacy.epsilon import (
    Mechanism,
    composed_epsilon,
    compute_epsilon,
    curves,
    gaussian_epsilon,
    group_epsilon,
    noise_for,
    sampling_rate_for,
    steps_for,
    steps_in,
)

# epsilon according to Google's dp-accounting, for (sampling rate, noise, steps, delta), printed by
#   event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)
#   accountant.compose(event); accountant.get_epsilon(delta)
# with pld.PLDAccountant() of version 0.6.0 and rdp.RdpAccountant() of version 0.4.3: from 0.4.4 on, RDP of fractional
# orders adds the absolute values of a series with signs, a bound that is up to 10 % looser (43.5 in the second row)
GOOGLE = [
    # rate, noise, steps, delta, PLD, RDP
    (32 / 10000, 0.7, 93750, 1e-5, 13.7062, 14.7898),  # Qu et al. 2022: 300 epochs of 10,000 images
    (32 / 1144, 0.7, 8044, 8.7e-4, 36.1718, 39.6418),  # 225 epochs of 1,144 images
    (0.01, 1.0, 1000, 1e-5, 1.8282, 2.1014),
    (0.01, 4.0, 1000, 1e-5, 0.2722, 0.3012),
    (0.1, 2.0, 500, 1e-5, 5.5555, 6.0343),
    (1.0, 5.0, 10, 1e-5, 2.5944, 2.8137),
    (0.5, 1.0, 20, 1e-3, 11.1008, 12.6666),
    (0.02, 0.4, 200, 1e-3, 15.1923, 18.985),
    (0.05, 10.0, 100, 1e-5, 0.1631, 0.1844),
    (0.004, 1.1, 15000, 1e-5, 2.2955, 2.5029),
    (0.25, 1.5, 60, 5e-3, 4.2835, 5.0773),
]

RATES, NOISES, DELTAS = st.floats(1e-3, 1.0), st.floats(0.5, 8.0), st.sampled_from([1e-6, 1e-4, 1e-2])


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "pld", "rdp"), GOOGLE)
def test_agrees_with_google_to_one_per_cent(rate, noise, steps, delta, pld, rdp):
    assert compute_epsilon(rate, noise, steps, delta, "rdp") == pytest.approx(rdp, rel=0.01)
    if steps < 20000:  # the largest takes PRV ten seconds
        assert compute_epsilon(rate, noise, steps, delta, "prv") == pytest.approx(pld, rel=0.01)


@pytest.mark.slow
def test_agrees_with_google_where_prv_is_slow():
    rate, noise, steps, delta, pld, _ = GOOGLE[0]
    assert compute_epsilon(rate, noise, steps, delta, "prv") == pytest.approx(pld, rel=0.01)


@pytest.mark.parametrize("order", [1.1, 1.5, 2.0, 3.7, 8.0])
def test_rdp_of_a_step_against_the_integral_it_is(order):
    """E over x ~ N(0, s^2) of ((1 - q) + q exp((2x - 1) / 2s^2))^order, by quadrature."""
    q, s = 32 / 1144, 0.7

    def density(x: float) -> float:
        ratio = (1 - q) + q * np.exp((2 * x - 1) / (2 * s * s))
        return np.exp(-x * x / (2 * s * s)) / (np.sqrt(2 * np.pi) * s) * ratio**order

    integral, _ = integrate.quad(density, -12 * s, 12 * s + order, limit=500, points=[0, 1, order])
    nearest = min(range(len(epsilon.ORDERS)), key=lambda i: abs(epsilon.ORDERS[i] - order))
    assert epsilon.ORDERS[nearest] == pytest.approx(order)
    found = epsilon._rdp_of_a_step(s, q)[nearest]
    assert found == pytest.approx(np.log(integral) / (order - 1), rel=1e-5)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_laws_hold_for_both_accountants_and_steps_are_the_last_ones_allowed(accountant):
    base = compute_epsilon(0.05, 1.0, 200, 1e-3, accountant)
    assert compute_epsilon(0.05, 1.0, 400, 1e-3, accountant) > base > compute_epsilon(0.05, 1.0, 100, 1e-3, accountant)
    assert compute_epsilon(0.05, 0.9, 200, 1e-3, accountant) > base > compute_epsilon(0.05, 1.1, 200, 1e-3, accountant)
    assert compute_epsilon(0.06, 1.0, 200, 1e-3, accountant) > base > compute_epsilon(0.04, 1.0, 200, 1e-3, accountant)
    assert 0 < base <= compute_epsilon(0.05, 1.0, 200, 1e-3, "rdp")
    steps = steps_for(3.0, 0.05, 1.0, 1e-3, accountant)
    allowed, above = (compute_epsilon(0.05, 1.0, count, 1e-3, accountant) for count in (steps, steps + 1))
    assert allowed <= 3.0 < above


@given(RATES, NOISES, DELTAS, st.integers(1, 500), st.integers(1, 500))
@settings(max_examples=10, deadline=None)
def test_steps_compose_and_never_cost_more_than_their_sum(rate, noise, delta, first, second):
    together = compute_epsilon(rate, noise, first + second, delta)
    apart = composed_epsilon([Mechanism(noise, rate, first), Mechanism(noise, rate, second)], delta)
    assert apart == pytest.approx(together)
    alone = compute_epsilon(rate, noise, first, delta / 2) + compute_epsilon(rate, noise, second, delta / 2)
    assert together <= alone + 1e-9


def test_mechanisms_compose_in_any_order_nothing_costs_nothing_and_no_noise_everything():
    a, b = Mechanism(1.0, 0.05, 100), Mechanism(2.0, 0.2, 50)
    for accountant in ("rdp", "prv"):
        both = composed_epsilon([a, b], 1e-3, accountant)
        assert both == pytest.approx(composed_epsilon([b, a], 1e-3, accountant), rel=1e-3)
        assert both > max(composed_epsilon([a], 1e-3, accountant), composed_epsilon([b], 1e-3, accountant))
    assert compute_epsilon(0.1, 1.0, 0, 1e-5) == 0
    assert composed_epsilon([], 1e-5) == 0
    assert compute_epsilon(0.1, 0.0, 1, 1e-5) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_next_to_no_noise_costs_everything_and_is_told_at_once(rate, accountant):
    """Opacus' sums do not end where the square of the noise is 0."""
    alone, beside = Mechanism(1e-101, rate, 1), Mechanism(1.0, rate, 5)
    assert composed_epsilon([alone], 1e-5, accountant) == math.inf
    assert composed_epsilon([beside, alone], 1e-5, accountant) == math.inf
    assert 1e199 < compute_epsilon(rate, 1e-100, 1, 1e-5, accountant) < math.inf
    # no step was taken with it
    assert composed_epsilon([beside, Mechanism(0.0, rate, 0)], 1e-5) == composed_epsilon([beside], 1e-5)


@pytest.mark.parametrize(("epochs", "samples", "batch", "steps"), [
    *((1, 100, 10, 10), (0.5, 10, 1, 5), (3, 10, 1, 30), (0, 100, 10, 0)),
    (1, 10, 3, 4),  # 3.3 rounded upwards
    (7, 4, 9, 7),  # every image takes part in every step
    (2, 49, 1, 98),  # 2 / (1 / 49) is a little more than 98 in floating point
])  # fmt: skip
def test_steps_of_epochs_by_hand(epochs, samples, batch, steps):
    assert steps_in(epochs, samples, batch) == steps


def test_steps_for_count_what_was_spent_before():
    before = [Mechanism(1.0, 0.05, 40)]
    assert steps_for(3.0, 0.05, 1.0, 1e-3, after=before) == steps_for(3.0, 0.05, 1.0, 1e-3) - 40
    assert steps_for(0.01, 0.05, 1.0, 1e-3, after=before) == 0


@pytest.mark.parametrize("steps", [*range(10), 31, 32, 33])
def test_any_number_of_steps_is_found_where_the_epsilon_is_just_that(steps):
    enough, rate, noise, delta = compute_epsilon(0.1, 2.0, steps, 1e-3), 0.1, 2.0, 1e-3
    assert steps_for(enough, rate, noise, delta) == steps
    assert steps_for(enough - 1e-9, rate, noise, delta) == max(0, steps - 1)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("wanted", [0.3, 0.4, 0.5, 0.9, 1.0, 1.3, 2.0, 7.0, 64.0])
def test_any_noise_is_found_to_a_thousandth_and_never_too_small(wanted, accountant):
    """Full batches, of which the epsilon takes no time."""
    found = noise_for(compute_epsilon(1.0, wanted, 1, 1e-3, accountant), 1.0, 1, 1e-3, accountant)
    assert 0 <= found - wanted <= 1.1e-3 * wanted + 1e-4
    assert found * 1e4 == pytest.approx(round(found * 1e4), abs=1e-6)


def test_searches_end_where_next_to_no_noise_or_any_number_of_steps_is_enough():
    assert noise_for(1e100, 1.0, 1, 1e-3) == 1e-4
    assert noise_for(1.0, 1.0, 0, 1e-3) == 1e-4
    assert steps_for(math.inf, 1.0, 1.0, 1e-5) >= epsilon.MOST_STEPS // 2
    with pytest.raises(BadInput, match="no noise reaches it"):
        noise_for(0.0, 1.0, 10**6, 1e-12)


@pytest.mark.parametrize("images", [2, 3, 10])
def test_group_privacy_is_the_theorem_at_its_own_delta(images):
    """(e, d) for one image is (k e, d (exp(k e) - 1) / (exp(e) - 1)) for k of them."""
    steps, delta = [Mechanism(8.0, 0.1, 10)], 1e-3
    one = group_epsilon(steps, delta, images) / images
    spent = delta * math.expm1(one) / math.expm1(images * one)  # the largest d that a patient's delta allows
    assert composed_epsilon(steps, spent) <= one <= 1.2 * composed_epsilon(steps, spent)


def test_a_large_group_has_no_privacy_and_no_number_overflows(monkeypatch):
    asked = []

    def composed(one):
        return lambda steps, single, accountant: asked.append(single) or one

    for one in (math.inf, 1e308, 800.0, 7.1):
        monkeypatch.setattr(epsilon, "composed_epsilon", composed(one))
        assert group_epsilon([], 1e-3, 100) == math.inf
    assert asked == [1e-5] * 4
    monkeypatch.setattr(epsilon, "composed_epsilon", composed(6.0))
    assert group_epsilon([], 1e-3, 100) == 600.0  # exp(-594) is a number
    assert group_epsilon([], 1e-3, 1) == 6.0
    assert group_epsilon([], 1e-3, 0) == 6.0  # whoever has none may have one


def test_an_account_adds_up_survives_a_restart_and_allows_what_is_left():
    account = Account(1e-2, trained=4, recorded=5, after=6)
    for _ in range(3):
        account.add(1.0, 0.1, 5)
        account.add(2.0, 0.1, 0)  # no steps
    account.add(2.0, 0.1, 7)
    account.add(2.0, 1.0, 1)
    assert account.history == [Mechanism(1.0, 0.1, 15), Mechanism(2.0, 0.1, 7), Mechanism(2.0, 1.0, 1)]
    assert account.steps == 23
    kept = account.tensors()
    assert kept["history"].tolist() == [[1.0, 0.1, 15.0], [2.0, 0.1, 7.0], [2.0, 1.0, 1.0]]
    assert kept["names"].tolist() == [4, 5, 6]
    again = Account.restored(account.tensors(), 1e-2, "rdp")
    assert again == account
    assert again.epsilon == composed_epsilon(account.history, 1e-2)
    assert Account.restored(Account(1e-2).tensors(), 1e-2, "rdp").history == []
    assert Account.restored({}, 1e-2, "rdp").epsilon == 0
    account = Account(1e-2)
    allowed = steps_for(2.0, 0.1, 1.0, 1e-2)
    assert account.steps_left(None, 1.0, 0.1, 10**6) == 10**6
    assert account.steps_left(2.0, 1.0, 0.1, allowed) == allowed
    account.add(1.0, 0.1, allowed - 3)
    assert account.steps_left(2.0, 1.0, 0.1, 10) == 3
    account.add(1.0, 0.1, 3)
    assert account.steps_left(2.0, 1.0, 0.1, 10) == 0
    assert account.epsilon <= 2.0


@pytest.mark.parametrize("steps", [1, 100])
def test_full_batches_are_counted_exactly_by_hand(steps):
    """Noise 1 on what one image moves by 1: delta(1) = Phi(-1/2) - e Phi(-3/2) = .3085375 - 2.7182818 x .0668072."""
    delta = 0.3085375 - math.e * 0.0668072
    noise = math.sqrt(steps)  # so many steps with more noise are one with noise 1
    assert compute_epsilon(1.0, noise, steps, delta, "prv") == pytest.approx(1.0, rel=1e-5)


def test_two_noises_are_one_gaussian_mechanism_and_a_shift_within_delta_is_free():
    """1 / 2^2 + 3 / 4^2 = 1 / 1.5118^2"""
    both = composed_epsilon([Mechanism(2.0, 1.0, 1), Mechanism(4.0, 1.0, 3)], 1e-5, "prv")
    assert both == pytest.approx(compute_epsilon(1.0, (1 / 4 + 3 / 16) ** -0.5, 1, 1e-5, "prv"), rel=1e-5)
    assert both < composed_epsilon([Mechanism(2.0, 1.0, 1), Mechanism(4.0, 1.0, 3)], 1e-5, "rdp")
    assert gaussian_epsilon(0.01, 0.1) == 0.0
    assert 0.0 < gaussian_epsilon(0.01, 1e-5) < 0.1


@pytest.mark.parametrize("shift", [1e-3, 0.1, 2.0])
def test_epsilon_of_a_gaussian_is_the_smallest_that_covers_the_shift(shift):
    """Balle and Wang 2018, Theorem 8, to a thousandth of it."""

    def delta_of(epsilon):
        more, less = (0.5 * math.erfc(-(sign * shift / 2 - epsilon / shift) / math.sqrt(2)) for sign in (1, -1))
        return more - math.exp(epsilon) * less

    found = gaussian_epsilon(shift, 1e-5)
    assert delta_of(found * 1.0001) <= 1e-5 < delta_of(found * 0.999)


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


GIVEN = {"sampling_rate": 0.1, "noise": 1.0, "steps": 1, "delta": 1e-3}
SEARCHED = {"epsilon": 1.0, "sampling_rate": 0.1, "delta": 1e-3}


IMPOSSIBLE = {"sampling_rate": (0.0, 1.1, 2.0), "noise": (-1.0, math.nan), "steps": (-1,), "delta": (0.0, 1.0)}


@pytest.mark.parametrize("wrong", IMPOSSIBLE)
def test_impossible_input_is_named(wrong):
    for value in IMPOSSIBLE[wrong]:
        calls = [lambda value=value: compute_epsilon(**{**GIVEN, wrong: value})]
        if wrong != "steps":
            calls.append(lambda value=value: steps_for(**{"noise": 1.0, **SEARCHED, wrong: value}))
        if wrong in SEARCHED:
            calls.append(lambda value=value: noise_for(**{**SEARCHED, wrong: value}, steps=3))
        for call in calls:
            with pytest.raises(BadInput, match=f"^{wrong.replace('_', ' ')} "):
                call()


def test_a_rate_is_a_share_of_images_and_no_privacy_is_told_in_no_time():
    assert (sampling_rate_for(1, 1), sampling_rate_for(8, 2), sampling_rate_for(2, 8)) == (1.0, 0.25, 1.0)
    for samples, batch in ((0, 8), (8, 0), (-1, 8)):
        with pytest.raises(BadInput, match="both must be at least 1"):
            sampling_rate_for(samples, batch)
    assert compute_epsilon(0.5, 0.1, 50, 1e-2, "prv") == compute_epsilon(0.5, 0.1, 50, 1e-2, "rdp") > epsilon.NO_PRIVACY
