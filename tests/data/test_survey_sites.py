"""`study new --for`: where images were taken, as folders, DICOM headers, archives and tables say it."""

from zlib import crc32

import numpy as np
import pytest
from test_survey import draw, write_dicom, write_study, written

from polyclinic.cli import run_app
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.survey import survey
from polyclinic.errors import BadInput
from polyclinic.study import load_study

HOSPITALS, CLASSES = ("General", "Lakeside", "StMary"), ("normal", "tb")


def draw_tree(top, upper, lower, each=3):
    for one in upper:
        for two in lower:
            for number in range(each):
                draw(top / one / two / f"{number}.png", seed=crc32(f"{one} {two} {number}".encode()))
    return top


def cases(tmp_path):
    """What the table beside the study lists: sets of what each column holds."""
    head, *rows = [line.split(",") for line in (tmp_path / "out" / "study_cases.csv").read_text().splitlines()]
    return {name: {row[i] for row in rows} for i, name in enumerate(head)}


def test_a_folder_for_each_hospital_with_a_folder_for_each_class(tmp_path, capsys):
    study, said = write_study(draw_tree(tmp_path / "scans", HOSPITALS, CLASSES), tmp_path, capsys)
    assert "2 classes (normal: 9, tb: 9), 3 sites (General: 6, Lakeside: 6, StMary: 6)" in said
    assert "upper folders (General, Lakeside, StMary) are taken for the sites, lower folders (normal, tb) are" in said
    assert "if it is the other way round, swap" in said
    assert study.sites.partition == "column"
    assert "WARNING" not in said
    found = cases(tmp_path)
    assert (found["label"], found["site"]) == (set(CLASSES), set(HOSPITALS))


def test_splits_above_hospitals_are_kept(tmp_path, capsys):
    for split in ("train", "test"):
        draw_tree(tmp_path / "scans" / split, HOSPITALS, CLASSES)
    write_study(tmp_path / "scans", tmp_path, capsys)
    found = cases(tmp_path)
    assert (found["split"], found["site"], found["label"]) == ({"train", "test"}, set(HOSPITALS), set(CLASSES))


@pytest.mark.parametrize("inside", [("train", "test"), ("left", "right"), ("p001", "p002"), ("a",), HOSPITALS])
def test_folders_inside_classes_make_sites_where_their_names_are_hospitals(tmp_path, inside):
    found = survey(draw_tree(tmp_path, CLASSES, inside))
    assert set(found.labels.classes) == set(CLASSES)
    assert set(found.sites) == (set(HOSPITALS) if inside == HOSPITALS else set())
    if "train" not in inside:
        assert Folder(path=tmp_path).listing().classes == CLASSES


