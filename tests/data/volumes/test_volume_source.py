"""Volumes as a source: prepared once, one at a time, spread over sites, and what becomes of broken cases."""

import numpy as np
import pytest

from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.registry import notice_once

BRAINS = {"samples": 24, "shape": (24, 24, 20), "size": (16, 16, 16)}


class SomeBroken(BrainVolumes):
    """Brains of which every fifth cannot be read."""

    def read(self, number, case):
        if number % 5 == 4:
            raise ValueError("t2.nii is cut off; copy it again")
        return super().read(number, case)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_sites_hold_their_own_cases_and_keep_patients_apart(cache):
    source, sites = BrainVolumes(**BRAINS), PARTITIONS["iid"](partition="iid", count=2)
    parts = prepare(source, sites, cache=cache)
    seen = []
    for name in parts.names:
        data = open_site(parts.folder, name)
        for part in (data.train, data.validation, data.test):
            seen += [volume.digest() for volume in part.images]
            for volume, label in zip(part.images, part.labels, strict=True):
                assert volume.image.dtype == np.float16
                assert volume.image.shape == (4, *volume.mask.shape)
                assert volume.image.max() < 20  # normalised
                inside = (volume.mask > 0).sum() * np.prod(volume.spacing) / 1000
                assert label == pytest.approx(inside, rel=0.01)  # millilitres
    assert len(seen) == len(set(seen)) == 24
    assert parts.info["channels"] == 4
    assert parts.info["size"] == [16, 16, 16]
    again = prepare(source, sites, cache=cache)
    assert again.info["digests"] == parts.info["digests"]


def test_files_of_a_site_are_mapped_and_none_stays_open(cache):
    parts = prepare(BrainVolumes(**BRAINS), PARTITIONS["iid"](partition="iid", count=2), cache=cache)
    data = open_site(parts.folder, parts.names[0])
    assert isinstance(data.train.images[0].image, np.memmap)
    assert data.mapped_files == 0
    assert len(data.train.take(np.array([1, 0])).images) == 2


def test_broken_cases_are_named_and_do_not_stop_the_others(cache):
    notice_once.cache_clear()
    with pytest.warns(UserWarning, match=r"4 cases are left out.*\n.*brain-0004: t2.nii is cut off; copy it again"):
        dataset = SomeBroken(**BRAINS).prepared(cache)
    assert len(dataset) == 20
    with pytest.raises(BadInput, match="4 cases cannot be used"):
        SomeBroken(**BRAINS, strict=True).prepared(cache)


def test_a_preparation_that_was_stopped_goes_on(cache):
    read = []

    class Stopped(BrainVolumes):
        def read(self, number, case):
            read.append(number)
            if len(read) == 3:
                raise KeyboardInterrupt
            return super().read(number, case)

    source = Stopped(**{**BRAINS, "samples": 5})
    with pytest.raises(KeyboardInterrupt):
        source.prepared(cache)
    assert len(source.prepared(cache)) == 5
    assert read == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"size": (16, 16)}, "three numbers"),
        ({"size": (16, 16, 4)}, "three numbers"),
        ({"structures": {"core": (0, 2)}}, "values from 1 to 255"),
        ({"structures": {"core": ()}}, "values from 1 to 255"),
        ({"preparation": {"normalise": "fixed"}}, "0 entries for 4 channels"),
        ({"acquisition": 0.5}, "leave it out"),
    ],
)
def test_settings_that_cannot_be(setting, words):
    with pytest.raises(ValueError, match=words):
        BrainVolumes(**{**BRAINS, **setting})
