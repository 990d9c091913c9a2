"""`engine.wire`: what arrives is what was sent, rounded no more than said; and nobody is made to unpack a bomb."""

import hashlib
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.budget import size_tells_something
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode, decode_all, digest_of, shortened
from polyclinic.federation.ledger.wire import SMALLEST

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def matrix(values) -> torch.Tensor:
    """A tensor that is large enough, with a drawn part."""
    full = torch.zeros(32, 40)
    full.view(-1)[: values.size] = torch.from_numpy(values)
    return full


def travelled(parcel, encoding, base=None):
    sent = shortened(parcel, encoding, base)
    return sent, decode(sent.encoded, base=base)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, 50, elements=finite), st.sampled_from(["fp16", "int8"]))
def test_a_receiver_finds_what_the_sender_says_it_will(values, encoding):
    sent, came = travelled(Parcel("weights", {"w": matrix(values), "b": torch.ones(3)}), encoding)
    assert torch.equal(sent.tensors["w"], came.tensors["w"])
    assert torch.equal(came.tensors["b"], torch.ones(3))
    assert sent.digest == came.digest
    assert sent.size == len(sent.encoded) == came.size


@pytest.mark.parametrize("encoding", ["fp16", "int8", "delta"])
def test_the_digest_does_not_depend_on_how_well_zlib_compresses(encoding, monkeypatch):
    exact = torch.sin(torch.arange(32 * 40.0)).reshape(32, 40)
    parcel, base = Parcel("weights", {"w": exact, "n": torch.arange(3)}, {"samples": 4}), {"w": exact.floor()}
    one, came = travelled(parcel, encoding, base)
    monkeypatch.setattr(wire_codec, "LEVEL", 9)
    other, came_too = travelled(parcel, encoding, base)
    assert one.encoded != other.encoded
    assert one.digest_of_bytes != other.digest_of_bytes
    assert len({one.digest, other.digest, came.digest, came_too.digest}) == 1
    changed = exact.clone()
    changed[3, 7] *= 2
    assert shortened(Parcel("weights", {"w": changed}, {"samples": 4}), encoding, base).digest != one.digest
    assert shortened(replace(parcel, metadata={"samples": 5}), encoding, base).digest != one.digest
    assert parcel.digest != one.digest


def test_bytes_that_are_no_parcel_have_a_digest_too():
    exact = Parcel("weights", {"w": torch.ones(3)})
    assert digest_of(exact.encoded) == exact.digest == exact.digest_of_bytes
    assert digest_of(b"junk") == hashlib.sha256(b"junk").hexdigest()


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, 50, elements=finite))
def test_rounding_is_bounded_and_never_overflows(values):
    exact = matrix(values)
    half = shortened(Parcel("weights", {"w": exact}), "fp16").tensors["w"]
    byte = shortened(Parcel("weights", {"w": exact}), "int8").tensors["w"]
    largest = exact.abs().max()
    rows = exact.abs().amax(1, keepdim=True)
    assert torch.isfinite(half).all()
    assert torch.isfinite(byte).all()
    tiny = 1e-37  # below it, float32 itself has few digits
    assert ((half - exact).abs() <= exact.abs() * 2**-10 + largest * 2**-23 + tiny).all()
    assert ((byte - exact).abs() <= rows / 127 * 0.51 + tiny).all()


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, 50), arrays(np.uint32, 50))
def test_a_difference_loses_no_bit(before, after):
    """NaN, infinities and signed zeros included: bits are bits."""
    base = {"w": matrix(before.view(np.float32))}
    exact = matrix(after.view(np.float32))
    _, came = travelled(Parcel("weights", {"w": exact}), "delta", base)
    assert torch.equal(came.tensors["w"].view(torch.int32), exact.view(torch.int32))


def test_numbers_that_are_not_finite_travel_as_they_are():
    odd = torch.full((32, 40), float("nan"))
    sent, came = travelled(Parcel("weights", {"w": odd}), "fp16")
    assert (sent.wire, came.wire) == ("exact", "exact")
    assert came.tensors["w"].isnan().all()


def test_small_tensors_whole_numbers_and_other_kinds_travel_as_they_are():
    count = torch.arange(2000)
    sent = shortened(Parcel("weights", {"n": count, "b": torch.rand(SMALLEST - 1)}), "int8")
    assert sent.wire == "exact"
    assert shortened(Parcel("metrics", {"m": torch.rand(2000)}), "int8").wire == "exact"


