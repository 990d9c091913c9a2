"""NumPy archives: every layout they come in, and what is said when one is at fault."""

from pathlib import Path

import numpy as np
import pytest
from dataset_files import levels
from PIL import Image

from polyclinic.data.archives import Archive
from polyclinic.data.datasets import SOURCES, own_settings
from polyclinic.data.datasets.npz import Npz
from polyclinic.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_cache")


def picture(file, value):
    Image.fromarray(np.full((20, 20), value, np.uint8)).save(file)
    return file


def archive(tmp_path, **arrays):
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def ramps(count, *shape):
    return (np.arange(count, dtype=np.uint8).reshape(-1, *([1] * len(shape))) + np.zeros(shape, np.uint8)).copy()


def test_an_archive_with_every_array_and_names_for_its_numbers(tmp_path):
    file = archive(
        tmp_path,
        images=ramps(4, 16, 16),
        labels=np.array([0, 2, 2, 1]),
        site=np.array([1, 0, 0, 1]),
        patient=np.array([5, 6, 6, 7]),
        split=np.array(["train", "val", "val", "test"]),
        masks=ramps(4, 16, 16) % 2,
        label_names=np.array(["no", "mild", "severe"]),
        site_names=np.array(["Graz", "other/unknown"]),
    )
    data = Npz(path=file, size=16).load()
    assert data.classes == ("no", "mild", "severe")
    assert data.labels.tolist() == [0, 2, 2, 1]
    assert data.site.tolist() == ["other-unknown", "Graz", "Graz", "other-unknown"]
    assert data.split.tolist() == ["train", "validation", "validation", "test"]
    assert data.patient.tolist() == [5, 6, 6, 7]
    assert data.masks.max(axis=(1, 2)).tolist() == [0, 1, 0, 1]
    assert levels(data) == [0, 1, 2, 3]
    bare = Npz(path=file, size=16, site="", split="", group="", masks="").load()
    assert (bare.site, bare.split, bare.patient, bare.masks) == (None, None, None, None)


def test_names_of_arrays_are_settings_and_labels_can_be_chosen(tmp_path):
    file = archive(
        tmp_path, x=ramps(5, 16, 16), grade=np.arange(5), grade_names=np.array(list("abcde")), lesion=np.ones(5)
    )
    data = Npz(
        path=file,
        size=16,
        images="x",
        labels="grade",
        group="lesion",
        keep={"grade": [0, 2, 3, 4]},
        merge={"ill": [2, "d", 4]},
    ).load()
    assert data.classes == ("a", "ill")
    assert data.labels.tolist() == [0, 1, 1, 1]
    assert levels(data) == [0, 2, 3, 4]
    assert data.patient.tolist() == [1, 1, 1, 1]


def test_the_medmnist_layout_and_packed_jpegs(tmp_path):
    parts = {"train": 3, "val": 1, "test": 2}
    arrays = {f"{name}_images": ramps(count, 16, 16) for name, count in parts.items()}
    arrays |= {f"{name}_labels": (np.arange(count) % 2)[:, None] for name, count in parts.items()}
    data = Npz(path=archive(tmp_path, **arrays), size=16).load()
    assert data.split.tolist() == ["train"] * 3 + ["validation"] + ["test"] * 2
    assert data.labels.tolist() == [0, 1, 0, 0, 0, 1]
    assert levels(data) == [0, 1, 2, 0, 0, 1]
    files = [picture(tmp_path / f"{i}.jpg", 40 * i).read_bytes() for i in range(3)]
    offsets = np.cumsum([0, *map(len, files)])
    file = archive(tmp_path, jpeg=np.frombuffer(b"".join(files), np.uint8), jpeg_off=offsets, labels=np.arange(3))
    assert levels(Npz(path=file, size=20).load()) == [0, 40, 80]


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        (np.array([False, True, False]), ["train", "test", "train"]),
        (np.array([0, 2, 1], np.int8), ["train", "test", "validation"]),
    ],
)
def test_flags_and_numbers_as_splits(tmp_path, flags, splits):
    file = archive(tmp_path, images=ramps(3, 16, 16), labels=np.arange(3), part=flags)
    assert Npz(path=file, size=16, split="part").load().split.tolist() == splits


