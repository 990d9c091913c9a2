"""A site that missed rounds: an honest course has gone on without it; whoever only pretends that gains little."""

import math
import re

import pytest
import torch
from attacked_site import SITE, ask, shuffled

from polyclinic.federation.call import DataDependentRefusal
from polyclinic.federation.layers import incoming_figures as course
from polyclinic.federation.layers import incoming_figures as returning
from polyclinic.federation.layers.incoming_figures import History
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState
from polyclinic.randomness import numpy_rng

ROUNDS = 200


def after_one_round(kit):
    """A site that has trained in round 1, the weights before, and how far a round of training moves each of them."""
    host = kit.host(optimizer={"lr": 0.02, "batch_size": 8}, method={"name": "fedavg", "rounds": ROUNDS})
    first = host.spec.first_weights(SITE)
    trained = dict(ask(host, "train", 1, weights=first).parcels[0].tensors)
    return host, first, {name: trained[name] - first[name] for name in first}


def along(first, step, rounds):
    """Weights that others have moved on in the same direction, as far as so many rounds do."""
    return {name: first[name] + rounds * step[name] for name in first}


def mixed(first, other, part):
    """Weights on the way from the first to others."""
    return {name: torch.lerp(first[name], other[name], part) for name in first}


def test_a_site_that_missed_twelve_rounds_goes_on_where_the_others_are(checked):
    host, first, step = after_one_round(checked)
    far = along(first, step, 12)
    assert max(course.movement(far, first).values()) > 1.2 * Incoming().moved
    assert ask(host, "train", 14, weights=far).parcels
    assert ask(host, "train", 15, weights=along(first, step, 13)).parcels


def test_the_same_weights_are_stopped_where_no_round_was_missed(checked):
    host, first, step = after_one_round(checked)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "train", 2, weights=along(first, step, 12))


def looks_on_for(host, round, weights):
    """How many rounds a site says that it will look on when these weights arrive; 0 where it works with them."""
    try:
        ask(host, "train", round, weights=weights)
    except ParcelRejected as error:
        return int(re.search(r"missed rounds and looks on for (\d+) more", str(error))[1])
    return 0


def test_a_pretended_absence_brings_another_network_no_nearer(checked):
    """Weights as far away as five or more rounds are looked at; an update leaves no sooner than if they had been walked
    to, four rounds with each arrival."""
    host, first, _ = after_one_round(checked)
    other = shuffled(first)
    farthest = max(course.movement(other, first).values())
    arrivals = math.ceil(farthest / (Incoming().at_once * Incoming().moved))
    said = [looks_on_for(host, round, other) for round in range(ROUNDS // 2, ROUNDS // 2 + arrivals + 1)]
    assert arrivals == 3
    assert said == [3, 2, 1, 0]


def test_no_room_is_left_at_the_end_of_a_study(checked):
    host, first, _ = after_one_round(checked)
    assert looks_on_for(host, ROUNDS, shuffled(first)) == 3
    assert looks_on_for(host, ROUNDS, shuffled(first)) == 3, "the second arrival of a round pays nothing"


def test_a_site_that_looks_on_goes_by_the_last_weights_and_stops_other_ones(checked):
    host, first, step = after_one_round(checked)
    assert looks_on_for(host, 60, along(first, step, 58)) >= 1
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "train", 61, weights=shuffled(first))


def test_an_operation_that_releases_nothing_does_not_work_where_a_site_looks_on(checked):
    host = checked.host(optimizer={"lr": 0.02, "batch_size": 8}, method={"name": "finetune", "rounds": ROUNDS})
    first = host.spec.first_weights(SITE)
    ask(host, "train", 1, weights=first)
    assert looks_on_for(host, 100, shuffled(first)) == 3
    with pytest.raises(ParcelRejected, match="looks on"):
        ask(host, "tune", 0, weights=shuffled(first))


def test_weights_that_are_too_far_for_all_missed_rounds_are_stopped(checked):
    host, first, _ = after_one_round(checked)
    with pytest.raises(DataDependentRefusal, match=r"moved of .*; the site missed 6 rounds before"):
        ask(host, "train", 8, weights=shuffled(first))


def test_a_deployed_site_comes_back_by_itself_so_often_and_no_more(checked):
    """A run that is put back does not forget it: each time tells whether weights moved farther than own training."""
    host, first, _ = after_one_round(checked)
    start = host.checkpoint()
    for seed in range(1, Incoming().returns + 1):
        assert looks_on_for(host, 100, shuffled(first, seed)) > 1
        host.restore(start)
    assert looks_on_for(host, 100, shuffled(first, 1)) > 1, "a call that was made before may be repeated"
    host.restore(start)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "train", 100, weights=shuffled(first, 9))


@pytest.mark.parametrize("seed", range(20))
def test_no_release_is_farther_away_than_four_rounds_for_each_arrival(seed):
    """Whatever gaps a coordinator pretends, and however far its weights move within them. One round more for each in
    which the site looked on: what is owed becomes less with every arrival."""
    rng, limits = numpy_rng(seed, "gaps"), Incoming()
    owed, arrivals, moved = 0, 0, 0
    looked_on = 0
    for _ in range(200):
        rounds = int(rng.choice([1, 1, 1, 2, 4, 5, 40]))
        arrivals, moved = arrivals + 1, moved + rounds
        owed = returning.owed_after(owed, rounds, limits)
        looked_on += owed > 0
        if not owed:
            assert moved <= limits.at_once * arrivals + looked_on
    assert owed_in_full(limits) == [37, 34, 31, 28, 25, 22, 19, 16, 13, 10, 7, 4, 1, 0]


