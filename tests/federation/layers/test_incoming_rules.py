"""The incoming check of weights at one small site, rule by rule: what is remembered and what is refused."""

import pytest
import torch
from one_site import FIRST, LAST, LIMITS, Asked, changed, inspect, make_check, make_site

from polyclinic.federation.call import DataDependentRefusal
from polyclinic.federation.layers.movement import History
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState


@pytest.mark.parametrize(
    ("declared", "sealed", "kept"),
    [
        (Asked.train, False, {"last", "passed"}),
        (None, False, {"last", "passed"}),
        (Asked.evaluate, False, set()),  # scores are not compared with a course
        (Asked.finish, False, set()),  # the run is over
        (Asked.encode, False, {"seen"}),  # the front was trained elsewhere
        (Asked.tune, False, {"last"}),  # may be called as often as one likes; the beginning is remembered
        (Asked.train, True, {"seen"}),
        (Asked.evaluate, True, {"seen"}),
    ],
)
def test_what_is_remembered_of_weights_by_what_they_came_for(declared, sealed, kept):
    site = make_site()
    inspect(site, FIRST, declared=declared, sealed=sealed)
    assert {name.split("/")[1] for name in site.state} & {"last", "passed", "seen"} == kept


def test_weights_that_release_nothing_are_compared_and_not_walked_along():
    site = make_site()
    near = changed(times=1.05)
    inspect(site, near, declared=Asked.tune)
    last = History(site.state).last()
    assert torch.equal(last[f"{LAST}.weight"], FIRST[f"{LAST}.weight"].bfloat16())
    inspect(site, near, declared=Asked.train)
    assert torch.equal(History(site.state).last()[f"{LAST}.weight"], near[f"{LAST}.weight"].bfloat16())


@pytest.mark.parametrize(("images", "inspected"), [(3, False), (4, True)])
def test_a_site_with_next_to_no_images_tries_nothing(images, inspected):
    site = make_site(images=images)
    inspect(site, FIRST)
    assert ("last" in {name.split("/")[1] for name in site.state}) is inspected


def test_weights_of_another_network_are_not_tried():
    site = make_site()
    inspect(site, {"other.weight": torch.randn(3, 20)})
    inspect(site, {**FIRST, f"{LAST}.bias": torch.zeros(5)})
    assert {name.split("/")[1] for name in site.state} == {"passed"}


def test_weights_that_have_passed_pass_again_only_as_thoroughly():
    site = make_site()
    check = inspect(site, FIRST, sealed=True)
    check._inspect_weights = None
    inspect(site, FIRST, sealed=True, check=check)
    with pytest.raises(TypeError):
        inspect(site, FIRST, check=check)
    history = History(SiteState())
    history.take_passed("x", has_course=True)
    assert history.has_passed("x", has_course=True)
    assert history.has_passed("x", has_course=False)
    assert not history.has_passed("y", has_course=False)
    history.take_passed("y", has_course=False)
    assert history.has_passed("y", has_course=False)
    assert not history.has_passed("y", has_course=True)


def test_only_weights_gradients_and_generators_are_inspected_and_only_where_it_is_on():
    site, huge = make_site(), {"x": torch.full((4, 9), 1e7)}
    inspect(site, huge, kind="statistics")
    assert not make_check(Incoming(on=False)).is_needed()
    for kind in ("weights", "gradients", "generator"):
        with pytest.raises(ParcelRejected, match="incoming check: largest of 'x'"):
            inspect(site, huge, kind=kind)


def test_rows_are_looked_at_in_weights_alone():
    site, alike = make_site(), {"x": torch.ones(6, 9)}
    inspect(site, alike, kind="generator")
    with pytest.raises(ParcelRejected, match="incoming check: alike of 'x'"):
        inspect(site, alike)


def test_weights_that_moved_too_far_are_refused_and_not_remembered():
    site = make_site()
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST}'") as refused:
        inspect(site, changed(times=4.0))
    assert "missed" not in str(refused.value)
    site.round = 4
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST}'.*; the site missed 3 rounds before"):
        inspect(site, changed(times=40.0))
    assert not any("passed" in name for name in site.state)


def test_a_site_that_knows_no_first_weights_begins_with_what_comes():
    site, check = make_site(), make_check(LIMITS, first=None)
    inspect(site, changed(times=3.0), check=check)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        inspect(site, FIRST, check=check)


def test_the_first_weights_are_remembered_before_others_are_compared():
    site = make_site()
    inspect(site, changed(times=1.05))
    assert int(site.state[f"{History.GROUP}/round/last"]) == 1
    with pytest.raises(DataDependentRefusal, match="moved of"):
        inspect(make_site(), changed(times=4.0))


@pytest.mark.parametrize("name", ["images", "quiet", "exposed", "graded", "loss"])
def test_limits_of_images_are_gone(name):
    with pytest.raises(ValueError, match=f"'{name}' is gone, as the check looks at no image any more"):
        Incoming(**{name: 0.5})


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [({"lr": 0.1}, ""), ({"lr": 0.11}, "sgd_rate of 'the study' is 0.11, and 0.1 is the limit; choose a smaller")],
)
def test_the_largest_rate_of_sgd(optimizer, words):
    check, site = make_check(LIMITS), make_site(**optimizer)
    [figure] = check._steps(site, FIRST)
    assert (figure.where, figure.value, figure.limit) == ("the study", optimizer["lr"], LIMITS.sgd_rate)
    if words:
        with pytest.raises(ParcelRejected, match=words):
            inspect(site, FIRST)


def test_one_step_of_adam_moves_every_number_by_its_rate():
    check, site = make_check(LIMITS), make_site(name="adam", lr=0.5, warmup=5)
    figures = {figure.where: figure for figure in check._steps(site, {"fc.weight": torch.tensor([[3.0, 4.0]] * 2)})}
    assert figures["fc"].value == pytest.approx(0.5 * 2**0.5 / 5)
    assert figures["fc"].limit == LIMITS.step
