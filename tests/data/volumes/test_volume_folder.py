"""Volumes of your own: cases, channels, masks and institutions by the names of files; FeTS' folders."""

import numpy as np
import pytest
from volume_files import save, write_series

from polyclinic.data.datasets.volume_folder import Fets, VolumeFolder
from polyclinic.errors import BadInput
from polyclinic.registry import notice_once

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
