"""What a site remembers of its own training, by which it knows how far weights may move; and its rehearsal."""

import pytest
import torch
from one_site import FIRST, LAST, LIMITS, changed, inspect, make_check, make_site, own

from polyclinic.federation.layers import incoming as inspection
from polyclinic.federation.layers import movement as course
from polyclinic.federation.layers.incoming import one_pass
from polyclinic.federation.layers.movement import History
from polyclinic.federation.ledger.parcel import Parcel


@pytest.mark.parametrize(("metadata", "steps"), [({"steps": 3}, 3), ({"steps": 1}, 1), ({}, 2), ({"steps": 0}, 2)])
def test_own_training_counts_by_its_steps(metadata, steps):
    """Where it does not say how many, by one pass: 20 images in batches of 8."""
    site = make_site()
    check = inspect(site, FIRST)
    check.note_own(site, [Parcel("weights", changed(), metadata)])
    assert own(site) == pytest.approx({LAST: steps * course.LONGEST_STEP})
    assert one_pass(site) == 2


def test_own_training_counts_as_far_as_it_moved():
    site = make_site()
    inspect(site, FIRST).note_own(site, [Parcel("weights", changed(times=1.1), {"steps": 5})])
    assert own(site) == pytest.approx({LAST: 0.1}, rel=1e-4)
    assert History(site.state).most("rate") == {LAST: 0.1}


@pytest.mark.parametrize(("name", "by_sign"), [("sgd", False), ("adam", True), ("adamw", True)])
def test_a_gradient_that_leaves_counts_as_one_step_along_it(name, by_sign):
    site = make_site(name=name, lr=1e-3)
    check = inspect(site, FIRST)
    gradients = {name: torch.full_like(one, 0.5) for name, one in FIRST.items() if name.startswith(LAST)}
    check.note_own(site, [Parcel("gradients", gradients)])
    last = History(site.state).last()
    expected = course.movement(course.stepped(last, gradients, 1e-3, by_sign=by_sign), last)
    assert own(site) == pytest.approx({LAST: expected[LAST]})
    check.note_own(site, [Parcel("gradients", {name: one * 1e9 for name, one in gradients.items()})])
    assert own(site)[LAST] <= course.LONGEST_STEP


def test_an_explosion_of_the_loss_counts_as_one_step():
    site = make_site()
    inspect(site, FIRST).note_own(site, [Parcel("weights", changed(times=1e5), {"steps": 9})])
    assert own(site) == {LAST: course.LONGEST_STEP}


def test_training_that_ends_in_no_number_moves_nothing():
    site = make_site()
    inspect(site, FIRST).note_own(site, [Parcel("weights", changed(times=torch.nan), {"steps": 9})])
    assert own(site) == {}


@pytest.mark.parametrize(("losses", "steps"), [((1.0, 9.99), 4), ((1.0, 10.01), 1), ((1.0, float("nan")), 1)])
def test_a_loss_up_to_ten_times_the_largest_has_not_exploded(monkeypatch, losses, steps):
    site, told = make_site(), iter(losses)
    check = inspect(site, FIRST)
    monkeypatch.setattr(inspection, "_loss", lambda site, weights: next(told))
    check.note_own(site, [Parcel("weights", changed(), {"steps": 4})])
    assert own(site) == pytest.approx({LAST: steps * course.LONGEST_STEP})


def test_the_loss_of_some_images_is_the_same_each_time():
    site = make_site()
    assert inspection._loss(site, FIRST) == inspection._loss(site, FIRST) < inspection._loss(site, changed(times=50.0))


@pytest.mark.parametrize("why", ["nothing arrived", "nothing trained leaves", "another network"])
def test_nothing_is_remembered_of_what_is_no_training_of_the_sites_network(why):
    site = make_site()
    check = make_check(LIMITS)
    if why != "nothing arrived":
        inspect(site, FIRST)
    sent = Parcel("metrics", changed()) if why == "nothing trained leaves" else Parcel("weights", changed())
    if why == "another network":
        sent = Parcel("weights", {"other.weight": torch.ones(2, 2)})
    check.note_own(site, [sent])
    assert own(site) == {}


def test_the_part_of_the_weights_that_stays_at_the_site_counts_as_trained():
    site = make_site()
    check = inspect(site, FIRST)
    site.state.put("local", {name: one for name, one in changed().items() if name.startswith(LAST)})
    check.note_own(site, [Parcel("weights", {name: one for name, one in FIRST.items() if not name.startswith(LAST)})])
    assert own(site)[LAST] == pytest.approx(2 * course.LONGEST_STEP)


def test_own_movement_is_that_of_the_larger_rate_of_this_round_and_the_last():
    site = make_site(round=3, decay_every=1, decay=0.1)
    check, history = make_check(LIMITS), History(site.state)
    history.take_movement({"fc": 0.4}, lr=0.1)
    for round, share in ((1, 1.0), (2, 1.0), (3, 0.1), (4, 0.01)):
        site.round = round
        assert check._own(site, history) == pytest.approx({"fc": 0.4 * share})
    assert check._lr(site) == pytest.approx(1e-4)
    assert check._lr(site, 2) == pytest.approx(0.01)


def test_a_learning_rate_of_nothing_can_still_be_divided_by():
    site = make_site(decay_every=1, decay=1e-300, round=3)
    assert 0 < make_check(LIMITS, first=None)._lr(site) <= 1e-30


# --- weights that others trained, before the site has -----------------------------------------------------


@pytest.mark.parametrize(
    ("moved", "known", "rehearsed"), [(0.15, False, False), (0.151, False, True), (9.0, True, False)]
)
def test_a_site_rehearses_where_weights_moved_and_it_has_not_trained(moved, known, rehearsed):
    site = make_site()
    check, history = inspect(site, FIRST), History(site.state)
    if known:
        history.take_movement({"conv1": 1e-3}, 0.1)
    before = own(site)
    check._rehearse_before(site, history, {})
    assert own(site) == before
    check._rehearse_before(site, history, {"conv1": moved})
    assert (own(site) != before) is rehearsed


def test_a_rehearsal_is_plain_training_in_a_copy_of_the_network():
    """Also in round 0, before the first: at the rate of the first round."""
    site, weights = make_site(round=0, decay_every=1, decay=1e-9), changed(times=1.05)
    held = site.trainer.weights()
    one, two = (inspection.rehearse(site, weights, steps) for steps in (1, 2))
    assert all(torch.equal(tensor, held[name]) for name, tensor in site.trainer.weights().items())
    assert one.keys() == FIRST.keys()
    first, second = (max(course.movement(after, weights).values()) for after in (one, two))
    assert 1e-4 < first < second
    again = inspection.rehearse(site, weights, 1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    site.round = 2
    assert max(course.movement(inspection.rehearse(site, weights, 2), weights).values()) < 1e-6
