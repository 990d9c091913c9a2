"""Encodings of the wire: by hand, back to what they were, and with faults."""

import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load, save

from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, Expected, Reply
from polyclinic.federation.ledger import wire
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode, shortened

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


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, 50), arrays(np.uint32, 50))
def test_a_difference_loses_no_bit(before, after):
    """NaN, infinities and signed zeros included: bits are bits."""
    base = {"w": matrix(before.view(np.float32))}
    exact = matrix(after.view(np.float32))
    _, came = travelled(Parcel("weights", {"w": exact}), "delta", base)
    assert torch.equal(came.tensors["w"].view(torch.int32), exact.view(torch.int32))


def test_replies_and_bytes_that_nobody_shortens():
    torch.manual_seed(0)
    before = {"w": torch.randn(50, 50)}
    call = Call("a", "train", 1, {"weights": Parcel("weights", before)})
    after = {"w": before["w"] * 1.001}
    data = Reply("a", (shortened(Parcel("weights", after), "delta", before),)).to_bytes()
    assert torch.equal(Reply.from_bytes(data, call).weights["w"], after["w"])
    with pytest.raises(ParcelRejected, match="difference"):
        Reply.from_bytes(data)
    with pytest.raises(wire.NotPictures):
        wire.unpack_images(torch.zeros(50, dtype=torch.uint8), (3, 1, 8, 8))
    with pytest.raises(wire.NotPictures, match="more bytes"):
        wire.unpack_images(
            torch.cat([wire.pack_images(smooth(3, 1, 8, 8)), torch.zeros(1, dtype=torch.uint8)]), (3, 1, 8, 8)
        )
    data = shortened(Parcel("weights", {"w": torch.rand(40, 40)}), "int8").encoded
    with pytest.raises(ParcelRejected, match="never travels shortened"):
        decode(data.replace(b'\\"weights\\"', b'\\"metrics\\"'))


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


@pytest.mark.parametrize("change", [
    lambda wire: wire["tensors"]["w"].update(shape=[2**20, 2**20]),
    lambda wire: wire["tensors"]["w"].update(shape=[40, 41]),
    lambda wire: wire["tensors"]["w"].update(shape=[40, -40]),
    lambda wire: wire["tensors"]["w"].update(shape=[0, 5]),
    lambda wire: wire["tensors"]["w"].update(shape=[40, 40, *[1] * 7]),
    lambda wire: wire["tensors"]["w"].update(shape=[True, 1600]),
    lambda wire: wire["tensors"]["w"].update(shape=[2**70, 0]),
    lambda wire: wire["tensors"]["w"].update(shape="many"),
    lambda wire: wire["tensors"]["w"].update(shape=[40.0, 40]),
    lambda wire: wire["tensors"].update(w=None),
    lambda wire: wire["tensors"]["w"].update(dtype="object"),
    lambda wire: wire["tensors"]["w"].update(dtype=["float32"]),
    lambda wire: wire["tensors"].update(v=wire["tensors"]["w"]),
    lambda wire: wire.update(encoding="pickle"),
    lambda wire: wire.update(encoding=[]),
    lambda wire: wire.update(encoding="delta"),
    lambda wire: wire.update(tensors=[]),
    lambda wire: wire.clear(),
])  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(change):
    with pytest.raises(ParcelRejected):
        decode(forged(change))


def smooth(count, channels, height, width, seed=0):
    rng = np.random.default_rng(seed)
    low = torch.from_numpy(rng.random((count, channels, 4, 4))).float()
    return (torch.nn.functional.interpolate(low, (height, width), mode="bilinear") * 255).to(torch.uint8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_any_images_come_back_as_they_were(count, channels, height, width, seed):
    images = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), np.uint8))
    assert torch.equal(wire.unpack_images(wire.pack_images(images), images.shape), images)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (4, 1, 8, 8), (3, 1, 8, 9), (3, 3, 8), (3, 2, 8, 8), (3, 1, 0, 8)])
def test_other_shapes_than_were_packed_are_refused(shape):
    with pytest.raises(wire.NotPictures):
        wire.unpack_images(wire.pack_images(smooth(3, 1, 8, 8)), shape)


