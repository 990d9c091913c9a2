"""Attack: change, remove, add, move or cut lines of a signed ledger, with the chain made anew by who has no key.

Whatever one does to the lines, `check_ledger` names the first wrong line.
"""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.ledger.ledger import GENESIS, AnchorFile, Ledger, LedgerBroken
from polyclinic.federation.ledger.verify import Evidence, check_ledger, witnesses_at_site

KEYS = SeedKeys(7)
LINES = 6


def lines_of_ledger(path, anchor, signer):
    ledger = Ledger(path, signer, anchor)
    for number in range(LINES):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        ledger.append(round=number, operation="train", kind="weights", bytes=9, digest=digest, to="coordinator")
    ledger.commit()
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A signed ledger of six lines with its anchor; its lines; and what it is checked with."""
    folder = tmp_path_factory.mktemp("honest")
    path, anchor = folder / "run" / "ledger" / "north.jsonl", folder / "anchors" / "run.json"
    lines = lines_of_ledger(path, AnchorFile(anchor), KEYS.signing_key("north"))
    evidence = Evidence(KEYS, strict=True, witnesses=witnesses_at_site(anchor, "north"))
    return path, lines, evidence


def chained(lines, signer=None):
    """The lines with a chain made anew from the beginning, as anybody can; old signatures, unless there is a key."""
    previous, result = GENESIS, []
    for index, line in enumerate(lines):
        new = {**line, "index": index, "previous": previous}
        content = {name: value for name, value in new.items() if name not in ("digest_of_line", "signature")}
        new["digest_of_line"] = previous = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if signer:
            new["signature"] = signer.sign(b"polyclinic ledger line 1 " + previous.encode()).hex()
        result.append(new)
    return result


def check(honest, lines):
    path, _, evidence = honest
    before = path.read_bytes()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        return check_ledger(path, "north", evidence)
    finally:
        path.write_bytes(before)


def wrong_line(honest, lines):
    with pytest.raises(LedgerBroken) as found:
        check(honest, lines)
    return int(str(found.value).split("north.jsonl, line ")[1].split(":")[0])


def test_the_honest_ledger_holds(honest):
    checked = check(honest, honest[1])
    assert (len(checked.lines), checked.unsigned, checked.seen, checked.signatures_checked) == (LINES, 0, LINES, True)


CHANGES = {"round": 77, "operation": "other", "kind": "metrics", "bytes": 1, "digest": "0" * 64, "to": "nobody"}
CHANGES |= {"privacy": {"epsilon": 0}, "index": 70, "previous": "f" * 64, "digest_of_line": "e" * 64}
CHANGES |= {"signature": "0" * 128, "salt": "0" * 32}


@given(
    what=st.sampled_from(["edit", "remove", "truncate", "repeat", "swap", "unsign"]),
    place=st.integers(0, LINES - 1),
    other=st.integers(0, LINES - 1),
    field=st.sampled_from(list(CHANGES)),
    rechained=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_first_wrong_line_is_named(honest, what, place, other, field, rechained):
    lines = list(honest[1])
    first = place
    if what == "edit":
        lines[place] = {**lines[place], field: CHANGES[field]}
    elif what == "remove":
        del lines[place]
    elif what == "truncate":
        lines = lines[:place]
    elif what == "repeat":
        lines.insert(place + 1, lines[place])
        first = place + 1
    elif what == "swap":
        if place == other:
            return
        lines[place], lines[other] = lines[other], lines[place]
        first = min(place, other)
    else:
        lines[place] = {name: value for name, value in lines[place].items() if name != "signature"}
    if rechained:
        lines = chained(lines)
    if lines == honest[1]:  # an edited index, digest or link that the new chain has put right again
        return
    assert wrong_line(honest, lines) == first + 1


def test_a_ledger_written_anew_with_another_key_is_found_at_its_first_line(honest):
    thief = Ed25519PrivateKey.generate()
    assert wrong_line(honest, chained(honest[1], thief)) == 1


def test_a_ledger_written_anew_with_the_right_key_does_not_fit_its_anchor(honest):
    """The site's own people have its key; the anchor has what the ledger was."""
    smaller = chained([{**line, "bytes": 1} for line in honest[1]], KEYS.signing_key("north"))
    assert wrong_line(honest, smaller) == LINES
    assert wrong_line(honest, chained(honest[1][2:], KEYS.signing_key("north"))) == LINES - 1


def test_the_spelling_of_a_line_is_part_of_it(honest):
    path, _, evidence = honest
    before = path.read_bytes()
    for text in (before.replace(b'"bytes": 9', b'"bytes":  9', 1), before[:-1], before.replace(b"\n", b"\r\n", 1)):
        path.write_bytes(text)
        with pytest.raises(LedgerBroken, match=r"north\.jsonl, line "):
            check_ledger(path, "north", evidence)
    path.write_bytes(before)


def test_a_deleted_ledger_is_missing_from_its_first_line(honest):
    path, _, evidence = honest
    gone = path.with_name("gone.jsonl")
    with pytest.raises(LedgerBroken, match=r"line 1: is missing, the ledger is empty or gone; the anchor .* 6 lines"):
        check_ledger(gone, "north", evidence)
