"""What a deployed site's file says about its images, put together with what the study asks for."""

import pytest

from polyclinic.data.datasets.at_sites import AtSites
from polyclinic.data.own_images import _source

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


def test_channels_are_those_of_the_study_where_a_source_can_choose(file):
    found = _source(file, AtSites(dataset="scans", channels=3, size=32), {"seed": 5, "test": 0.25})
    assert (found.channels, found.size, found.seed, found.test) == (3, 32, 5, 0.25)
    assert found.path == file.parent / "scans"
    assert _source(file, AtSites(dataset="drawn", channels=3, size=32), {}).samples == 20


def test_channels_of_the_sites_own_file_count(file):
    file.write_text(FILE.replace('path = "scans"', 'path = "scans"\nchannels = 1'), encoding="utf-8")
    assert _source(file, AtSites(dataset="scans", channels=3), {}).channels == 1
