"""Sites that send something else than a step of a secure sum asks for, and coordinators that do."""

from types import SimpleNamespace

import pytest
import torch
from company import Company

from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums.settings import Federated

NAMES = ("ann", "bo", "cleo", "di", "emil")


@pytest.fixture
def company(tmp_path):
    return Company(tmp_path, {name: torch.tensor(float(len(name))) for name in NAMES}, Federated(sum="secure"))


def replace_reply(company, step, change):
    """What site 'di' sends at a step, changed."""
    company.change = lambda call, parcel: change(parcel) if (call.site, call.operation) == ("di", step) else parcel


def mean(names):
    weights = {name: 10 + len(name) for name in names}
    return sum(len(name) * weight for name, weight in weights.items()) / sum(weights.values())


@pytest.mark.parametrize(
    "key", [torch.zeros(32), torch.zeros(31, dtype=torch.uint8), torch.zeros(1, 32, dtype=torch.uint8)]
)
def test_a_site_without_a_mask_key_is_left_out(company, key):
    replace_reply(company, "give_mask_key", lambda parcel: Parcel("keys", {"di": key}))
    assert float(company.total(2)[0]) == pytest.approx(mean([name for name in NAMES if name != "di"]))
    assert company.refusals() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {"boxes": tensors["boxes"]},
        lambda tensors: {**tensors, "boxes": tensors["boxes"][:-1]},
        lambda tensors: {**tensors, "boxes": tensors["boxes"][:, :-1]},
        lambda tensors: {**tensors, "commitment": tensors["commitment"][:-1]},
        lambda tensors: {**tensors, "commitment": tensors["commitment"].float()},
    ],
    ids=["no commitment", "a box less", "short boxes", "a short commitment", "another type"],
)
def test_boxes_of_another_form_are_named(company, change):
    replace_reply(company, "give_shares", lambda parcel: Parcel("shares", change(parcel.tensors), parcel.metadata))
    with pytest.raises(WorkFailed, match="site 'di' sent boxes of shares of another form"):
        company.total(2)


@pytest.mark.parametrize("step", ["take_shares", "answer", "unmask"])
def test_a_sum_of_which_too_few_are_left_says_how_many_are_needed(company, step):
    company.broken = {(name, step) for name in NAMES[3:]}
    words = "the secure sum of 'answer' cannot be opened: 3 of 5 sites are left, and 4 are needed"
    with pytest.raises(WorkFailed, match=words):
        company.total(2)


def test_a_site_that_needs_more_sites_than_the_study_stops_the_sum(company):
    replace_reply(company, "give_shares", lambda parcel: Parcel("shares", parcel.tensors, {"needs": 5}))
    assert float(company.total(2)[0]) == pytest.approx(mean(NAMES))
    company.broken = {("bo", "answer")}
    federation = company.federation()
    federation.round = 2
    with pytest.raises(WorkFailed, match="4 of 5 sites are left, and 5 are needed"):
        federation.ask_all("answer", weights={"w": torch.ones(2)})


@pytest.mark.parametrize("place", [0, -1])
def test_a_lie_about_a_site_that_dropped_out_is_noticed(company, place):
    """The share of the mask key of 'bo', whose answer did not come, is another one: its first byte, or its last."""
    company.broken = {("bo", "answer")}

    def change(parcel):
        shares = parcel.tensors["shares"].clone()
        shares[NAMES.index("bo"), place] ^= 1
        return Parcel("shares", {"shares": shares}, parcel.metadata)

    replace_reply(company, "unmask", change)
    with pytest.raises(WorkFailed, match="the shares of the mask key of site 'bo' do not fit; a site lied about them"):
        company.total(2)


def test_a_site_shares_nothing_in_a_sum_without_its_own_key_or_with_a_site_that_no_kit_knows(company):
    keys, site = company.keys_of(NAMES), company.sites["ann"]
    others = {name: key for name, key in keys.items() if name != "ann"}
    for wrong in (others, {**others, "ann": keys["bo"]}):
        with pytest.raises(ParcelRejected, match="the mask keys that came do not have that of site 'ann'"):
            company.give_shares("ann", wrong)
    ring = site.keys
    site.keys = SimpleNamespace(own=ring.own, public=lambda name: None if name == "di" else ring.public(name))
    with pytest.raises(ParcelRejected, match="site 'ann' has no key of 'di', which is said to be in the sum"):
        company.give_shares("ann", keys)
