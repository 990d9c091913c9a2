"""What a deployed site's file says about its images, put together with what the study asks for."""

import numpy as np
import pytest

from polyclinic.data.own_images import _as_numbered, _source, split_in_words
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.source import AtSites
from polyclinic.errors import BadInput

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


def test_a_class_may_be_left_out_and_none_may_be_unknown(file):
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
