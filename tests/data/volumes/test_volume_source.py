"""Sources of volumes: drawn brains, folders, and what a source prepares of them."""

import numpy as np
import pytest
from volume_files import save, write_series

from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.datasets.volume_folder import Fets, VolumeFolder
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.parts import open_site, prepare
from polyclinic.data.volumes.brain import CHANNELS, FIELD, draw_brain
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


def test_sites_hold_and_map_their_own_cases(cache):
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


SHAPE = (36, 36, 24)


@pytest.fixture(scope="module")
def brains():
    return [draw_brain(0, number, SHAPE) for number in range(12)]


def test_drawn_brains_are_the_same_whenever_and_in_millimetres(brains):
    again = draw_brain(0, 3, SHAPE)
    np.testing.assert_array_equal(again.image, brains[3].image)
    np.testing.assert_array_equal(again.mask, brains[3].mask)
    assert not np.array_equal(draw_brain(1, 3, SHAPE).mask, again.mask)
    for brain in brains:
        assert brain.image.shape == (len(CHANNELS), *brain.mask.shape)
        assert np.isfinite(brain.image).all()
        np.testing.assert_allclose(np.multiply(brain.spacing, brain.mask.shape), FIELD, rtol=1e-6)
        sizes = [int((brain.mask >= value).sum()) for value in (1, 2, 3)]
        assert sizes[0] > sizes[1] >= sizes[2]
        assert sizes[0] > 0
    spacings = {brain.institution: brain.spacing for brain in brains}
    assert len(set(spacings.values())) == len(spacings) > 1


def test_vessels_and_voxels_of_drawn_brains():
    """By brightness alone, a slice has as much that looks like a tumour outside of it, and slices without it have,
    too."""
    brain = next(one for one in (draw_brain(0, n, (72, 72, 48)) for n in range(9)) if one.institution.endswith("1"))
    flair, inside = brain.image[0].astype(float), brain.mask > 0
    bright = flair > np.quantile(flair[inside], 0.2)
    assert (bright & ~inside).sum() > 0.3 * (bright & inside).sum()
    without = ~inside.any((0, 1)) & (flair > 0).any((0, 1))
    assert bright[:, :, without].any()
    usual = next(n for n in range(20) if draw_brain(0, n, SHAPE).institution == "institution-1")
    brain = draw_brain(0, usual, (240, 240, 155))
    assert brain.mask.shape == (240, 240, 155)
    assert brain.spacing == (1.0, 1.0, 1.0)


VOXELS = np.random.default_rng(0).integers(1, 500, (10, 9, 8)).astype(np.int16)
MASK = (VOXELS > 400).astype(np.uint8)
MR = {"channels": ("flair", "t1"), "structures": {"tumour": (1,)}, "size": (8, 8, 8)}


def by_underscore(root):
    for case in ("a", "b"):
        for word, voxels in (("flair", VOXELS), ("T1", VOXELS), ("seg", MASK)):
            save(root / case / f"{case}_{word}.nii.gz", voxels)
    return ["a", "b"], ["", ""]


def by_hospital(root):
    for site in ("Graz", "Wien"):
        for word, voxels in (("flair", VOXELS), ("t1", VOXELS), ("mask", MASK)):
            save(root / site / f"{site}-7" / f"{word}.nii", voxels)
    return ["Graz-7", "Wien-7"], ["Graz", "Wien"]


def by_number(root):
    for case in ("liver_1", "liver_2"):
        for number in (0, 1):
            save(root / "imagesTr" / f"{case}_{number:04}.nii.gz", VOXELS)
        save(root / "labelsTr" / f"{case}.nii.gz", MASK)
    return ["liver_1", "liver_2"], ["", ""]


def archives(root):
    for case in ("x", "y"):
        np.savez(root / f"{case}.npz", image=np.stack([VOXELS, VOXELS]), mask=MASK, spacing=(1, 2, 3))
    return ["x", "y"], ["", ""]


def dicom(root):
    for case in ("p1", "p2"):
        for word in ("flair", "t1"):
            write_series(root / case / word, VOXELS)
        save(root / case / "seg.nii.gz", MASK, np.diag([-1.0, -2.0, 3.0, 1.0]))
    return ["p1", "p2"], ["", ""]


