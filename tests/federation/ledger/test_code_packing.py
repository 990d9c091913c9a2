"""Codes in as few bits as they need, latents in one, two or four bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.errors import BadInput
from polyclinic.federation.ledger import wire
from polyclinic.federation.ledger.wire import bits_for, pack_codes, restore, shrink, unpack_codes


@given(st.data(), st.integers(1, 2**15), st.integers(0, 200))
def test_codes_come_back_from_ceil_log2_k_bits(data: st.DataObject, size: int, numbers: int):
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=numbers, max_size=numbers))
    codes = torch.tensor(values, dtype=torch.int16)
    packed = pack_codes(codes, size)
    assert packed.numel() == math.ceil(numbers * max(1, math.ceil(math.log2(size))) / 8)
    assert torch.equal(unpack_codes(packed, size, (numbers,)), codes)


def test_many_codes_are_packed_piece_by_piece_as_if_at_once(monkeypatch: pytest.MonkeyPatch):
    codes = torch.randint(300, (7, 5, 5), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    at_once = pack_codes(codes, 300)
    monkeypatch.setattr(wire, "CHUNK", 16)
    assert torch.equal(pack_codes(codes, 300), at_once)
    assert torch.equal(unpack_codes(at_once, 300, (7, 5, 5)), codes)


def test_pieces_end_with_a_byte_whatever_the_bits_of_a_code():
    assert wire.CHUNK % 8 == 0


def test_bits_by_hand():
    assert [bits_for(size) for size in (1, 2, 3, 4, 5, 512, 513)] == [1, 1, 2, 2, 3, 9, 10]
    # 1 and 2 in two bits each, lowest bit first: 10 01 0000
    assert pack_codes(torch.tensor([1, 2]), 4).tolist() == [0b10010000]


@pytest.mark.parametrize(
    ("words", "work"),
    [
        ("run from 0 to 4, but the codebook has 4", lambda: pack_codes(torch.tensor([4, 0]), 4)),
        ("run from -1 to 3, but the codebook has 4", lambda: pack_codes(torch.tensor([3, -1]), 4)),
        ("4 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(4, dtype=torch.uint8), 4, (4,))),
        ("1 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(1, dtype=torch.int8), 4, (4,))),
        ("1 bytes are not 4 codes of 2 bits", lambda: unpack_codes(torch.zeros(1, 1, dtype=torch.uint8), 4, (4,))),
        ("not 9 codes of 2 bits", lambda: unpack_codes(torch.zeros(2, dtype=torch.uint8), 4, (9,))),
        ("hold code 3", lambda: unpack_codes(torch.tensor([0xFF], dtype=torch.uint8), 3, (4,))),
        ("not finite", lambda: shrink(torch.tensor([[float("nan")]]), "int8")),
    ],
)
def test_faults_are_named(words: str, work):
    with pytest.raises(BadInput, match=words):
        work()


def test_latents_come_back_within_the_step_of_their_channel():
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, 3, 4, 4, generator=generator) * torch.tensor([0.01, 1.0, 100.0]).reshape(3, 1, 1)
    assert torch.equal(restore(shrink(latents, "fp32")), latents)
    assert ((restore(shrink(latents, "fp16")) - latents).abs() <= latents.abs() * 2**-11 + 1e-7).all()
    sent = shrink(latents, "int8")
    assert sent["latents"].dtype == torch.int8
    off = (restore(sent) - latents).abs().amax((0, 2, 3))
    assert (off <= sent["step"] * 0.501).all()
    assert off[0] < 1e-3 < off[2]  # a scale for each channel, not one for all


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


def test_int8_takes_a_quarter_of_the_bytes_and_survives_constant_channels():
    latents = torch.ones(64, 4, 8, 8) * torch.tensor([0.0, 3.0, -2.0, 1e9]).reshape(4, 1, 1)
    sent = shrink(latents, "int8")
    assert sum(t.numel() * t.element_size() for t in sent.values()) == latents.numel() + 2 * 4 * 4
    assert torch.equal(restore(sent), latents)


def test_fp16_holds_what_is_too_large_at_its_largest_number():
    assert restore(shrink(torch.tensor([[1e6]]), "fp16")).item() == 65504
