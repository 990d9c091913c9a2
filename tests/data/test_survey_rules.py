"""Rules of a first look at tables, masks and archives, and data that lie: doubles, two labels, several labels."""

import io
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from test_survey import draw

from polyclinic.cli import run_app
from polyclinic.data import archives, survey_cases, survey_tables
from polyclinic.data.dataset import SPLITS, Dataset, Fold, kept_together, split
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.table import Csv
from polyclinic.data.doubles import digest_of, near_doubles, said_of_doubles, several_labels, thumbnail, twins
from polyclinic.data.survey import survey
from polyclinic.data.survey_cases import Hints
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput, Notice
from polyclinic.runner.run.data_check import check_images, draw_doubles


def table_of(tmp_path, text):
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    return read_table(tmp_path / "table.csv")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return [folder / name for name in names]


def test_of_several_tables_the_one_that_lists_images_is_found(tmp_path):
    touch(tmp_path, *(f"{n}.png" for n in range(4)))
    (tmp_path / "all.csv").write_text("file,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b\n")
    (tmp_path / "some.csv").write_text("file,label\n0.png,a\n1.png,b\n")
    (tmp_path / "none.csv").write_text("name,label\nx,a\n")
    assert survey_tables.find_table(tmp_path) == tmp_path / "all.csv"
    assert survey_tables.find_table(tmp_path, ignore=tmp_path / "all.csv") == tmp_path / "some.csv"
    (tmp_path / "more.csv").write_text("file,label\n0.png,a\n1.png,b\n2.png,b\n")
    with pytest.raises(BadInput, match=r"all\.csv, more\.csv all list images; name one of them, --for .*all\.csv"):
        survey_tables.find_table(tmp_path)


def test_images_are_named_by_most_cells_of_their_column(tmp_path):
    """With or without their endings and folders; a column that names half of its images is none."""
    touch(tmp_path, "a.png", "b.nii.gz")
    most = table_of(tmp_path, "label,file\n1,elsewhere/a.png\n2,b\n3,zz\n")
    cases = survey_tables.cases_in_table(most.file, tmp_path)
    assert [row["path"] for row in cases.rows] == ["a.png", "b.nii.gz"]
    half = table_of(tmp_path, "file,label\na,1\nzz,2\n")
    with pytest.raises(BadInput, match=r"no column names images .*fits 1 of 2 rows; such as 'zz' is not there"):
        survey_tables.cases_in_table(half.file, tmp_path)


def test_columns_are_known_by_their_names(tmp_path):
    def named(head, *rows):
        return survey_tables._named_columns(table_of(tmp_path, "\n".join([head, *rows]) + "\n"), "file")

    assert named("file,Bone Age,sex", "a,1,2") == {"label": "Bone Age"}
    assert named("file,Age,sex", "a,1,2") == {"label": "Age"}
    assert named("file,whatever", "a,1") == {"label": "whatever"}
    assert named("file,what,ever", "a,1,2") == {}
    assert named("file,label,mask", "a,1,m") == {"mask": "mask"}
    assert named("file,label,hospital", "a,1,x", "b,1,x") == {"label": "label"}
    assert named("file,label,hospital", "a,1,x", "b,1,y", "c,1,") == {"label": "label", "site": "hospital"}
    for sites, known in ((50, True), (51, False)):
        rows = [f"{n},1,h{n}" for n in range(sites)]
        assert ("site" in named("file,label,hospital", *rows)) is known


def test_gaps_are_counted_in_a_note(tmp_path):
    touch(tmp_path, "a.png", "b.png", "c.png", "d.png")
    (tmp_path / "t.csv").write_text("file,label,site\na,1,x\nb,,y\nc,,x\nd,2,y\ngone,1,x\na,1,x\n")
    cases = survey_tables.cases_in_table(tmp_path / "t.csv", tmp_path)
    assert [row["path"] for row in cases.rows] == ["a.png", "d.png"]
    assert cases.is_new
    assert list(cases.notes) == [
        "1 row names no image that is there, such as 'gone': left out",
        "1 row names an image again, such as 'a.png': left out",
        "2 rows without label (an empty cell) left out",
    ]
    (tmp_path / "t.csv").write_text("file,label\na.png,1\nb.png,2\n")
    assert not survey_tables.cases_in_table(tmp_path / "t.csv", tmp_path).is_new


def test_masks_belong_to_images_of_their_names(tmp_path):
    files = touch(tmp_path, "a.png", "a_mask.png", "b.png", "masks/b.png", "c.png")
    cases = survey_cases.paired_masks(tmp_path, files)
    assert cases.rows == [{"path": "a.png", "mask": "a_mask.png"}, {"path": "b.png", "mask": "masks/b.png"}]
    assert cases.notes == ("1 image has no mask and is left out, such as c.png",)
    more = [*files, *touch(tmp_path, "d.png")]
    assert survey_cases.paired_masks(tmp_path, more).notes[0].startswith("2 images have no mask and are left out")
    most = [*more, *touch(tmp_path, "e.png")]
    assert survey_cases.paired_masks(tmp_path, most) is None, "fewer than half have masks"