@pytest.mark.parametrize("lay", [by_underscore, by_hospital, by_number, archives, dicom])
def test_cases_are_found_by_the_names_of_files(lay, root):
    names, sites = lay(root)
    source = VolumeFolder(path=root, **MR)
    cases = source.cases()
    assert [case.name for case in cases] == names
    assert [case.site for case in cases] == sites
    dataset = source.prepared(root / "cache")
    assert len(dataset) == 2
    for volume in dataset.images:
        assert volume.image.shape == (2, 10, 9, 8)
        assert volume.mask.sum() == MASK.sum()
        assert volume.spacing == pytest.approx((1, 2, 3))


def test_a_table_names_institutions_patients_and_splits(root):
    by_underscore(root / "v")
    table = root / "cases.csv"
    table.write_text("case,site,patient,split\na,Graz,p9,train\nb,Wien,p9,test\n")
    first, second = VolumeFolder(path=root / "v", table=table, **MR).cases()
    assert (first.site, first.patient, first.split) == ("Graz", "p9", "train")
    assert (second.site, second.split) == ("Wien", "test")
    table.write_text("case,site\na,Graz\n")
    with pytest.raises(BadInput, match="there is no row for case 'b'; add it"):
        VolumeFolder(path=root / "v", table=table, **MR).cases()
    table.write_text("name,site\na,Graz\n")
    with pytest.raises(BadInput, match="has no column 'case'"):
        VolumeFolder(path=root / "v", table=table, **MR).cases()


def test_patients_by_a_pattern(root):
    by_number(root)
    assert [case.patient for case in VolumeFolder(path=root, patient=r"^(liver)_", **MR).cases()] == ["liver"] * 2
    for pattern, words in (("(", "no regular expression|not a regular"), ("spleen", "finds nothing")):
        with pytest.raises(BadInput, match=words):
            VolumeFolder(path=root, patient=pattern, **MR).cases()


def test_parts_that_are_there_twice_and_those_that_are_missing(root):
    by_underscore(root)
    save(root / "a" / "a_label.nii.gz", MASK)
    with pytest.raises(BadInput, match="same part of one case; rename or remove"):
        VolumeFolder(path=root, **MR).cases()
    (root / "a" / "a_label.nii.gz").unlink()
    (root / "a" / "a_T1.nii.gz").unlink()
    (root / "b" / "b_seg.nii.gz").unlink()
    notice_once.cache_clear()
    with pytest.raises(BadInput, match=r"a: has no channel 't1' \(there: flair\)[^\n]*\n  b: has no mask; add it"):
        VolumeFolder(path=root, **MR).prepared(root / "cache")
    with pytest.raises(BadInput, match=r"data.path: there is nothing at .*brain-volumes"):
        VolumeFolder(path=root / "nowhere", **MR).cases()


def fets_case(root, name, shape, values, words):
    image, mask = np.zeros(shape, np.int16), np.zeros(shape, np.uint8)
    inside = tuple(slice(side // 3, side // 3 + 12) for side in shape)
    image[inside] = np.random.default_rng(1).integers(1, 900, (12, 12, 12))
    for value, start in zip(values, (2, 4, 6), strict=True):
        mask[tuple(slice(one.start + start, one.stop) for one in inside)] = value
    for word in words:
        save(root / name / f"{name}{word}.nii.gz", mask if word[1:] == "seg" else image, np.eye(4))
    return mask


def test_fets_folders_with_their_institutions(root):
    words = ("_t1", "_t1ce", "_t2", "_flair", "_seg")
    mask = fets_case(root, "FeTS2022_00001", (240, 240, 155), (2, 1, 4), words)
    (root / "partitioning_1.csv").write_text("Partition_ID,Subject_ID\n4,FeTS2022_00001\n")
    source = Fets(path=root)
    (case,) = source.cases()
    assert (case.name, case.site) == ("FeTS2022_00001", "4")
    raw = source.read(0, case)
    assert raw.image.shape == (4, 240, 240, 155)
    np.testing.assert_array_equal(raw.mask, mask)
    dataset = source.prepared(root / "cache")
    assert dataset.images[0].image.shape == (4, 12, 12, 12)
    assert dataset.site.tolist() == ["4"]


def test_newer_names_and_numbers_of_brats(root):
    name = "BraTS-GLI-00003-001"
    fets_case(root, name, (20, 20, 20), (2, 1, 3), ("-t1n", "-t1c", "-t2w", "-t2f", "-seg"))
    source = Fets(path=root, patient=r"^(BraTS-GLI-\d+)")
    (case,) = source.cases()
    assert (case.name, case.patient) == (name, "BraTS-GLI-00003")
    assert set(np.unique(source.read(0, case).mask)) == {0, 1, 2, 3}
