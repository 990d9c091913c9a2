"""Secure sums: the coordinator learns the sum and nothing else, whoever drops out or lies, and whatever it asks."""

import contextlib
import hashlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from company import Company

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums import arithmetic as masks
from polyclinic.federation.sums.settings import Federated
from polyclinic.federation.sums.site_memory import known

NAMES = ("ann", "bo", "cleo", "di", "emil")
SECURE, INTEGER = Federated(sum="secure"), Federated(sum="integer")
STEPS = ("give_mask_key", "give_shares", "take_shares", "answer", "agree", "unmask")


def answers(names=NAMES):
    return {name: torch.tensor(0.3 * place - 0.5) for place, name in enumerate(names)}


@pytest.fixture
def company(tmp_path):
    def make(names=NAMES, settings=SECURE, **more):
        return Company(tmp_path, answers(names), settings, **more)

    return make


def mean(names=NAMES, of=NAMES):
    known_answers = answers(of)
    weights = {name: 10 + len(name) for name in names}
    return sum(float(known_answers[name]) * w for name, w in weights.items()) / sum(weights.values())


def until_answered(company, names=NAMES):
    """Sites that have answered, and wait to be told who else did; what each one sent."""
    company.broken = {(name, "agree") for name in names}
    with pytest.raises(WorkFailed):
        company.total()
    company.broken = set()
    return {call.site: reply for call, reply in company.replies if call.operation == "answer" and reply}


def agree(company, answered, names=NAMES):
    """The signatures of all sites under one set of sites."""
    return {name: company.agree(name, answered) for name in names}


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[:4], NAMES])
def test_masks_cancel_and_the_sum_is_that_of_open_integers(company, names):
    secure, integer = company(names).total(), company(names, INTEGER).total()
    assert torch.equal(secure, integer)
    assert float(secure[0]) == pytest.approx(mean(names, names), abs=1e-6)


def test_what_one_site_sends_is_uniform(company):
    """Chi-square of the bytes of 20,000 masked numbers that are all the same: 255 on average, with deviation 23."""
    some = company(settings=SECURE)
    some.total(size=20_000)
    [sent] = [
        reply.masked["numbers"] for call, reply in some.replies if (call.site, call.operation) == ("bo", "answer")
    ]
    bytes_ = sent.numpy().view(np.uint8).reshape(-1, 8)[:20_000]
    for column in bytes_.T:
        counts = np.bincount(column, minlength=256)
        chi_square = float(((counts - len(column) / 256) ** 2 / (len(column) / 256)).sum())
        assert 120 < chi_square < 420
    assert len(np.unique(sent.numpy())) == len(sent)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("gone", ["ann", "cleo", "emil"])
