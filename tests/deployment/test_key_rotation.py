"""Keys that change hands: rotation, a site that leaves for good, a site that others no longer trust."""

import hashlib
import json
import shutil
import tomllib

import pytest
import tomli_w

from polyclinic.cli import run_app
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.key_rotation import accept_rotations, rotate_keys
from polyclinic.deployment.kits import pin_keys
from polyclinic.deployment.processes import Participant
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys, public_key, signing_public_key
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken
from polyclinic.files import lock
from polyclinic.study import Study


@pytest.fixture
def kits(tmp_path):
    """Kits of two sites and the server, with keys and nothing else."""
    kits = {name: tmp_path / name for name in ("north", "south", "server")}
    for kit in kits.values():
        (kit / "local").mkdir(parents=True)
    pin_keys({name: kits[name] / "local" for name in ("north", "south")}, kits["server"] / "local")
    return kits


def release(kit, content, run="run"):
    path = kit / "runs" / run / "ledger" / "north.jsonl"
    anchor = AnchorFile(kit / "anchors" / "runs" / f"{run}.json")
    ledger = Ledger(path, KitKeys(kit / "local").signing_key(), anchor)
    digest = hashlib.sha256(content.encode()).hexdigest()
    ledger.append(round=1, operation="train", kind="weights", bytes=1, digest=digest, to="coordinator")
    ledger.commit()
    return path


def test_a_ledger_goes_on_with_the_new_key_and_all_of_it_verifies(kits, capsys):
    path = release(kits["north"], "before")
    rotate_keys(kits["north"])
    release(kits["north"], "after")
    rotate_keys(kits["north"])
    keys = KitKeys(kits["north"] / "local")
    assert len(set(keys.verifying_keys("north"))) == 3
    assert keys.verifying_keys("north")[-1] == signing_public_key(keys.signing_key())
    assert keys.public("north") == public_key(keys.own(""))
    for folder in (path.parent.parent, kits["north"] / "keys" / "rotations"):
        assert run_app(["ledger", "verify", str(folder)]) == 0
        assert "signatures are right; records outside the ledger confirm" in capsys.readouterr().out
    # the oldest key signs nothing after a newer one has
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "signature": lines[0]["signature"]}) + "\n" for line in lines))
    assert run_app(["ledger", "verify", str(path)]) == 1
    assert "line 2: is not signed by the site's key" in capsys.readouterr().err


def test_a_key_that_the_old_one_does_not_vouch_for_is_not_taken(kits, tmp_path):
    file = kits["server"] / "local" / "site_keys.toml"
    before = file.read_text()
    forged = tmp_path / "north.jsonl"
    shutil.copy(rotate_keys(kits["south"]), forged)  # signed by south's key
    with pytest.raises(
        LedgerBroken, match=r"north\.jsonl, line 1: is not signed by the key that site 'north' had then"
    ):
        accept_rotations(file, forged)
    shutil.copy(rotate_keys(kits["north"]), forged)
    old = forged.read_bytes()
    accept_rotations(file, forged)
    accept_rotations(file, rotate_keys(kits["north"]))
    after = file.read_text()
    forged.write_bytes(old)
    with pytest.raises(LedgerBroken, match="lacks a key of site 'north'"):
        accept_rotations(file, forged)
    assert file.read_text() == after
    assert after != before


def test_a_site_that_is_not_trusted_does_not_come_back_by_a_rotation(kits):
    """A thief has the old key, whose word would bring in a key of the thief's own."""
    file = kits["south"] / "local" / "site_keys.toml"
    tables = tomllib.loads(file.read_text())
    del tables["sealing"]["north"]
    file.write_text(tomli_w.dumps(tables))
    with pytest.raises(BadInput, match="has no sealing key of site 'north', which is not trusted here"):
        accept_rotations(file, rotate_keys(kits["north"]))


def test_a_site_that_has_deleted_its_keys_can_still_check_its_ledgers(kits, capsys):
    path = release(kits["north"], "before")
    (kits["north"] / "local" / "signing.key").unlink()
    assert run_app(["ledger", "verify", str(path.parent.parent)]) == 0
    assert "signatures are right; records outside the ledger confirm 1 lines" in capsys.readouterr().out
    path.write_bytes(b"")
    assert run_app(["ledger", "verify", str(path.parent.parent)]) == 1


def test_keys_are_not_rotated_while_a_run_is_at_work(kits, monkeypatch):
    monkeypatch.setattr("polyclinic.deployment.key_rotation.WAIT", 0.05)
    (kits["north"] / "runs").mkdir()
    with (
        lock(kits["north"] / "runs" / ".study.lock"),
        pytest.raises(BadInput, match="run 'study' is at work at this site"),
    ):
        rotate_keys(kits["north"])
    rotate_keys(kits["north"])