def owed_in_full(limits):
    """What is owed after 40 missed rounds that moved as far as they may, and then with one arrival in each round."""
    owed = [returning.owed_after(0, 41, limits)]
    while owed[-1]:
        owed.append(returning.owed_after(owed[-1], 1, limits))
    return owed


@pytest.mark.parametrize(
    ("gap", "farthest", "own", "rounds"),
    [
        (1, 9.0, 0.0, 1),
        (4, 9.0, 0.0, 4),
        (41, 0.0, 0.0, 1),  # what did not move pays for all of an arrival
        (41, 0.2, 0.0, 2),
        (41, 0.6, 0.0, 4),
        (41, 0.61, 0.0, 5),
        (41, 0.61, 0.1, 4),  # the site's own training moves as far
        (41, 4.0, 0.1, 27),  # how long it looks on does not tell how far its own training moves
        (41, 99.0, 0.0, 41),
        (41, math.inf, 0.0, 4),
        (41, math.nan, 0.0, 4),
    ],
)
def test_the_room_of_an_arrival(gap, farthest, own, rounds):
    given = {"fc": farthest}, {"fc": own}, Incoming(moved=0.15, times_own=8), gap
    assert returning.rounds_allowed(*given, may_return=lambda: True) == rounds
    assert returning.rounds_allowed(*given, may_return=lambda: False) == min(rounds, 4)


@pytest.mark.parametrize(("own", "limit"), [(0.1, 0.8), (1e-3, 0.15)])
def test_the_limit_grows_with_the_rounds(own, limit):
    limits = Incoming(moved=0.15, times_own=8)
    room = [next(course.moved({"fc": 1.0}, {"fc": own}, limits, rounds=rounds)).limit for rounds in (1, 2, 41)]
    assert room == pytest.approx([limit, 2 * limit, 41 * limit])


def test_rounds_are_counted_from_the_weights_that_arrived_last():
    history = History(SiteState())
    assert history.rounds_since(7) == 1  # the state of an older version does not say
    history.take({}, 3)
    assert [history.rounds_since(round) for round in (2, 3, 4, 15)] == [1, 1, 1, 12]


def test_weights_without_a_course_leave_no_history(checked):
    """A head that is solved for at once, or a sealed model: what it does with images is no beginning of a course."""
    host = checked.host(optimizer={"lr": 0.02, "batch_size": 8}, method={"name": "fedavg", "rounds": 3})
    host.inspection.has_course = False
    assert ask(host, "train", 1, weights=host.spec.first_weights(SITE)).parcels
    assert {name.split("/")[0] for name in host.sites.get(SITE).state.group("incoming")} == {"seen"}


@pytest.mark.parametrize("rounds", [(20, 0), (1, 1)])
def test_an_operation_that_releases_nothing_does_not_walk_the_course_to_other_weights(checked, rounds):
    host = checked.host(optimizer={"lr": 0.02, "batch_size": 8}, method={"name": "finetune", "rounds": 20})
    first = host.spec.first_weights(SITE)
    other = shuffled(first)
    ask(host, "train", 1, weights=first)
    near, far = ({n: first[n] + share * (other[n] - first[n]) for n in first} for share in (0.07, 0.14))
    ask(host, "tune", rounds[0], weights=near)
    with pytest.raises(DataDependentRefusal, match="moved of"):  # beside `near` it would pass
        ask(host, "tune", rounds[1], weights=far)


def test_the_round_that_counts_does_not_go_back():
    history = History(SiteState())
    history.take({}, 9)
    history.take({}, 2)
    assert history.rounds_since(10) == 1


def test_a_site_that_is_drawn_seldom_takes_part_again():
    """Each arrival brings all the movement that one may bring; still something is paid."""
    limits, owed = Incoming(), 9
    for left in (8, 7, 6, 5, 4, 3, 2, 1, 0, 0):
        owed = returning.owed_after(owed, limits.at_once, limits)
        assert owed == left


def test_a_site_that_looks_on_is_not_walked_anywhere_within_a_round(checked):
    host, first, _ = after_one_round(checked)
    looks_on_for(host, 60, mixed(first, shuffled(first), 0.4))
    before = {name: one.clone() for name, one in History(host.sites.get(SITE).state).last().items()}
    for part in (0.42, 0.44, 0.46):
        assert looks_on_for(host, 60, mixed(first, shuffled(first), part)), "it looks on"
    after = History(host.sites.get(SITE).state).last()
    assert all(torch.equal(before[name], one) for name, one in after.items())


def test_weights_that_passed_before_are_not_worked_with_while_a_site_looks_on(checked):
    host, first, _ = after_one_round(checked)
    looks_on_for(host, 100, shuffled(first))
    with pytest.raises(ParcelRejected, match="looks on"):
        ask(host, "train", 100, weights=first)


def test_old_weights_do_not_make_room_for_others(checked, monkeypatch):
    """A site's own training is measured from the weights that came, not from the last ones of the course."""
    # a site's draws are its own, and some would train far
    monkeypatch.setattr("polyclinic.federation.host.secrets.token_hex", lambda size: "7" * 2 * size)
    host, first, _ = after_one_round(checked)
    part = 1.0
    while max(course.movement(mixed(first, shuffled(first), part), first).values()) > 0.14:
        part *= 0.9
    other = mixed(first, shuffled(first), part)
    ask(host, "train", 2, weights=other)
    ask(host, "train", 3, weights=first)  # they passed in round 1, so that they do not move the course
    away = max(course.movement(other, first).values())
    assert max(History(host.sites.get(SITE).state).most("own").values()) < 0.8 * away
