"""Data that lie: images that are there twice, one file with two labels, several labels, tables in other letters."""

import io

import numpy as np
import pytest
from PIL import Image
from test_survey import draw

from polyclinic.cli import run_app
from polyclinic.data.dataset import SPLITS, Dataset, Fold, kept_together, split
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.table import Csv
from polyclinic.data.doubles import digest_of, near_doubles, said_of_doubles, several_labels, thumbnail, twins
from polyclinic.data.survey import survey
from polyclinic.data.survey_cases import Hints
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput, Notice
from polyclinic.runner.run.data_check import check_images, draw_doubles

RNG = np.random.default_rng(0)


def scene(seed=0, side=64):
    """Smooth shapes, as photographs have them."""
    coarse = np.random.default_rng(seed).integers(0, 255, (8, 8), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


def save(file, pixels, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)


def test_images_that_are_the_same_share_a_number_and_a_split():
    images = [scene(1), scene(2), scene(1), np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8), scene(1)]
    found = twins(np.array([digest_of(one) for one in images]))
    assert found.tolist() == [0, 1, 0, 3, 4, 0], "images of one colour show nothing"
    count = 60
    same = np.arange(count) // 2  # pairs: the second of each, and the first of the next patient
    patient = (np.arange(count) + 1) // 2
    data = Dataset(np.zeros((count, 1, 16, 16), np.uint8), np.arange(count) % 2, ("a", "b"), twins=same)
    for fold in (None, Fold(1, 3)):
        parts = split(data, validation=0.2, test=0.2, seed=0, fold=fold)
        owners = [set(same[parts[name]].tolist()) for name in SPLITS]
        assert sum(map(len, owners)) == 30
    chained = Dataset(data.images, data.labels, ("a", "b"), patient=patient, twins=same)
    assert set(kept_together(chained).tolist()) == {0}, "patients who share an image belong together"


def test_an_image_in_two_classes_is_named_with_its_files(tmp_path):
    for number in range(12):
        save(tmp_path / "scans" / "ab"[number % 2] / f"{number}.png", scene(number))
    save(tmp_path / "scans" / "b" / "copy.png", scene(0))
    found = check_images(Folder(path=tmp_path / "scans"))
    warning = "WARNING: 1 image is there more than once, with another class: a/0.png = b/copy.png"
    assert warning in found
    assert warning in survey(tmp_path / "scans").notes
    save(tmp_path / "scans" / "b" / "copy.png", scene(1))
    found = check_images(Folder(path=tmp_path / "scans"))
    assert "1 image is there twice: b/1.png = b/copy.png; they stay in one split, unless the source fixes it" in found
    assert Folder(path=tmp_path / "scans").prepared(tmp_path / "cache").twins is not None


def test_sites_and_splits_of_doubles_are_told():
    digests = np.array([1, 2, 1, 3])
    columns = {"class": ["x"] * 4, "site": ["n", "n", "s", "s"], "split": ["train", "train", "test", "test"]}
    found = said_of_doubles(digests, ["0", "1", "2", "3"], columns)
    assert found == [
        f"WARNING: 1 image is there more than once, with another {one}: 0 = 2" for one in ("site", "split")
    ]
    assert said_of_doubles(np.arange(1, 5), ["0", "1", "2", "3"], columns) == []


def test_near_doubles_are_a_hint_with_a_picture(tmp_path):
    for number in range(24):
        save(tmp_path / "scans" / "ab"[number % 2] / f"{number}.png", scene(number))
    save(tmp_path / "scans" / "a" / "again.jpg", scene(0), quality=50)
    source = Folder(path=tmp_path / "scans", size=32)
    (hint,) = [one for one in check_images(source) if one.startswith("hint")]
    assert "1 pair of images look nearly the same, such as a/0.png and a/again.jpg" in hint
    assert str(tmp_path / "d.png") in draw_doubles(source, tmp_path / "d.png")
    assert Image.open(tmp_path / "d.png").size[0] > 200
    half = np.asarray(Image.fromarray(scene(3)).resize((32, 32), Image.Resampling.BOX))
    pictures = [scene(3), half, *(scene(20 + n) for n in range(30))]
    seen, digests = np.stack([thumbnail(one) for one in pictures]), np.array([digest_of(one) for one in pictures])
    assert near_doubles(seen, digests) == [(0, 1)]
    assert near_doubles(seen[[0, 1] * 5], np.arange(10)) == [], "alike by nature"


def test_one_file_with_two_labels_is_refused(tmp_path):
    for number in range(12):
        draw(tmp_path / f"{number}.png", seed=number)
    rows = [f"{number}.png,{'xy'[number % 2]}" for number in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows, "0.png,y"]) + "\n")
    with pytest.raises(BadInput, match=r"row 2 and row 14: '0\.png' has two labels, 'x' and 'y'; remove one"):
        Csv(path=tmp_path / "t.csv").listing()
    with pytest.raises(BadInput, match=r"'0\.png' has two labels, 'x' and 'y'"):
        survey(tmp_path)


