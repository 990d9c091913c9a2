"""Digests and lines that are made beside training are the same as those made at once, and complete when read."""

import threading

import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.layers import gate
from polyclinic.federation.ledger import background, parcel
from polyclinic.federation.ledger.background import Background
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.parcel import Parcel


@pytest.fixture
def always(monkeypatch):
    """Every parcel counts as a large one."""
    for module in (background, gate, parcel):
        monkeypatch.setattr(module, "PAYS_FROM", 0)


def test_a_large_parcel_is_digested_by_the_thread(always):
    one, other = (Parcel("weights", {"a": torch.arange(5.0)}) for _ in range(2))
    assert one.digest_soon.result() == other._digest_now() == one.digest


def test_a_small_parcel_is_digested_at_once():
    small = Parcel("weights", {"a": torch.arange(5.0)})
    assert small.digest_soon.done()
    assert small.digest_soon.result() == small.digest


def test_a_tensor_that_is_changed_meanwhile_is_found(always, monkeypatch):
    hold, held = threading.Event(), Background(1)
    monkeypatch.setattr(parcel, "BACKGROUND", held)
    held.submit(hold.wait, [])
    changed = Parcel("weights", {"a": torch.zeros(5)})
    digest = changed.digest_soon
    changed.tensors["a"].add_(1)
    hold.set()
    with pytest.raises(WorkFailed, match="'a' of a parcel of kind 'weights' was changed after"):
        digest.result()


def test_who_adds_more_than_may_wait_waits(monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 100)
    held, order = Background(1), []
    first = held.submit(lambda: order.append("first"), [torch.zeros(20)])
    held.submit(lambda: order.append("second"), [torch.zeros(20)])
    assert first.done()
    held.submit(lambda: None, []).result()
    assert order == ["first", "second"]


def test_lines_that_wait_for_digests_are_those_of_lines_written_at_once(tmp_path):
    about = {"round": 1, "operation": "train", "kind": "weights", "bytes": 3, "to": "coordinator", "privacy": None}
    hold, held = threading.Event(), Background(1)
    now, soon = Ledger(tmp_path / "now.jsonl"), Ledger(tmp_path / "soon.jsonl")
    for number in range(3):
        now.append(digest=f"{number}", **about)
        soon.append_soon(held.submit(lambda n=number: hold.wait() and f"{n}", []), **about)
    assert not soon.is_settled
    assert not soon.path.exists()
    hold.set()
    assert soon.head == now.head
    assert soon.is_settled
    assert soon.path.read_bytes() == now.path.read_bytes()
    assert len(verify(soon.path)) == 3


def test_a_line_written_at_once_comes_after_those_that_wait(tmp_path):
    about = {"round": 1, "operation": "train", "bytes": 3, "to": "coordinator"}
    ledger = Ledger(tmp_path / "site.jsonl")
    ledger.append_soon(Background().submit(lambda: "first", []), kind="weights", privacy=None, **about)
    ledger.append(kind="metrics", digest="second", **about)
    assert [line["digest"] for line in verify(ledger.path)] == ["first", "second"]


def test_settling_waits_for_all_and_leaves_errors_to_whoever_asks():
    held = Background(2)
    wrong = held.submit(lambda: 1 / 0, [])
    right = [held.submit(lambda n=n: n, []) for n in range(5)]
    held.settle()
    assert [one.result() for one in right] == list(range(5))
    assert isinstance(wrong.exception(), ZeroDivisionError)
