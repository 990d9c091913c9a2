"""`study new --for`: what a first look at somebody's images finds, and the study that is written for them."""

import builtins

import medical_files
import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.data.datasets.table import Csv
from polyclinic.data.labels import are_labels, to_number
from polyclinic.data.survey import survey
from polyclinic.errors import BadInput
from polyclinic.federation.policy import Policy
from polyclinic.study import load_study
from polyclinic.study.policy_check import Counts, refused_by

SIDE = 40


def draw(file, side=SIDE, seed=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side), dtype=np.uint8)).save(file)


def write_study(images, tmp_path, capsys):
    """The study that the command writes, and what it says."""
    file = tmp_path / "out" / "study.toml"
    file.parent.mkdir()
    assert run_app(["study", "new", str(file), "--for", str(images)]) == 0
    said = capsys.readouterr().out
    assert run_app(["study", "check", str(file)]) == 0, capsys.readouterr().err
    return load_study(file), said + capsys.readouterr().out


def written(tmp_path):
    return (tmp_path / "out" / "study.toml").read_text()


@pytest.fixture
def folders(tmp_path):
    for label, count in (("benign", 30), ("malignant", 20)):
        for number in range(count):
            draw(tmp_path / "scans" / label / f"p{number // 2:03d}_{number}.png", seed=number)
    return tmp_path / "scans"


@pytest.fixture
def masked(tmp_path):
    """Twelve pictures in `images`, and their masks in `segmentations`."""
    for number in range(12):
        draw(tmp_path / "scans" / "images" / f"{number:02d}.png", seed=number)
        draw(tmp_path / "scans" / "segmentations" / f"{number:02d}.png", seed=number + 100)
    return tmp_path / "scans"


@pytest.fixture
def ages(tmp_path):
    """Forty pictures, and a table of ages by their names without a suffix; one age is n/a."""
    for number in range(40):
        draw(tmp_path / "scans" / "hands" / f"{number}.png", seed=number)
    about = [(number, "n/a" if number == 7 else 10 + 5 * number) for number in range(40)]
    rows = [f"{number},{age},F" for number, age in about]
    (tmp_path / "scans" / "ages.csv").write_text("id,boneage,sex\n" + "\n".join(rows) + "\n")
    return tmp_path / "scans"


def test_a_folder_per_class(folders, tmp_path, capsys):
    (folders / "normal").mkdir()
    study, said = write_study(folders, tmp_path, capsys)
    assert "50 images of 40 x 40 pixels, 2 classes (benign: 30, malignant: 20), 15 patients" in said
    assert "no image lies in normal, which makes no class" in said
    assert 0 < said.index("polyclinic study check") < said.index("polyclinic run")
    assert (study.data.source, study.data.path, study.task.name) == ("folder", folders, "classification")
    assert study.data.patient == "^([^_-]+)[_-]"
    assert (study.method.name, study.optimizer.balanced_batches, study.federation.sum) == ("fedavg", True, "secure")
    assert study.audit is not None
    assert "a site has fewer than 15 images of a class" in written(tmp_path)


def test_masks_in_a_folder_beside_their_images(masked, tmp_path, capsys):
    (masked / "segmentations" / "03.png").unlink()
    study, said = write_study(masked, tmp_path, capsys)
    assert "11 images of 40 x 40 pixels, masks" in said
    assert "1 image has no mask and is left out, such as 03.png" in said
    assert (study.task.name, study.sites.partition, study.method.name) == ("segmentation", "iid", "fedavg")
    assert isinstance(study.data, Csv)
    assert "all 11 images and their masks can be read" in said
    assert "hint: sites with very few images: site-1" in said
    assert len(study.data.listing()) == 11
    # three sites have about 3 images each, and train on 2
    assert "batch_size = 4  # the smallest site takes about 1 step in a pass" in written(tmp_path)


