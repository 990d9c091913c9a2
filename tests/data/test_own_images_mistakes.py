"""Mistakes with images of one's own, each one sentence with the cure; what a site's file says about its images."""

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.table import Csv
from polyclinic.data.own_images import _as_numbered, _source, split_in_words
from polyclinic.data.parts import ImageSet, SiteData, prepare
from polyclinic.data.source import AtSites, FileSource
from polyclinic.errors import BadInput, Notice
from polyclinic.runner.run.data_check import left_out
from polyclinic.runner.run.run import run
from polyclinic.study import load_run_study, load_study

STUDY = """
[data]
source = "folder"
path = "scans"
size = 28
[sites]
partition = "iid"
count = 2
[model]
backbone = "lenet5"
[method]
name = "fedavg"
rounds = 1
local_steps = 1
[engine]
workers = 1
device = "cpu"
"""


@pytest.fixture
def scans(tmp_path):
    """A folder `scans` of two classes with twelve little pictures each."""
    rng = np.random.default_rng(0)
    for label in ("benign", "malignant"):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for number in range(12):
            picture = Image.fromarray(rng.integers(0, 255, (28, 28), dtype=np.uint8))
            picture.save(tmp_path / "scans" / label / f"{number}.png")
    return tmp_path / "scans"


def listed(folder, rows):
    (folder / "cases.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    return folder / "cases.csv"


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (
            ["benign/0.png,", "nowhere.png,1", "malignant/0.png,0"],
            {},
            ["1 cell is empty", "row 2: no label", "1 file is not there", "row 3: nowhere.png"],
        ),
        (
            ["benign/0.png,0", "malignant/0.png,", ",1"],
            {"mask": "nomask", "patient": "who"},
            ["no columns 'who', 'nomask'", "2 cells are empty", "row 3: no label", "row 4: no path"],
        ),
    ],
)
def test_columns_cells_and_files_at_fault_are_named_at_once(scans, rows, settings, words):
    with pytest.raises(BadInput) as told:
        Csv(path=listed(scans, rows), **settings).listing()
    lines = str(told.value).splitlines()
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_files_and_folders_without_an_image_are_named(scans):
    (scans / "normal").mkdir()
    with pytest.warns(Notice, match="no image lies in normal of .*, which makes no class"):
        assert Folder(path=scans).listing().classes == ("benign", "malignant")
    (scans / "benign" / "0.dcm").write_bytes(b"no DICOM " * 100)
    with pytest.raises(BadInput, match=r"0\.dcm: this is no DICOM file, or its beginning is damaged; export it again"):
        Folder(path=scans, size=28).prepared(scans.parent / "cache")


