"""Attack: put a site back to a position that is no position, to have it read or count something else."""

import pytest
from attacked_site import SITE

from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.federation.state import SitePosition


@pytest.mark.parametrize("position", [("../../x", 0), (-1, 0), (0, -3), (0.5, 0), (True, 0), (1, "2")])
def test_a_position_is_two_whole_numbers(kit, position):
    with pytest.raises(ParcelRejected, match="a position of a site is two whole numbers"):
        kit.host().restore({SITE: SitePosition(*position)})


def test_positions_of_other_names_are_refused(kit):
    with pytest.raises(ParcelRejected, match="this host serves site 'north' only"):
        kit.host().restore({"../elsewhere": SitePosition(1, 1)})
