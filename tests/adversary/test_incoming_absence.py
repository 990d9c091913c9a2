"""A site that missed rounds: an honest course has gone on without it; whoever only pretends that gains little."""

import pytest
from attacked_site import SITE, ask, shuffled

from polyclinic.federation.arriving import course
from polyclinic.federation.arriving.history import History
from polyclinic.federation.arriving.settings import Incoming
from polyclinic.federation.leaving.suspension import DataDependentRefusal
from polyclinic.federation.state import SiteState

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


@pytest.mark.parametrize("round", [14, ROUNDS])
def test_a_pretended_absence_does_not_make_room_for_another_network(checked, round):
    host, first, _ = after_one_round(checked)
    with pytest.raises(DataDependentRefusal, match=rf"moved of .*; the site missed {round - 2} rounds before"):
        ask(host, "train", round, weights=shuffled(first))


@pytest.mark.parametrize(("own", "limit"), [(0.1, 0.8), (1e-3, 0.15)])
def test_the_room_grows_with_the_rounds_and_ends_after_four(own, limit):
    limits = Incoming(moved=0.15, times_own=8)
    room = {
        rounds: next(course.moved({"fc": 1.0}, {"fc": own}, limits, rounds=rounds)) for rounds in (1, 2, 4, 5, 10**6)
    }
    times = {rounds: figure.limit / limit for rounds, figure in room.items()}
    assert times == pytest.approx({1: 1, 2: 2, 4: 4, 5: 4, 10**6: 4})


def test_many_absences_give_no_more_room_than_none():
    """Rounds only go forward: the sum over arrivals is largest where every round has one."""
    room = [next(course.moved({"fc": 1.0}, {"fc": 0.1}, Incoming(), rounds=gap)).limit for gap in range(1, 40)]
    assert all(room[gap - 1] <= gap * room[0] for gap in range(1, 40))


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
