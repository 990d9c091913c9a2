"""What lies in the cache: ages, sizes, and what is removed; some images of a listing."""

import os
import time

import numpy as np
import pytest

from polyclinic.data.cache import entries, remove
from polyclinic.data.dataset import Dataset
from polyclinic.data.labels import masked_share
from polyclinic.data.listing import Listing

DAY = 86400


def entry(folder, shelf, name, size, days):
    path = folder / shelf / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used = time.time() - days * DAY
    os.utime(path, (used, used))
    return path


def test_entries_are_told_with_their_size_and_age_the_oldest_first(tmp_path):
    entry(tmp_path, "prepared/a", "images.npy", 10, 9)
    entry(tmp_path, "prepared/a", "labels.npy", 5, 3)
    old = entry(tmp_path, "generators", "g.safetensors", 7, 5)
    entry(tmp_path, "generators", "g.lock", 1, 8)
    (tmp_path / "parts" / "empty").mkdir(parents=True)
    found = entries(cache=tmp_path)
    assert [(one.shelf, one.path.name, one.bytes) for one in found] == [
        ("generators", "g.safetensors", 7),
        ("prepared", "a", 15),
        ("parts", "empty", 0),
    ]
    assert [one.days for one in found] == pytest.approx([5, 3, 0], abs=0.01)
    assert [one.path for one in entries(4, tmp_path)] == [old]
    assert len(entries(2.9, tmp_path)) == 2
    assert entries(cache=tmp_path / "nowhere") == []
    for one in found:
        remove(one)
    assert entries(cache=tmp_path) == []
    assert (tmp_path / "prepared").is_dir()


def listing(count, **more):
    numbers = np.arange(count)
    return Listing(picture=lambda i: 10 * i, name=str, labels=numbers, ids=numbers.astype(str), **more)


def test_listings_of_some_images():
    whole = listing(3, mask=lambda i: -i)
    taken = whole.take(np.array([2, 0]))
    assert ([taken.picture(i) for i in range(2)], taken.labels.tolist(), taken.spacing) == ([20, 0], [2, 0], None)
    assert [taken.mask(i) for i in range(2)] == [-2, 0]


def test_images_are_taken_with_what_is_known_of_them():
    numbers = np.arange(4)
    images = np.zeros((4, 1, 2, 2), np.uint8) + numbers.astype(np.uint8)[:, None, None, None]
    whole = Dataset(images, numbers, classes=("a", "b"), patient=numbers + 10, column_names=("sex",))
    some = whole.take(np.array([3, 1]))
    assert (some.labels.tolist(), some.patient.tolist(), some.images[:, 0, 0, 0].tolist()) == ([3, 1], [13, 11], [3, 1])
    assert (some.classes, some.column_names, some.site, len(some)) == (("a", "b"), ("sex",), None, 2)
    with pytest.raises(ValueError, match="labels has 3 entries for 4 images"):
        Dataset(images, numbers[:3])
    for wrong in (images.astype(float), images[0]):
        with pytest.raises(ValueError, match=r"images must be uint8 \[N, C, H, W\]"):
            Dataset(wrong, np.arange(len(wrong)))


def test_the_share_of_pixels_inside_masks():
    masks = np.zeros((2, 2, 2))
    masks[0, 0, 0], masks[1] = 1, 0.5
    assert masked_share(masks) == pytest.approx((0.25 + 1) / 2)
    assert masked_share(None) == 0
    assert masked_share(masks[:0]) == 0
