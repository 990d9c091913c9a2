"""Verifying a ledger, and the keys that sign it."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned_keys import pin_keys

from polyclinic.errors import BadInput, Damaged, WorkFailed
from polyclinic.federation.call import COORDINATOR
from polyclinic.federation.ledger import verify as ledger_check
from polyclinic.federation.ledger.keys import (
    OVERHEAD,
    PUBLIC_FILE,
    SIGNING_FILE,
    Anchor,
    KitKeys,
    PublicKeys,
    SealBroken,
    SeedKeys,
    open_box,
    public_key,
    seal_box,
    sign_anchor,
    sign_line,
    signer_of_line,
    signing_public_key,
)
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken
from polyclinic.federation.ledger.verify import (
    RECEIVED_FILE,
    Checked,
    Evidence,
    Witness,
    check_ledger,
    check_run,
    evidence_about,
    witnesses_in,
)
from polyclinic.run_folder import note_files

KEYS = SeedKeys(7)


def write_ledger(path, site="north", lines=3, anchor=None, signed=True):
    """A ledger of so many lines; it is given back for more."""
    ledger = Ledger(path, KEYS.signing_key(site) if signed else None, anchor)
    for number in range(lines):
        add_line(ledger, number)
    return ledger


def add_line(ledger, number):
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    ledger.append(round=number, operation="train", kind="weights", bytes=9, digest=digest, to="coordinator")
    ledger.commit()


def write_public_keys(local, *sites):
    local.mkdir(parents=True)
    rows = [f'{site} = ["{signing_public_key(KEYS.signing_key(site)).hex()}"]' for site in sites]
    (local / PUBLIC_FILE).write_text("[signing]\n" + "\n".join(rows) + "\n")
    return local / PUBLIC_FILE


@pytest.fixture
def run(tmp_path):
    """A simulated run of seed 7 with the ledgers of two sites."""
    folder = tmp_path / "run"
    for site in ("north", "south"):
        write_ledger(folder / "ledger" / f"{site}.jsonl", site)
    (folder / "study.toml").write_text("seed = 7\n")
    return folder


@pytest.fixture
def kit(tmp_path):
    """The kit of site 'north', whose run has a ledger of three lines and an anchor."""
    folder = tmp_path / "kit"
    write_public_keys(folder / "local", "north", "south", "coordinator")
    (folder / "local" / SIGNING_FILE).write_bytes(KEYS.signing_key("north").private_bytes_raw())
    anchor = AnchorFile(folder / "anchors" / "runs" / "study.json")
    write_ledger(folder / "runs" / "study" / "ledger" / "north.jsonl", anchor=anchor)
    return folder


def test_a_run_is_checked_with_the_keys_that_are_known(run):
    found = check_run(run)
    assert {site: (len(one.lines), one.signatures_checked) for site, one in found.items()} == {
        "north": (3, True),
        "south": (3, True),
    }
    (run / "study.toml").write_text("seed = 8\n")
    with pytest.raises(WorkFailed, match=r"of site 'north' does not hold: .*line 1: is not signed by the site's key"):
        check_run(run)
    (run / "study.toml").write_text('[data]\nsource = "at-sites"\n')
    assert [found.signatures_checked for found in check_run(run).values()] == [False, False]
    (run / "study.toml").unlink()
    assert [found.signatures_checked for found in check_run(run).values()] == [False, False]


def test_lines_of_an_older_version_are_counted_in_a_simulation_and_refused_by_named_keys(tmp_path):
    run = tmp_path / "run"
    write_ledger(run / "ledger" / "north.jsonl", lines=2, signed=False)
    add_line(Ledger(run / "ledger" / "north.jsonl", KEYS.signing_key("north")), 2)
    (run / "study.toml").write_text("seed = 7\n")
    assert check_run(run)["north"].unsigned == 2
    keys = write_public_keys(tmp_path / "local", "north")
    with pytest.raises(WorkFailed, match="line 1: is not signed"):
        check_run(run, keys=keys)


def test_a_ledger_file_by_itself(run, tmp_path):
    """In a run folder it is compared with what the folder says; anywhere else the chain is all there is."""
    file = run / "ledger" / "north.jsonl"
    assert check_run(file)["north"].signatures_checked
    alone = tmp_path / "elsewhere" / "north.jsonl"
    alone.parent.mkdir()
    alone.write_bytes(file.read_bytes())
    found = check_run(alone)["north"]
    assert (len(found.lines), found.signatures_checked, found.seen) == (3, False, 0)
    assert evidence_about(alone).run == ""
    assert evidence_about(file).run == "run"


def test_missing_ledgers_and_results_are_named(tmp_path):
    with pytest.raises(BadInput, match="holds no ledger; name a run folder or a ledger file"):
        check_run(tmp_path)
    (tmp_path / RECEIVED_FILE).write_text("")
    with pytest.raises(BadInput, match=r"the ledgers of this run are at its sites; name KIT/runs/NAME"):
        check_run(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(BadInput, match=r"--against .*: holds no received\.jsonl; name the coordinator's folder"):
        check_run(tmp_path, against=other)
    (tmp_path / "result.json").write_text('{"ledgers": {}}')
    note_files(tmp_path)
    assert witnesses_in(tmp_path) == []
    (tmp_path / "result.json").unlink()
    with pytest.raises(Damaged, match=r"result\.json: is gone"):
        witnesses_in(tmp_path)


def test_a_ledger_that_is_gone_is_missed_by_who_has_seen_it(run):
    head = json.loads((run / "ledger" / "south.jsonl").read_text().splitlines()[-1])
    (run / "checkpoint").mkdir()
    seen = {"plain": {"ledgers": {"south": [3, head["digest_of_line"], "", ""]}}}
    (run / "checkpoint" / "manifest.json").write_text(json.dumps(seen))
    assert check_run(run)["south"].seen == 3
    for file in (run / "ledger").iterdir():
        file.unlink()
    with pytest.raises(WorkFailed, match=r"the ledger of site 'south' does not hold: .*empty or gone"):
        check_run(run)


def test_a_run_in_a_kit_is_checked_with_its_keys_and_its_anchor(kit):
    run = kit / "runs" / "study"
    evidence = evidence_about(run)
    assert isinstance(evidence.keys, PublicKeys)
    assert evidence.strict
    assert [(one.site, one.anchor.lines) for one in evidence.witnesses] == [("north", 3)]
    assert check_run(run)["north"].seen == 3
    (run / "ledger" / "north.jsonl").unlink()
    with pytest.raises(WorkFailed, match="the ledger of site 'north' does not hold"):
        check_run(run)


def test_a_site_that_has_deleted_its_key_is_known_by_its_only_ledger(kit):
    (kit / "local" / SIGNING_FILE).unlink()
    run = kit / "runs" / "study"
    assert [one.site for one in evidence_about(run).witnesses] == ["north"]
    assert check_run(run)["north"].seen == 3
    write_ledger(run / "ledger" / "south.jsonl", "south")  # now it may be either's
    assert evidence_about(run).witnesses == []
    for file in (run / "ledger").iterdir():
        file.unlink()
    assert evidence_about(run).witnesses == []


def test_a_sites_kit_answers_for_its_own_ledger_only(kit, tmp_path):
    """The coordinator has seen the ledgers of all; those of others are not in this kit."""
    run, against = kit / "runs" / "study", tmp_path / "server"
    against.mkdir()
    last = json.loads((run / "ledger" / "north.jsonl").read_text().splitlines()[-1])
    base = {"round": 1, "operation": "train", "to": "coordinator", "parcels": []}
    heads = {"north": [3, last["digest_of_line"], "", ""], "south": [5, "d", "", ""]}
    text = [json.dumps({**base, "site": site, "head": head}) for site, head in heads.items()]
    (against / RECEIVED_FILE).write_text("\n".join(text) + "\n")
    assert list(check_run(run, against=against)) == ["north"]
    assert [one.site for one in evidence_about(run, against=against).witnesses] == ["north", "north", "south"]


def test_named_keys_come_before_those_of_the_kit(kit, tmp_path):
    named = write_public_keys(tmp_path / "named", "south")
    with pytest.raises(WorkFailed, match="line 1: there is no public key of site 'north' to check its signature with"):
        check_run(kit / "runs" / "study", keys=named)


def test_a_run_folder_tells_of_heads_in_its_result_checkpoint_and_received_lines(tmp_path):
    assert witnesses_in(tmp_path) == []
    (tmp_path / "result.json").write_text(json.dumps({"ledgers": {"a": {"lines": 2, "digest": "r"}}}))
    (tmp_path / "checkpoint").mkdir()
    manifest = {"plain": {"ledgers": {"a": [1, "c", "s", "t"]}}}
    (tmp_path / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
    rows = [{"site": "a", "head": [number, f"d{number}", "", ""]} for number in (1, 2, 3)]
    (tmp_path / RECEIVED_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"site": "a", "he')
    found = witnesses_in(tmp_path)
    assert [(one.site, tuple(one.anchor)) for one in found] == [
        ("a", (2, "r", "", "")),
        ("a", (1, "c", "s", "t")),
        ("a", (3, "d3", "", "")),
    ]
    assert [one.name.removeprefix(f"{tmp_path}/") for one in found] == [
        "result.json",
        "checkpoint/manifest.json",
        "received.jsonl, line 3,",
    ]


@pytest.mark.parametrize(("file", "text", "words"), [
    ("result.json", "{", "result.json: is damaged"),
    ("result.json", "[]", "result.json: is damaged"),
    ("result.json", '{"ledgers": {"a": {}}}', "what it says about the ledger of site 'a' is damaged"),
    ("checkpoint/manifest.json", '{"plain": 3}', "manifest.json: is damaged"),
])  # fmt: skip
def test_a_witness_that_is_damaged_is_named(tmp_path, file, text, words):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / file).write_text(text)
    with pytest.raises(LedgerBroken, match=words):
        witnesses_in(tmp_path)


def head_at(path, number):
    """What a witness of the first lines of a ledger has seen."""
    line = json.loads(path.read_text().splitlines()[number - 1])
    return Anchor(number, line["digest_of_line"], line.get("signature", ""))


def test_the_furthest_witness_counts_and_the_furthest_counter_signature(tmp_path):
    path = tmp_path / "run" / "ledger" / "north.jsonl"
    write_ledger(path, lines=4)
    signed = [
        sign_anchor(KEYS.signing_key("coordinator"), "run", "north", head_at(path, number).head) for number in (1, 2)
    ]
    witnesses = [Witness("w", "north", one) for one in (head_at(path, 3), signed[1], signed[0])]
    witnesses.append(Witness("w", "south", Anchor(99, "of another ledger")))
    checked = check_ledger(path, "north", Evidence(KEYS, True, witnesses, run="run"))
    assert (checked.seen, checked.countersigned, checked.not_received) == (3, 2, [])
    forged = [Witness("w", "north", head_at(path, 3)._replace(countersignature="00" * 64))]
    with pytest.raises(LedgerBroken, match="w: the counter-signature of 3 lines is not the coordinator's"):
        check_ledger(path, "north", Evidence(KEYS, True, forged, run="run"))
    for unknown in (Evidence(KEYS, True, forged), Evidence(None, False, forged, run="run")):
        assert check_ledger(path, "north", unknown).countersigned == 3  # nobody can say whose it is


def test_what_the_coordinator_never_received_is_counted(monkeypatch, tmp_path):
    same = {"round": 1, "operation": "train", "kind": "weights", "digest": "d"}
    lines = [
        {**same, "index": 0, "to": COORDINATOR, "bytes": 5},
        {**same, "index": 1, "to": "site-2", "bytes": 5},
        {**same, "index": 2, "to": COORDINATOR, "bytes": 0},
        {**same, "index": 3, "to": COORDINATOR, "bytes": 7},
    ]
    came = {"site": "site-1", "number": 1, "round": 1, "operation": "train", "to": COORDINATOR}
    parcel = {"kind": "weights", "bytes": 5, "digest": "d"}
    told = [{**came, "parcels": [parcel]}, {**came, "site": "another", "parcels": [7]}]
    monkeypatch.setattr(ledger_check, "read_received", lambda folder: told)
    checked = Checked(lines, signatures_checked=True)
    ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    assert checked.not_received == [4]
    sealed = {**came, "to": "site-2", "parcels": [{**parcel, "digest": None}]}  # nobody but site 2 knows its content
    told.append(sealed)
    ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    sealed["to"] = COORDINATOR
    with pytest.raises(LedgerBroken, match="has no such line"):
        ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)
    told.pop()
    parcel["digest"] = "other"
    with pytest.raises(LedgerBroken, match=r"line 1: weights of 'train' in round 1 came, and .* has no such line"):
        ledger_check._compare(tmp_path / "ledger", "site-1", checked, tmp_path)


def test_kits_have_their_own_keys_and_the_public_ones_of_all(tmp_path):
    local = {name: tmp_path / name for name in ("north", "south", "server")}
    for folder in local.values():
        folder.mkdir()
    pin_keys({name: local[name] for name in ("north", "south")}, local["server"])
    rings = {name: KitKeys(folder) for name, folder in local.items()}
    assert [ring.owner() for ring in rings.values()] == ["north", "south", "coordinator"]
    for name, ring in rings.items():
        assert (local[name] / "signing.key").stat().st_mode & 0o777 == 0o600
        mine = (signing_public_key(ring.signing_key()),)
        assert {other.verifying_keys(ring.owner()) for other in rings.values()} == {mine}
        assert ring.verifying_keys("phantom") == ()
    assert not (local["server"] / "sealing.key").exists()
    with pytest.raises(BadInput, match=r"sealing\.key: is missing"):
        KitKeys(tmp_path).own("north")
    assert SeedKeys(1).public("a") == SeedKeys(1).public("a") == public_key(SeedKeys(1).own("a"))
    assert len({SeedKeys(seed).public(name) for seed in (1, 2) for name in "ab"}) == 4


def test_signatures_and_boxes_are_for_who_made_them():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    keys, signature = [signing_public_key(key)], sign_line(key, "a" * 64)
    assert signer_of_line(keys, "a" * 64, signature) == 0
    for changed in (signature.upper(), f" {signature}", signature[:-2], signature + "00", "no digits", 7, None):
        assert signer_of_line(keys, "a" * 64, changed) is None
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben(), ABOUT, recipient=EVE, sender=public_key(ANNA))
    forged = seal_box(b"model", ABOUT, sender=EVE, recipient=public_key(BEN))
    with pytest.raises(SealBroken):
        open_box(forged, ABOUT, recipient=BEN, sender=public_key(ANNA))
    with pytest.raises(SealBroken):
        open_box(bytes(32) + from_anna_to_ben()[32:], ABOUT, recipient=BEN, sender=public_key(ANNA))


ANNA, BEN, EVE = (X25519PrivateKey.generate() for _ in range(3))
ABOUT = {"from": "anna", "to": "ben", "round": 4}


def from_anna_to_ben(plain=b"model"):
    return seal_box(plain, ABOUT, sender=ANNA, recipient=public_key(BEN))


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300))
def test_what_is_sealed_comes_out_and_cannot_be_seen(plain):
    box = from_anna_to_ben(plain)
    assert len(box) == len(plain) + OVERHEAD
    assert len(plain) < 8 or plain not in box
    assert open_box(box, ABOUT, recipient=BEN, sender=public_key(ANNA)) == plain


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_changed_bit_is_noticed(data):
    box = bytearray(from_anna_to_ben())
    box[data.draw(st.integers(0, len(box) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    with pytest.raises(SealBroken):
        open_box(bytes(box), ABOUT, recipient=BEN, sender=public_key(ANNA))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 47])
def test_a_box_cut_short_is_noticed(length):
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben()[:length], ABOUT, recipient=BEN, sender=public_key(ANNA))


@pytest.mark.parametrize("about", [{**ABOUT, "round": 5}, {**ABOUT, "to": "eve"}, {}])
def test_a_box_about_something_else_does_not_open(about):
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben(), about, recipient=BEN, sender=public_key(ANNA))
