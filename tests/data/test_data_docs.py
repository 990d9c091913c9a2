"""Every study in docs/data.md is read, and every real file at hand loads by a study of examples/data."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from medical_files import write_dicom, write_nifti
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.data.datasets import SOURCES
from polyclinic.data.parts import open_site, prepare
from polyclinic.study import load_study

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
STUDIES = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
OWN = [text for text in STUDIES if re.search(r'source = "(folder|csv|npz)"', text)]


def save(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def hospital(tmp_path, monkeypatch):
    """The files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    cases, ages = ["path,label,site,patient,split,mask"], ["path,age"]
    for i in range(90):
        kind = ("benign", "malignant")[i % 2]
        pixels = rng.integers(0, 200, (24, 24), np.uint8) + np.uint8(50 * (i % 2))
        save(Path("lesions", kind, f"{i:04d}.png"), pixels)
        save(Path("scans", f"{i:04d}.png"), pixels)
        save(Path("masks", f"{i:04d}.png"), (pixels > 100).astype(np.uint8) * 255)
        split = ("", "", "train", "test")[i // 3 % 4]
        cases.append(f"scans/{i:04d}.png,{kind},{('Graz', 'Wien')[i % 2]},p{i // 3},{split},masks/{i:04d}.png")
        ages += [f"scans/{i:04d}.png,{2.5 * i + k / 2}" for k in range(4)]
    Path("cases.csv").write_text("\n".join(cases))
    Path("ages.csv").write_text("\n".join(ages))
    for i in range(24):
        folder = Path("ct", ("clear", "nodule")[i % 2])
        folder.mkdir(parents=True, exist_ok=True)
        write_nifti(folder / f"{i}.nii.gz", rng.uniform(-1000, 1000, (20, 20, 6)).astype(np.float32))
        values = rng.integers(-1000, 1000, (20, 20), np.int16)
        write_dicom(folder / f"{i}.dcm", values, WindowCenter=40, WindowWidth=400)
    images = rng.integers(0, 256, (200, 20, 20), np.uint8)
    columns = {"grade": np.arange(200) % 5, "case": np.arange(200) // 2, "site": np.arange(200) % 3}
    np.savez("images.npz", images=images, is_test=np.arange(200) // 2 % 5 == 0, **columns)
    np.savez("boneage_rsna_male_64.npz", images=images, boneage_months=np.arange(200))
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))


def write(text):
    Path("study.toml").write_text(text, encoding="utf-8")
    return Path("study.toml")


@pytest.mark.parametrize("text", OWN, ids=lambda text: text.split('"')[1])
def test_studies_of_your_own_images_give_sites_with_training_and_test_images(text, hospital):
    study = load_study(write(text))
    parts = prepare(study.data, study.sites)
    assert len(parts.names) >= 2
    for counts in parts.info["counts"].values():
        assert counts["train"] > 0
        assert counts["test"] > 0


def test_the_five_minutes_end_in_a_trained_model(hospital, capsys):
    write(STUDIES[0])
    assert run_app(["data", "inspect", "study.toml"]) == 0
    assert Path("study_sites.png").exists()
    assert run_app(["run", "study.toml", "--out", "runs/first", "--quiet", "--set", "method.rounds=1"]) == 0
    assert Path("runs/first/result.json").exists()


@pytest.mark.parametrize("text", [text for text in STUDIES if text not in OWN], ids=lambda text: text.split('"')[1])
def test_studies_of_named_datasets_can_be_read(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load_study(write(text))


def test_every_source_is_on_the_page():
    page = DOCS.read_text(encoding="utf-8")
    for name in SOURCES:
        assert f"`{name}`" in page or f'source = "{name}"' in page


EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
REAL = os.environ.get("POLYCLINIC_DATA")
needs_real_data = pytest.mark.skipif(REAL is None, reason="POLYCLINIC_DATA names no folder with the real files")


def study(name, *changes):
    return load_study(EXAMPLES / f"{name}.toml").with_settings(dict(changes))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@needs_real_data
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_example_gives_parts_without_a_patient_on_both_sides(file, cache):
    chosen = study(file.stem)
    parts = prepare(chosen.data, chosen.sites, cache=cache)
    patients = {"train": set(), "validation": set(), "test": set()}
    for name in parts.names:
        site = open_site(parts.folder, name)
        for split_name, found in patients.items():
            part = getattr(site, split_name)
            assert len(part) == parts.info["counts"][name][split_name] > 0
            found |= set() if part.cases is None else set(part.cases.tolist())
    assert not patients["train"] & (patients["validation"] | patients["test"])
    assert not patients["validation"] & patients["test"]
