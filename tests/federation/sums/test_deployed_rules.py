"""What a deployed site keeps to, whatever a coordinator puts back; and numbers of images that a policy hides."""

from types import SimpleNamespace

import pytest
import torch
from company import Company

from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers.call_checks import SumSteps
from polyclinic.federation.layers.leaving import HiddenSamples
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import SiteState
from polyclinic.federation.sums.settings import Federated
from polyclinic.federation.sums.site_memory import known
from polyclinic.files import write_tensors

NAMES = ("ann", "bo", "cleo", "di")


@pytest.fixture
def company(tmp_path):
    some = Company(tmp_path, dict.fromkeys(NAMES, torch.tensor(2.0)), Federated(sum="secure", liars=1))
    for site in some.sites.values():
        site.secret = "a secret of its own"
    return some


def until_answered(company):
    """All have answered; the states of the sites at that point."""
    keys = company.keys_of(NAMES)
    boxes = {name: company.give_shares(name, keys) for name in NAMES}
    for name in NAMES:
        company.take_shares(name, boxes, NAMES)
        company.send_answer(name)
    return {name: dict(site.state) for name, site in company.sites.items()}


def test_a_site_that_is_put_back_agrees_to_no_second_set_of_sites(company):
    """With one sum of all and one without 'di', their difference would be what 'di' sent."""
    states = until_answered(company)
    company.agree("ann", NAMES)
    company.sites["ann"].state = SiteState(states["ann"])
    with pytest.raises(GateRefused, match="was opened before, of other sites or for another question"):
        company.agree("ann", NAMES[:3])
    agreed = {name: company.agree(name, NAMES) for name in NAMES}  # the same again tells nothing new
    company.unmask("ann", NAMES, agreed)
    company.sites["ann"].state = SiteState(states["ann"])
    with pytest.raises(ParcelRejected, match="were in the memory of a process that has ended"):
        company.agree("ann", NAMES)  # its secrets are gone with the first opening


def test_a_policy_may_hide_how_many_images_there_are():
    def left(weighting, how="mean", **told):
        study = SimpleNamespace(method=SimpleNamespace(weighting=weighting))
        sums = SimpleNamespace(covered=(), summed={"train": how})
        layer = HiddenSamples(SimpleNamespace(spec=SimpleNamespace(study=study), sites=None, sums=sums))
        transaction = SimpleNamespace(call=Call("a", "train", 1))
        return dict(layer.leaving(transaction, (Parcel("weights", {}, {**told, "steps": 2}),))[0].metadata)

    assert left("uniform", samples=7) == left("samples") == {"steps": 2}
    for refused in (("samples", "mean"), ("uniform", "sum")):
        with pytest.raises(GateRefused, match=r"set federation\.sum = 'secure'"):
            left(*refused, samples=7)


def test_two_answers_have_two_masks_and_none_before_the_first_round(company):
    """In two sets, one would tell the mask key of 'di', who "dropped out", and the other the seed of its own mask."""
    keys = company.keys_of(NAMES)
    before = dict(company.sites["di"].state)
    company.give_shares("di", keys)
    company.sites["di"].state = SiteState(before)
    with pytest.raises(GateRefused, match="has its secrets shared with other sites"):
        company.give_shares("di", {name: keys[name] for name in ("ann", "bo", "di")})
    company.give_shares("di", keys)  # the same set again tells nothing new
    # A method with one round would else be asked twice: once with a site, once without it.
    with pytest.raises(ParcelRejected, match="before the first round"):
        company.step("ann", "give_mask_key", round=0)


def test_one_answer_goes_under_one_seed(company, shared):
    """Rows of two member sets under the same seeds are opened together, and their difference is what 'di' sent."""
    _, boxes = shared
    before = dict(company.sites["ann"].state)
    company.take_shares("ann", boxes, NAMES[:3])
    company.send_answer("ann")
    company.sites["ann"].state = SiteState(before)
    company.take_shares("ann", boxes, NAMES)
    with pytest.raises(GateRefused, match="was answered before, in other company or with other numbers"):
        company.send_answer("ann")


def test_two_answers_never_have_the_same_mask(company, shared):
    """Their difference would be that of the two answers, in the clear."""
    company.take_shares("ann", shared[1], NAMES)
    ready = dict(company.sites["ann"].state)
    company.send_answer("ann")
    company.sites["ann"].state = SiteState(ready)
    company.answers["ann"] = torch.tensor(3.0)  # another answer to the same question, such as after more training
    with pytest.raises(GateRefused, match="with other numbers"):
        company.send_answer("ann")


def secrets_of(site):
    """Every secret of the sum in progress, as bytes."""
    found = known(site)
    return [bytes.fromhex(one) for one in (found.mask_key, found.own_seed, *sum(found.held.values(), ())) if one]


def assert_not_on_disk(company, folder, step):
    """The state of every site is written as a checkpoint writes it; no file has a secret, neither as bytes nor as hex
    digits."""
    for site in company.sites.values():
        found = secrets_of(site)
        assert found
        write_tensors(site.folder / f"state-{step}.safetensors", site.state)
        for file in folder.rglob("*"):
            content = file.read_bytes() if file.is_file() else b""
            for secret in found:
                assert secret not in content
                assert secret.hex().encode() not in content


def test_no_secret_of_a_sum_reaches_the_disk_of_a_deployed_site(company, tmp_path):
    keys = company.keys_of(NAMES)
    assert_not_on_disk(company, tmp_path, 1)
    boxes = {name: company.give_shares(name, keys) for name in NAMES}
    assert_not_on_disk(company, tmp_path, 2)
    for name in NAMES:
        company.take_shares(name, boxes, NAMES)
    assert_not_on_disk(company, tmp_path, 3)
    for name in NAMES:
        company.send_answer(name)
    assert_not_on_disk(company, tmp_path, 4)
    agreed = {name: company.agree(name, NAMES) for name in NAMES}
    assert_not_on_disk(company, tmp_path, 5)
    for name in NAMES:
        company.unmask(name, NAMES, agreed)
        assert company.sites[name].sum_secrets[known(company.sites[name]).label]["mask_key"] == ""


def test_a_process_that_begins_anew_drops_out_of_the_sum(company):
    until_answered(company)
    company.sites["ann"].sum_secrets = {}
    with pytest.raises(ParcelRejected, match="were in the memory of a process that has ended"):
        company.agree("ann", NAMES)


@pytest.mark.parametrize("step", ["give_mask_key", "give_shares", "agree", "unmask", "answer"])
def test_a_part_of_a_sum_goes_to_the_coordinator_only(company, step):
    layer = SumSteps(SimpleNamespace(sums=company.sums, spec=None, sites=None))
    with pytest.raises(ParcelRejected, match="which the coordinator adds up; nobody else"):
        layer.arriving(SimpleNamespace(call=Call("ann", step, 1, to="bo")))
    layer.arriving(SimpleNamespace(call=Call("ann", step, 1, {}, {"sum_of": "answer"})))


def test_two_names_with_one_pinned_key_count_as_one(company):
    keys, ring = company.keys_of(NAMES), company.sites["ann"].keys
    company.sites["ann"].keys = SimpleNamespace(
        own=ring.own, public=lambda name: ring.public("bo" if name == "cleo" else name), pinned=lambda: NAMES
    )
    with pytest.raises(ParcelRejected, match="the same pinned key, and count as one"):
        company.give_shares("ann", keys)


@pytest.fixture
def shared(company):
    """The mask keys of all, and the boxes of shares that each has made."""
    keys = company.keys_of(NAMES)
    return keys, {name: company.give_shares(name, keys) for name in NAMES}
