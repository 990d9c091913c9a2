"""Size and digest of a parcel: without its bytes, beside training, and complete when read."""

import hashlib
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.errors import WorkFailed
from polyclinic.federation.layers import gate
from polyclinic.federation.ledger import digest_threads, parcel
from polyclinic.federation.ledger import parcel as parcels
from polyclinic.federation.ledger.digest_threads import Background
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.parcel import Parcel


@pytest.fixture
def always(monkeypatch):
    """Every parcel counts as a large one."""
    for module in (digest_threads, gate, parcel):
        monkeypatch.setattr(module, "PAYS_FROM", 0)


def test_a_large_parcel_is_digested_by_the_thread_and_a_change_meanwhile_is_found(always, monkeypatch):
    one, other = (Parcel("weights", {"a": torch.arange(5.0)}) for _ in range(2))
    assert one.digest_soon.result() == other._digest_now() == one.digest
    hold, held = threading.Event(), Background(1)
    monkeypatch.setattr(parcel, "BACKGROUND", held)
    held.submit(hold.wait, [])
    changed = Parcel("weights", {"a": torch.zeros(5)})
    digest = changed.digest_soon
    changed.tensors["a"].add_(1)
    hold.set()
    with pytest.raises(WorkFailed, match="'a' of a parcel of kind 'weights' was changed after"):
        digest.result()


def test_lines_that_wait_for_digests_are_those_of_lines_written_at_once(tmp_path):
    about = {"round": 1, "operation": "train", "kind": "weights", "bytes": 3, "to": "coordinator", "privacy": None}
    hold, held = threading.Event(), Background(1)
    now, soon = Ledger(tmp_path / "now.jsonl"), Ledger(tmp_path / "soon.jsonl")
    for number in range(3):
        now.append(digest=f"{number}", **about)
        soon.append_soon(held.submit(lambda n=number: hold.wait() and f"{n}", []), **about)
    assert soon.due
    assert not soon.path.exists()
    hold.set()
    assert soon.head == now.head
    assert not soon.due
    assert soon.path.read_bytes() == now.path.read_bytes()
    assert len(verify(soon.path)) == 3


SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.text(max_size=6), st.tuples(st.sampled_from(list(parcels.TYPES)), SHAPES), max_size=6)


def encoded_copy(parcel: Parcel) -> bytes:
    """The bytes of an equal parcel, so that this one stays without."""
    return Parcel(parcel.kind, parcel.tensors, parcel.metadata, parcel.privacy, parcel.compressed).encoded


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=2))
def test_size_and_digest_are_those_of_the_bytes(described, metadata):
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in described.items()}
    if "__metadata__" in tensors:
        return
    parcel = Parcel("weights", tensors, metadata)
    data = encoded_copy(parcel)
    assert parcel.size == len(data)
    assert parcel.digest == hashlib.sha256(data).hexdigest()
    assert "encoded" not in vars(parcel)