@pytest.mark.parametrize(("shape", "fits"), [
    *(((2, 1, 1, 1), True), ((2, 3, 1, 1), True), ((0, 1, 4, 4), True), ((1, 1, wire.LONGEST, 1), True)),
    *(((1, 1, 1, wire.LONGEST), True), ((1, 1, wire.LONGEST + 1, 1), False), ((1, 1, 1, wire.LONGEST + 1), False)),
    *(((1, 1, 0, 4), False), ((1, 1, 4, 0), False), ((1, 2, 4, 4), False), ((1, 4, 4, 4), False)),
    *(((3, 4, 4), False), ((1, 1, 1, 4, 4), False)),
])  # fmt: skip
def test_shapes_that_are_packed_are_those_that_are_unpacked(shape, fits):
    images = torch.zeros(shape, dtype=torch.uint8)
    assert wire.can_pack_images(images) is fits
    if fits:
        assert torch.equal(wire.unpack_images(wire.pack_images(images), shape), images)
    else:
        with pytest.raises(wire.NotPictures, match="cannot be in there"):
            wire.unpack_images(torch.zeros(0, dtype=torch.uint8), shape)


def test_a_parcel_compresses_on_its_way_and_nobody_sees_it():
    images, labels = smooth(8, 3, 32, 32), torch.arange(8)
    parcel = Parcel("synthetic-images", {"images": images, "labels": labels}, {"n": 8}, compressed=("images",))
    open_one = Parcel("synthetic-images", {"images": images, "labels": labels}, {"n": 8})
    assert len(parcel.encoded) < len(open_one.encoded) / 2
    arrived = decode(parcel.encoded)
    Expected.like("synthetic-images", open_one.tensors).check(arrived)
    assert torch.equal(arrived.tensors["images"], images)
    assert torch.equal(arrived.tensors["labels"], labels)
    assert (arrived.metadata, arrived.digest) == ({"n": 8}, parcel.digest)
    assert (
        Parcel("synthetic-images", arrived.tensors, {"n": 8}, compressed=arrived.compressed).encoded == parcel.encoded
    )


def changed(parcel, shapes):
    """The parcel's bytes with another header."""
    metadata = {"parcel": '{"kind": "synthetic-images", "metadata": {}, "compressed": ' + shapes + "}"}
    return save(load(parcel.encoded), metadata)


@pytest.mark.parametrize(("shapes", "reason"), [
    ('{"images": [1000000, 3, 10000, 10000]}', "above the limit"),
    ('{"images": [8, 3, 32]}', "with their shapes"),
    ('{"images": [8, 3, 32, true]}', "with their shapes"),
    ("[1]", "with their shapes"),
    ('{"images": [9, 3, 32, 32]}', "cannot be read"),
    ('{"others": [8, 3, 32, 32]}', "cannot be read"),
])  # fmt: skip
def test_false_shapes_are_refused(shapes, reason):
    parcel = Parcel("synthetic-images", {"images": smooth(8, 3, 32, 32)}, compressed=("images",))
    with pytest.raises(ParcelRejected, match=reason):
        decode(changed(parcel, shapes))


@pytest.mark.parametrize(("source", "megabytes"), [("chest-phantom", 20), ("skin-phantom", 60)])
def test_512_images_of_256_px_are_below_what_the_paper_sends(source, megabytes):
    """Table 7 of FedER: 20 MB for grey images, 60 for colour. Ten phantoms stand for all."""
    from polyclinic.data.datasets import SOURCES

    drawn = SOURCES[source].model_validate({"source": source, "size": 256, "samples": 10}).load()
    images = torch.from_numpy(np.asarray(drawn.images))
    parcel = Parcel("synthetic-images", {"images": images}, compressed=("images",))
    assert len(parcel.encoded) * 512 / len(images) < megabytes * 1e6


LIMIT = 10**6
SMALL = torch.tensor([[1.0, -2.0], [0.5, 4.0]])


def packed(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(zlib.compress(raw), np.uint8).copy())


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def told(encoding="int8", dtype="float32", shape=(2, 2)) -> dict:
    return {"encoding": encoding, "tensors": {"w": {"dtype": dtype, "shape": list(shape)}}}


def refusal(blobs, described, limit=LIMIT, base=None) -> str:
    with pytest.raises(wire.NotOnWire) as refused:
        wire.unpack(blobs, described, limit, base)
    return str(refused.value)


#: 4 is the scale; of 0.25, -0.5, 0.125 and 1 in half precision all low bytes come first, then all high ones
FP16 = floats(4.0) + bytes([0, 0, 0, 0, 0x34, 0xB8, 0x30, 0x3C])
#: a scale for each row, so that its largest number is 127
INT8 = floats(2 / 127, 4 / 127) + np.array([64, -127, 16, 127], np.int8).tobytes()


