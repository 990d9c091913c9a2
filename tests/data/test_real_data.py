"""Every real file at hand loads by a study of a few lines.

The files are looked for in the folder that POLYCLINIC_DATA names; without it these tests are skipped.
"""

import os
from pathlib import Path

import pytest

from polyclinic.data.parts import open_site, prepare
from polyclinic.study import load_study

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
