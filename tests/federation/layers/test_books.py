"""The coordinator's books: heads of the sites' ledgers, and which parcels differential privacy covers."""

import json

import pytest
import torch

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.replies import Coverage, Heads
from polyclinic.federation.ledger.keys import Head, SeedKeys, is_countersigned, sign_line
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.verify import RECEIVED_FILE, read_received

KEYS = SeedKeys(3)
PARCEL = Parcel("weights", {"w": torch.ones(2)})


def head(lines, digest="d", site="a"):
    return Head(lines, digest, sign_line(KEYS.signing_key(site), digest))


def receive(heads, found, site="a", parcels=(PARCEL,), round=1):
    heads.receive(Call(site, "train", round), Reply(site, tuple(parcels), found))


def test_a_deployed_head_is_counter_signed_and_written_down(tmp_path):
    heads = Heads(tmp_path, KEYS)
    assert heads.known == {}
    receive(heads, head(1), parcels=(PARCEL, Parcel("metrics", {})))
    anchor = heads.known["a"]
    assert anchor.head == head(1)
    assert is_countersigned(KEYS.verifying_keys("coordinator"), tmp_path.name, "a", anchor)
    [line] = read_received(tmp_path)
    assert (line["site"], line["round"], line["operation"], line["to"]) == ("a", 1, "train", "coordinator")
    assert line["parcels"][0] == {"kind": "weights", "bytes": PARCEL.size, "digest": PARCEL.digest}
    assert line["head"] == list(anchor)
    assert heads.summary()["a"].keys() == {"lines", "digest", "signature", "countersignature"}


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ((3, "d"), True),
        ((4, "e"), True),
        ((99, "e"), True),
        ((3, "other"), False),
        ((2, "d"), False),
        ((1, "other"), False),
    ],
)
def test_a_ledger_grows_and_stays_the_same_one(tmp_path, found, fits):
    heads = Heads(tmp_path, KEYS)
    receive(heads, head(3))
    if fits:
        receive(heads, head(*found))
        assert heads.known["a"].lines == found[0]
        return
    with pytest.raises(ParcelRejected, match=f"its ledger had 3 lines, and is another one now, of {found[0]} lines"):
        receive(heads, head(*found))
    assert heads.known["a"].head == head(3)


def test_an_answer_has_a_head_that_its_site_signed(tmp_path):
    """Nothing left a new site, and nothing is missing; a deployed site that sends something has written it down."""
    simulated, deployed = Heads(tmp_path), Heads(tmp_path, KEYS)
    receive(simulated, None)
    receive(deployed, None, parcels=())
    assert simulated.plain() == deployed.plain() == {}
    with pytest.raises(ParcelRejected, match="without the head"):
        receive(deployed, None)
    for heads, known in ((simulated, Head(1, "x")), (deployed, head(1))):
        receive(heads, known)
        with pytest.raises(ParcelRejected, match="without the head"):
            receive(heads, None, parcels=())
    with pytest.raises(ParcelRejected, match="not signed with the key that the kits have for it"):
        receive(Heads(tmp_path, KEYS), head(1, site="b"))


def test_heads_that_are_still_to_come_are_taken_when_they_are_asked_for(tmp_path):
    heads, asked = Heads(tmp_path), []

    def soon(found):
        return lambda: asked.append(found) or found

    heads.receive(Call("a", "train", 1), Reply("a", (), head_soon=soon(Head(1, "x"))))
    heads.receive(Call("b", "train", 1), Reply("b", (), head_soon=soon(None)))
    assert asked == []
    assert heads.plain() == {"a": (1, "x", "", "")}
    assert asked == [Head(1, "x"), None]
    heads.receive(Call("a", "train", 2), Reply("a", (), head_soon=soon(Head(2, "y"))))
    with pytest.raises(ParcelRejected, match="had 2 lines"):
        receive(heads, Head(1, "x"))


def test_a_resumed_run_knows_what_came_after_its_checkpoint(tmp_path):
    heads = Heads(tmp_path, KEYS)
    receive(heads, head(1))
    kept = json.loads(json.dumps(heads.plain()))
    receive(heads, head(2, "e"), round=2)
    receive(heads, head(5, "f", "b"), "b", round=2)
    resumed = Heads(tmp_path, KEYS)
    resumed.restore(kept)
    assert {site: anchor.lines for site, anchor in resumed.plain().items()} == {"a": 2, "b": 5}
    later = {"a": [7, "later", "", ""], "b": [5, "the same length", "", ""]}
    resumed.restore(later)
    assert {site: anchor.digest for site, anchor in resumed.plain().items()} == {"a": "later", "b": "the same length"}
    simulated = Heads(tmp_path)
    simulated.restore(kept)
    assert {site: anchor.lines for site, anchor in simulated.plain().items()} == {"a": 1}


@pytest.mark.parametrize(("before", "after"), [("", ""), ("{}\n", "{}\n"), ('{"si', '{"si\n')])
def test_a_line_that_a_killed_process_left_unfinished_is_ended(tmp_path, before, after):
    file = tmp_path / RECEIVED_FILE
    if before:
        file.write_text(before)
    Heads(tmp_path)  # a simulation leaves the file alone
    assert (file.read_text() if file.exists() else "") == before
    Heads(tmp_path, KEYS)
    assert (file.read_text() if file.exists() else "") == after


RECORD = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "covers": ["weights"], "does_not_cover": ["labels"]}
TENSORS = {"w": torch.ones(1)}


def noted(*parcels):
    coverage = Coverage()
    for parcel in parcels:
        coverage.note("a", parcel)
    return coverage


def test_the_last_record_of_a_site_with_what_all_together_cover():
    later = {**RECORD, "epsilon": 2, "covers": ["generator", "weights"], "does_not_cover": []}
    coverage = noted(*(Parcel("weights", TENSORS, privacy=one) for one in (RECORD, later)))
    joined = {"covers": ["weights", "generator"], "does_not_cover": ["labels"]}
    assert coverage.plain() == {"records": {"a": {**later, **joined}}, "uncovered": []}
    assert Coverage(coverage.plain()).plain() == coverage.plain()


@pytest.mark.parametrize(
    ("parcel", "uncovered"),
    [
        (Parcel("weights", TENSORS), True),
        (Parcel("weights", TENSORS, {"samples": 3}), True),
        (Parcel("metrics", {}, {"loss": 0.5}), True),
        (Parcel("metrics", {}, {"samples": 3, "steps": 9}), False),  # sizes count as public
        (Parcel("metrics", {}), False),
        (Parcel(min(OF_NO_IMAGE), TENSORS, {"anything": 1}), False),
    ],
)
def test_what_tells_something_of_images_without_a_record_is_uncovered(parcel, uncovered):
    assert noted(parcel).uncovered == ({parcel.kind} if uncovered else set())


@pytest.mark.parametrize("name", RECORD)
@pytest.mark.parametrize("value", [None, "a word"])
def test_a_record_that_is_none_covers_nothing(name, value):
    coverage = noted(Parcel("weights", TENSORS, privacy={**RECORD, name: value}))
    assert (coverage.records, coverage.uncovered) == ({}, {"weights"})
