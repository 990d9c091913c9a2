"""Gradients, generators and corrections that arrive at one small site, rule by rule."""

import pytest
import torch
from one_site import FIRST, LAST, LIMITS, inspect, make_site

from polyclinic.federation.call import DataDependentRefusal
from polyclinic.federation.layers import movement as course
from polyclinic.federation.layers.incoming import one_pass
from polyclinic.federation.layers.movement import History, dominances, lengths
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState


def test_what_arrives_may_be_a_hundred_times_the_longest_so_far():
    site = make_site()
    for length in (1.0, 100.0, 50.0, 9_999.0):
        inspect(site, {"g": torch.tensor([length])}, kind="generator")
    assert History(site.state).most("generator") == {"g": 9_999.0}
    with pytest.raises(DataDependentRefusal, match="longer of 'g' is 200, and 100 is the limit"):
        inspect(site, {"g": torch.tensor([1_999_800.0])}, kind="generator", limits=Incoming(largest=1e9))
    assert list(lengths({"a": 5.0, "b": 5.0}, {"b": 2.0, "c": 1.0}, LIMITS)) == [("longer", "b", 2.5, 100.0)]
    assert list(lengths({"a": 5.0}, {"a": 0.0}, LIMITS)) == []


def test_a_gradient_of_one_image_is_refused_where_it_is_longer_than_before():
    site = make_site()
    single = torch.zeros(4, 3)
    single[2] = 1.0
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations' is 1"):
        inspect(site, {"activations": 1e-3 * single}, kind="gradients")  # the first one, however short
    inspect(site, {"activations": torch.ones(4, 3)}, kind="gradients")
    inspect(site, {"activations": single}, kind="gradients")
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations' is 1"):
        inspect(site, {"activations": 10 * single}, kind="gradients")
    inspect(site, {"generated": 10 * single}, kind="generator")  # a generator has no rows of images


@pytest.mark.parametrize(
    ("gradient", "share"),
    [([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0], [3.0, -4.0]], 0.25), ([[1e-20], [0], [0], [0]], 1.0), ([[0.0]] * 4, 0.0)],
)
def test_the_share_of_one_image_in_a_gradient(gradient, share):
    [figure] = dominances({"g": torch.tensor(gradient)}, LIMITS)
    assert figure == ("dominance", "g", pytest.approx(share), 0.9)


def test_gradients_of_few_images_or_of_none_are_not_of_one_image():
    assert list(dominances({"few": torch.ones(3, 2), "vector": torch.ones(9), "four": torch.ones(4, 2)}, LIMITS)) == [
        ("dominance", "four", 0.25, 0.9)
    ]


def test_a_control_variate_moves_weights_by_a_rounds_steps():
    """The drift is the control that came less the site's own: with both alike nothing moves."""
    site = make_site()
    check, history = inspect(site, FIRST), History(site.state)
    history.take_movement({LAST: 1e-9}, 0.1)  # nothing is rehearsed
    control = {name: torch.full_like(one, 0.25) for name, one in FIRST.items() if name.startswith(LAST)}
    figures = {figure.where: figure.value for figure in check._corrected(site, control, history)}
    last = history.last()
    reach = 0.1 * one_pass(site)
    expected = course.movement(course.stepped(last, control, reach, by_sign=False), last)
    assert figures == pytest.approx({f"{LAST} by the control variate": expected[LAST]})
    site.state.put("control", control)
    assert max(figure.value for figure in check._corrected(site, control, history)) < 1e-6
    assert list(check._corrected(site, {}, history)) == []
    assert list(check._corrected(site, control, History(SiteState()))) == []


def test_a_correction_that_moves_too_far_is_refused_and_others_count_by_their_length():
    site = make_site()
    inspect(site, FIRST)
    control = {f"{LAST}.weight": torch.full_like(FIRST[f"{LAST}.weight"], 1e4)}
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST} by the control variate'"):
        inspect(site, control, kind="gradients")
    small = {name: one * 1e-6 for name, one in control.items()}
    inspect(site, {**small, "other": torch.ones(2)}, kind="gradients")
    assert set(History(site.state).most("gradients")) == {"other"}
