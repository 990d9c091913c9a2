"""What arrives is what was sent, rounded no more than said; and nobody is made to unpack a bomb."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load, save

from polyclinic.federation.call import Call, Expected, Reply
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode, shortened
from polyclinic.federation.ledger.wire import LONGEST, NotPictures, can_pack_images, pack_images, unpack_images

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
    with pytest.raises(NotPictures):
        unpack_images(torch.zeros(50, dtype=torch.uint8), (3, 1, 8, 8))
    with pytest.raises(NotPictures, match="more bytes"):
        unpack_images(torch.cat([pack_images(smooth(3, 1, 8, 8)), torch.zeros(1, dtype=torch.uint8)]), (3, 1, 8, 8))
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
    assert torch.equal(unpack_images(pack_images(images), images.shape), images)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (4, 1, 8, 8), (3, 1, 8, 9), (3, 3, 8), (3, 2, 8, 8), (3, 1, 0, 8)])
def test_other_shapes_than_were_packed_are_refused(shape):
    with pytest.raises(NotPictures):
        unpack_images(pack_images(smooth(3, 1, 8, 8)), shape)


@pytest.mark.parametrize(("shape", "fits"), [
    *(((2, 1, 1, 1), True), ((2, 3, 1, 1), True), ((0, 1, 4, 4), True), ((1, 1, LONGEST, 1), True)),
    *(((1, 1, 1, LONGEST), True), ((1, 1, LONGEST + 1, 1), False), ((1, 1, 1, LONGEST + 1), False)),
    *(((1, 1, 0, 4), False), ((1, 1, 4, 0), False), ((1, 2, 4, 4), False), ((1, 4, 4, 4), False)),
    *(((3, 4, 4), False), ((1, 1, 1, 4, 4), False)),
])  # fmt: skip
def test_shapes_that_are_packed_are_those_that_are_unpacked(shape, fits):
    images = torch.zeros(shape, dtype=torch.uint8)
    assert can_pack_images(images) is fits
    if fits:
        assert torch.equal(unpack_images(pack_images(images), shape), images)
    else:
        with pytest.raises(NotPictures, match="cannot be in there"):
            unpack_images(torch.zeros(0, dtype=torch.uint8), shape)


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