def test_several_labels_of_an_image_are_refused(tmp_path):
    assert several_labels(["mass", "cyst", "mass|cyst"]) == "mass|cyst"
    assert several_labels(["mass", "cyst", "mass, cyst"]) == "mass, cyst"
    assert several_labels(["left, upper", "right", "T+", "A&E"]) == ""
    for number in range(12):
        draw(tmp_path / f"{number}.png", seed=number)
    rows = [f"{number}.png,{('mass', 'cyst', 'mass|cyst')[number % 3]}" for number in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    with pytest.raises(BadInput, match=r"the label 'mass\|cyst' names several, and one label of an image is learnt"):
        survey(tmp_path)
    with pytest.raises(BadInput, match=r"row 4: the label 'mass\|cyst' names several"):
        Csv(path=tmp_path / "t.csv").listing()
    assert "both" in Csv(path=tmp_path / "t.csv", rename={"mass|cyst": "both"}).listing().classes
    rows = [f"{number}.png,{number % 2},{number // 2 % 2}" for number in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["path,mass,cyst", *rows]) + "\n")
    with pytest.raises(BadInput, match=r"columns mass, cyst are 0 or 1, several labels .* --label mass"):
        survey(tmp_path)


def table(tmp_path, head, row, count=30, encoding="utf-8"):
    for number in range(count):
        draw(tmp_path / f"{number}.png", seed=number)
    rows = [f"{number}.png;{'xy'[number % 2]};{row(number)}" for number in range(count)]
    (tmp_path / "t.csv").write_text("\n".join([f"path;label;{head}", *rows]) + "\n", encoding=encoding)
    return tmp_path / "t.csv"


@pytest.mark.parametrize(
    ("site", "patient"),
    [
        ("Klinik", "Patientennummer"),
        ("Krankenhaus", "Patienten-ID"),
        ("Hôpital", "numero patient"),
        ("centro", "paciente"),
        ("Ospedale", "paziente"),
        ("ziekenhuis", "patiëntnummer"),
        ("Standort", "sujet"),
    ],
)
def test_sites_and_patients_in_the_words_of_their_countries(tmp_path, site, patient):
    found = survey(table(tmp_path, f"{site};{patient}", lambda n: f"{'NS'[n % 2]};{n // 2}", encoding="cp1252"))
    assert (found.sites, found.patients) == ({"N": 15, "S": 15}, 15)


def test_a_column_that_may_be_the_sites_is_named_and_can_be_given(tmp_path, capsys):
    file = table(tmp_path, "Haus;Fall", lambda n: f"{'abc'[n % 3]};{n // 2}")
    (note,) = [one for one in survey(file).notes if "may be" in one]
    assert note == "no column is taken for the sites; Haus (3 values) may be: --site-column NAME"
    found = survey(file, hints=Hints(site_column="Haus", patient_column="Fall"))
    assert (len(found.sites), found.patients) == (3, 15)
    assert any("patients are at more than one site, such as" in one for one in found.notes)
    command = ["study", "new", str(tmp_path / "s.toml"), "--for", str(file), "--patient-column"]
    assert run_app([*command, "Fal"]) == 2
    assert "--patient-column: " in capsys.readouterr().err
    images = RNG.integers(0, 255, (30, 28, 28), dtype=np.uint8)
    np.savez(
        tmp_path / "a.npz", images=images, labels=np.arange(30) % 2, haus=np.arange(30) % 3, fall=np.arange(30) // 2
    )
    assert any("haus (3 values) may be: --site-column" in one for one in survey(tmp_path / "a.npz").notes)
    found = survey(tmp_path / "a.npz", hints=Hints(site_column="haus", patient_column="fall"))
    assert (found.sites, found.patients) == ({"0": 10, "1": 10, "2": 10}, 15)


@pytest.mark.parametrize(("encoding", "name"), [("cp1252", "Windows-1252"), ("latin-1", "Latin-1")])
def test_tables_of_older_programs_are_read_and_it_is_said(tmp_path, encoding, name):
    letters = b"f\xfcr" if name == "Windows-1252" else b"f\xfc\x81r"  # a byte that Windows-1252 does not have
    (tmp_path / "t.csv").write_bytes(b"path;label\na.png;" + letters + b"\n")
    with pytest.warns(Notice, match=f"is no UTF-8, and was read as {name}"):
        assert read_table(tmp_path / "t.csv").column("label")[0].startswith("fü")


def test_a_picture_that_was_saved_again_is_another_file_and_the_same_image(tmp_path):
    plain = io.BytesIO()
    Image.fromarray(scene(5)).save(plain, "PNG", compress_level=0)
    save(tmp_path / "scans" / "a" / "0.png", scene(5))
    (tmp_path / "scans" / "a" / "1.png").write_bytes(plain.getvalue())
    save(tmp_path / "scans" / "b" / "0.png", scene(6))
    assert "1 image is there twice: a/0.png = a/1.png" in " ".join(check_images(Folder(path=tmp_path / "scans")))