@pytest.mark.parametrize("kind", ["masked", "ages"])
def test_images_elsewhere_than_the_study_can_be_prepared(kind, request, tmp_path, capsys):
    """A table that is written beside the study lists images of another folder, which a run refuses if nobody allows."""
    scans = request.getfixturevalue(kind)
    study, _ = write_study(scans, tmp_path, capsys)
    assert study.data.allow_outside
    assert len(study.data.prepared(tmp_path / "cache")) == len(study.data.listing())
    file = tmp_path / "out" / "study.toml"
    file.write_text(file.read_text().replace("allow_outside = true", "allow_outside = false"))
    capsys.readouterr()
    assert run_app(["study", "check", str(file)]) == 2  # what a run would say
    assert "or set data.allow_outside = true" in capsys.readouterr().err
    beside = scans.parent / "beside.toml"
    assert run_app(["study", "new", str(beside), "--for", str(scans)]) == 0
    assert "allow_outside" not in beside.read_text()


def test_ages_in_a_table_with_a_gap(ages, tmp_path, capsys):
    study, said = write_study(ages, tmp_path, capsys)
    assert "39 images of 40 x 40 pixels, values from 10 to 205" in said
    assert "1 row without boneage (such as 'n/a') left out" in said
    assert (study.task.name, study.data.label_range) == ("regression", (10, 205))
    assert len(study.data.listing()) == 39
    told = "TAKEN FROM YOUR DATA: write the range that is possible"
    assert told in said
    assert written(tmp_path).count(told) == 1
    lines = (tmp_path / "out" / "study_cases.csv").read_text().splitlines()
    assert lines[0] == "path,label,sex"  # for results by sub-group
    assert all(line.endswith(",F") for line in lines[1:])


def test_a_table_that_can_be_used_as_it_is(folders, tmp_path, capsys):
    files = sorted(folders.rglob("*.png"))
    rows = [f"{file.relative_to(folders)},{'AB'[i % 2]},{file.parent.name}" for i, file in enumerate(files)]
    (folders / "cases.csv").write_text("file;hospital;diagnosis\n".replace(";", ",") + "\n".join(rows) + "\n")
    study, said = write_study(folders, tmp_path, capsys)
    assert "2 sites (A: 25, B: 25)" in said
    assert (study.data.source, study.data.path) == ("csv", folders / "cases.csv")
    assert (study.data.image, study.data.label, study.data.site) == ("file", "diagnosis", "hospital")
    assert study.sites.partition == "column"
    assert not (tmp_path / "out" / "study_cases.csv").exists()


def test_none_is_a_class_where_many_images_have_it_and_images_without_a_label_are_left_out(tmp_path, capsys):
    labels = np.array(["none", "mild", "severe"] * 20)
    labels[[3, 7]] = ""
    images = np.random.default_rng(0).integers(0, 255, (60, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, target=labels)
    study, said = write_study(tmp_path / "a.npz", tmp_path, capsys)
    assert "3 classes (severe: 20, none: 19, mild: 19)" in said
    assert "2 images have no label (image 3: '', counted from 0); data.keep leaves them out" in said
    listing = study.data.listing()
    assert (len(listing), set(listing.classes)) == (58, {"none", "mild", "severe"})


@pytest.mark.parametrize("labels", [["a", "b"] * 20 + ["none"], [str(n) for n in range(38)] + ["none"] * 4])
def test_a_rare_none_and_one_among_values_are_no_label(labels):
    assert are_labels(labels) == [label != "none" for label in labels]


@pytest.mark.parametrize(("text", "value"), [("168,0", 168), ("-1,25", -1.25), ("1,000", None), ("1,5,2", None)])
def test_values_may_have_a_decimal_comma(text, value):
    assert to_number(text) == value


def test_a_row_that_stands_twice_counts_once(tmp_path, capsys):
    names = [f"{number}.png" for number in range(30)]
    for number, name in enumerate(names):
        draw(tmp_path / name, seed=number)
    rows = [f"{name};{number},5" for number, name in enumerate([*names, *names[:2]])]
    rows[-2:] = rows[:2]
    (tmp_path / "ages.csv").write_text("file;age\n" + "\n".join(rows) + "\n")
    found = survey(tmp_path)
    assert (found.task, found.labels.bounds, found.images) == ("regression", (0, 30), 30)
    assert "2 rows name an image again, such as '0.png': left out" in found.notes
    listed = Csv(path=tmp_path / "ages.csv", image="file", label="age", label_range=(0, 40), size=28).listing()
    assert listed.patient is not None
    assert (listed.patient[-2:] == listed.patient[:2]).all()  # never on both sides of a split


def draw_patients(top, names):
    for patient in range(14):
        for name in names:
            draw(top / f"p{patient}" / f"p{patient}_{name}.png", seed=patient)
    return top


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("flair", "t1", "seg"), "several images lie beside one mask, such as in"),
        (("flair", "t1"), "14 folders hold 28 images, so they look like patients and not like classes"),
    ],
)
def test_folders_of_patients_are_not_taken_for_classes(tmp_path, names, message):
    with pytest.raises(BadInput, match=message):
        survey(draw_patients(tmp_path, names))


