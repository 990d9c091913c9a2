"""Messages that are junk: whatever the bytes are, the receiver sees ParcelRejected or a message, nothing else."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.call import Call, MissingParcel, Reply, base_of, pack
from polyclinic.federation.ledger.keys import Anchor, Head
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel

PARCEL = Parcel("weights", {"w": torch.ones(2)}, {"samples": 3})
CALL = Call("a", "train", 1, {"weights": PARCEL}, {"split": "test"})
HEADER = {"site": "a", "operation": "train", "round": 1, "arguments": {}, "to": "coordinator", "parcels": []}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", HEADER)
def test_a_call_with_a_name_missing_or_of_another_type_is_rejected(name):
    assert Call.from_bytes(pack(HEADER, [])).site == "a"
    for changed in ({k: v for k, v in HEADER.items() if k != name}, HEADER | {name: None}, HEADER | {name: 1.5}):
        with pytest.raises(ParcelRejected, match="is no call"):
            Call.from_bytes(pack(changed, []))
    with pytest.raises(ParcelRejected):
        Call.from_bytes(pack(HEADER | {"another": 1}, []))
    with pytest.raises(ParcelRejected):
        Call.from_bytes(pack(HEADER | {"parcels": ["weights", "weights"]}, [PARCEL.encoded, PARCEL.encoded]))


@given(st.binary(max_size=200))
def test_junk_is_rejected(data):
    for kind in (Call, Reply):
        with pytest.raises(ParcelRejected):
            kind.from_bytes(data)


@given(
    st.dictionaries(st.sampled_from([*HEADER, "anchor", "head"]), JSON), st.lists(st.binary(max_size=20), max_size=2)
)
def test_any_header_gives_a_message_or_is_rejected(header, blobs):
    for kind in (Call, Reply):
        with contextlib.suppress(ParcelRejected):
            kind.from_bytes(pack(header, blobs))


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_gives_a_message_or_is_rejected(place, change):
    for message in (CALL, Reply("a", (PARCEL,))):
        data = bytearray(message.to_bytes())
        data[place % len(data)] ^= change
        with contextlib.suppress(ParcelRejected):
            type(message).from_bytes(bytes(data))


def test_a_message_keeps_its_heads_and_the_only_weights_as_base():
    anchor, head = Anchor(2, "d", "s", "c"), Head(3, "e", "t")
    assert Call.from_bytes(Call("a", "train", 1, anchor=anchor).to_bytes()).anchor == anchor
    assert Call.from_bytes(CALL.to_bytes()).anchor is None
    assert Reply.from_bytes(Reply("a", (), head).to_bytes()).head == head
    assert Reply.from_bytes(Reply("a", ()).to_bytes()).head is None
    with pytest.raises(ParcelRejected, match="no readable header: not the head of a ledger"):
        Call.from_bytes(pack(HEADER | {"anchor": [0, "d", "s", "c"]}, []))
    with pytest.raises(ParcelRejected, match="its header names no site"):
        Reply.from_bytes(pack({"head": None}, []))
    other = Parcel("weights", {"v": torch.ones(1)})
    statistics = Parcel("statistics", {"s": torch.ones(1)})
    assert base_of({"statistics": statistics, "weights": PARCEL}) is PARCEL.tensors
    assert base_of({"weights": PARCEL, "front": other}) == base_of({"statistics": statistics}) == base_of({}) == {}


@pytest.mark.parametrize("names", [[], ["weights", "more"], [3], ["weights", "weights"]])
def test_a_call_names_each_of_its_parcels_once(names):
    with pytest.raises(ParcelRejected, match="its parcels are not those that its header names"):
        Call.from_bytes(pack(HEADER | {"parcels": names}, [PARCEL.encoded]))


def test_a_reply_gives_tensors_by_kind_and_says_what_is_missing():
    reply = Reply("a", (PARCEL, Parcel("synthetic-images", {"x": torch.zeros(1)}, {"steps": 2})))
    assert reply.synthetic_images["x"].tolist() == [0]
    assert reply.metadata == {"samples": 3, "steps": 2}
    assert copy.copy(reply).weights["w"].tolist() == [1, 1]  # a copy is asked for names while it is still empty
    with pytest.raises(MissingParcel, match="site 'a' released no parcel of kind 'latents'"):
        reply.latents  # noqa: B018