def test_fewer_bytes_travel():
    torch.manual_seed(0)
    before = torch.randn(200, 200)
    parcel = Parcel("weights", {"w": before + 1e-4 * torch.randn(200, 200)})
    sizes = {name: shortened(parcel, name, {"w": before}).size for name in ("exact", "fp16", "int8", "delta")}
    assert sizes["exact"] > sizes["delta"] > sizes["fp16"] > sizes["int8"]
    assert sizes["int8"] < 0.3 * sizes["exact"]


def test_a_reply_is_read_with_the_call_that_it_answers():
    torch.manual_seed(0)
    before = {"w": torch.randn(50, 50)}
    call = Call("a", "train", 1, {"weights": Parcel("weights", before)})
    after = {"w": before["w"] * 1.001}
    data = Reply("a", (shortened(Parcel("weights", after), "delta", before),)).to_bytes()
    assert torch.equal(Reply.from_bytes(data, call).weights["w"], after["w"])
    with pytest.raises(ParcelRejected, match="difference"):
        Reply.from_bytes(data)


# --- whoever is on the other side may lie ------------------------------------------------------------


def forged(change, encoding="int8"):
    """The bytes of a parcel whose description was changed, with the header's length made right."""
    data = shortened(Parcel("weights", {"w": torch.rand(40, 40)}), encoding, {"w": torch.rand(40, 40)}).encoded
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    told = json.loads(header["__metadata__"]["parcel"])
    change(told["wire"])
    header["__metadata__"]["parcel"] = json.dumps(told)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    "change",
    [
        lambda wire: wire["tensors"]["w"].update(shape=[2**20, 2**20]),
        lambda wire: wire["tensors"]["w"].update(shape=[40, 41]),
        lambda wire: wire["tensors"]["w"].update(shape=[40, -40]),
        lambda wire: wire["tensors"]["w"].update(shape=[0, 5]),
        lambda wire: wire["tensors"]["w"].update(shape=[2**70, 0]),
        lambda wire: wire["tensors"]["w"].update(shape="many"),
        lambda wire: wire["tensors"]["w"].update(dtype="object"),
        lambda wire: wire["tensors"]["w"].update(dtype=["float32"]),
        lambda wire: wire["tensors"].update(v=wire["tensors"]["w"]),
        lambda wire: wire.update(encoding="pickle"),
        lambda wire: wire.update(encoding=[]),
        lambda wire: wire.update(encoding="delta"),
        lambda wire: wire.update(tensors=[]),
        lambda wire: wire.clear(),
    ],
)
def test_a_description_that_does_not_fit_is_refused(change):
    with pytest.raises(ParcelRejected):
        decode(forged(change))


def test_a_bomb_is_refused_before_it_is_unpacked():
    """10 MB of zeros in 10 kB, said to be a small tensor."""
    bomb = torch.from_numpy(np.frombuffer(zlib.compress(bytes(10_000_000)), np.uint8).copy())
    parcel = Parcel("weights", {"w": torch.rand(40, 40)})
    sent = shortened(parcel, "int8")
    vars(sent)["_on_wire"] = ("int8", {"w": bomb}, {"w": {"dtype": "float32", "shape": [40, 40]}})
    with pytest.raises(ParcelRejected, match="other bytes came"):
        decode(sent.encoded)


def test_the_parcels_of_a_message_are_bounded_together(monkeypatch):
    one = shortened(Parcel("weights", {"w": torch.rand(100, 100)}), "int8").encoded
    monkeypatch.setattr("polyclinic.federation.ledger.kinds.MESSAGE_LIMIT", 60_000)
    assert len(decode_all([one])) == 1  # 40 kB, once it is read
    with pytest.raises(ParcelRejected, match="the limit is"):
        decode_all([one, one])


def test_kinds_that_nobody_shortens_do_not_come_so():
    data = shortened(Parcel("weights", {"w": torch.rand(40, 40)}), "int8").encoded
    with pytest.raises(ParcelRejected, match="never travels shortened"):
        decode(data.replace(b'\\"weights\\"', b'\\"metrics\\"'))


def test_the_size_of_a_shortened_parcel_tells_something():
    parcel = Parcel("weights", {"w": torch.rand(40, 40)})
    assert not size_tells_something(parcel)
    assert size_tells_something(shortened(parcel, "int8"))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_scale_that_is_no_number_is_refused(scale):
    raw = np.float32(scale).tobytes() + bytes(2 * 1600)
    blob = torch.from_numpy(np.frombuffer(zlib.compress(raw), np.uint8).copy())
    sent = shortened(Parcel("weights", {"w": torch.rand(40, 40)}), "fp16")
    vars(sent)["_on_wire"] = ("fp16", {"w": blob}, {"w": {"dtype": "float32", "shape": [40, 40]}})
    with pytest.raises(ParcelRejected, match="scale"):
        decode(sent.encoded)
