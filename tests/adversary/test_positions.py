"""Attack: put a site back to a position that is no position, to have it read or count something else."""

import pytest
from attacked_site import PRIVATE, SITE, ask, first_weights

from polyclinic.federation.call import Suspended
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.site import SitePosition


@pytest.mark.parametrize("position", [("../../x", 0), (-1, 0), (0, -3), (0.5, 0), (True, 0), (1, "2")])
def test_a_position_is_two_whole_numbers(kit, position):
    with pytest.raises(ParcelRejected, match="a position of a site is two whole numbers"):
        kit.host().restore({SITE: SitePosition(*position)})


def test_positions_of_other_names_are_refused(kit):
    with pytest.raises(ParcelRejected, match="this host serves site 'north' only"):
        kit.host().restore({"../elsewhere": SitePosition(1, 1)})


@pytest.fixture
def trained(kit):
    """A site with states of two versions."""
    host = kit.host(privacy=PRIVATE)
    for round in (1, 2):
        ask(host, "train", round, weights=first_weights(host))
        host.save(SITE)
    return host


def states(kit):
    return sorted(path.name for path in (kit.folder / "runs" / "run" / "sites" / SITE).glob("state-*"))


def test_a_position_that_the_site_never_had_deletes_nothing(kit, trained):
    before = states(kit)
    assert len(before) == 2
    for version in (999, 3, 0):
        trained.drop_old_versions({SITE: SitePosition(version, 0)})
        assert states(kit) == before
    kit.host(privacy=PRIVATE).drop_old_versions({SITE: SitePosition(2, 0)})  # a process that stands at the beginning
    assert states(kit) == before
    trained.drop_old_versions({SITE: SitePosition(2, 0)})
    assert states(kit) == before[1:]


def test_a_suspended_site_deletes_nothing(kit, trained):
    before = states(kit)
    Suspensions(kit.folder).suspend("run", "NaN")
    with pytest.raises(Suspended):
        trained.drop_old_versions({SITE: SitePosition(2, 0)})
    assert states(kit) == before