def test_a_site_may_drop_out_at_every_step(company, step, gone):
    some = company()
    some.broken = {(gone, step)}
    left = NAMES if step in ("agree", "unmask") else [name for name in NAMES if name != gone]
    assert float(some.total()[0]) == pytest.approx(mean(left), abs=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_nothing_is_opened(company, step):
    some = company(settings=Federated(sum="secure", threshold=0.75))  # four of five
    some.broken = {(name, step) for name in NAMES[:3]}
    with pytest.raises(WorkFailed):
        some.total()
    assert not [call for call, reply in some.replies if call.operation == "unmask" and reply and step != "unmask"]


@pytest.mark.parametrize(("names", "min_sites"), [(NAMES[:2], 3), (NAMES[:1], 3), (NAMES[:4], 5)])
def test_a_sum_of_too_few_sites_is_refused(company, names, min_sites):
    some = company(names, min_sites=min_sites)
    with pytest.raises(WorkFailed):
        some.total()
    assert any(f"wants {min_sites} or more (min_sites)" in reason for reason in some.refusals())


def test_there_is_one_sum_of_a_rounds_answers(company):
    """Two sums of the same answers, one without a site, would give that site's answer away by their difference."""
    some = company()
    some.total()
    with pytest.raises(ParcelRejected, match="has begun in round 1; there is one of each"):
        some.step("ann", "give_mask_key")
    with pytest.raises(ParcelRejected, match="past this step"):  # nor under the masks of before
        some.send_answer("ann", 50)


def test_two_sums_at_once_do_not_mix(company):
    """A second sum that begins before the first is opened ends the first: its shares are gone."""
    some = company()
    until_answered(some)
    for name in NAMES:
        some.step(name, "give_mask_key", sum_of="another")
    with pytest.raises(ParcelRejected, match="no sum of 'answer' has begun"):
        some.agree("bo", NAMES)


def test_a_site_answers_one_unmasking_request(company):
    some = company()
    until_answered(some)
    agreed = agree(some, NAMES)
    some.unmask("bo", NAMES, agreed)
    for again in (NAMES, NAMES[:4]):
        with pytest.raises(ParcelRejected, match="past this step"):
            some.unmask("bo", again, agreed)
    kept = known(some.sites["bo"])
    assert not kept.mask_key + kept.own_seed
    assert not kept.held


@pytest.mark.parametrize(
    "said", [["ann"], ["ann", "bo", "cleo"], ["ann", "cleo", "di", "emil"], ["bo"] * 5, [*NAMES, "zoe"]]
)
def test_lies_about_who_answered_are_refused(company, said):
    some = company()
    until_answered(some)
    with pytest.raises((ParcelRejected, GateRefused)):
        some.agree("bo", said)


def test_a_site_signs_one_set_of_sites(company):
    some = company()
    until_answered(some)
    some.agree("bo", NAMES)
    with pytest.raises(ParcelRejected, match="past this step"):
        some.agree("bo", NAMES[:4])
    with pytest.raises(ParcelRejected, match="others than this site agreed to"):
        some.unmask("bo", NAMES[:4], {})


def test_no_share_is_given_before_enough_sites_signed_the_same(company):
    some = company()
    until_answered(some)
    agreed = agree(some, NAMES)
    three = dict(list(agreed.items())[:3])
    forged = {**three, "di": agreed["emil"], "emil": "no signature", "zoe": agreed["di"]}
    for given in ({}, three, forged, None):
        with pytest.raises(ParcelRejected, match="of the 4 sites that are needed have signed"):
            some.unmask("bo", NAMES, given)
    some.unmask("bo", NAMES, {**three, "di": agreed["di"]})


@pytest.mark.parametrize("told", [told for n in range(1, 5) for told in itertools.combinations(NAMES, n)], ids="".join)
def test_sites_that_hear_different_things_open_nothing(company, told):
    """Some sites hear that 'cleo' answered, the others that it dropped out: neither set has enough signatures, or only
    one has. Nobody gets both secrets of a site."""
    some = company()
    until_answered(some)
    others = [name for name in NAMES if name != "cleo"]
    agreed = {}
    for name in NAMES:
        if name in told or name != "cleo":  # 'cleo' knows that it answered
            agreed[name] = some.agree(name, NAMES if name in told else others)
    opened = set()
    for name in agreed:
        with contextlib.suppress(ParcelRejected):
            some.unmask(name, NAMES if name in told else others, agreed)
            opened.add(name in told)
    assert len(opened) <= 1
    assert bool(opened) == (len(told) >= 4 or len(set(others) - set(told)) >= 4)


def test_a_site_that_is_said_to_have_dropped_out_stays_masked(company):
    """The coordinator takes out 'cleo', whose answer it has: what is left of that answer is its own mask."""
    some = company()
    sent = until_answered(some)
    before = known(some.sites["cleo"])
    others = [name for name in NAMES if name != "cleo"]
    agreed = agree(some, others, others)
    shares = {NAMES.index(name) + 1: some.unmask(name, others, agreed) for name in others}
    row = NAMES.index("cleo")
    found = masks.combine_shares({place: some_shares[row].numpy().tobytes() for place, some_shares in shares.items()})
    assert found == bytes.fromhex(before.mask_key)  # the coordinator has it now, and all masks with the others
    with pytest.raises(ParcelRejected, match="or not this site"):
        some.agree("cleo", others)
    commitment = hashlib.sha256(bytes.fromhex(before.own_seed)).digest()
    assert hashlib.sha256(found).digest() != commitment
    assert sent["cleo"]


def with_tensors(call, name, **tensors):
    kept = {key: one for key, one in {**call.parcels[name].tensors, **tensors}.items() if one is not None}
    return replace(call, parcels={name: Parcel(call.parcels[name].kind, kept)})


#: what is lied about, at which step, to whom, the lie, and what is said: by the coordinator, or by a site
LIES = {
    "the question": ("answer", ["bo"], ("weights", {"w": torch.full((50,), 1.000001)}), "masks do not cancel"),
    # the boxes of 'emil' reach only some sites, which so have masks with it, and the others have none
    "the members": ("take_shares", ["ann", "bo"], ("shares", {"emil": None}), "are needed have signed"),
    # the coordinator would know the masks with 'emil'; but the site's shares are sealed for a sum of other keys
    "a mask key": ("give_shares", NAMES[:4], ("keys", {"emil": torch.arange(32, dtype=torch.uint8)}), "does not open"),
    "a weak key": ("give_shares", NAMES, ("keys", {"emil": torch.zeros(32, dtype=torch.uint8)}), "is none that two"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_coordinator_that_lies_opens_no_sum(company, lie):
    some, (step, sites, (name, tensors), words) = company(), LIES[lie]
    some.lie = lambda call: (
        with_tensors(call, name, **tensors) if call.operation == step and call.site in sites else call
    )
    with pytest.raises(WorkFailed) as failed:
        some.total()
    assert any(words in reason for reason in [str(failed.value), *some.refusals()])


def test_unequal_arguments_cannot_be_summed(company):
    some = company()
    some.lie = lambda call: replace(call, arguments={}) if call.operation == "answer" else call
    with pytest.raises(WorkFailed, match="masks do not cancel"):
        list(some.federation().ask_each("answer", weights={"w": torch.ones(5)}, lr=1))


def test_a_site_that_lies_about_shares_is_noticed(company):
    some = company()
    some.change = lambda call, parcel: (
        Parcel("shares", {"shares": parcel.tensors["shares"] ^ 1}, parcel.metadata)
        if (call.site, call.operation) == ("di", "unmask")
        else parcel
    )
    with pytest.raises(WorkFailed, match="do not fit; a site lied"):
        some.total()


def test_a_site_whose_answer_has_another_form_fails_by_name(company):
    """Its tensors cannot be added to those of the others. The sum is that of the others, and the run says who."""
    for settings in (SECURE, INTEGER):
        some = company(settings=settings)
        honest = some.answer
        other = lambda call, honest=honest: {"else": torch.ones(3)} if call.site == "di" else honest(call)  # noqa: E731
        some.answer = other
        federation = some.federation()
        [reply] = federation.ask_all("answer", weights={"w": torch.ones(5)})
        left = [name for name in NAMES if name != "di"]
        assert float(reply.weights["w"][0]) == pytest.approx(mean(left), abs=1e-6)
        [failure] = federation.failures
        assert (failure["site"], failure["operation"]) == ("di", "answer")
        assert "other tensors than those of the other sites" in failure["reason"]


@pytest.mark.parametrize("lie", [{0: 2**60}, {-1: 2}, {-3: -5}])
def test_an_open_row_that_no_site_can_have_made_is_refused(company, lie):
    some = company(settings=INTEGER)

    def change(call, parcel):
        if call.site != "di":
            return parcel
        numbers = parcel.tensors["numbers"].clone()
        for place, value in lie.items():
            numbers[place] = value
        return Parcel("weights", {"numbers": numbers}, parcel.metadata)

    some.change = change
    federation = some.federation()
    federation.ask_all("answer", weights={"w": torch.ones(5)})
    assert [failure["site"] for failure in federation.failures] == ["di"]


@pytest.fixture
def five(tmp_path):
    return Company(tmp_path, {name: torch.tensor(float(len(name))) for name in NAMES}, Federated(sum="secure"))


def replace_reply(five, step, change):
    """What site 'di' sends at a step, changed."""
    five.change = lambda call, parcel: change(parcel) if (call.site, call.operation) == ("di", step) else parcel


def mean_of_sites(names):
    weights = {name: 10 + len(name) for name in names}
    return sum(len(name) * weight for name, weight in weights.items()) / sum(weights.values())


@pytest.mark.parametrize(
    "key", [torch.zeros(32), torch.zeros(31, dtype=torch.uint8), torch.zeros(1, 32, dtype=torch.uint8)]
)
def test_a_site_without_a_mask_key_is_left_out(five, key):
    replace_reply(five, "give_mask_key", lambda parcel: Parcel("keys", {"di": key}))
    assert float(five.total(2)[0]) == pytest.approx(mean_of_sites([name for name in NAMES if name != "di"]))
    assert five.refusals() == []


@pytest.mark.parametrize("change", [
    lambda tensors: {"boxes": tensors["boxes"]},
    lambda tensors: {**tensors, "boxes": tensors["boxes"][:-1]},
    lambda tensors: {**tensors, "boxes": tensors["boxes"][:, :-1]},
    lambda tensors: {**tensors, "commitment": tensors["commitment"][:-1]},
    lambda tensors: {**tensors, "commitment": tensors["commitment"].float()},
], ids=["no commitment", "a box less", "short boxes", "a short commitment", "another type"])  # fmt: skip
def test_boxes_of_another_form_are_named(five, change):
    replace_reply(five, "give_shares", lambda parcel: Parcel("shares", change(parcel.tensors), parcel.metadata))
    with pytest.raises(WorkFailed, match="site 'di' sent boxes of shares of another form"):
        five.total(2)


@pytest.mark.parametrize("step", ["take_shares", "answer", "unmask"])
def test_a_sum_of_which_too_few_are_left_says_how_many_are_needed(five, step):
    five.broken = {(name, step) for name in NAMES[3:]}
    words = "the secure sum of 'answer' cannot be opened: 3 of 5 sites are left, and 4 are needed"
    with pytest.raises(WorkFailed, match=words):
        five.total(2)


def test_a_site_that_needs_more_sites_than_the_study_stops_the_sum(five):
    replace_reply(five, "give_shares", lambda parcel: Parcel("shares", parcel.tensors, {"needs": 5}))
    assert float(five.total(2)[0]) == pytest.approx(mean_of_sites(NAMES))
    five.broken = {("bo", "answer")}
    federation = five.federation()
    federation.round = 2
    with pytest.raises(WorkFailed, match="4 of 5 sites are left, and 5 are needed"):
        federation.ask_all("answer", weights={"w": torch.ones(2)})


@pytest.mark.parametrize("place", [0, -1])
def test_a_lie_about_a_site_that_dropped_out_is_noticed(five, place):
    """The share of the mask key of 'bo', whose answer did not come, is another one: its first byte, or its last."""
    five.broken = {("bo", "answer")}

    def change(parcel):
        shares = parcel.tensors["shares"].clone()
        shares[NAMES.index("bo"), place] ^= 1
        return Parcel("shares", {"shares": shares}, parcel.metadata)

    replace_reply(five, "unmask", change)
    with pytest.raises(WorkFailed, match="the shares of the mask key of site 'bo' do not fit; a site lied about them"):
        five.total(2)


def test_a_site_shares_nothing_in_a_sum_without_its_own_key_or_with_a_site_that_no_kit_knows(five):
    keys, site = five.keys_of(NAMES), five.sites["ann"]
    others = {name: key for name, key in keys.items() if name != "ann"}
    for wrong in (others, {**others, "ann": keys["bo"]}):
        with pytest.raises(ParcelRejected, match="the mask keys that came do not have that of site 'ann'"):
            five.give_shares("ann", wrong)
    ring = site.keys
    site.keys = SimpleNamespace(own=ring.own, public=lambda name: None if name == "di" else ring.public(name))
    with pytest.raises(ParcelRejected, match="site 'ann' has no key of 'di', which is said to be in the sum"):
        five.give_shares("ann", keys)
