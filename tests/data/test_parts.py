"""Parts: written once, whole or not at all, and each site opens its own only; the cache and listings behind them."""

import hashlib
import os
import shutil
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.data import parts as parts_module
from polyclinic.data.allowed_paths import check_site_names, safe_name, safe_names
from polyclinic.data.cache import entries, remove
from polyclinic.data.dataset import Dataset, split
from polyclinic.data.labels import masked_share
from polyclinic.data.listing import Listing
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.parts import open_array, open_site, prepare
from polyclinic.data.source import Source
from polyclinic.errors import BadInput


class Drawn(Source):
    """Sixty images of random pixels, two per patient."""

    source: str = "drawn"
    size: int = 16

    def load(self) -> Dataset:
        rng = np.random.default_rng(5)
        return Dataset(
            rng.integers(0, 256, (60, 1, 16, 16), np.uint8),
            np.repeat(np.arange(30) % 2, 2),
            ("no", "yes"),
            masks=rng.integers(0, 2, (60, 16, 16), np.uint8),
            patient=np.array([f"p{i // 2:02d}" for i in range(60)]),
            subgroup=np.array(["left", "right"] * 30),
            columns=np.array([[f"scanner {i % 7}", f"age {i}"] for i in range(60)]),
            column_names=("scanner", "age"),
        )


@pytest.fixture
def sites():
    return PARTITIONS["iid"](partition="iid", count=3)


def test_every_image_goes_to_one_site_with_its_label_mask_patient_and_subgroup(tmp_path, sites):
    data = Drawn().load()
    parts = prepare(Drawn(), sites, cache=tmp_path)
    place = {image.tobytes(): i for i, image in enumerate(data.images)}
    seen = []
    for name in parts.names:
        site = open_site(parts.folder, name)
        for part in (site.train, site.validation, site.test):
            at = [place[image.tobytes()] for image in part.images]
            seen += at
            assert np.array_equal(part.labels, data.labels[at])
            assert np.array_equal(part.masks, data.masks[at])
            assert np.array_equal(part.subgroup, data.subgroup[at])
            assert np.array_equal(part.columns, data.columns[at])
            assert np.array_equal(part.cases, np.array(at) // 2)
    assert sorted(seen) == list(range(60))
    assert parts.info["columns"] == ["scanner", "age"]


def test_info_and_digests_are_of_labels_and_images(tmp_path, sites):
    parts = prepare(Drawn(), sites, cache=tmp_path)
    site = open_site(parts.folder, parts.names[1])
    assert parts.info["counts"][site.name] == {
        "train": len(site.train),
        "validation": len(site.validation),
        "test": len(site.test),
    }
    assert parts.info["class_counts"][site.name]["train"] == np.bincount(site.train.labels, minlength=2).tolist()
    assert (parts.info["channels"], parts.info["size"], parts.info["has_masks"]) == (1, 16, True)
    assert 0 <= parts.info["mean_ks"] < 0.5
    empty = prepare(Drawn(validation=0), sites, cache=tmp_path)
    assert len(open_site(empty.folder, "site-1").validation) == 0
    parts = prepare(Drawn(), sites, cache=tmp_path)
    data = Drawn().load()
    index = split(data, validation=0.15, test=0.2, seed=0)["test"]
    by_hand = hashlib.sha256(data.labels[index].tobytes() + data.images[index].tobytes()).hexdigest()
    assert parts.info["digests"]["test"] == by_hand
    fewer = prepare(Drawn(), PARTITIONS["iid"](partition="iid", count=2), cache=tmp_path)
    assert fewer.info["digests"] == parts.info["digests"]
    assert fewer.folder != parts.folder


def test_a_site_opens_its_own_part_only(tmp_path, sites):
    """With every other site's folder, and the summary, gone from the disk a site still opens its part."""
    parts = prepare(Drawn(), sites, cache=tmp_path)
    mine, *others = parts.names
    before = open_site(parts.folder, mine).train.images.copy()
    for other in others:
        shutil.rmtree(parts.folder / other)
    (parts.folder / "info.json").unlink()
    assert np.array_equal(open_site(parts.folder, mine).train.images, before)
    with pytest.raises(BadInput, match="no part of 'site-2'"):
        open_site(parts.folder, others[0])


def test_small_files_are_read_at_once_and_large_ones_mapped(tmp_path, sites, monkeypatch):
    parts = prepare(Drawn(), sites, cache=tmp_path)
    small = open_site(parts.folder, parts.names[0])
    monkeypatch.setattr("polyclinic.data.parts.READ_AT_ONCE", 0)
    mapped = open_site(parts.folder, parts.names[0])
    assert (small.mapped_files, mapped.mapped_files) == (0, 18)
    for one, other in ((small.train, mapped.train), (small.test, mapped.test)):
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.labels, other.labels)
    for one in (small, mapped):
        with pytest.raises(ValueError, match="read-only"):
            one.train.images[0] = 0


