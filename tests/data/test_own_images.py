"""A hospital's own images: folder, CSV and npz, what they give and what they say when something is wrong."""

import os
import shutil
import threading

import numpy as np
import pytest
from dataset_files import levels
from medical_files import write_dicom, write_nifti
from PIL import Image

from polyclinic.data import listing as prepare_module
from polyclinic.data.dataset import split
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.table import Csv
from polyclinic.errors import BadInput


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(file, value, size=(20, 20)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size, value, np.uint8)).save(file)
    return file


@pytest.fixture
def classes(tmp_path):
    """Two classes of three grey images each; the brightness is the number in the name."""
    for i in range(3):
        picture(tmp_path / "images" / "benign" / f"{i}.png", i)
        picture(tmp_path / "images" / "malignant" / "deep" / f"{10 + i}.jpg", 10 * (10 + i))
    (tmp_path / "images" / "benign" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def test_folders_of_classes_and_of_splits(classes, tmp_path):
    data = Folder(path=classes, size=16).load()
    assert data.classes == ("benign", "malignant")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert levels(data) == [0, 1, 2, 100, 110, 120]
    assert data.images.shape == (6, 1, 16, 16)
    assert data.ids[3] == "malignant/deep/10.jpg"
    assert data.split is None
    (tmp_path / "top").mkdir()
    shutil.copytree(classes, tmp_path / "top" / "train")
    shutil.copytree(classes, tmp_path / "top" / "Test")
    data = Folder(path=tmp_path / "top", size=16).load()
    assert sorted(data.split.tolist()) == ["test"] * 6 + ["train"] * 6
    assert len(split(data, validation=0.3, test=0.2, seed=0)["test"]) == 6


def test_the_patient_is_found_in_the_file_name(tmp_path):
    for name in ("benign/007_a", "benign/007_b", "malignant/008_a"):
        picture(tmp_path / "x" / f"{name}.png", 5)
    data = Folder(path=tmp_path / "x", size=16, patient=r"^(\d+)_").load()
    assert data.patient.tolist() == ["007", "007", "008"]
    with pytest.raises(BadInput, match="finds no patient in the file name '007_a"):
        Folder(path=tmp_path / "x", size=16, patient="nobody").load()
    with pytest.raises(BadInput, match="not a regular expression"):
        Folder(path=tmp_path / "x", size=16, patient="(").load()


def test_volumes_and_dicom_lie_beside_pictures_and_slices_of_one_volume_are_one_patients(tmp_path):
    picture(tmp_path / "x" / "a" / "p.png", 0)
    (tmp_path / "x" / "b").mkdir()
    write_dicom(tmp_path / "x" / "b" / "d.dcm", np.full((18, 18), 7, np.uint8), WindowCenter=128, WindowWidth=256)
    write_nifti(tmp_path / "x" / "b" / "v.nii.gz", np.ones((18, 18, 4), np.float32))
    data = Folder(path=tmp_path / "x", size=16, slices="all", window=(128, 256)).load()
    assert data.labels.tolist() == [0, 1, 1, 1, 1, 1]
    assert levels(data)[:2] == [0, 7]
    assert len(set(data.patient[2:])) == 1
    assert len(set(data.patient)) == 3
    assert data.ids[-1] == "b/v.nii.gz slice 3"


@pytest.mark.parametrize(
    ("make", "says"), [("nothing", "nothing at"), ("file", "not a folder"), ("one", "at least two")]
)
def test_a_folder_that_is_none_says_so(tmp_path, make, says):
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    if make == "one":
        picture(path / "benign" / "a.png", 1)
    with pytest.raises(BadInput, match=says):
        Folder(path=path, size=16).load()


def test_colour_is_found_and_can_be_chosen(classes):
    assert Folder(path=classes, size=16).load().images.shape[1] == 1
    assert Folder(path=classes, size=16, channels=3).load().images.shape[1] == 3
    Image.fromarray(np.full((20, 20, 3), (200, 0, 0), np.uint8)).save(classes / "benign" / "red.png")
    data = Folder(path=classes, size=16).load()
    assert data.images.shape[1] == 3
    assert data.images[3, :, 0, 0].tolist() == [200, 0, 0]


def test_the_source_is_prepared_once_and_again_when_a_file_changes(classes, cache, monkeypatch):
    first = Folder(path=classes, size=16).load()
    assert isinstance(first.images, np.memmap)
    reads = []
    real = prepare_module.fit_image
    monkeypatch.setattr(prepare_module, "fit_image", lambda *args: (reads.append(1), real(*args))[1])
    Folder(path=classes, size=16, seed=4, test=0.5).load()  # how it is split does not change the images
    assert reads == []
    picture(classes / "benign" / "0.png", 99)
    os.utime(classes / "benign" / "0.png", ns=(1, 1))
    assert levels(Folder(path=classes, size=16).load())[0] == 99
    assert len(reads) == 6
    assert len(list((cache / "prepared").iterdir())) == 2


def test_an_interrupted_preparation_goes_on_where_it_stopped(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(prepare_module, "STEP", 2)
    monkeypatch.setattr(prepare_module, "NOTED_EVERY", 1)
    for i in range(10):
        picture(tmp_path / "x" / "ab"[i % 2] / f"{i}.png", i)
    undisturbed = Folder(path=tmp_path / "x", size=16).prepared(tmp_path / "other").images.copy()

    def stop(what, done, total):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Folder(path=tmp_path / "x", size=16).prepared(progress=stop)
    assert [folder.suffix for folder in (cache / "prepared").iterdir()] == [".partial"]
    seen = []
    data = Folder(path=tmp_path / "x", size=16).prepared(progress=lambda *step: seen.append(step))
    assert seen == [("preparing images", 8, 10), ("preparing images", 10, 10)]
    assert np.array_equal(data.images, undisturbed)
    assert [folder.suffix for folder in (cache / "prepared").iterdir()] == [""]


def test_of_two_that_prepare_the_same_the_second_waits_and_reads_nothing(classes, monkeypatch):
    monkeypatch.setattr(prepare_module, "STEP", 2)
    reads, others = [], []
    real = prepare_module.fit_image
    monkeypatch.setattr(prepare_module, "fit_image", lambda *args: (reads.append(1), real(*args))[1])
    second = threading.Thread(target=lambda: others.append(Folder(path=classes, size=16).load()))

    def meanwhile(what, done, total):
        if done == 2:
            second.start()

    mine = Folder(path=classes, size=16).prepared(progress=meanwhile)
    second.join()
    assert len(reads) == 6
    assert np.array_equal(mine.images, others[0].images)
    assert levels(mine) == [0, 1, 2, 100, 110, 120]


@pytest.fixture
def table(tmp_path):
    for i in range(4):
        picture(tmp_path / "t" / "scans" / f"{i}.png", 10 * i)
        Image.fromarray(np.eye(20, dtype=np.uint8) * (255 if i else 0)).save(tmp_path / "t" / f"mask{i}.png")

    def write(header, *rows):
        (tmp_path / "t" / "cases.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8-sig")
        return tmp_path / "t" / "cases.csv"

    return write


def test_a_csv_with_every_column(table):
    file = table(
        "path;label;site;split;patient;mask;subgroup",
        "scans/0.png;b;Graz;train;p1;mask0.png;x",
        "scans/1.png;a;Wien/AKH;val;p2;mask1.png;y",
        "scans/2.png;b;Graz;test;p3;mask2.png;x",
        "scans/3.png;a;Graz;;p1;mask3.png;x",
    )
    data = Csv(path=file, size=20).load()
    assert data.classes == ("a", "b")
    assert data.labels.tolist() == [1, 0, 1, 0]
    assert levels(data) == [0, 10, 20, 30]
    assert data.site.tolist() == ["Graz", "Wien-AKH", "Graz", "Graz"]
    assert data.split.tolist() == ["train", "validation", "test", ""]
    assert data.patient.tolist() == ["p1", "p2", "p3", "p1"]
    assert data.subgroup.tolist() == ["x", "y", "x", "x"]
    assert data.masks.sum(axis=(1, 2)).tolist() == [0, 20, 20, 20]


def test_values_to_predict_are_numbers_in_their_range(table):
    file = table("path,age", "scans/0.png,12.5", "scans/1.png,200")
    data = Csv(path=file, size=16, label="age", label_range=(0, 228), unit="months").load()
    assert data.labels.tolist() == [12.5, 200]
    assert data.labels.dtype == np.float32
    assert (data.classes, data.unit, data.label_range) == ((), "months", (0, 228))
    with pytest.raises(BadInput, match=r"cases.csv row 3: the label 200 is outside data.label_range \[0.0, 100.0\]"):
        Csv(path=file, size=16, label="age", label_range=(0, 100)).load()
    file = table("path,age", "scans/0.png,old")
    with pytest.raises(BadInput, match=r"cases\.csv row 2: the label 'old' is not a number; remove these rows"):
        Csv(path=file, size=16, label="age", label_range=(0, 100)).load()
    ages = ["nan", "n/a", "12", "?", "-", "n/a", "n/a", "unknown"]
    file = table("path,age", *(f"scans/{number % 2}.png,{age}" for number, age in enumerate(ages)))
    with pytest.raises(BadInput) as error:
        Csv(path=file, size=16, label="age", label_range=(0, 100)).listing()
    said = str(error.value).splitlines()
    assert [line.partition(" row ")[2].partition(":")[0] for line in said[:5]] == ["2", "3", "5", "6", "7"]
    assert "2 more" in said[5]


def test_masks_and_labels_are_chosen_by_settings(table):
    data = Csv(path=table("path,mask", "scans/1.png,mask1.png"), size=20).load()
    assert data.masks[0].sum() == 20
    assert data.classes == ("image",)
    file = table("path,grade", *(f"scans/{i}.png,{grade}" for i, grade in enumerate(["0", "2", "10", "1"])))
    data = Csv(
        path=file, size=16, label="grade", keep={"grade": [0, 2, 10]}, merge={"ill": [2, 10]}, rename={"0": "well"}
    ).load()
    assert data.classes == ("well", "ill")
    assert data.labels.tolist() == [0, 1, 1]
    file = table("path,label", *(f"scans/{i}.png,{'aaab'[i]}" for i in range(4)))
    draws = {tuple(levels(Csv(path=file, size=16, per_class=1, seed=seed).load())) for seed in range(12)}
    assert draws == {(0, 30), (10, 30), (20, 30)}
    with pytest.raises(BadInput, match="class 1 has only 1 images, not 2"):
        Csv(path=file, size=16, per_class=2).load()


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        (["image,label", "scans/0.png,a"], {}, "there is no column 'path'; it has image, label"),
        (["path,other", "scans/0.png,a"], {}, "neither a column 'label' nor 'mask'"),
        (["path,label", "scans/0.png,a"], {"patient": "case"}, "there is no column 'case'"),
        (["path,label", "scans/0.png,a"], {"keep": {"label": ["z"]}}, "data.keep.label: no image has the value 'z'"),
        (["path,label", "scans/0.png,a"], {"merge": {"m": ["z"]}}, "data.merge.m: no image has the label 'z'"),
        (["path,label,split", "scans/0.png,a,dev"], {}, "unknown split 'dev'; use train, validation or test"),
        ([], {}, "the table is empty"),
    ],
)
def test_a_table_with_a_fault_is_refused_in_one_sentence(table, rows, settings, says):
    file = table(*rows) if rows else table("")
    with pytest.raises(BadInput) as caught:
        Csv(path=file, size=16, **settings).load()
    assert says in str(caught.value)
