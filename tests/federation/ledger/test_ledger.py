"""The ledger shows every change, is the same after a kill, and says what repeats and who signed; its anchors."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.federation.ledger.keys import (
    Anchor,
    Head,
    anchor_from_json,
    head_from_json,
    is_countersigned,
    sign_anchor,
    signing_public_key,
)
from polyclinic.federation.ledger.ledger import GENESIS, AnchorFile, Ledger, LedgerBroken, verify


def release(ledger, round=1, operation="train", kind="weights", content="x", to="coordinator"):
    digest = hashlib.sha256(content.encode()).hexdigest()
    ledger.append(round=round, operation=operation, kind=kind, bytes=len(content), digest=digest, to=to)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger" / "site-1.jsonl"


@pytest.fixture
def five(path):
    """A ledger of five lines."""
    ledger = Ledger(path)
    for number in range(5):
        release(ledger, round=number, content=f"parcel {number}")
    return path


def test_a_line_says_what_left_and_what_came_before(path):
    ledger = Ledger(path)
    release(ledger, round=3, operation="finish", kind="latents", content="abc", to="site-2")
    release(ledger)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    digest_of_line = first.pop("digest_of_line")
    assert first == {
        "index": 0,
        "previous": GENESIS,
        "round": 3,
        "operation": "finish",
        "kind": "latents",
        "bytes": 3,
        "digest": hashlib.sha256(b"abc").hexdigest(),
        "to": "site-2",
        "privacy": None,
    }
    assert digest_of_line == hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()
    assert second["previous"] == digest_of_line
    assert second["index"] == 1
    assert ledger.position == (2, second["digest_of_line"])


def test_a_line_whose_digest_was_made_anew_breaks_the_next(five):
    """Who changes a line and its own digest must change every line after it."""
    lines = [json.loads(line) for line in five.read_text().splitlines()]
    forged = {**lines[1], "bytes": 1}
    del forged["digest_of_line"]
    forged["digest_of_line"] = hashlib.sha256(json.dumps(forged, sort_keys=True).encode()).hexdigest()
    lines[1] = forged
    five.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LedgerBroken, match="line 3: does not follow"):
        verify(five)


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", "3", "{}", '{"digest_of_line": "x"}', '{"index": 2, "digest_of_line": "x"}', "\xff"]
)
def test_an_inserted_line_is_found(five, text):
    lines = five.read_text().splitlines(keepends=True)
    five.write_bytes("".join(lines[:2]).encode() + text.encode("latin-1") + b"\n" + "".join(lines[2:]).encode())
    with pytest.raises(LedgerBroken, match="line 3"):
        verify(five)


@pytest.mark.parametrize("left", [0, 3])
def test_lines_missing_since_a_checkpoint_are_found(five, left):
    """A chain cannot show that its end was cut off; the number of lines in the checkpoint can."""
    five.write_text("".join(five.read_text().splitlines(keepends=True)[:left]))
    with pytest.raises(LedgerBroken, match=rf"holds {left} lines.* 5"):
        Ledger(five).expect_repeats_after(5)


@given(cut=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "site-1.jsonl"
    for number in range(3):
        release(Ledger(path), content=str(number))
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: min(len(whole) - 1, start + cut)])
    ledger = Ledger(path)
    assert ledger.position.lines == 2
    release(ledger, content="2")
    assert path.read_bytes() == whole


def test_dropping_a_torn_line_never_rewrites_the_lines_before_it(five, monkeypatch):
    """A second kill, while the torn line is being dropped, must not cost the whole ledger."""
    whole = five.read_bytes()
    five.write_bytes(whole + b'{"index": 5, "prev')
    monkeypatch.setattr(type(five), "write_bytes", lambda *_: pytest.fail("rewrote the ledger"))
    monkeypatch.setattr(type(five), "write_text", lambda *_, **__: pytest.fail("rewrote the ledger"))
    Ledger(five)
    assert five.read_bytes() == whole


def test_a_repeat_is_written_once_and_only_after_the_checkpoint(five):
    ledger = Ledger(five)
    ledger.expect_repeats_after(3)
    assert ledger.confirmed == 3
    before = five.read_bytes()
    release(ledger, round=3, content="parcel 3")
    assert ledger.confirmed == 4
    release(ledger, round=4, content="parcel 4")
    assert ledger.confirmed == 5
    assert five.read_bytes() == before
    release(ledger, round=4, content="parcel 4")  # once more is a second release
    assert len(verify(five)) == ledger.confirmed == 6
    release(ledger, round=1, content="parcel 1")  # the checkpoint had this one behind it
    assert len(verify(five)) == 7


@pytest.mark.parametrize(
    "other", [{"round": 9}, {"operation": "other"}, {"kind": "metrics"}, {"content": "y"}, {"to": "site-2"}]
)
def test_a_release_that_differs_in_anything_is_no_repeat(path, other):
    release(Ledger(path))
    ledger = Ledger(path)
    ledger.expect_repeats_after(0)
    release(ledger, **other)
    assert len(verify(path)) == 2
    release(ledger)
    assert len(verify(path)) == 2


plans = st.lists(
    st.lists(st.tuples(st.sampled_from(["train", "evaluate"]), st.sampled_from("abc")), max_size=4),
    min_size=1,
    max_size=5,
)


@given(rounds=plans, kills=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 100), st.booleans()), max_size=4))
@settings(max_examples=150, deadline=None)
def test_killed_anywhere_the_ledger_equals_an_undisturbed_one(tmp_path_factory, rounds, kills):
    """A run is a list of rounds of releases with a checkpoint after each; it is killed after so many releases
    (perhaps with half a line written, perhaps after the checkpoint was written), again and again."""
    folder = tmp_path_factory.mktemp("kills")
    straight = Ledger(folder / "straight.jsonl")
    for number, releases in enumerate(rounds):
        for operation, content in releases:
            release(straight, round=number, operation=operation, content=content)

    path, checkpoint = folder / "killed.jsonl", (0, 0)  # (round to go on with, lines)
    for budget, torn, after_checkpoint in [*kills, (10**6, 0, True)]:
        ledger = Ledger(path)
        ledger.expect_repeats_after(checkpoint[1])
        for number in range(checkpoint[0], len(rounds)):
            for operation, content in rounds[number]:
                if budget <= 0:
                    break
                budget -= 1
                release(ledger, round=number, operation=operation, content=content)
            if budget <= 0 and not after_checkpoint:
                break
            if budget <= 0 and ledger.confirmed < checkpoint[1] + len(rounds[number]):
                break  # killed inside the round: no checkpoint of it
            checkpoint = (number + 1, ledger.confirmed)
        if torn and path.exists() and budget <= 0:
            with path.open("ab") as file:
                file.write(b'{"index": 99, "previous": "0000000000000000000'[: torn % 40 + 1])
    assert (path.read_bytes() if path.exists() else b"") == (
        straight.path.read_bytes() if straight.path.exists() else b""
    )
    assert checkpoint == (len(rounds), straight.position.lines)


OLD, NEW, FOREIGN = (Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in (1, 2, 3))


def append(ledger, round=1, operation="train", kind="weights", digest="d", to="coordinator", **more):
    ledger.append(round=round, operation=operation, kind=kind, bytes=1, digest=digest, to=to, **more)


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


@pytest.mark.parametrize(("value", "right"), [
    *(([1, "d", "s"], True), ((7, "d", ""), True), ([0, "d", "s"], False), ([-1, "d", "s"], False)),
    *(([True, "d", "s"], False), (["1", "d", "s"], False), ([1.0, "d", "s"], False), ([1, 2, "s"], False)),
    *(([1, "d", None], False), ([1, "d"], False), ([1, "d", "s", "c"], False), ("abc", False), (None, False)),
    *(({"lines": 1}, False), ([], False)),
])  # fmt: skip
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