@pytest.mark.parametrize("shape", [(16, 18), (16, 18, 3), (3, 16, 18), (16, 18, 1), (1, 16, 18)])
def test_every_order_of_axes(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
    last = pixels.transpose(0, 2, 3, 1) if shape[0] in (1, 3) else pixels
    file = archive(tmp_path, images=pixels, labels=np.arange(2))
    data = Npz(path=file, size=16, shape="crop").load()
    expected = last[:, :, 1:17].reshape(2, 16, 16, -1).transpose(0, 3, 1, 2)
    assert np.array_equal(data.images, expected)


def test_floats_from_zero_to_one_are_images_and_others_are_named(tmp_path):
    images = np.zeros((3, 16, 16), np.float32)
    images[1], images[2] = 0.5, 7
    file = archive(tmp_path, images=images[:2], labels=np.arange(2))
    assert levels(Npz(path=file, size=16).load()) == [0, 128]
    file = archive(tmp_path, images=images, labels=np.arange(3), name=np.array(["x", "y", "z"]))
    with pytest.raises(BadInput, match=r"a.npz image 2 \(z\): its values run from 7 to 7 instead of 0 to 1"):
        Npz(path=file, size=16, ids="name").load()


@pytest.mark.parametrize(
    ("arrays", "settings", "says"),
    [
        ({"images": ramps(2, 16, 16)}, {}, "there is no array 'labels'; name one of images"),
        ({"images": ramps(2, 16, 16), "labels": np.arange(2)}, {"site": "centre"}, "there is no array 'centre'"),
        ({"images": ramps(2, 16), "labels": np.arange(2)}, {}, "images must be [N, H, W]"),
        ({"images": ramps(0, 16, 16), "labels": np.arange(0)}, {}, "no images found"),
        ({"images": ramps(2, 16, 16), "labels": np.array([{}, {}])}, {}, "'labels' cannot be read"),
        (
            {"images": ramps(2, 16, 16), "labels": np.array([0, 7]), "label_names": np.array(["a"])},
            {},
            "label 7 has no name",
        ),
    ],
)
def test_an_archive_with_a_fault_is_refused_in_one_sentence(tmp_path, arrays, settings, says):
    with pytest.raises(BadInput) as caught:
        Npz(path=archive(tmp_path, **arrays), size=16, **settings).load()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"unit": "months"}, "unit needs label_range"),
        ({"label_range": (3, 1)}, "lowest and then the highest"),
        ({"label_range": (0, 1), "merge": {"a": [1]}}, "merge, rename and per_class are for classes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        Npz(path=tmp_path, **settings)


def test_paths_in_the_data_folder_and_origins_change_nothing_that_is_prepared(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "images.npz", images=np.zeros((2, 16, 16), np.uint8), labels=[0, 1])
    source = Npz(path="$POLYCLINIC_DATA/images.npz", size=16)
    for name in ("here", "there"):
        monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path / name))
        assert source.location == tmp_path / name / "images.npz"
        assert len(source.listing()) == 2
    assert source.model_dump(mode="json")["path"] == "$POLYCLINIC_DATA/images.npz"
    assert Npz(path="images.npz").location == Path("images.npz").absolute()
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 16, 16), np.uint8), labels=[0, 1])
    told = Npz(path=tmp_path / "images.npz", origin="the archive of our clinic")
    assert told._entry() == Npz(path=tmp_path / "images.npz")._entry()


def test_settings_of_real_images_and_of_phantoms_stand_side_by_side(tmp_path):
    table = {"path": "images.npz", "labels": "grade", "keep": {"grade": [1]}, "samples": 50, "size": 32}
    real = own_settings(Npz, {"source": "npz", **table})
    assert Npz.model_validate(real).labels == "grade"
    assert real.keys() == {"source", "path", "labels", "keep", "size"}
    drawn = own_settings(SOURCES["hand-phantom"], {"source": "hand-phantom", **table})
    assert drawn == {"source": "hand-phantom", "samples": 50, "size": 32}
    for kind in (Npz, SOURCES["hand-phantom"], SOURCES["at-sites"]):
        assert own_settings(kind, {"sampels": 50}) == {"sampels": 50}  # misspelt: left in, and so refused
    assert own_settings(SOURCES["at-sites"], {"samples": 50}) == {"samples": 50}


def test_a_file_that_is_no_archive_or_of_an_unknown_version_is_named(tmp_path):
    file = archive(tmp_path, images=np.zeros((2, 4, 4), np.uint8))
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 250  # the version that is needed to read it
    for broken in (b"PK nothing", content):
        file.write_bytes(broken)
        with pytest.raises(BadInput, match="cannot be opened as"):
            Archive(file)
