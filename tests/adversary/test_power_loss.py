"""Attack: cut the power right after a parcel has left, so that the ledger and the budgets forget it."""

import os

import pytest
from attacked_site import SITE, ask, first_weights, study

from polyclinic import __version__
from polyclinic.deployment.approval import Approvals


@pytest.fixture
def on_disk(monkeypatch):
    """(inode, size) of everything that was synced to disk, in order."""
    synced, fsync = [], os.fsync

    def watching(descriptor):
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size))
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    return synced


def is_whole(path, synced):
    """Whether the file as it is now is what was synced."""
    return (path.stat().st_ino, path.stat().st_size) in synced


def was_synced(folder, synced):
    return folder.stat().st_ino in {inode for inode, _ in synced}


def test_a_parcel_leaves_after_its_line_and_its_anchor_are_on_disk(kit, on_disk):
    host = kit.host()
    weights = first_weights(host)
    ledger, anchor = (kit.folder / part for part in ("runs/run/ledger/north.jsonl", "anchors/runs/run.json"))
    for number in (1, 2):
        ask(host, "train", number, weights=weights)
        sent = list(on_disk)  # what was on disk when the answer was handed out
        assert is_whole(ledger, sent)
        assert is_whole(anchor, sent)
        assert is_whole(kit.folder / "runs" / "run" / "sites" / SITE / "noise.key", sent)
        assert was_synced(ledger.parent, sent)
        assert was_synced(anchor.parent, sent)
        lines, kept = (
            max(place for place, one in enumerate(sent) if one[0] == path.stat().st_ino) for path in (ledger, anchor)
        )
        assert lines < kept  # an anchor that knows more lines than the ledger would stop the site


def test_scored_weights_are_on_disk_before_their_scores_leave(kit, on_disk):
    host = kit.host()
    ask(host, "evaluate", 1, weights=first_weights(host))
    assert is_whole(kit.folder / "runs" / "run" / "sites" / SITE / "scored.json", on_disk)


def test_a_decision_counts_after_it_is_on_disk(kit, on_disk):
    kit.policy(approve="")
    approvals = Approvals(kit.folder, SITE)
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    assert is_whole(approvals.ledger_file("run"), on_disk)
