"""Attack: ask for what is computed from one patient, or a few."""

from dataclasses import replace

import numpy as np
import pytest
from attacked_site import ask, first_weights

from polyclinic.data.parts import ImageSet
from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import GateRefused, GateRefusedData
from polyclinic.federation.layers.cohort import fewest_patients, images_in_private_step
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected

TOO_FEW = "fewer patients are behind it than the 10 that the site's policy wants"


@pytest.fixture
def site(kit):
    kit.policy(min_cohort=10)
    return kit


def test_scores_count_the_split_that_is_scored_also_where_the_call_names_none(site):
    """The site has 39 training images and 9 for validation."""
    host = site.host()
    assert len(host.sites.get("north").data.validation) < 10
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


def test_how_many_patients_were_in_a_batch_is_not_told(site):
    """All images are of three patients: batches have enough images, and the refusal would tell whose they are."""
    host = site.host(method={"name": "fedavg", "rounds": 3, "local_steps": 2})
    data = host.sites.get("north").data
    host.sites.get("north").data = replace(data, train=replace(data.train, cases=np.arange(len(data.train)) % 3))
    with pytest.raises(GateRefusedData) as refusal:
        ask(host, "train", weights=first_weights(host))
    assert discreet(str(site.folder))(refusal.value) == FAILED
    assert Suspensions(site.folder).all()


SHAM = {"on": ["classifier"], "noise_multiplier": 1e-6, "max_grad_norm": 10.0}


@pytest.mark.parametrize(("batch", "size", "leaves"), [("mini", 1, False), ("mini", 10, True), ("full", 1, True)])
def test_noise_of_next_to_nothing_is_no_cover_for_one_image(site, batch, size, leaves):
    host = site.host(method={"name": "fedsgd", "rounds": 3, "batch": batch}, optimizer__batch_size=size, privacy=SHAM)
    if leaves:
        assert ask(host, "gradient", weights=first_weights(host)).parcels
        return
    with pytest.raises(GateRefused, match=TOO_FEW):
        ask(host, "gradient", weights=first_weights(host))


def test_a_budget_of_epsilon_is_cover_and_refuses_what_is_none(site):
    """One image in a batch, with noise: the budget of epsilon decides."""
    site.policy(min_cohort=10, max_epsilon=50.0)
    sgd = {"method": {"name": "fedsgd", "rounds": 3, "batch": "mini"}, "optimizer__batch_size": 1}
    host = site.host("noisy", **sgd, privacy={**SHAM, "noise_multiplier": 1.0})
    assert ask(host, "gradient", weights=first_weights(host)).parcels
    host = site.host("sham", **sgd, privacy=SHAM)
    with pytest.raises(GateRefused, match=r"epsilon .* would be spent"):
        ask(host, "gradient", weights=first_weights(host))


@pytest.mark.parametrize(("size", "leaves"), [(1, False), (9, False), (10, True)])
@pytest.mark.parametrize("operation", ["give_synthetic", "train_generator", "start_round"])
def test_a_generator_of_one_image_stays(site, operation, size, leaves):
    """`start_round` of FELICIA is a grouped operation."""
    site.policy(min_cohort=10, scores="fine")
    tiny = {"name": "dcgan", "steps": 1, "batch_size": size, "width": 2, "latent": 4}
    studies = {
        "give_synthetic": {"method": {"name": "centralized", "images": "synthetic", "rounds": 1}},
        "train_generator": {"replay": {"codes": "prior"}},
        "start_round": {"method": {"name": "felicia", "rounds": 1}},
    }
    host = site.host(**studies[operation], generator=tiny, data__size=32, tuning={"on": False})
    if leaves:
        assert ask(host, operation, 0).parcels
        return
    with pytest.raises(GateRefused, match=TOO_FEW):
        ask(host, operation, 0)


def test_a_batch_counts_the_patients_that_it_has_at_least():
    """Patient a has 3 images, b 2 and c 1."""
    images = np.zeros((6, 1, 2, 2), np.uint8)
    known = ImageSet(images, np.zeros(6), cases=np.array(list("abacab")))
    assert [fewest_patients(known, size) for size in (1, 3, 4, 5, 6, 7)] == [1, 1, 2, 2, 3, 3]
    assert [fewest_patients(ImageSet(images, np.zeros(6)), size) for size in (1, 6, 7)] == [1, 6, 6]


def test_a_private_step_counts_by_its_smallest_sampling_rate():
    steps = [{"noise": 1.0, "sampling_rate": rate, "steps": number} for rate, number in ((0.5, 3), (0.25, 1), (0.1, 0))]
    assert images_in_private_step({"mechanisms": steps}, 40) == 10
    assert images_in_private_step({"mechanisms": []}, 40) == 40  # no image was looked at
    assert images_in_private_step({"epsilon": 1.0}, 40) == 0  # a record that does not say is no cover


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
