"""Attack: ask for what is computed from one patient, or a few."""

import pytest
from attacked_site import ask, first_weights

from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.federation.leaving.suspension import Suspensions

TOO_FEW = "fewer patients are behind it than the 10 that the site's policy wants"


@pytest.fixture
def site(kit):
    kit.policy(min_cohort=10)
    return kit


def test_scores_count_the_split_that_is_scored_also_where_the_call_names_none(site):
    """The site has 39 training images and 9 for validation."""
    host = site.host()
    assert len(host._site("north").data.validation) < 10
    for arguments in ({}, {"split": "validation"}):
        with pytest.raises(GateRefused, match=TOO_FEW):
            ask(host, "evaluate", weights=first_weights(host), **arguments)


def test_a_gradient_of_one_image_stays(site):
    host = site.host(method={"name": "fedsgd", "rounds": 3, "batch": "mini"}, optimizer__batch_size=1)
    with pytest.raises(GateRefused, match=TOO_FEW):
        ask(host, "gradient", weights=first_weights(host))


@pytest.mark.parametrize(("steps", "size", "leaves"), [(1, 1, False), (9, 1, False), (1, 8, False), (2, 8, True)])
def test_a_few_local_steps_on_a_few_patients_stay_too(site, steps, size, leaves):
    host = site.host(method={"name": "fedavg", "rounds": 3, "local_steps": steps}, optimizer__batch_size=size)
    weights = first_weights(host)
    if leaves:
        assert ask(host, "train", weights=weights).parcels
        return
    with pytest.raises(GateRefused, match=TOO_FEW):
        ask(host, "train", weights=weights)


def test_scores_of_training_images_stay(site):
    host = site.host()
    with pytest.raises(GateRefused, match="scores of training images never leave a deployed site"):
        ask(host, "evaluate", weights=first_weights(host), split="train")


@pytest.mark.parametrize("arguments", [{"split": "name"}, {"split": "__class__"}, {"no_such": 1}])
def test_an_argument_that_the_operation_does_not_take_is_refused_before_the_work(site, arguments):
    host = site.host()
    with pytest.raises(ParcelRejected):
        ask(host, "evaluate", weights=first_weights(host), **arguments)
    assert Suspensions(site.folder).all() == []