def test_an_image_and_a_mask_alone_in_a_folder_belong_together(tmp_path):
    files = touch(tmp_path, "p1/scan.png", "p1/lesion_seg.png", "p2/scan.png", "p2/lesion_seg.png")
    assert len(survey_cases.paired_masks(tmp_path, files).rows) == 2
    assert survey_cases.paired_masks(tmp_path, files[:2]) is None, "one folder says little"
    with pytest.raises(BadInput, match=r"several images lie beside one mask, such as in .*p1"):
        survey_cases.paired_masks(tmp_path, [*files, *touch(tmp_path, "p1/other.png")])


def test_masks_may_be_called_mask_and_nothing_else(tmp_path):
    files = touch(tmp_path, "p1/image.png", "p1/mask.png", "p2/image.png", "p2/mask.png")
    assert survey_cases.paired_masks(tmp_path, files).rows == [
        {"path": f"{patient}/image.png", "mask": f"{patient}/mask.png"} for patient in ("p1", "p2")
    ]
    assert survey_cases.masks_among(files, tmp_path) == [files[1], files[3]]
    alone = touch(tmp_path, "classes/mask.png")
    assert survey_cases.masks_among(alone, tmp_path) == [], "no image lies beside it"


def test_floats_run_from_zero_to_one():
    assert archives.as_bytes(np.array([0.0, 0.5, 1.0])).tolist() == [0, 128, 255]
    assert archives.as_bytes(np.array([False, True])).tolist() == [0, 255]
    for wrong, cure in (([0.0, 1.1], True), ([0.0, 255.0], True), ([0.0, 256.0], False), ([-0.1, 1.0], False)):
        with pytest.raises(ValueError, match="instead of 0 to 1") as error:
            archives.as_bytes(np.array(wrong))
        assert ("divide them by 255" in str(error.value)) is cure
    with pytest.raises(ValueError, match="instead of 0 to 1"):
        archives.as_bytes(np.array([0.0, np.nan]))


def test_pixels_are_counted_from_the_shape_and_headers_read_in_both_versions(tmp_path):
    arrays = {"rgb": (1, 3, 4, 5), "last": (1, 4, 5, 3), "grey": (1, 4, 5), "labels": (500,)}
    np.savez(tmp_path / "a.npz", **{name: np.ones(shape, np.uint8) for name, shape in arrays.items()})
    enough, few = archives.Archive(tmp_path / "a.npz", 20), archives.Archive(tmp_path / "a.npz", 19)
    for name in arrays:
        assert enough[name].shape == arrays[name]
    for name in ("rgb", "last", "grey"):
        with pytest.raises(BadInput, match=f"the array '{name}' cannot be read"):
            few[name]
    assert few["labels"].shape == (500,)
    assert enough.first("rgb").shape == (60,)
    assert archives.Archive(tmp_path / "a.npz", 20).first("last").shape == (60,)
    with pytest.raises(BadInput, match="the array 'rgb' cannot be read"):
        few.first("rgb")  # 60 numbers, and 3 channels of 19 pixels
    assert enough.first("labels").tolist() == [1]
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as packed:
        packed.writestr("one.npy", npy(np.arange(3), (1, 0)))
        packed.writestr("two.npy", npy(np.arange(3), (2, 0)))
        packed.writestr("three.npy", npy(np.arange(3), (3, 0)))
        packed.writestr("objects.npy", npy(np.array([{}], object), (1, 0)))
    archive = archives.Archive(tmp_path / "a.npz")
    assert archive["one"].tolist() == archive["two"].tolist() == [0, 1, 2]
    with pytest.raises(BadInput, match=r"version \(3, 0\) of the .npy format is unknown"):
        archive.shape("three")
    with pytest.raises(BadInput, match="it holds Python objects"):
        archive.shape("objects")


def npy(array, version):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=True)
    return stream.getvalue()


def test_a_large_array_is_unpacked_to_a_file_where_there_is_room(tmp_path, monkeypatch):
    for name, order in (("c", "C"), ("f", "F")):
        np.savez(tmp_path / f"{name}.npz", x=np.asarray(np.arange(600).reshape(20, 30), order=order))
    monkeypatch.setattr(archives, "LARGE", 1000)
    for name in ("c", "f"):
        found = archives.Archive(tmp_path / f"{name}.npz")["x"]
        assert isinstance(found, np.memmap)
        assert found.tolist() == np.arange(600).reshape(20, 30).tolist()
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3000))
    with pytest.raises(BadInput, match="has no room to unpack it"):
        archives.Archive(tmp_path / "c.npz")["x"]
    monkeypatch.setattr(archives, "LARGE", 10_000)
    assert not isinstance(archives.Archive(tmp_path / "c.npz")["x"], np.memmap)


def test_sizes_are_those_of_a_few_images_in_colour_and_grey(tmp_path):
    for name, size, mode in (("a", (4, 2), "RGB"), ("b", (6, 2), "L"), ("c", (6, 3), "RGB")):
        Image.new(mode, size).save(tmp_path / f"{name}.png")
    files = [tmp_path / f"{name}.png" for name in "abc"]
    assert survey_cases.sizes_of(files) == survey_cases.Sizes(((4, 2), (6, 2), (6, 3)), (6, 2), all=True)
    (tmp_path / "d.png").write_bytes(b"broken")
    assert survey_cases.sizes_of([tmp_path / "d.png"]) == survey_cases.Sizes()
    assert not survey_cases.sizes_of([tmp_path / "a.png"] * 200).all


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
    row = np.arange(30)
    np.savez(tmp_path / "a.npz", images=images, labels=row % 2, haus=row % 3, fall=row // 2)
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
