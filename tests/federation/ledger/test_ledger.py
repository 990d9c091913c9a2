"""The ledger shows every change, and a run that was killed leaves the same one as a run that was not."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.federation.ledger.ledger import GENESIS, Ledger, LedgerBroken, verify


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


CHANGES = {"round": 9, "operation": "other", "kind": "metrics", "bytes": 10**6, "digest": "0" * 64, "to": "nobody"}
CHANGES |= {"privacy": {"epsilon": 0}, "index": 7, "previous": "f" * 64, "digest_of_line": "e" * 64}


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
