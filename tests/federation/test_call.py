"""Messages that are junk: whatever the bytes are, the receiver sees ParcelRejected or a message, nothing else."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.call import Call, Reply, pack
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected

PARCEL = Parcel("weights", {"w": torch.ones(2)}, {"samples": 3})
CALL = Call("a", "train", 1, {"weights": PARCEL}, {"split": "test"})
HEADER = {"site": "a", "operation": "train", "round": 1, "arguments": {}, "to": "coordinator", "parcels": []}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_a_call_comes_back():
    again = Call.from_bytes(CALL.to_bytes())
    assert (again.site, again.operation, again.round, again.arguments) == ("a", "train", 1, {"split": "test"})
    assert again.parcels["weights"].digest == PARCEL.digest
    assert Reply.from_bytes(Reply("a", (PARCEL,)).to_bytes()).weights["w"].tolist() == [1, 1]


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