@pytest.fixture
def kit(tmp_path):
    """The kit of site 'north': its keys, a run that was approved and one that waits."""
    places = {name: tmp_path / name / "local" for name in ("north", "south", "server")}
    for place in places.values():
        place.mkdir(parents=True)
    pin_keys({name: places[name] for name in ("north", "south")}, places["server"])
    kit = tmp_path / "north"
    files = {
        "startup/fed_client.json": json.dumps({"client": {"fqsn": "north"}}),
        "startup/client.key": "secret",
        "startup/client.crt": "public",
        "local/policy.toml": "",
        "runs/first/sites/north/noise.key": "secret",
        "runs/first/model.safetensors": "model",
        "cache/images.npy": "images",
    }
    for name, text in files.items():
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text(text)
    study = Study(
        data={"source": "at-sites", "dataset": "scans", "classes": ["clear", "ill"]},
        sites={"partition": "column", "names": ["north", "south"]},
        method={"name": "fedavg"},
    )
    approvals = Approvals(kit, "north")
    for run in ("first", "second", "third"):
        approvals.request(run, study, "1")
    approvals.decide("first", "approve")
    approvals.decide("third", "refuse")
    return kit


def test_what_could_act_in_its_name_goes_and_the_proof_stays(kit, capsys):
    assert run_app(["site", "leave", "--kit", str(kit)]) == 2
    assert "--yes: missing" in capsys.readouterr().err
    assert (kit / "startup" / "client.key").exists()
    assert run_app(["site", "leave", "--yes", "--kit", str(kit)]) == 0
    told = capsys.readouterr().out
    gone = ("startup/client.key", "local/sealing.key", "local/signing.key", "runs/first/sites/north/noise.key", "cache")
    for name in gone:
        assert f"deleted {kit / name}\n" in told
        assert not (kit / name).exists()
    for name in ("startup/client.crt", "local/site_keys.toml", "runs/first/model.safetensors"):
        assert (kit / name).exists()
    approvals = Approvals(kit, "north")
    assert [approvals.state(run) for run in ("first", "second", "third")] == ["revoked", "refused", "refused"]
    assert approvals.decisions("first")[-1].why == "the site leaves for good"
    assert approvals.decisions("third")[-1].why == ""
    with pytest.raises(BadInput, match=r"left for good on .*; to take part again, get a new kit"):
        Participant.of(kit).start()


def test_a_running_site_does_not_leave(kit, capsys, monkeypatch):
    monkeypatch.setattr("polyclinic.deployment.key_rotation.is_running", lambda folder: folder == kit)
    assert run_app(["site", "leave", "--yes", "--kit", str(kit)]) == 2
    assert "site north is running; stop it" in capsys.readouterr().err
    assert (kit / "startup" / "client.key").exists()


def test_nothing_is_sealed_for_a_site_that_is_not_trusted_and_its_old_ledgers_verify(kit, capsys):
    before = KitKeys(kit / "local").verifying_keys("south")
    assert KitKeys(kit / "local").public("south") is not None
    assert run_app(["site", "distrust", "south", "--kit", str(kit)]) == 0
    assert KitKeys(kit / "local").public("south") is None
    assert KitKeys(kit / "local").verifying_keys("south") == before
    assert run_app(["site", "distrust", "south", "--kit", str(kit)]) == 2
    assert "has no sealing key of this site" in capsys.readouterr().err


def test_keys_are_rotated_and_taken_by_others_on_the_old_keys_word(kit, tmp_path, capsys):
    old = KitKeys(kit / "local").public("north")
    assert run_app(["site", "rotate-keys", "--kit", str(kit)]) == 0
    file = kit / "keys" / "rotations" / "ledger" / "north.jsonl"
    assert f"send {file} to the coordinator" in capsys.readouterr().out
    for other in ("south", "server"):
        assert KitKeys(tmp_path / other / "local").public("north") == old
        for told in ("north: new keys taken", "north: its newest keys are known already"):
            assert run_app(["site", "accept-keys", str(file), "--kit", str(tmp_path / other)]) == 0
            assert told in capsys.readouterr().out
        assert KitKeys(tmp_path / other / "local").public("north") == KitKeys(kit / "local").public("north") != old


def test_keys_for_which_the_old_key_does_not_vouch_are_not_taken(kit, tmp_path, capsys):
    run_app(["site", "rotate-keys", "--kit", str(kit)])
    thief = tmp_path / "north.jsonl"
    lines = (kit / "keys" / "rotations" / "ledger" / "north.jsonl").read_text().splitlines()
    forged = json.loads(lines[0]) | {"signature": "00" * 64}
    thief.write_text(json.dumps(forged) + "\n")
    before = (tmp_path / "south" / "local" / "site_keys.toml").read_text()
    assert run_app(["site", "accept-keys", str(thief), "--kit", str(tmp_path / "south")]) == 1
    assert "these keys were not taken" in capsys.readouterr().err
    assert (tmp_path / "south" / "local" / "site_keys.toml").read_text() == before
    assert run_app(["site", "accept-keys", "gone.jsonl", "--kit", str(tmp_path / "south")]) == 2
