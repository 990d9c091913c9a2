"""A backup of a kit that is put back as a whole: the coordinator has seen a later end of a ledger."""

import json
import shutil

import pytest
from kit_of_north import make_kit

from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.coordination import ends_of_ledgers
from polyclinic.deployment.deployed_site import ApprovedRelay, notice_put_back
from polyclinic.errors import BadInput
from polyclinic.federation.call import pack
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger
from polyclinic.run_folder import note_files


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path)


def released(kit, run, times, key=None):
    """Parcels leave for a run; the head of its ledger."""
    path, anchor = kit / "runs" / run / "ledger" / "north.jsonl", AnchorFile(kit / "anchors" / "runs" / f"{run}.json")
    ledger = Ledger(path, key or KitKeys(kit / "local").signing_key(), anchor)
    for number in range(times):
        about = {"round": number, "operation": "train", "kind": "weights", "bytes": 9, "to": "coordinator"}
        ledger.append(f"{number}" * 64, **about)
    ledger.commit()
    return ledger.head


def known_to_coordinator(tmp_path, run, head):
    folder = tmp_path / "server" / "runs" / run
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"ledgers": {"north": head._asdict()}}))
    note_files(folder)
    return ends_of_ledgers(tmp_path / "server" / "runs")["north"]


def ask(kit, seen, run="now"):
    relay = ApprovedRelay("north", None, str, lambda: None, lambda told: notice_put_back(kit, "north", run, told))
    relay.handle("ping", pack({"seen": seen}, []))
    return [one.reason for one in Suspensions(kit).all()]


def test_a_ledger_that_is_whole_suspends_nobody(kit, tmp_path):
    seen = known_to_coordinator(tmp_path, "first", released(kit, "first", 3))
    released(kit, "second", 2)
    assert ask(kit, seen) == []


@pytest.mark.parametrize("backup_has", [0, 1])
def test_a_backup_that_is_put_back_is_noticed_once(kit, tmp_path, backup_has):
    if backup_has:
        released(kit, "first", backup_has)
    shutil.copytree(kit, tmp_path / "backup")
    seen = known_to_coordinator(tmp_path, "first", released(kit, "first", 3))
    shutil.rmtree(kit)
    shutil.copytree(tmp_path / "backup", kit)
    [why] = ask(kit, seen)
    assert f"north.jsonl, line {backup_has + 1}: is missing" in why
    assert f"the coordinator says {3 + backup_has} lines" in why
    assert "your budgets do not count what left since that backup" in why
    Suspensions(kit).release("now")  # a person has looked
    assert ask(kit, seen) == []


def test_a_coordinator_invents_no_end_of_a_ledger(kit, tmp_path):
    """Whoever could would suspend a site by it: an end counts if the site itself has signed its line."""
    released(kit, "first", 1)
    thief = KitKeys(tmp_path / "server").signing_key()
    forged = released(tmp_path / "elsewhere", "first", 5, thief)
    assert ask(kit, {"first": list(forged)}) == []
    for damaged in ({"first": "x"}, {"../first": list(forged)}):
        with pytest.raises((ValueError, BadInput), match=r"head of a ledger|cannot be the name"):
            ask(kit, damaged)
    assert Approvals(kit, "north").requests() == []