def test_check_says_what_is_wrong_with_the_images(scans, tmp_path, capsys):
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    assert run_app(["study", "check", str(study)]) == 0
    assert "all 24 images can be read; classes: benign, malignant" in capsys.readouterr().out
    whole = (scans / "benign" / "3.png").read_bytes()
    (scans / "benign" / "3.png").write_bytes(whole[: len(whole) // 2])
    assert run_app(["study", "check", str(study)]) == 2
    assert "1 of 24 images cannot be read; repair or remove them:\n  benign/3.png: " in capsys.readouterr().err
    scans.rename(tmp_path / "elsewhere")
    assert run_app(["study", "check", str(study)]) == 2
    assert capsys.readouterr().err.startswith(f"data.path: there is nothing at '{scans}'; ")
    assert run_app(["study", "check", str(study), "--no-images"]) == 0


def test_regression_without_a_range_names_the_setting(scans, tmp_path):
    file = listed(scans, ["benign/0.png,12", "malignant/0.png,30"])
    study = tmp_path / "study.toml"
    study.write_text(STUDY.replace('"folder"', '"csv"').replace('"scans"', f'"{file}"'))
    for settings in (["task.name=regression"], ["data.label_range=[0, 40]"]):
        with pytest.raises(BadInput, match=r"^data\.label_range: "):
            load_study(study, settings)
    assert load_study(study, ["task.name=regression", "data.label_range=[0, 40]"]).task.name == "regression"


def path_of(study):
    assert isinstance(study.data, FileSource)
    return study.data.path


def test_a_path_begins_at_the_file_that_says_it_and_that_of_a_flag_at_the_shell(scans, tmp_path, monkeypatch):
    study, shell = tmp_path / "study.toml", tmp_path / "shell"
    study.write_text(STUDY)
    (shell / "mine").mkdir(parents=True)
    monkeypatch.chdir(shell)
    assert path_of(load_study(study)) == scans
    assert path_of(load_study(study, ["data.path=mine"])) == shell / "mine"
    study.write_text(STUDY.replace('"scans"', '"$POLYCLINIC_DATA/scans"'))
    assert str(path_of(load_study(study))) == "$POLYCLINIC_DATA/scans"


def test_an_old_study_is_told_how_to_change(scans, tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"^data\.path: 'scans' begins at the folder of .*: write '\.\./scans'$"):
        load_study(tmp_path / "studies" / "study.toml")


def test_a_run_is_resumed_from_any_folder(scans, tmp_path, monkeypatch):
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    done = run(load_study(tmp_path / "study.toml"), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.chdir("/")
    assert path_of(load_run_study(tmp_path / "run")) == scans
    assert run(None, tmp_path / "run", resume=True)["weights_sha256"] == done["weights_sha256"]


def test_sites_that_names_leaves_out_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    images, sites = rng.integers(0, 255, (60, 28, 28), dtype=np.uint8), np.array(["a", "b", "c"] * 20)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(60) % 2, site=sites)
    (tmp_path / "study.toml").write_text(
        STUDY.replace('"folder"', '"npz"').replace('"scans"', '"a.npz"').replace('"iid"\ncount = 2', '"column"')
    )
    study = load_study(tmp_path / "study.toml", ['sites.names=["a", "c"]'])
    assert prepare(study.data, study.sites).info["left_out"] == {"b": 20}
    assert prepare(study.data, load_study(tmp_path / "study.toml").sites).info["left_out"] == {}


FILE = """
[datasets.scans]
source = "folder"
path = "scans"

[datasets.drawn]
source = "hand-phantom"
samples = 20
"""


@pytest.fixture
def file(tmp_path):
    target = tmp_path / "site.toml"
    target.write_text(FILE, encoding="utf-8")
    return target


def test_channels_are_those_of_the_sites_file_or_of_the_study(file):
    found = _source(file, AtSites(dataset="scans", channels=3, size=32), {"seed": 5, "test": 0.25})
    assert (found.channels, found.size, found.seed, found.test) == (3, 32, 5, 0.25)
    assert found.path == file.parent / "scans"
    assert _source(file, AtSites(dataset="drawn", channels=3, size=32), {}).samples == 20
    file.write_text(FILE.replace('path = "scans"', 'path = "scans"\nchannels = 1'), encoding="utf-8")
    assert _source(file, AtSites(dataset="scans", channels=3), {}).channels == 1


def parts(*labels):
    numbers = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    return SiteData("a", *[ImageSet(numbers, np.array(labels), cases=np.arange(len(labels)))] * 3)


def numbered(file, classes, names, **label_map):
    words = ", ".join(f'"{own}" = "{meant}"' for own, meant in label_map.items())
    file.write_text(FILE.replace('path = "scans"', f'path = "scans"\nlabel_map = {{ {words} }}'), encoding="utf-8")
    wanted = AtSites(dataset="scans", classes=names)
    return _as_numbered(parts(*range(len(classes))), list(classes), wanted, file)


def test_labels_are_numbered_as_the_study_numbers_its_classes(file):
    turned = numbered(file, ("ill", "well"), ("well", "ill"))
    assert turned.train.labels.tolist() == turned.test.labels.tolist() == [1, 0]
    assert turned.train.cases.tolist() == [0, 1]
    renamed = numbered(file, ("krank", "gesund"), ("well", "ill"), krank="ill", gesund="well")
    assert renamed.validation.labels.tolist() == [1, 0]
    same = numbered(file, ("well", "ill"), ("well", "ill"))
    assert same.train.labels.tolist() == [0, 1]
    some = numbered(file, ("ill", "odd", "well"), ("well", "ill"), odd="-")
    assert some.train.labels.tolist() == [1, 0]
    assert some.train.cases.tolist() == [0, 2]
    assert some.test.images[:, 0, 0, 0].tolist() == [0, 2]
    with pytest.raises(BadInput, match=r"'odd' is none of the study's classes, well, ill; .*\"odd\" = \"well\""):
        numbered(file, ("ill", "odd"), ("well", "ill"))
    with pytest.raises(BadInput, match="the site has no class 'sick'"):
        numbered(file, ("ill", "well"), ("well", "ill"), sick="ill")


def test_the_split_of_a_site_in_words(file):
    file.write_text(FILE.replace("samples = 20", "samples = 20\ntest = 0.3\nvalidation = 0.15"), encoding="utf-8")
    assert "30% for test, 15% for validation" in split_in_words(file, AtSites(dataset="drawn"))
    file.write_text(FILE.replace('path = "scans"', 'path = "scans"\ntest_per_class = 7'), encoding="utf-8")
    assert "7 of each class for test" in split_in_words(file, AtSites(dataset="scans"))
    file.write_text('[datasets.scans]\nprepared = "here"\n', encoding="utf-8")
    assert split_in_words(file, AtSites(dataset="scans")) == "Your images lie prepared, and are split already."


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ""),
    ({"data.keep": {"label": ["x", "y"]}}, "20 by data.keep"),
    ({"sites.names": ["a", "b"]}, "20 of site 'c', which sites.names lacks"),
    ({"data.opt_out": "out.txt"}, "4 by data.opt_out"),
])  # fmt: skip
def test_the_check_says_which_images_are_left_out_and_why(tmp_path, changes, words):
    rows = []
    for number in range(60):
        Image.fromarray(np.full((28, 28), number, np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'xyz'[number % 3]},{'abc'[number // 20]},p{number // 2}")
    (tmp_path / "t.csv").write_text("\n".join(["path,label,site,patient", *rows]) + "\n")
    (tmp_path / "out.txt").write_text("p0\np1\n")
    sites = '[sites]\npartition = "column"\n[model]'
    text = STUDY.replace('"folder"', '"csv"').replace('"scans"', '"t.csv"')
    (tmp_path / "study.toml").write_text(text.replace('[sites]\npartition = "iid"\ncount = 2\n[model]', sites))
    changes = {**changes, **({"data.opt_out": str(tmp_path / "out.txt")} if "data.opt_out" in changes else {})}
    found = left_out(load_study(tmp_path / "study.toml").with_settings(changes))
    assert found == ([f"images left out: {words}"] if words else [])
