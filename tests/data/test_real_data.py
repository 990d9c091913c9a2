"""Every real file at hand loads by a study of a few lines, with the counts that its README states.

The files are looked for in the folder that POLYCLINIC_DATA names; without it these tests are skipped.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.dataset import split
from polyclinic.data.parts import load, open_site, prepare
from polyclinic.study import load_study

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
REAL = os.environ.get("POLYCLINIC_DATA")
needs_real_data = pytest.mark.skipif(REAL is None, reason="POLYCLINIC_DATA names no folder with the real files")


def study(name, *changes):
    return load_study(EXAMPLES / f"{name}.toml").with_settings(dict(changes))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture
def opened(cache):
    return lambda name, *changes: load(study(name, *changes).data, cache)


def counts(values) -> dict:
    return {str(name): int(count) for name, count in zip(*np.unique(values, return_counts=True), strict=True)}


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


@needs_real_data
def test_every_real_file_has_an_example():
    files = {file.name for file in Path(REAL).glob("*.npz")}
    assert files == {load_study(file).data.path.name for file in EXAMPLES.glob("*.toml")}


@needs_real_data
@pytest.mark.parametrize(
    ("name", "images", "found"),
    [
        ("mnist", 70000, {"train": 60000, "test": 10000}),
        ("pneumonia", 5856, {"train": 4708, "validation": 524, "test": 624}),
        ("tuberculosis", 4200, {"0": 3500, "1": 700}),
        ("retinopathy", 2570, {"0": 1285, "1": 1285}),
    ],
)
def test_images_are_as_many_as_their_readme_says(opened, name, images, found):
    data = opened(name)
    assert len(data) == images
    assert counts(data.labels if "0" in found else data.split) == found


@needs_real_data
def test_skin(opened):
    data = opened("skin_centres")
    assert counts(data.site) == {
        "vidir_modern": 3363,
        "vidir_molemax": 3954,
        "rosendahl": 2259,
        "vienna_dias": 439,
        "msk4": 819,
    }
    assert data.classes == ("MEL", "other")
    assert counts(data.labels) == {"0": 1328, "1": 10834 - 1328}
    masks = opened("skin_masks")
    assert len(masks) == 10015
    assert masks.masks.max(axis=(1, 2)).mean() > 0.99
    lesions = opened("skin_lesions")
    assert counts(lesions.subgroup) == {"NV": 6705, "MEL": 1113, "BKL": 1099, "BCC": 514}  # as FELICIA states


@needs_real_data
def test_bone_age_and_brain(opened):
    data = opened("bone_age")
    assert (len(data), data.labels.min(), data.labels.max(), data.unit) == (6833, 1, 228, "months")
    data = opened("brain_masks", ("data.keep", None))
    patients = {name.split()[0][-2:]: len(set(data.patient[data.site == name])) for name in set(data.site)}
    assert patients == {"CS": 16, "DU": 45, "EZ": 1, "FG": 14, "HT": 34}
    assert np.array_equal(data.masks.any(axis=(1, 2)), data.labels == 1)


@needs_real_data
def test_covid(opened):
    data = opened("covid", ("data.keep", {"site": list(range(9))}))
    assert len(data) == 1686
    assert counts(data.site)["NIH_ChestXray8"] == 1000
    assert "COVID-19" in data.classes
    assert not (data.labels[data.site == "NIH_ChestXray8"] == data.classes.index("COVID-19")).any()
    assert len(opened("covid")) == 686


@needs_real_data
def test_cifar10(opened):
    data = opened("cifar10")
    found = counts(np.array(data.classes)[data.labels])
    assert {name: found[name] for name in ("cat", "deer", "dog", "horse")} == dict.fromkeys(
        ("cat", "deer", "dog", "horse"), 6000
    )
    assert sorted(found.values()) == [500] * 6 + [6000] * 4
    assert len(split(data, validation=0.1, test=0.2, seed=0)["test"]) == (data.split == "test").sum()


@needs_real_data
def test_omniglot(opened):
    data = opened("omniglot")
    assert len(data) == 4840
    assert (len(data.classes), len(set(data.site)), len(set(data.patient))) == (242, 8, 20)