def test_label_skew_is_not_offered_for_masks(tmp_path, capsys):
    assert run_app(["study", "new", str(tmp_path / "s.toml"), "--source", "brain-phantom"]) == 0
    assert load_study(tmp_path / "s.toml").sites.partition == "iid"


def test_patients_of_dicom_files_and_slices_of_volumes_are_found(tmp_path, capsys):
    from polyclinic.data.survey_folders import slices_of

    for number in range(12):
        folder = tmp_path / "dicom" / ("clear", "nodule")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        write_dicom(folder / f"{number}.dcm", patient=f"P{number // 3}")
    nibabel = pytest.importorskip("nibabel")
    for number in range(6):
        for ending, kind in (("", np.float32), ("_mask", np.uint8)):
            volume = nibabel.Nifti1Image(np.ones((32, 32, 7), kind), np.eye(4))
            (tmp_path / "nifti").mkdir(exist_ok=True)
            nibabel.save(volume, tmp_path / "nifti" / f"{number}{ending}.nii.gz")
    assert run_app(["study", "new", str(tmp_path / "a.toml"), "--for", str(tmp_path / "dicom")]) == 0
    assert "4 patients" in capsys.readouterr().out
    table = (tmp_path / "a_cases.csv").read_text()
    assert "P0" not in table  # a digest, not the patient
    assert len({line.split(",")[2] for line in table.splitlines()[1:]}) == 4
    assert load_study(tmp_path / "a.toml").data.patient == "patient"
    assert run_app(["study", "new", str(tmp_path / "b.toml"), "--for", str(tmp_path / "nifti")]) == 0
    assert "volumes of about 7 slices: the middle slice of each is used" in capsys.readouterr().out
    study = load_study(tmp_path / "b.toml")
    assert study.method.local_epochs == 10  # one step in a pass
    assert slices_of([tmp_path / "a.toml"]) == 1


def write_dicom(path, *, patient, institution=""):
    """An image of 32 px that names its patient."""
    medical_files.write_dicom(path, np.zeros((32, 32), np.uint8), PatientID=patient, InstitutionName=institution)


@pytest.mark.parametrize(
    ("counts", "sites", "method", "rule", "sum"),
    [
        ((200, 200), 3, "analytic", None, "secure"),
        ((300, 80), 3, "gaussian-heads", "fisher", "secure"),  # classes of different size
        ((300, 30), 3, "fedavg", None, "secure"),  # few of a class at a site
        ((200, 200), 2, "analytic", None, "float"),  # a sum of two shows each the other
    ],
)
def test_the_method_is_one_that_a_policy_lets_run(tmp_path, counts, sites, method, rule, sum):
    """The study's own words pass the kit of a hospital: nothing that can be foreseen is refused."""
    labels = np.repeat(np.arange(len(counts)), counts)
    place = np.random.default_rng(0).permutation(len(labels)) % sites
    images = np.random.default_rng(0).integers(0, 255, (len(labels), 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=labels, site=np.array(["a", "b", "c"])[place])
    assert run_app(["study", "new", str(tmp_path / "s.toml"), "--for", str(tmp_path / "a.npz")]) == 0
    study = load_study(tmp_path / "s.toml")
    assert (study.method.name, getattr(study.method, "rule", None), study.federation.sum) == (method, rule, sum)
    assert (study.method.rounds == 1) is (method != "fedavg")
    for name in "abc"[:sites]:
        own = [int(np.sum((labels == label) & (place == "abc".index(name)))) * 65 // 100 for label in (0, 1)]
        site = Counts(builtins.sum(own), builtins.sum(own), dict(zip(study.data.listing().classes, own, strict=True)))
        assert refused_by(study, Policy(min_cohort=10, max_scores=1000, deployed=True), site, pinned=sites) == []
    alone = load_study(tmp_path / "s.toml", ["method.name=standalone"])  # as `compare` does
    assert alone.federation.sum == "float"
