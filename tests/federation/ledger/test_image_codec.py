"""Images in parcels: nothing is lost, bytes are saved, and false ones are refused before they fill the memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from polyclinic.federation.ledger.kinds import Expected, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode
from polyclinic.federation.ledger.wire import LONGEST, NotPictures, can_pack_images, pack_images, unpack_images


def smooth(count, channels, height, width, seed=0):
    rng = np.random.default_rng(seed)
    low = torch.from_numpy(rng.random((count, channels, 4, 4))).float()
    return (torch.nn.functional.interpolate(low, (height, width), mode="bilinear") * 255).to(torch.uint8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_any_images_come_back_as_they_were(count, channels, height, width, seed):
    images = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), np.uint8))
    assert torch.equal(unpack_images(pack_images(images), images.shape), images)


def test_many_images_take_several_strips():
    images = smooth(3, 1, LONGEST // 2, 2)
    assert torch.equal(unpack_images(pack_images(images), images.shape), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_smooth_images_shrink(channels):
    images = smooth(8, channels, 64, 64)
    assert len(pack_images(images)) < images.numel() / 2


@pytest.mark.parametrize(
    "images",
    [torch.zeros(1, 2, 4, 4, dtype=torch.uint8), torch.zeros(1, 1, 4, 4), torch.zeros(4, 4, dtype=torch.uint8)],
)
def test_what_is_no_picture_travels_as_it_is(images):
    assert not can_pack_images(images)
    parcel = Parcel("synthetic-images", {"images": images}, compressed=("images",))
    assert torch.equal(decode(parcel.encoded).tensors["images"], images)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (4, 1, 8, 8), (3, 1, 8, 9), (3, 3, 8), (3, 2, 8, 8), (3, 1, 0, 8)])
def test_other_shapes_than_were_packed_are_refused(shape):
    with pytest.raises(NotPictures):
        unpack_images(pack_images(smooth(3, 1, 8, 8)), shape)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        *(((2, 1, 1, 1), True), ((2, 3, 1, 1), True), ((0, 1, 4, 4), True), ((1, 1, LONGEST, 1), True)),
        *(((1, 1, 1, LONGEST), True), ((1, 1, LONGEST + 1, 1), False), ((1, 1, 1, LONGEST + 1), False)),
        *(((1, 1, 0, 4), False), ((1, 1, 4, 0), False), ((1, 2, 4, 4), False), ((1, 4, 4, 4), False)),
        *(((3, 4, 4), False), ((1, 1, 1, 4, 4), False)),
    ],
)
def test_shapes_that_are_packed_are_those_that_are_unpacked(shape, fits):
    images = torch.zeros(shape, dtype=torch.uint8)
    assert can_pack_images(images) is fits
    if fits:
        assert torch.equal(unpack_images(pack_images(images), shape), images)
    else:
        with pytest.raises(NotPictures, match="cannot be in there"):
            unpack_images(torch.zeros(0, dtype=torch.uint8), shape)


def test_webp_has_no_longer_side():
    assert LONGEST == 2**14 - 1  # 14 bits of a side less one, in the file itself


def test_nothing_but_bytes_of_no_fewer_than_no_images_is_unpacked():
    nothing = torch.zeros(0, dtype=torch.uint8)
    assert unpack_images(nothing, (0, 1, 8, 8)).shape == (0, 1, 8, 8)
    with pytest.raises(NotPictures, match="cannot be in there"):
        unpack_images(nothing, (-1, 1, 8, 8))
    with pytest.raises(NotPictures, match="cannot be in there"):
        unpack_images(pack_images(smooth(3, 1, 8, 8)).to(torch.int16), (3, 1, 8, 8))


def test_each_strip_comes_after_its_length_in_four_bytes():
    images = smooth(3, 1, LONGEST // 2, 2)  # two images in the first strip, one in the second
    data = pack_images(images).numpy().tobytes()
    first = int.from_bytes(data[:4], "little")
    second = int.from_bytes(data[4 + first : 8 + first], "little")
    assert len(data) == 8 + first + second
    assert data[4:8] == data[8 + first : 12 + first] == b"RIFF"
    alone = pack_images(images[2:]).numpy().tobytes()
    assert data[4 + first :] == alone


def test_a_strip_of_another_size_is_refused_before_its_pixels_are_read():
    one = pack_images(smooth(3, 1, 8, 8))
    with pytest.raises(NotPictures, match=r"a strip of \(8, 24\) px came where \(8, 16\) was expected"):
        unpack_images(one, (2, 1, 8, 8))


def test_bytes_that_are_no_pictures_are_refused():
    with pytest.raises(NotPictures):
        unpack_images(torch.zeros(50, dtype=torch.uint8), (3, 1, 8, 8))
    with pytest.raises(NotPictures, match="more bytes"):
        unpack_images(torch.cat([pack_images(smooth(3, 1, 8, 8)), torch.zeros(1, dtype=torch.uint8)]), (3, 1, 8, 8))


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


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ('{"images": [1000000, 3, 10000, 10000]}', "above the limit"),
        ('{"images": [8, 3, 32]}', "with their shapes"),
        ('{"images": [8, 3, 32, true]}', "with their shapes"),
        ("[1]", "with their shapes"),
        ('{"images": [9, 3, 32, 32]}', "cannot be read"),
        ('{"others": [8, 3, 32, 32]}', "cannot be read"),
    ],
)
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
