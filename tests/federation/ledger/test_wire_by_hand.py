"""The bytes of weights, codes and latents on the wire, written out by hand, and each way in which they can be wrong."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.errors import BadInput
from polyclinic.federation.ledger import wire
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.wire import (
    LARGEST,
    SMALLEST,
    NotOnWire,
    bits_for,
    pack,
    pack_codes,
    restore,
    shrink,
    unpack,
    unpack_codes,
)

LIMIT = 10**6
SMALL = torch.tensor([[1.0, -2.0], [0.5, 4.0]])


def packed(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(zlib.compress(raw), np.uint8).copy())


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def told(encoding="int8", dtype="float32", shape=(2, 2)) -> dict:
    return {"encoding": encoding, "tensors": {"w": {"dtype": dtype, "shape": list(shape)}}}


def refusal(blobs, described, limit=LIMIT, base=None) -> str:
    with pytest.raises(NotOnWire) as refused:
        unpack(blobs, described, limit, base)
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
    torch.testing.assert_close(unpack({"w": packed(raw)}, told(encoding), LIMIT, None)["w"], numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_differences_of_every_type(dtype):
    base = {"w": torch.arange(SMALLEST).reshape(32, 32).to(dtype)}
    sent = {"w": base["w"].flip(0), "n": torch.arange(SMALLEST)}
    blobs, described = pack(sent, "delta", {**base, "n": sent["n"] + 1})
    name = str(dtype).removeprefix("torch.")
    assert described == {"w": {"dtype": name, "shape": [32, 32]}}  # whole numbers travel as they are
    back = unpack(blobs, {"encoding": "delta", "tensors": described}, LIMIT, base)
    assert torch.equal(back["w"], sent["w"])


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
@pytest.mark.parametrize(("tensor", "shortened"), [
    (torch.ones(SMALLEST), True),
    (torch.ones(SMALLEST - 1), False),
    (torch.ones(SMALLEST, dtype=torch.float64), False),
    (torch.ones(SMALLEST, dtype=torch.int64), False),
    (torch.full((SMALLEST,), 0.99 * LARGEST), True),
    (torch.full((SMALLEST,), -1.01 * LARGEST), False),
    (torch.full((SMALLEST,), 1.5e38), False),
    (torch.full((SMALLEST,), math.nan), False),
])  # fmt: skip
def test_tensors_that_are_rounded(encoding, tensor, shortened):
    for base in ({}, {"w": tensor}):
        blobs, described = pack({"w": tensor}, encoding, base)
        assert (list(blobs), list(described)) == ((["w"], ["w"]) if shortened else ([], []))


def test_rounding_differences_and_faults_by_hand():
    tensor = torch.ones(32, 32)
    assert pack({"w": tensor}, "delta", {"w": tensor})[0]
    for base in ({}, {"v": tensor}, {"w": tensor.double()}, {"w": tensor.flatten()}):
        assert pack({"w": tensor}, "delta", base) == ({}, {})
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
    assert torch.equal(restore(shrink(latents, "fp32")), latents)
    assert ((restore(shrink(latents, "fp16")) - latents).abs() <= latents.abs() * 2**-11 + 1e-7).all()
    sent = shrink(latents, "int8")
    assert sent["latents"].dtype == torch.int8
    off = (restore(sent) - latents).abs().amax((0, 2, 3))
    assert (off <= sent["step"] * 0.501).all()
    assert off[0] < 1e-3 < off[2]  # a scale for each channel, not one for all


@pytest.mark.parametrize(("shape", "most"), [((4, 4), 64), ((4, 1), 20)])
def test_memory_is_bounded_by_what_is_unpacked_and_by_what_it_is_unpacked_from(shape, most):
    """16 numbers are 64 bytes; 4 rows of one number have 16 bytes of scales and 4 of codes."""
    raw = floats(1, 1, 1, 1) + bytes(math.prod(shape))
    assert unpack({"w": packed(raw)}, told(shape=shape), most, None)["w"].tolist() == torch.zeros(shape).tolist()
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
    packed = pack_codes(codes, size)
    assert packed.numel() == math.ceil(numbers * max(1, math.ceil(math.log2(size))) / 8)
    assert torch.equal(unpack_codes(packed, size, (numbers,)), codes)


def test_codes_are_packed_by_hand_and_piece_by_piece(monkeypatch):
    assert [bits_for(size) for size in (1, 2, 3, 4, 5, 512, 513)] == [1, 1, 2, 2, 3, 9, 10]
    # 1 and 2 in two bits each, lowest bit first: 10 01 0000
    assert pack_codes(torch.tensor([1, 2]), 4).tolist() == [0b10010000]
    codes = torch.randint(300, (7, 5, 5), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    at_once = pack_codes(codes, 300)
    monkeypatch.setattr(wire, "CHUNK", 16)
    assert torch.equal(pack_codes(codes, 300), at_once)
    assert torch.equal(unpack_codes(at_once, 300, (7, 5, 5)), codes)


@pytest.mark.parametrize(("words", "work"), [
    ("run from 0 to 4, but the codebook has 4", lambda: pack_codes(torch.tensor([4, 0]), 4)),
    ("run from -1 to 3, but the codebook has 4", lambda: pack_codes(torch.tensor([3, -1]), 4)),
    ("4 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(4, dtype=torch.uint8), 4, (4,))),
    ("1 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(1, dtype=torch.int8), 4, (4,))),
    ("1 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(1, 1, dtype=torch.uint8), 4, (4,))),
    ("not 9 codes of 2 bits", lambda: unpack_codes(torch.zeros(2, dtype=torch.uint8), 4, (9,))),
    ("hold code 3", lambda: unpack_codes(torch.tensor([0xFF], dtype=torch.uint8), 3, (4,))),
    ("not finite", lambda: shrink(torch.tensor([[float("nan")]]), "int8")),
])  # fmt: skip
def test_faults_are_named(words: str, work):
    with pytest.raises(BadInput, match=words):
        work()


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_int8_by_hand(axes: tuple[int, ...]):
    """One channel from -1 to 254, so that a step is 1, and one from 10 to 20.2, so that it is 0.04."""
    latents = torch.tensor([[-1.0, 10.0], [0.0, 15.0], [254.0, 20.2]]).reshape(3, 2, *axes)
    sent = shrink(latents, "int8")
    assert sent["latents"].flatten(1).tolist() == [[-128, -128], [-127, -3], [127, 127]]
    assert sent["low"].tolist() == [-1.0, 10.0]
    assert sent["step"].tolist() == pytest.approx([1.0, 0.04])
    torch.testing.assert_close(restore(sent), latents)
    assert restore(sent).shape == latents.shape
