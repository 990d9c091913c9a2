"""`study new --for` on untidy exports: hospitals in paths, patients in headers and names, odd tables and archives."""

import numpy as np
import pytest
from test_survey import draw, write_dicom, write_study, written

from polyclinic.cli import run_app
from polyclinic.data.datasets.table import Csv
from polyclinic.data.labels import code_notes
from polyclinic.data.survey import survey
from polyclinic.data.survey_cases import Hints
from polyclinic.data.survey_folders import hospitals_of, like_names
from polyclinic.data.survey_study import NO_PATIENTS
from polyclinic.errors import BadInput
from polyclinic.study import load_study

COUNTRIES = ("China", "United Kingdom", "other_or_unknown")


@pytest.fixture
def exports(tmp_path):
    """Eighteen DICOM files of nine patients in a folder for each hospital, and a table of findings."""
    rows = []
    for number in range(18):
        file = tmp_path / "scans" / COUNTRIES[number // 2 % 3] / "export" / f"IM{number:04d}"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_dicom(file, patient=f"P{number // 2}")
        rows.append(f"1.2.{number},{file.relative_to(tmp_path / 'scans')},{'ab'[number // 3 % 2]}")
    (tmp_path / "scans" / "reports.csv").write_text("uid,path,finding\n" + "\n".join(rows) + "\n")
    return tmp_path / "scans"


def test_hospital_folders_and_patients_of_files_that_a_table_lists(exports, tmp_path, capsys):
    study, said = write_study(exports, tmp_path, capsys)
    assert "9 patients, 3 sites (China: 6, United Kingdom: 6, other_or_unknown: 6)" in said
    assert "the uppermost folders (China, United Kingdom, other_or_unknown) are taken for the sites" in said
    assert "patients are those of the DICOM files" in said
    assert "sites with fewer than 10 images train on very little" in said
    assert NO_PATIENTS not in said
    assert study.sites.partition == "column"
    listing = study.data.listing()
    assert len(set(listing.patient.tolist())) == 9
    assert "P1" not in (tmp_path / "out" / "study_cases.csv").read_text()


def test_no_digest_of_a_patient_is_written(exports):
    """A digest of a short number gives the number away by trying."""
    rows = survey(exports).cases.rows
    assert {row["patient"] for row in rows} == {f"p{number}" for number in range(1, 10)}
    assert len({(row["patient"], row["path"].split("/")[0]) for row in rows}) == 9


def test_equal_patient_ids_at_two_hospitals_are_two_patients(tmp_path):
    for number in range(16):
        site, label = ("mercy", "stmary")[number // 8], ("ill", "normal")[number % 2]
        (tmp_path / site / label).mkdir(parents=True, exist_ok=True)
        write_dicom(tmp_path / site / label / f"{number}.dcm", patient=f"70{number % 8 // 2}")
    found = survey(tmp_path)
    assert found.patients == 8
    patients = {row["path"]: row["patient"] for row in found.cases.rows}
    assert set(patients.values()) == {f"p{number}" for number in range(1, 9)}
    assert patients["mercy/ill/0.dcm"] == patients["mercy/normal/1.dcm"] != patients["stmary/ill/8.dcm"]


def test_patterns_are_searched_in_the_paths_of_a_table(exports, tmp_path, capsys):
    command = ["study", "new", str(tmp_path / "s.toml"), "--for", str(exports / "reports.csv")]
    assert run_app([*command, "--site", "^(China|United|other)", "--patient", r"IM\d\d(\d\d)"]) == 0
    assert "18 patients, 3 sites (China: 6, United: 6, other: 6)" in capsys.readouterr().out
    assert run_app([*command, "--force", "--patient", "^X"]) == 2
    assert "--patient: '^X' finds no patient in the file name 'IM0000'" in capsys.readouterr().err
    assert run_app(["study", "new", str(tmp_path / "t.toml"), "--patient", "x"]) == 2
    assert "--patient: goes with --for" in capsys.readouterr().err


def test_patients_in_the_names_of_a_folder_of_classes(tmp_path, capsys):
    for number in range(12):
        draw(tmp_path / "scans" / "ab"[number % 2] / f"x{number // 2}.{number}.png", seed=number)
    command = ["study", "new", str(tmp_path / "s.toml"), "--for", str(tmp_path / "scans")]
    assert run_app(command) == 0
    assert NO_PATIENTS in capsys.readouterr().out
    assert run_app([*command, "--patient", r"^(x\d+)\.", "--force"]) == 0
    said = capsys.readouterr().out
    assert "2 classes (a: 6, b: 6), 6 patients" in said
    assert NO_PATIENTS not in said
    assert len(set(load_study(tmp_path / "s.toml").data.listing().patient)) == 6


@pytest.mark.parametrize(
    ("paths", "labels", "sites"),
    [
        (["Graz/a", "Wien/b"], "xy", True),
        (["Graz/a", "Wien/b"], "xx", False),  # a folder for each label, as far as one can see
        (["../in/Graz/a", "../in/Wien/b"], "xy", False),
        (["part_1/a", "part_2/b"], "xy", False),
        (["left/a", "right/b"], "xy", False),
        (["TCGA_CS_4944/a", "TCGA_DU_1234/b"], "xy", False),
        (["a", "b"], "xy", False),
    ],
)
def test_folders_that_look_like_hospitals(paths, labels, sites):
    many = [path for path in paths for _ in range(6)]
    own = [labels[i % 2] if labels != "xx" else paths[i // 6] for i in range(12)]
    assert (hospitals_of(many, own) is not None) is sites
    assert hospitals_of(paths) is None, "too few images for a hospital"


def write_findings(tmp_path, name=lambda number: f"pictures\\{number}.png", count=12):
    for number in range(count):
        draw(tmp_path / "skin" / "pictures" / f"{number}.png", seed=number)
    rows = [f"{name(number)};{'ab'[number % 2]};{7000 + number // 2};{'MSK4' if number < 5 else 'msk4'}"
            for number in range(count)]  # fmt: skip
    (tmp_path / "skin" / "findings.csv").write_text("File name;Diagnosis;Lesion ID;Device\n" + "\n".join(rows) + "\n")
    return tmp_path / "skin"


def test_backslashes_and_a_column_like_patients(tmp_path, capsys):
    skin = write_findings(tmp_path, lambda number: f"pictures{'/' if number % 2 else chr(92)}{number}.png")
    study, said = write_study(skin, tmp_path, capsys)
    assert "12 images of 40 x 40 pixels, 2 classes (a: 6, b: 6), 6 patients" in said
    assert "'Lesion ID' is taken for the patient: images that share one stay in one split" in said
    assert len(study.data.listing()) == 12
    by_hand = Csv(path=skin / "findings.csv", image="File name", label="Diagnosis", size=32)
    assert len(by_hand.prepared(tmp_path / "cache")) == 12


def test_tables_of_other_things_are_not_taken_and_fits_are_counted(tmp_path):
    skin = write_findings(tmp_path, lambda number: f"pictures/{number if number < 4 else 100 + number}.png")
    fits = r"\('File name' fits 4 of 12 rows; such as 'pictures/104.png' is not there\)"
    with pytest.raises(BadInput, match=f"no column names images that lie in .*{fits}; it has File name"):
        survey(skin / "findings.csv")
    with pytest.raises(BadInput, match=f"nothing says what they show.*findings.csv is not used: .*{fits}"):
        survey(skin)
    # Its only row names an image by accident; and a label that all share teaches nothing.
    for number in range(24):
        draw(tmp_path / "scans" / ("normal", "sick")[number % 2] / f"{number}.png")
    (tmp_path / "scans" / "notes.csv").write_text("day;remark\n1;2\n")
    assert set(survey(tmp_path / "scans").labels.classes) == {"normal", "sick"}
    with pytest.raises(BadInput, match="every image has the remark '2'; name a --label"):
        survey(tmp_path / "scans" / "notes.csv")


def test_a_label_may_be_named(tmp_path, capsys):
    skin = write_findings(tmp_path)
    assert set(survey(skin, hints=Hints(label="Device")).labels.classes) == {"MSK4", "msk4"}
    with pytest.raises(BadInput, match=r"--label: .* has no 'Devise' \(did you mean 'Device'\?\); it has File name"):
        survey(skin, hints=Hints(label="Devise"))
    assert like_names(["MSK4", "msk-4", "b"]) == ["sites that may be one: MSK4 and msk-4; write them alike if so"]
    assert like_names(["a", "b"]) == []


def test_the_only_array_that_can_be_images_and_a_label_with_a_unit(tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrays = {
        "pixel_values": rng.integers(0, 255, (40, 28, 28), dtype=np.uint8),
        "age_years": np.arange(40) / 2,
        "clinic": np.array(["a", "b"] * 20),
        "record": np.arange(40) // 2 + 500,
    }
    np.savez(tmp_path / "a.npz", **arrays)
    study, said = write_study(tmp_path / "a.npz", tmp_path, capsys)
    assert "40 images of 28 x 28 pixels, values from 0 to 20, 20 patients, 2 sites (a: 20, b: 20)" in said
    assert (study.data.images, study.data.labels, study.data.unit) == ("pixel_values", "age_years", "years")
    assert (study.data.group, study.data.site) == ("record", "clinic")
    assert "may be better" not in written(tmp_path)  # the images are not larger
    np.savez(tmp_path / "a.npz", other_view=arrays["pixel_values"], **arrays)
    with pytest.raises(BadInput, match=r"several arrays can be images \(other_view, pixel_values\).*--images other"):
        survey(tmp_path / "a.npz")
    with pytest.raises(
        BadInput, match=r"--images: 'clinic' of .* has the shape \[40\], which images have not; choose from o"
    ):
        survey(tmp_path / "a.npz", hints=Hints(images="clinic"))
    with pytest.raises(
        BadInput, match=r"--label: 'pixel_values' of .* has not one entry for each image; choose from age"
    ):
        survey(tmp_path / "a.npz", hints=Hints(images="other_view", label="pixel_values"))
    named = survey(tmp_path / "a.npz", hints=Hints(images="other_view", label="record"))
    assert (named.columns["images"], named.columns["labels"]) == ("other_view", "record")


def test_masks_of_an_archive_may_have_a_name_of_their_own(tmp_path):
    images = np.zeros((6, 3, 16, 16), np.uint8)
    np.savez(tmp_path / "a.npz", scans=images, tumour_seg=images[:, 0], segment=np.arange(6))
    found = survey(tmp_path / "a.npz")
    assert (found.task, found.columns["images"], found.columns["masks"]) == ("segmentation", "scans", "tumour_seg")


def test_values_that_may_stand_for_not_known():
    ages = [str(age) for age in range(20)]
    assert code_notes(ages) == ()
    assert code_notes([*ages, "-1", "-1", "999"]) == (
        "2 of 23 labels are -1: if it stands for 'not known', leave these out",
        "1 of 23 labels are 999: if it stands for 'not known', leave these out",
    )
    assert code_notes([*map(str, range(80, 100))]) == ()
    assert code_notes(["a", "b"]) == ()


def masked(names, image, mask):
    return [path for name in names for path in (image.format(name), mask.format(name))]


SITED = [f"{site}/{number:03d}.png" for site in ("hospA", "hospB") for number in range(5)]
SCANS = [f"{site}/p{who}/{scan}" for site in ("mercy", "stmary") for who in range(3) for scan in range(2)]
VISITS = [f"patient{who:02d}/visit{visit}" for who in range(4) for visit in range(2)]
DAYS = [f"{day}/{time}" for day in ("monday", "tuesday") for time in ("early", "late")]
KINDS = [f"{kind}/{kind}{number}" for kind in ("benign", "malignant", "normal") for number in range(5)]
LAYOUTS = {
    "an ending": (masked(range(4), "{}.png", "{}_mask.png"), 4, {}, None),
    "a folder each": (masked([f"p{n}/p{n}" for n in range(13)], "{}_flair.png", "{}_seg.png"), 13, {}, 13),
    "hospitals inside": (masked(SITED, "images/{}", "masks/{}"), 10, {"hospA": 5, "hospB": 5}, None),
    "the same names": (masked(SCANS, "{}.png", "{}_mask.png"), 12, {"mercy": 6, "stmary": 6}, 6),
    "visits": (masked(VISITS, "{}/img.png", "{}/img_mask.png"), 8, {}, 4),
    "visits, other names": (masked(VISITS, "{}/scan.png", "{}/lesion_mask.png"), 8, {}, 4),
    "no patients": (masked(DAYS, "{}/scan.png", "{}/lesion_mask.png"), 4, {}, None),
    "classes are no hospitals": (masked(KINDS, "{}.png", "{}_mask.png"), 15, {}, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_are_found_beside_their_images(tmp_path, layout):
    paths, images, sites, patients = LAYOUTS[layout]
    for number, path in enumerate(paths):
        draw(tmp_path / path, seed=number)
    found = survey(tmp_path)
    assert (found.task, found.images, found.sites, found.patients) == ("segmentation", images, sites, patients)
    expected = dict(zip(paths[::2], paths[1::2], strict=True))
    assert {row["path"]: row["mask"] for row in found.cases.rows} == expected
    if sites and patients:
        assert {row["patient"] for row in found.cases.rows} == {scan.rpartition("/")[0] for scan in SCANS}
    if layout == "an ending":
        draw(tmp_path / "0_seg.png")
        with pytest.raises(BadInput, match=r"several masks lie beside one image, such as in .*0_.*; keep the one"):
            survey(tmp_path)
