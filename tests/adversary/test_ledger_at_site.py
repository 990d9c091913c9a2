"""Attack: empty, delete, cut or put back the ledger of a deployed site, so that its budgets begin anew."""

import json
import shutil

import numpy as np
import pytest
from attacked_site import KINDS, SITE, ask, first_weights

from polyclinic.cli import run_app
from polyclinic.federation.call import COORDINATOR, Call, GateRefused
from polyclinic.federation.ledger.keys import KitKeys, sign_anchor
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.verify import Heads


def ledger_of(kit, run="run"):
    return kit.folder / "runs" / run / "ledger" / f"{SITE}.jsonl"


def train(host, round=1, anchor=None):
    parcels = {"weights": Parcel("weights", first_weights(host))}
    return host.handle(Call(SITE, "train", round, parcels, anchor=anchor))


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def tear(path):
    path.write_bytes(path.read_bytes()[:-20])


ATTACKS = [empty, cut, tear, lambda path: path.unlink(), lambda path: shutil.rmtree(path.parent.parent)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_does_not_go_on_without_its_ledger(kit, attack):
    train(kit.host())
    attack(ledger_of(kit))
    with pytest.raises(LedgerBroken, match=r"line 1: is missing.* the anchor .* says 1 lines; put the ledger back"):
        train(kit.host(), 2)


@pytest.mark.parametrize("attack", ATTACKS)
def test_budgets_of_other_runs_are_not_reset(kit, attack):
    size = len(train(kit.host("first")).parcels[0].encoded)
    kit.policy(max_bytes=int(1.5 * size))
    with pytest.raises(GateRefused, match="bytes would have left this site"):
        train(kit.host("second"))
    attack(ledger_of(kit, "first"))
    with pytest.raises(LedgerBroken, match="says 1 lines"):
        train(kit.host("third"))
    assert not ledger_of(kit, "third").exists()


def test_what_is_written_down_is_on_disk_before_it_leaves(kit, monkeypatch):
    """Order of events: the line and its folder are synced, then the anchor has the head; only then there is a reply."""
    from polyclinic.federation.ledger import ledger

    events = []
    monkeypatch.setattr(ledger, "sync_file", lambda path: events.append((path.name, len(path.read_text().split("\n")))))
    monkeypatch.setattr(ledger, "sync_folder", lambda path: events.append((path.name, None)))
    write = ledger.atomic_write

    def noted(path, content, **options):
        events.append((path.name, options["durable"]))
        write(path, content, **options)

    monkeypatch.setattr(ledger, "atomic_write", noted)
    reply = train(kit.host())
    # what comes before these are the lines about the study's approval
    assert events[-3:] == [("north.jsonl", 2), ("ledger", None), ("run.json", True)]
    assert reply.head.lines == 1
    assert json.loads((kit.folder / "anchors" / "runs" / "run.json").read_text())["head"] == list(reply.head)


def test_files_of_anchors_are_private(kit):
    train(kit.host())
    anchor = kit.folder / "anchors" / "runs" / "run.json"
    assert anchor.stat().st_mode & 0o777 == 0o600
    assert anchor.parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def heads(kit):
    """What the coordinator of the run keeps."""
    folder = kit.server / "runs" / "run"
    folder.mkdir(parents=True)
    return Heads(folder, KitKeys(kit.server))


def exchange(kit, heads, round):
    """A call with the anchor, and its answer, as a federation does it."""
    host = kit.host()
    call = Call(SITE, "train", round, {"weights": Parcel("weights", first_weights(host))}, anchor=heads.anchor(SITE))
    call = Call.from_bytes(call.to_bytes())
    heads.receive(call, host.handle(call))


def test_the_site_keeps_what_the_coordinator_signed(kit, heads):
    exchange(kit, heads, 1)
    exchange(kit, heads, 2)
    kept = json.loads((kit.folder / "anchors" / "runs" / "run.json").read_text())
    assert (kept["head"][0], kept["countersigned"][0]) == (2, 1)
    lines = [json.loads(text) for text in ledger_of(kit).read_text().splitlines()]
    assert [kept["countersigned"][1], kept["head"][1]] == [line["digest_of_line"] for line in lines]


def test_ledger_and_anchor_put_back_together_are_found_by_the_coordinators_signature(kit, heads, tmp_path):
    """A backup of the whole kit fits itself: only somebody else can know that there was more."""
    exchange(kit, heads, 1)
    shutil.copytree(kit.folder, tmp_path / "backup")
    exchange(kit, heads, 2)
    shutil.rmtree(kit.folder)
    shutil.copytree(tmp_path / "backup", kit.folder)
    with pytest.raises(LedgerBroken, match="line 2: is missing; the coordinator's counter-signature says 2 lines"):
        exchange(kit, heads, 3)


def test_ledger_and_anchor_deleted_together_are_found_too(kit, heads):
    exchange(kit, heads, 1)
    ledger_of(kit).unlink()
    shutil.rmtree(kit.folder / "anchors")
    with pytest.raises(LedgerBroken, match="line 1: is missing"):
        exchange(kit, heads, 2)


def test_the_coordinator_refuses_a_ledger_that_went_back_or_has_another_key(kit, heads):
    exchange(kit, heads, 1)
    exchange(kit, heads, 2)
    host = kit.host("other")
    reply = train(host)
    call = Call(SITE, "train", 3)
    with pytest.raises(ParcelRejected, match="its ledger had 2 lines, and is another one now, of 1 lines"):
        heads.receive(call, reply)
    forged = reply.head._replace(lines=3, signature="0" * 128)
    with pytest.raises(ParcelRejected, match="is not signed with the key that the kits have for it"):
        heads.receive(call, type(reply)(SITE, reply.parcels, forged))
    with pytest.raises(ParcelRejected, match="without the head of the site's ledger"):
        heads.receive(call, type(reply)(SITE, reply.parcels))


def test_a_coordinator_cannot_invent_heads(kit, heads):
    exchange(kit, heads, 1)
    anchor = heads.anchor(SITE)
    invented = anchor.head._replace(lines=50, digest="0" * 64)
    server = KitKeys(kit.server).signing_key()
    with pytest.raises(ParcelRejected, match="not signed by this site"):
        train(kit.host(), 2, sign_anchor(server, "run", SITE, invented))
    for wrong in (anchor._replace(countersignature="0" * 128), sign_anchor(server, "other run", SITE, anchor.head)):
        with pytest.raises(ParcelRejected, match="not signed by the coordinator's key"):
            train(kit.host(), 2, wrong)


def test_a_head_tells_the_coordinator_nothing_about_what_was_sealed(kit):
    """Who knows the content of a line otherwise could confirm a guess by the head, which depends on the content."""
    from polyclinic.federation.layers.gate import Gate, RawImages
    from polyclinic.federation.ledger.ledger import Ledger
    from polyclinic.federation.policy import Policy

    heads = set()
    for number in range(2):
        ledger = Ledger(kit.folder / f"{number}.jsonl", KitKeys(kit.folder / "local").signing_key())
        gate = Gate(
            SITE, Policy(deployed=True, kinds=("metrics",)), ledger, RawImages(np.zeros((0, 1, 16, 16), dtype=np.uint8))
        )
        for to in (COORDINATOR, "south"):
            gate.release([Parcel("metrics", {})], round=1, operation="x", to=to)
        heads.add(ledger.head.digest)
        lines = [json.loads(text) for text in ledger.path.read_text().splitlines()]
        assert ["salt" in line for line in lines] == [False, True]
    assert len(heads) == 2


def verify(capsys, *arguments):
    code = run_app(["ledger", "verify", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_verify_compares_with_what_the_coordinator_received(kit, heads, capsys):
    exchange(kit, heads, 1)
    exchange(kit, heads, 2)
    run, server = kit.folder / "runs" / "run", kit.server / "runs" / "run"
    code, words = verify(capsys, run, "--against", server)
    assert code == 0
    assert words == (
        "north: 2 lines, each follows the one before it; signatures are right; records outside the ledger confirm 2 "
        "lines; 2 are counter-signed by the coordinator.\n"
    )
    received = server / "received.jsonl"
    received.write_text(received.read_text().replace('"kind": "weights"', '"kind": "latents"', 1))
    code, words = verify(capsys, run, "--against", server)
    assert code == 1
    assert "received.jsonl, line 1: latents of 'train' in round 1 came, and" in words
    assert verify(capsys, server)[0] == 2


def test_verify_with_public_keys_and_the_file_only(kit, heads, tmp_path, capsys):
    exchange(kit, heads, 1)
    exchange(kit, heads, 2)
    alone = tmp_path / f"{SITE}.jsonl"
    shutil.copy(ledger_of(kit), alone)
    keys = kit.server / "site_keys.toml"
    code, words = verify(capsys, alone, "--keys", keys)
    assert (code, "signatures are right" in words) == (0, True)
    assert "nothing outside the ledger says how many lines it must have" in words
    cut(alone)
    assert verify(capsys, alone, "--keys", keys)[0] == 0  # what is left is right, and verify said what it cannot know
    assert verify(capsys, alone, "--keys", keys, "--against", kit.server / "runs" / "run")[0] == 1
    shutil.copy(alone, tmp_path / "south.jsonl")
    code, words = verify(capsys, tmp_path / "south.jsonl", "--keys", keys)
    assert (code, "line 1: is not signed by the site's key" in words) == (1, True)


@pytest.mark.parametrize("attack", ATTACKS)
def test_verify_in_the_kit_finds_it(kit, attack, capsys):
    train(kit.host())
    attack(ledger_of(kit))
    code, words = verify(capsys, kit.folder / "runs" / "run")
    assert code == 1
    assert "the ledger of site 'north' does not hold: " in words
    assert "north.jsonl, line 1: is " in words


def test_an_officer_reads_sentences(kit, capsys):
    kit.policy(kinds=[kind for kind in KINDS if kind != "metrics"])
    host = kit.host()
    weights = ask(host, "train", weights=first_weights(host)).weights
    with pytest.raises(GateRefused) as refused:
        ask(host, "evaluate", weights=weights, split="validation")
    (kit.folder / "failures.log").write_text(f"2026-01-01 00:00:00 {refused.value}\n")
    assert run_app(["ledger", "show", str(kit.folder / "runs" / "run"), "--for-officer"]) == 0
    words = capsys.readouterr().out
    assert "- weights of a model: once, in round 1, " in words
    assert "to the coordinator (step 'train')." in words
    assert "Differential privacy covers nothing of this" in words
    assert "The gate kept parcels back 1 times" in words
    assert "kept back metrics of 'evaluate'" in words