def write_dicoms(top, place, institution=lambda hospital: hospital):
    for number in range(24):
        hospital, label = HOSPITALS[number % 3], CLASSES[number // 3 % 2]
        file = top / place(hospital, label) / f"{number}.dcm"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_dicom(file, patient=f"P{number // 6}", institution=institution(hospital))
    return top


@pytest.mark.parametrize("place", [lambda site, label: f"{site}/{label}", lambda site, label: f"{label}/{site}"])
def test_dicom_headers_say_which_folders_are_hospitals(tmp_path, capsys, place):
    study, said = write_study(write_dicoms(tmp_path / "scans", place), tmp_path, capsys)
    assert "2 classes (normal: 12, tb: 12), 12 patients, 3 sites (General: 8, Lakeside: 8, StMary: 8)" in said
    assert "(3 different InstitutionName)" in said
    assert study.sites.partition == "column"


def test_institutions_of_dicom_files_in_a_folder_per_class(tmp_path, capsys):
    """Two spellings of one hospital are one site; a name with signs that no folder may have is changed."""
    names = iter(["St. Mary's", "ST. MARY'S", "General"] * 8)
    scans = write_dicoms(tmp_path / "scans", lambda site, label: label, lambda site: next(names))
    _, said = write_study(scans, tmp_path, capsys)
    assert "2 sites" in said


def test_hospitals_are_not_taken_for_classes(tmp_path, capsys):
    scans = write_dicoms(tmp_path / "scans", lambda site, label: site)
    with pytest.raises(BadInput, match="the folders are hospitals, as the InstitutionName of the DICOM files says"):
        survey(scans)
    study = tmp_path / "study.toml"
    study.write_text(
        '[data]\nsource = "folder"\npath = "scans"\n[sites]\npartition = "iid"\ncount = 2\n'
        '[method]\nname = "fedavg"\nrounds = 1\n'
    )
    assert run_app(["study", "check", str(study)]) == 0
    said = capsys.readouterr().out
    assert "WARNING: the classes are hospitals (General, Lakeside, StMary)" in said
    assert "let `polyclinic study new --for` find both" in said


def save(file, **arrays):
    np.savez(file, **arrays)
    return file


def images(count=24):
    return np.random.default_rng(0).integers(0, 255, (count, 28, 28), dtype=np.uint8)


@pytest.mark.parametrize("name", ["hospital", "institution", "center", "scanner"])
def test_an_array_gives_the_sites_of_an_archive(tmp_path, capsys, name):
    arrays = {"images": images(), "labels": np.arange(24) % 2, name: np.array(["a", "b", "c"] * 8)}
    study, said = write_study(save(tmp_path / "a.npz", **arrays, patient_id=np.arange(24) // 2), tmp_path, capsys)
    assert "12 patients, 3 sites (a: 8, b: 8, c: 8)" in said
    assert (study.data.site, study.data.group, study.sites.partition) == (name, "patient_id", "column")


def test_numbers_of_classes_and_sites_have_the_names_that_the_archive_gives_them(tmp_path):
    names = {"label_names": np.array(["well", "ill"]), "site_names": np.array(["north", "south"])}
    numbers = {"labels": np.arange(24) % 2, "site": np.arange(24) // 12}
    found = survey(save(tmp_path / "a.npz", images=images(), **numbers, **names))
    assert (found.labels.classes, found.sites) == ({"well": 12, "ill": 12}, {"north": 12, "south": 12})


def test_an_archive_without_images_names_what_it_has(tmp_path):
    save(tmp_path / "a.npz", y=np.arange(4), X=np.zeros((4, 9)))
    with pytest.raises(BadInput, match=r"no array has images \[N, H, W\]; it has y \[4\], X \[4, 9\]"):
        survey(tmp_path / "a.npz")
    save(tmp_path / "b.npz", images=images(4), odd=np.arange(3))
    with pytest.raises(BadInput, match=r"no array looks like labels \[N\] or masks; it has images .*, odd \[3\]"):
        survey(tmp_path / "b.npz")


def test_different_sizes_are_told(tmp_path, capsys):
    for number in range(8):
        draw(tmp_path / "scans" / "ab"[number % 2] / f"{number}.png", side=(40, 64, 48)[number % 3])
    _, said = write_study(tmp_path / "scans", tmp_path, capsys)
    assert "8 images of 3 sizes, from 40 x 40 to 64 x 64 pixels" in said
    from PIL import Image

    Image.new("L", (90, 60)).save(tmp_path / "scans" / "a" / "9.png")
    assert run_app(["study", "new", str(tmp_path / "b.toml"), "--for", str(tmp_path / "scans")]) == 0
    assert 'shape = "squash"  # made square of 48 x 48 px' in (tmp_path / "b.toml").read_text()


def write_table(tmp_path, blank=(), rows=12):
    """A table of images with hospital and patient; `blank`: (row, column) of empty cells."""
    lines = [["file", "diagnosis", "hospital", "patient"]]
    for number in range(rows):
        draw(tmp_path / "scans" / f"{number}.png", seed=number)
        lines.append([f"{number}.png", CLASSES[number % 2], HOSPITALS[number % 3], f"p{number}"])
    for row, column in blank:
        lines[row + 1][column] = ""
    (tmp_path / "scans" / "patients.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    return tmp_path / "scans"


def test_rows_without_a_site_or_a_patient_are_left_out(tmp_path, capsys):
    study, said = write_study(write_table(tmp_path, [(1, 2), (4, 3), (5, 3)]), tmp_path, capsys)
    assert "1 row without hospital (an empty cell) left out" in said
    assert "2 rows without patient (an empty cell) left out" in said
    assert "to change a row, change patients.csv, then write both anew with --force" in written(tmp_path)
    assert (len(study.data.listing()), cases(tmp_path)["site"]) == (9, set(HOSPITALS))


def test_a_column_that_is_mostly_empty_is_not_used(tmp_path, capsys):
    study, said = write_study(write_table(tmp_path, [(row, 3) for row in range(8)]), tmp_path, capsys)
    assert "column patient is empty in most rows: not used for the patient" in said
    assert len(study.data.listing()) == 12
    assert "other_patient" in cases(tmp_path)


def test_a_study_is_written_anew_with_force(tmp_path, capsys):
    """Also where its table lies among the images, and would be taken for theirs."""
    scans = write_table(tmp_path, [(1, 2)])
    command = ["study", "new", str(scans / "s.toml"), "--for", str(scans)]
    assert run_app(command) == 0
    write_table(tmp_path)
    assert run_app(command) == 2
    assert "exists already; name another file, or write it anew with --force" in capsys.readouterr().err
    (scans / "s.toml").unlink()
    assert run_app([*command[:-1], str(scans / "s_cases.csv"), "--force"]) == 0  # fit to be used as it is
    assert run_app([*command, "--force"]) == 0
    assert run_app(["study", "check", str(scans / "s.toml")]) == 0
    assert "all 12 images can be read" in capsys.readouterr().out


def draw_named(tmp_path, masks):
    for site in ("CS", "DU"):
        for number in range(6):
            draw(tmp_path / "scans" / ("imagesTr" if masks else CLASSES[number % 2]) / f"{site}_{number}.png")
            if masks:
                draw(tmp_path / "scans" / "labelsTr" / f"{site}_{number}.png")
    return tmp_path / "scans"


@pytest.mark.parametrize("masks", [False, True])
def test_sites_in_the_names_of_files(tmp_path, capsys, masks):
    scans, file = draw_named(tmp_path, masks), tmp_path / "s.toml"
    assert run_app(["study", "new", str(file), "--for", str(scans)]) == 0
    assert "# if names of files say it: study new --for DIR --site REGEX --force" in file.read_text()
    assert run_app(["study", "new", str(file), "--for", str(scans), "--site", "^([A-Z]+)_", "--force"]) == 0
    assert run_app(["study", "check", str(file)]) == 0
    assert "2 sites (CS: 6, DU: 6)" in capsys.readouterr().out
    study = load_study(file)
    assert study.sites.partition == "column"
    assert set(study.data.listing().site) == {"CS", "DU"}
    wrong = ["study", "new", str(tmp_path / "t.toml"), "--for", str(scans), "--site"]
    assert run_app([*wrong, "^(X)"]) == 2
    assert "--site: '^(X)' finds no site in the file name 'CS_0.png'" in capsys.readouterr().err
    assert not (tmp_path / "t_cases.csv").exists()


def folder_study(tmp_path, capsys, setting=""):
    """What `study check` says of a study whose source is the folder `scans` itself."""
    study = tmp_path / "study.toml"
    study.write_text(
        f'[data]\nsource = "folder"\npath = "scans"\n{setting}\n[sites]\npartition = "iid"\ncount = 2\n'
        '[method]\nname = "fedavg"\nrounds = 1\n'
    )
    code = run_app(["study", "check", str(study)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_source_folder_refuses_to_guess_between_hospitals_and_classes(tmp_path, capsys):
    draw_tree(tmp_path / "scans", HOSPITALS, CLASSES)
    code, said = folder_study(tmp_path, capsys)
    assert code == 2
    assert "has the folders General, Lakeside, StMary, and in these the folders normal, tb" in said
    assert "set data.class_folders = 'lower'; if they are the classes, set it to 'upper'" in said
    code, said = folder_study(tmp_path, capsys, 'class_folders = "upper"')
    assert code == 0
    assert "classes: General, Lakeside, StMary" in said
    code, said = folder_study(tmp_path, capsys, 'class_folders = "lower"')
    assert code == 0
    assert "classes: normal, tb" in said


@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_lower_folders_are_classes_and_upper_ones_sites(tmp_path, splits):
    for top in [tmp_path / split for split in splits] or [tmp_path]:
        draw_tree(top, HOSPITALS, CLASSES, each=1)
    listing = Folder(path=tmp_path, class_folders="lower").listing()
    assert listing.classes == CLASSES
    places = [name.split("/")[-3:-1] for name in listing.ids.tolist()]
    assert [[site, CLASSES[label]] for site, label in zip(listing.site, listing.labels, strict=True)] == places
    draw(tmp_path.joinpath(*splits[:1]) / "General" / "loose.png")
    with pytest.raises(BadInput, match=r"loose\.png' lies in no folder of a class"):
        Folder(path=tmp_path, class_folders="lower").listing()
