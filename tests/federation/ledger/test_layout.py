"""Size and digest of a parcel are those of its bytes, which need not be made for that."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.federation.ledger import parcel as parcels
from polyclinic.federation.ledger.parcel import Parcel

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


@pytest.mark.parametrize(
    "tensors",
    [
        {"turned": torch.arange(12.0).reshape(3, 4).t()},
        {"last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)},
        {"whole": (shared := torch.arange(6.0)), "part": shared[:2], "same": shared},
    ],
)
def test_it_does_not_matter_how_tensors_lie_in_memory(tensors):
    parcel = Parcel("weights", tensors, privacy={"epsilon": 1.0})
    data = encoded_copy(parcel)
    assert (parcel.size, parcel.digest) == (len(data), hashlib.sha256(data).hexdigest())


def test_compressed_images_are_digested_as_they_travel():
    images = {"images": torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8)}
    parcel = Parcel("synthetic-images", images, compressed=("images",))
    data = encoded_copy(parcel)
    assert (parcel.size, parcel.digest) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_safetensors_that_writes_another_header_is_digested_by_its_bytes(monkeypatch):
    monkeypatch.setattr(parcels, "_is_as_installed", lambda: False)
    parcel = Parcel("weights", {"a": torch.ones(3)})
    assert parcel.digest == hashlib.sha256(encoded_copy(parcel)).hexdigest()
    assert "encoded" in vars(parcel)
