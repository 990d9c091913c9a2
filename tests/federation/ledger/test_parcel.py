"""A parcel comes back as it was sent, and nothing else is taken for one."""

import contextlib
import hashlib
import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from polyclinic.federation.call import Call, Expected, unpack
from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw) -> torch.Tensor:
    """Any dtype, 0 to 4 axes of 0 to 3, any bits (NaN too), now and then a transposed view."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


parcels = st.builds(
    Parcel,
    st.sampled_from(list(KINDS)),
    # "__metadata__" is the one name that the encoding keeps for itself
    st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors(), max_size=4),
    st.dictionaries(st.text(max_size=8), plain_values, max_size=4),
)


def bits(tensor: torch.Tensor) -> tuple:
    contiguous = tensor.contiguous()
    raw = contiguous.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def content(parcel: Parcel) -> tuple:
    return parcel.kind, dict(parcel.metadata), {name: bits(tensor) for name, tensor in parcel.tensors.items()}


def a_parcel() -> Parcel:
    return Parcel("weights", {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}, {"samples": 7})


@given(parcels)
@settings(max_examples=200, deadline=None)
def test_any_parcel_comes_back_with_the_same_bits(parcel):
    back = decode(parcel.encoded)
    assert content(back) == content(parcel)
    assert list(back.tensors) == list(parcel.tensors) == sorted(parcel.tensors)  # in one order, encoded or not


@given(parcels, st.randoms())
@settings(max_examples=100, deadline=None)
def test_bytes_do_not_depend_on_the_order_of_names(parcel, random):
    names, keys = list(parcel.tensors), list(parcel.metadata)
    random.shuffle(names)
    random.shuffle(keys)
    other = Parcel(parcel.kind, {n: parcel.tensors[n] for n in names}, {k: parcel.metadata[k] for k in keys})
    assert other.encoded == parcel.encoded
    assert other.digest == parcel.digest == hashlib.sha256(parcel.encoded).hexdigest()


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_garbage_is_rejected(data):
    with pytest.raises(ParcelRejected):
        decode(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_parcel_cut_short_anywhere_is_rejected(data):
    encoded = a_parcel().encoded
    for wrong in (encoded[: data.draw(st.integers(0, len(encoded) - 1))], encoded + b"x", save({"a": torch.zeros(2)})):
        with pytest.raises(ParcelRejected):
            decode(wrong)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_a_changed_byte_is_rejected_or_read_as_plain_tensors(data):
    """Whatever a changed byte does, the receiver sees ParcelRejected or a parcel, nothing else."""
    encoded = bytearray(a_parcel().encoded)
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ParcelRejected):
        assert isinstance(decode(bytes(encoded)), Parcel)


class Detonator:
    exploded = False

    def __reduce__(self):
        return exec, ("import test_parcel; test_parcel.Detonator.exploded = True",)


@pytest.mark.parametrize("wrap", ["pickle", "torch"])
def test_a_pickle_is_rejected_and_never_opened(wrap, tmp_path):
    if wrap == "pickle":
        data = pickle.dumps(Detonator())
    else:
        torch.save({"a": Detonator()}, tmp_path / "a.pt")
        data = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(ParcelRejected):
        decode(data)
    assert not Detonator.exploded
    pickle.loads(pickle.dumps(Detonator()))  # the trap is a real one
    assert Detonator.exploded
    Detonator.exploded = False


def with_header(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


def declared(kind, metadata) -> str:
    return json.dumps({"kind": kind, "metadata": metadata})


@pytest.mark.parametrize("text", [
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"__metadata__": {}}',
    b'{"__metadata__": {"parcel": "{"}}',
    b'{"__metadata__": {"parcel": "[]"}}',
    b'{"__metadata__": {"parcel": 3}}',
    b'{"__metadata__": "parcel"}',
    b"[" * 100_000,
    b'{"__metadata__": {"parcel": "' + b"[" * 100_000 + b'"}}',
], ids=lambda text: text[:24].decode(errors="replace"))  # fmt: skip
def test_a_header_that_says_something_else_is_rejected(text):
    with pytest.raises(ParcelRejected):
        decode(with_header(text))


def test_metadata_and_sizes_out_of_bounds_are_rejected():
    for metadata in ([1], "x", None, {"samples": math.nan}, {"deep": [{"x": -math.inf}]}):
        with pytest.raises(ParcelRejected):
            decode(save({"a": torch.zeros(1)}, {"parcel": declared("weights", metadata)}))
    big = Parcel("latents", {"a": torch.zeros(100)})
    Expected("latents", max_bytes=400).check(big)
    with pytest.raises(ParcelRejected, match="above the limit"):
        Expected("latents", max_bytes=399).check(big)


LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.int64)}


def changed(**tensors) -> Parcel:
    merged = {**a_parcel().tensors, **tensors}
    return Parcel("weights", {name: tensor for name, tensor in merged.items() if tensor is not None})


@pytest.mark.parametrize(("parcel", "message"), [
    (Parcel("gradients", a_parcel().tensors), "kind 'gradients' came where 'weights' was expected"),
    (changed(a=torch.zeros(2, 3, dtype=torch.float64)), "'a' is torch.float64"),
    (changed(a=torch.zeros(3, 2)), r"'a' is torch.float32 \(3, 2\), expected torch.float32 \(2, 3\)"),
    (changed(a=torch.zeros(6)), "'a'"),
    (changed(b=None), r"missing tensors \['b'\]"),
    (changed(c=torch.zeros(1)), r"unexpected tensors \['c'\]"),
])  # fmt: skip
def test_what_the_receiver_does_not_expect_is_rejected(parcel, message):
    expected = Expected.like("weights", LIKE)
    expected.check(decode(a_parcel().encoded))
    for came in (parcel, decode(parcel.encoded)):  # where the engine skipped the copy, and where not
        with pytest.raises(ParcelRejected, match=message):
            expected.check(came)
    Expected.like("weights", LIKE, partial=True).check(changed(b=None))
    with pytest.raises(ParcelRejected):
        Expected.like("weights", LIKE, partial=True).check(changed(c=torch.zeros(1)))


@given(
    st.dictionaries(st.sampled_from(["weights", "latents"]), parcels, max_size=2),
    st.dictionaries(st.text(), plain_values, max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_a_call_comes_back_as_it_was_sent(carried, arguments):
    call = Call("site-1", "train", 3, carried, arguments, "site-2")
    back = Call.from_bytes(call.to_bytes())
    assert (back.site, back.operation, back.round, back.to) == ("site-1", "train", 3, "site-2")
    assert back.arguments == arguments
    assert {n: content(p) for n, p in back.parcels.items()} == {n: content(p) for n, p in carried.items()}


@pytest.mark.parametrize("text", [
    '{"header": {}, "lengths": [-3, 6]}',
    '{"header": {}, "lengths": ["3"]}',
    '{"header": {}, "lengths": [3.0]}',
    '{"header": {}, "lengths": 3}',
    '{"header": {}, "lengths": [true, 2]}',
    '{"header": [], "lengths": [3]}',
    '{"lengths": [3]}',
    "[]",
    '{"header": {}, "lengths": {}}',
    "[" * 100_000,
    "nonsense",
    "",
], ids=lambda text: text[:40])  # fmt: skip
def test_a_message_with_a_strange_header_is_rejected(text):
    with pytest.raises(ParcelRejected):
        unpack(with_header(text.encode(), b"abc"))