@pytest.mark.parametrize(
    ("encoding", "raw", "numbers"),
    [("fp16", FP16, SMALL), ("int8", INT8, torch.tensor([[128 / 127, -2.0], [64 / 127, 4.0]]))],
)
def test_rounded_numbers_by_hand(encoding, raw, numbers):
    assert wire_codec._rounded(SMALL, encoding) == raw
    torch.testing.assert_close(wire.unpack({"w": packed(raw)}, told(encoding), LIMIT, None)["w"], numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_differences_of_every_type(dtype):
    base = {"w": torch.arange(wire.SMALLEST).reshape(32, 32).to(dtype)}
    sent = {"w": base["w"].flip(0), "n": torch.arange(wire.SMALLEST)}
    blobs, described = wire.pack(sent, "delta", {**base, "n": sent["n"] + 1})
    name = str(dtype).removeprefix("torch.")
    assert described == {"w": {"dtype": name, "shape": [32, 32]}}  # whole numbers travel as they are
    back = wire.unpack(blobs, {"encoding": "delta", "tensors": described}, LIMIT, base)
    assert torch.equal(back["w"], sent["w"])


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
@pytest.mark.parametrize(("tensor", "shortened"), [
    (torch.ones(wire.SMALLEST), True),
    (torch.ones(wire.SMALLEST - 1), False),
    (torch.ones(wire.SMALLEST, dtype=torch.float64), False),
    (torch.ones(wire.SMALLEST, dtype=torch.int64), False),
    (torch.full((wire.SMALLEST,), 0.99 * wire.LARGEST), True),
    (torch.full((wire.SMALLEST,), -1.01 * wire.LARGEST), False),
    (torch.full((wire.SMALLEST,), 1.5e38), False),
    (torch.full((wire.SMALLEST,), math.nan), False),
])  # fmt: skip
def test_tensors_that_are_rounded(encoding, tensor, shortened):
    for base in ({}, {"w": tensor}):
        blobs, described = wire.pack({"w": tensor}, encoding, base)
        assert (list(blobs), list(described)) == ((["w"], ["w"]) if shortened else ([], []))


def test_rounding_differences_and_faults_by_hand():
    tensor = torch.ones(32, 32)
    assert wire.pack({"w": tensor}, "delta", {"w": tensor})[0]
    for base in ({}, {"v": tensor}, {"w": tensor.double()}, {"w": tensor.flatten()}):
        assert wire.pack({"w": tensor}, "delta", base) == ({}, {})
    # 190 times the smallest number over 127 is the smallest number itself: 190 codes, of which there are 127
    least = 2.0**-149
    raw = wire_codec._rounded(torch.tensor([190 * least, -190 * least]), "int8")
    assert np.frombuffer(raw[4:], np.int8).tolist() == [127, -127]
    blob = {"w": packed(INT8)}
    assert refusal(blob, {"encoding": "int8", "tensors": [1]}) == "its tensors must come with types and shapes"
    assert refusal(blob, {"encoding": "int8", "tensors": {"w": 1}}) == "its tensors must come with types and shapes"
    missing = "a tensor that it describes is not there as bytes"
    assert refusal({}, told()) == missing
    assert refusal({"w": blob["w"].float()}, told()) == missing
    assert refusal({"w": blob["w"][None]}, told()) == missing
    assert refusal(blob, told(dtype="float64")) == "only float32 is rounded"
    assert refusal({"w": packed(FP16)}, told("fp16", dtype="float16")) == "only float32 is rounded"
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, 3, 4, 4, generator=generator) * torch.tensor([0.01, 1.0, 100.0]).reshape(3, 1, 1)
    assert torch.equal(wire.restore(wire.shrink(latents, "fp32")), latents)
    assert ((wire.restore(wire.shrink(latents, "fp16")) - latents).abs() <= latents.abs() * 2**-11 + 1e-7).all()
    sent = wire.shrink(latents, "int8")
    assert sent["latents"].dtype == torch.int8
    off = (wire.restore(sent) - latents).abs().amax((0, 2, 3))
    assert (off <= sent["step"] * 0.501).all()
    assert off[0] < 1e-3 < off[2]  # a scale for each channel, not one for all


@pytest.mark.parametrize(("shape", "most"), [((4, 4), 64), ((4, 1), 20)])
def test_memory_is_bounded_by_what_is_unpacked_and_by_what_it_is_unpacked_from(shape, most):
    """16 numbers are 64 bytes; 4 rows of one number have 16 bytes of scales and 4 of codes."""
    raw = floats(1, 1, 1, 1) + bytes(math.prod(shape))
    assert wire.unpack({"w": packed(raw)}, told(shape=shape), most, None)["w"].tolist() == torch.zeros(shape).tolist()
    sentence = f"{4 * math.prod(shape)} bytes are declared, and the limit is {most - 1}"
    assert refusal({"w": packed(raw)}, told(shape=shape), limit=most - 1) == sentence


