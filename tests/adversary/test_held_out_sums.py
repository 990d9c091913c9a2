"""Attack: have a deployed site tell sums over its validation images more often, or of fewer patients, than allowed."""

import pytest
from attacked_site import SITE, ask, study

from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput
from polyclinic.federation.call import DataDependentRefusal, GateRefused
from polyclinic.federation.ledger.kinds import ParcelRejected

ENCODER = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
METHOD = {"name": "analytic", "numbers": 4, "worth": True}


def test_sums_over_validation_images_are_told_once_and_only_for_worth(kit):
    host = kit.host(model=ENCODER, method=METHOD)
    [told] = ask(host, "give_held_out_sums", 1).parcels
    assert int(told.tensors["products"][0]) == 9  # 15 % of 60 images, and none of those for training
    [trained] = ask(host, "give_sums", 1).parcels
    assert int(trained.tensors["products"][0]) == 39
    with pytest.raises(GateRefused, match="'give_held_out_sums' has released what it made in round 1 already"):
        ask(host, "give_held_out_sums", 1)
    plain = kit.host("plain", model=ENCODER, method={**METHOD, "worth": False})
    with pytest.raises(ParcelRejected, match=r"the study has no method\.worth"):
        ask(plain, "give_held_out_sums", 1)


def test_few_validation_images_are_not_summed(kit):
    """Nine are enough for four numbers, and too few for a cohort of five in each class, or for nine numbers."""
    kit.policy(min_cohort=5)
    with pytest.raises(DataDependentRefusal, match="has validation images of fewer than min_cohort patients"):
        ask(kit.host("cohort", model=ENCODER, method=METHOD), "give_held_out_sums", 1)


def test_validation_images_are_more_than_their_numbers(kit):
    kit.policy(few_images="refuse")
    with pytest.raises(DataDependentRefusal, match="sums of products of 9 features of 9 images"):
        ask(kit.host("numbers", model=ENCODER, method={**METHOD, "numbers": 9}), "give_held_out_sums", 1)


def test_the_person_who_approves_reads_of_it(kit):
    told = Asked(study(model=ENCODER, method=METHOD), SITE, kit.folder, policy_of(kit.folder / "local" / "policy.toml"))
    assert any("sums of products over your validation images" in sentence for sentence in told.sentences(None))


@pytest.mark.parametrize("how", ["integer", "secure"])
def test_a_site_refuses_worth_of_sums_that_are_not_open(kit, how):
    with pytest.raises(BadInput, match=r"the worth of a site \(method\.worth\)"):
        kit.host(model=ENCODER, method=METHOD, federation={"sum": how})
