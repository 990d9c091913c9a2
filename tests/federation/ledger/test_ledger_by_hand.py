"""Ledgers and their anchors: what repeats, what is counted, who signed, and which sentence tells what is wrong."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyclinic.federation.ledger.keys import (
    Anchor,
    Head,
    anchor_from_json,
    head_from_json,
    is_countersigned,
    sign_anchor,
    signing_public_key,
)
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken, verify

OLD, NEW, FOREIGN = (Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in (1, 2, 3))


def append(ledger, round=1, operation="train", kind="weights", digest="d", to="coordinator", **more):
    ledger.append(round=round, operation=operation, kind=kind, bytes=1, digest=digest, to=to, **more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger" / "north.jsonl"


def written(path, *signers):
    """A ledger with a line by each of these."""
    for number, signer in enumerate(signers):
        append(Ledger(path, signer, AnchorFile(path.parent / "anchor.json")), round=number, digest=str(number))
    return verify(path)


def test_an_operation_of_a_round_repeats_until_all_of_it_came_again(path):
    for kind in ("weights", "metrics"):
        append(Ledger(path), kind=kind)
    ledger = Ledger(path)
    assert not ledger.may_repeat(1, "train")
    ledger.expect_repeats_after(0)
    assert [ledger.may_repeat(*one) for one in ((1, "train"), (2, "train"), (1, "evaluate"))] == [True, False, False]
    append(ledger, kind="weights")
    assert not ledger.has(1, "train", "weights", "d", "coordinator")
    assert ledger.has(1, "train", "metrics", "d", "coordinator")
    assert ledger.may_repeat(1, "train")
    append(ledger, kind="metrics")
    assert not ledger.may_repeat(1, "train")
    assert not ledger.has(1, "train", "metrics", "d", "coordinator")
    assert len(verify(path)) == 2


def test_what_an_operation_released_repeats_and_how_often(path):
    ledger = Ledger(path)
    assert ledger.times(1, "train", "coordinator") == 0
    for kind in ("weights", "metrics", "weights"):  # the first two at once
        append(ledger, kind=kind)
    append(ledger, to="south")
    append(ledger, round=2)
    for one in (ledger, Ledger(path)):
        asked = [(1, "train", "coordinator"), (1, "train", "south"), (2, "train", "coordinator"), (1, "other", "south")]
        assert [one.times(*about) for about in asked] == [2, 1, 1, 0]


def test_lines_say_how_numbers_travelled_and_what_they_are_summed_in_only_where_it_matters(path):
    ledger = Ledger(path)
    append(ledger, wire="int8", sum={"id": "x", "sites": 3}, salted=True)
    append(ledger)
    first, second = verify(path)
    assert (first["wire"], first["sum"], len(bytes.fromhex(first["salt"]))) == ("int8", {"id": "x", "sites": 3}, 16)
    assert not {"wire", "sum", "salt"} & set(second)


def test_keys_rotate_in_one_direction_and_only_the_first_lines_may_be_unsigned(path):
    keys = [signing_public_key(key) for key in (OLD, NEW)]
    assert len(written(path, OLD, OLD, NEW, NEW)) == len(verify(path, keys)) == 4
    for some, number in ((keys[::-1], 3), (keys[:1], 3), (keys[1:], 1), ([], 1)):
        with pytest.raises(LedgerBroken, match=f"line {number}: is not signed by the site's key"):
            verify(path, some)


def test_only_the_first_lines_may_be_unsigned(path):
    keys = [signing_public_key(OLD)]
    written(path, None, None, OLD)
    assert len(verify(path, keys, unsigned=2)) == 3
    for unsigned, number in ((0, 1), (1, 2)):
        with pytest.raises(LedgerBroken, match=f"line {number}: is not signed$"):
            verify(path, keys, unsigned=unsigned)
    with pytest.raises(LedgerBroken, match=r"line 1: is not signed$"):
        verify(path, keys)


def test_a_simulated_site_opens_its_own_ledger_only(path):
    written(path, None, None, OLD)
    assert Ledger(path, OLD).position.lines == 3
    assert Ledger(path).position.lines == 3  # without a key there is nothing to compare
    with pytest.raises(LedgerBroken, match="line 3: is not signed by the site's key"):
        Ledger(path, FOREIGN)
    assert Ledger(path, FOREIGN, AnchorFile(path.parent / "anchor.json")).position.lines == 3  # a rotated key


def test_a_line_that_is_cut_off_is_named_or_left_out(path):
    written(path, None, None, None)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(LedgerBroken, match="line 3: is cut off before its end"):
        verify(path)
    assert [line["index"] for line in verify(path, torn=True)] == [0, 1]


def test_an_anchor_keeps_the_head_when_lines_are_committed(path):
    anchor = AnchorFile(path.parent / "anchor.json")
    ledger = Ledger(path, OLD, anchor)
    ledger.commit()
    assert not anchor.path.exists()  # an empty ledger has no head
    append(ledger)
    ledger.commit()
    assert AnchorFile(anchor.path).head == anchor.head == ledger.head
    before = anchor.path.stat().st_ino
    ledger.commit()
    assert anchor.path.stat().st_ino == before  # nothing new: it is not written again
    append(ledger)
    ledger.commit()
    assert AnchorFile(anchor.path).head.lines == 2
    Ledger(path).commit()  # a simulated site has no anchor


def test_a_counter_signed_head_is_kept_if_it_is_new_and_this_ledgers(path):
    lines = written(path, OLD, OLD, OLD)
    anchor = AnchorFile(path.parent / "anchor.json")
    ledger = Ledger(path, OLD, anchor)

    def of(number, digest=None):
        return Anchor(number, digest or lines[number - 1]["digest_of_line"], "signature", "counter")

    ledger.take_anchor(of(2))
    assert anchor.countersigned == of(2)
    for older in (of(1), of(2, "another"), of(1, "another")):
        ledger.take_anchor(older)
    assert anchor.countersigned == of(2)
    with pytest.raises(LedgerBroken, match="line 3: is not the line that the coordinator's counter-signature has seen"):
        ledger.take_anchor(of(3, "another"))
    with pytest.raises(LedgerBroken, match="line 4: is missing; the coordinator's counter-signature says 9 lines"):
        ledger.take_anchor(of(9, "another"))
    ledger.take_anchor(of(3))
    assert AnchorFile(anchor.path).countersigned == of(3)


def test_an_anchor_file_keeps_what_it_is_not_given_anew(tmp_path):
    file, head, anchor = AnchorFile(tmp_path / "a" / "b.json"), Head(1, "x", "s"), Anchor(2, "y", "s", "c")
    file.check(tmp_path, [])  # it has seen nothing
    file.keep(head=head)
    assert (AnchorFile(file.path).head, AnchorFile(file.path).countersigned) == (head, None)
    file.keep(countersigned=anchor)
    assert (AnchorFile(file.path).head, AnchorFile(file.path).countersigned) == (head, anchor)
    file.keep(head=Head(2, "y"))
    assert (AnchorFile(file.path).head, AnchorFile(file.path).countersigned) == (Head(2, "y"), anchor)
    AnchorFile(file.path).check(tmp_path, ["x", "y"])
    with pytest.raises(LedgerBroken, match="line 2: is missing"):
        AnchorFile(file.path).check(tmp_path, ["x"])
    alone = AnchorFile(tmp_path / "alone.json")
    alone.keep(countersigned=anchor)
    with pytest.raises(LedgerBroken, match="line 2: is not the line"):
        AnchorFile(alone.path).check(tmp_path, ["x", "z"])


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"head": [0, "x", ""], "countersigned": null}', '{"head": null}'])
def test_an_anchor_file_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "north.json").write_text(content)
    with pytest.raises(LedgerBroken, match=r"north\.json: is damaged; put it back from a backup"):
        AnchorFile(tmp_path / "north.json")


@pytest.mark.parametrize(
    ("value", "right"),
    [
        *(([1, "d", "s"], True), ((7, "d", ""), True), ([0, "d", "s"], False), ([-1, "d", "s"], False)),
        *(([True, "d", "s"], False), (["1", "d", "s"], False), ([1.0, "d", "s"], False), ([1, 2, "s"], False)),
        *(([1, "d", None], False), ([1, "d"], False), ([1, "d", "s", "c"], False), ("abc", False), (None, False)),
        *(({"lines": 1}, False), ([], False)),
    ],
)
def test_heads_that_came_from_outside(value, right):
    if right:
        assert head_from_json(json.loads(json.dumps(value))) == Head(*value)
        assert anchor_from_json([*value, "c"]) == Anchor(*value, "c")
        assert anchor_from_json([*value, "c"]).head == Head(*value)
    else:
        with pytest.raises(ValueError, match="not the head of a ledger"):
            head_from_json(value)


def test_a_counter_signature_is_for_one_run_one_site_and_one_head():
    keys, head = [signing_public_key(FOREIGN), signing_public_key(NEW)], Head(3, "digest", "signature")
    anchor = sign_anchor(NEW, "run", "north", head)
    assert anchor.head == head
    assert is_countersigned(keys, "run", "north", anchor)
    assert not is_countersigned(keys[:1], "run", "north", anchor)
    assert not is_countersigned(keys, "other", "north", anchor)
    assert not is_countersigned(keys, "run", "south", anchor)
    for changed in ({"lines": 4}, {"digest": "other"}, {"countersignature": ""}, {"countersignature": "no digits"}):
        assert not is_countersigned(keys, "run", "north", anchor._replace(**changed))