@pytest.mark.parametrize("blob", [
    packed(INT8[:-1]),
    packed(INT8 + b"\0"),
    packed(INT8 + bytes(1000)),
    packed(INT8)[:-1],
    torch.cat([packed(INT8), torch.zeros(1, dtype=torch.uint8)]),
], ids=["one too few", "one too many", "many too many", "cut short", "something after it"])  # fmt: skip
def test_other_bytes_than_declared(blob):
    assert refusal({"w": blob}, told()) == f"other bytes came than the {len(INT8)} that it declares"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0.0])
def test_one_scale_of_several_that_is_no_number(wrong):
    raw = floats(1.0, wrong) + bytes(4)
    assert refusal({"w": packed(raw)}, told()) == "a scale is not a number above zero"


@pytest.mark.parametrize("base", [None, {}, {"w": SMALL.double()}, {"w": SMALL.flatten()}, {"v": SMALL}])
def test_a_difference_to_a_tensor_that_the_receiver_does_not_have(base):
    blob = {"w": torch.zeros(3, dtype=torch.uint8)}  # it is refused before a byte is decompressed
    assert refusal(blob, told("delta"), base=base) == (
        "tensor 'w' is a difference to one that the receiver does not have"
    )


@given(st.data(), st.integers(1, 2**15), st.integers(0, 200))
def test_codes_come_back_from_ceil_log2_k_bits(data: st.DataObject, size: int, numbers: int):
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=numbers, max_size=numbers))
    codes = torch.tensor(values, dtype=torch.int16)
    packed = wire.pack_codes(codes, size)
    assert packed.numel() == math.ceil(numbers * max(1, math.ceil(math.log2(size))) / 8)
    assert torch.equal(wire.unpack_codes(packed, size, (numbers,)), codes)


def test_codes_are_packed_by_hand_and_piece_by_piece(monkeypatch):
    assert [wire.bits_for(size) for size in (1, 2, 3, 4, 5, 512, 513)] == [1, 1, 2, 2, 3, 9, 10]
    # 1 and 2 in two bits each, lowest bit first: 10 01 0000
    assert wire.pack_codes(torch.tensor([1, 2]), 4).tolist() == [0b10010000]
    codes = torch.randint(300, (7, 5, 5), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    at_once = wire.pack_codes(codes, 300)
    monkeypatch.setattr(wire, "CHUNK", 16)
    assert torch.equal(wire.pack_codes(codes, 300), at_once)
    assert torch.equal(wire.unpack_codes(at_once, 300, (7, 5, 5)), codes)


@pytest.mark.parametrize(("words", "work"), [
    ("run from 0 to 4, but the codebook has 4", lambda: wire.pack_codes(torch.tensor([4, 0]), 4)),
    ("run from -1 to 3, but the codebook has 4", lambda: wire.pack_codes(torch.tensor([3, -1]), 4)),
    ("4 bytes are not 4 codes of 2 bits", lambda: wire.unpack_codes(torch.zeros(4, dtype=torch.uint8), 4, (4,))),
    ("1 bytes are not 4 codes of 2 bits", lambda: wire.unpack_codes(torch.zeros(1, dtype=torch.int8), 4, (4,))),
    ("1 bytes are not 4 codes of 2 bits", lambda: wire.unpack_codes(torch.zeros(1, 1, dtype=torch.uint8), 4, (4,))),
    ("not 9 codes of 2 bits", lambda: wire.unpack_codes(torch.zeros(2, dtype=torch.uint8), 4, (9,))),
    ("hold code 3", lambda: wire.unpack_codes(torch.tensor([0xFF], dtype=torch.uint8), 3, (4,))),
    ("not finite", lambda: wire.shrink(torch.tensor([[float("nan")]]), "int8")),
])  # fmt: skip
def test_faults_are_named(words: str, work):
    with pytest.raises(BadInput, match=words):
        work()


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_int8_by_hand(axes: tuple[int, ...]):
    """One channel from -1 to 254, so that a step is 1, and one from 10 to 20.2, so that it is 0.04."""
    latents = torch.tensor([[-1.0, 10.0], [0.0, 15.0], [254.0, 20.2]]).reshape(3, 2, *axes)
    sent = wire.shrink(latents, "int8")
    assert sent["latents"].flatten(1).tolist() == [[-128, -128], [-127, -3], [127, 127]]
    assert sent["low"].tolist() == [-1.0, 10.0]
    assert sent["step"].tolist() == pytest.approx([1.0, 0.04])
    torch.testing.assert_close(wire.restore(sent), latents)
    assert wire.restore(sent).shape == latents.shape