@pytest.mark.parametrize(
    "name", ["../site-2", "site-1/../site-2", "/etc", "..", ".", "", "a\\b", "a\0b", ".hidden", "x."]
)
def test_a_name_that_could_leave_its_folder_is_refused(tmp_path, sites, name):
    parts = prepare(Drawn(), sites, cache=tmp_path)
    with pytest.raises(BadInput, match="cannot be the name of a site"):
        open_site(parts.folder, name)


def test_names_of_institutions_are_made_safe():
    assert safe_name("other/unknown") == "other-unknown"
    assert safe_name("../../x") == "x"
    assert safe_name("Hôpital St. Luc (Bruxelles)") == "Hôpital St. Luc (Bruxelles)"
    with pytest.raises(BadInput, match="'a-b' and 'a/b' would have the same name"):
        safe_names(["a/b", "c", "a-b"])
    with pytest.raises(BadInput, match="'Ulm' and 'ulm' differ by upper case only"):
        check_site_names(["Ulm", "Graz", "ulm"])


@given(st.text(max_size=150))
def test_whatever_an_institution_is_called_its_name_is_safe(text):
    check_site_names(safe_names([text]))


def test_a_second_preparation_reads_the_cache_and_a_failed_one_leaves_nothing(tmp_path, sites, monkeypatch):
    monkeypatch.setattr(parts_module, "describe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(Drawn(), sites, cache=tmp_path)
    assert list((tmp_path / "parts").iterdir()) == []
    monkeypatch.undo()
    assert prepare(Drawn(), sites, cache=tmp_path).names == ("site-1", "site-2", "site-3")
    first = prepare(Drawn(), sites, cache=tmp_path)
    monkeypatch.setattr(parts_module, "load", lambda *_: pytest.fail("loaded again"))
    assert prepare(Drawn(), sites, cache=tmp_path) == first
    monkeypatch.undo()
    assert prepare(Drawn(seed=1), sites, cache=tmp_path).info["digests"] != first.info["digests"]


def test_each_site_has_its_own_camera_and_masks_follow_it(tmp_path, sites):
    class Seen(Drawn):
        acquisition: float = 1.0

    # with this seed every camera crops so much that small masks show it
    plain, seen = (prepare(kind(seed=3), sites, cache=tmp_path) for kind in (Drawn, Seen))
    changes = []
    for name in plain.names:
        before, after = open_site(plain.folder, name).train, open_site(seen.folder, name).train
        assert np.array_equal(before.labels, after.labels)
        changes.append(float(after.images.mean()) - float(before.images.mean()))
        assert after.masks.shape == before.masks.shape
        assert not np.array_equal(after.masks, before.masks)
    assert np.ptp(changes) > 2


ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.array([1.5, -2], dtype=np.float32),
    np.array(7, dtype=np.int64),
    np.array(["old", "young é"]),
    np.zeros((0, 3, 4), dtype=np.uint8),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda one: f"{one.dtype}-{one.shape}")
def test_a_file_gives_what_numpy_gives(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    found = open_array(str(tmp_path / "a.npy"))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    assert not found.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


def test_a_damaged_file_and_one_of_objects_are_refused(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    objects = file.read_bytes()
    np.save(file, ARRAYS[0])
    whole = file.read_bytes()
    for content in (whole[:-5], whole[:9], whole.replace(b"'shape'", b"'shap3'"), b"", objects):
        file.write_bytes(content)
        with pytest.raises((ValueError, EOFError)):
            open_array(str(file))


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


def test_listings_and_datasets_of_some_images():
    whole = listing(3, mask=lambda i: -i)
    taken = whole.take(np.array([2, 0]))
    assert ([taken.picture(i) for i in range(2)], taken.labels.tolist(), taken.spacing) == ([20, 0], [2, 0], None)
    assert [taken.mask(i) for i in range(2)] == [-2, 0]
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
    masks = np.zeros((2, 2, 2))
    masks[0, 0, 0], masks[1] = 1, 0.5
    assert masked_share(masks) == pytest.approx((0.25 + 1) / 2)
    assert masked_share(None) == 0
    assert masked_share(masks[:0]) == 0
