"""The least that a site accepts of a secure sum: it hangs on the keys that its kit pins, not on the coordinator."""

import itertools

import pytest

from polyclinic.federation.call import GateRefused
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import Federated, Floor, floor_of

USUAL = Federated(sum="secure")


def test_the_default_follows_the_pinned_keys():
    """More than half of the pinned sites, and a sixth of them may lie; in a simulation nothing is pinned."""
    found = {pinned: floor_of(Policy(), pinned) for pinned in (0, 2, 3, 5, 9, 12, 32)}
    assert [floor.min_sites for floor in found.values()] == [3, 3, 3, 3, 5, 7, 17]
    assert [floor.liars for floor in found.values()] == [0, 1, 1, 1, 1, 2, 5]
    assert floor_of(Policy(min_sites=4, liars=0), 32) == Floor(4, 0)


@pytest.mark.parametrize("pinned", range(3, 40))
def test_the_default_takes_every_sum_of_enough_sites_with_the_default_threshold(pinned):
    floor = floor_of(Policy(), pinned)
    for sites in range(floor.min_sites, pinned + 1):
        assert floor.min_sites <= floor.threshold(USUAL, sites) <= sites


def test_a_sum_of_the_site_and_of_liars_is_refused():
    """Nine pinned sites; the coordinator brings two that work for it, which was enough before."""
    with pytest.raises(GateRefused, match=r"wants 5 or more \(min_sites\)"):
        floor_of(Policy(), 9).threshold(USUAL, 3)


@pytest.mark.parametrize(("sites", "threshold", "liars"), [(9, 0.5, 1), (12, 2 / 3, 6), (5, 2 / 3, 4), (4, 0.5, 2)])
def test_a_threshold_that_does_not_protect_is_refused_with_the_cure(sites, threshold, liars):
    with pytest.raises(GateRefused, match=r"raise federation\.threshold, or take more sites"):
        Floor(3, liars).threshold(Federated(sum="secure", threshold=threshold), sites)


def openings(sites, liars, common, own):
    """Whether the coordinator and the last `liars` sites can open site 0, with all they may try: each honest site signs
    one set of at least as many sites as it wants, with itself in it, and gives its shares for that one if enough sites
    signed it. Site 0 wants `own`, the other honest ones `common`."""
    honest = range(sites - liars)
    sets = [set(some) for size in range(common, sites + 1) for some in itertools.combinations(range(sites), size)]
    for first, second in itertools.product(sets, repeat=2):
        # honest sites sign the one or the other; all those that may do both are free to be told either
        one, other = ({site for site in honest if site in some} for some in (first, second))
        if 0 not in one or len(first) < own:
            continue
        both = one & other
        if first == second:
            if one == {0} and len(one) + liars >= own:
                return True
            continue
        for told in range(len(both) + 1):
            signs_first, signs_second = len(one - both) + len(both) - told, len(other - both) + told
            if signs_first + liars >= own and signs_second + liars >= common:
                return True  # two sets are agreed on: 0 in one, and its pairs in the other
    return False


@pytest.mark.parametrize("sites", [3, 4, 5, 6])
@pytest.mark.parametrize("threshold", [0.5, 0.6, 2 / 3, 0.8])
def test_what_is_accepted_cannot_be_opened(sites, threshold):
    """All lies that the coordinator may tell, tried one by one, for every number of liars."""
    settings = Federated(sum="secure", threshold=threshold)
    common = max(settings.fewest_of(sites), 3)
    for liars in range(sites):
        floor = Floor(3, liars)
        try:
            own = floor.threshold(settings, sites)
        except GateRefused:
            continue
        assert not openings(sites, liars, common, own)


def test_what_is_refused_could_be_opened():
    assert openings(3, 2, 3, 3)  # the site and two liars
    assert openings(5, 2, 3, 3)  # two sets of three, one with site 0 and one without it
