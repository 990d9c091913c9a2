"""New keys of a site: the old key vouches for them, and old ledgers stay as good as they were."""

import hashlib
import json
import shutil
import tomllib

import pytest
import tomli_w

from polyclinic.cli import run_app
from polyclinic.deployment.key_rotation import accept_rotations, rotate_keys
from polyclinic.deployment.kits import pin_keys
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys, PublicKeys, public_key, signing_public_key
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken
from polyclinic.files import lock


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


def test_others_take_the_new_key_on_the_old_ones_word(kits):
    rotations = rotate_keys(kits["north"])
    rotations = rotate_keys(kits["north"])
    for name in ("south", "server"):
        file = kits[name] / "local" / "site_keys.toml"
        assert accept_rotations(file, rotations) == ("north", 2)
        assert accept_rotations(file, rotations) == ("north", 0)
        assert file.read_text() == (kits["north"] / "local" / "site_keys.toml").read_text()
    assert PublicKeys(kits["server"] / "local" / "site_keys.toml").verifying_keys("south")


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
