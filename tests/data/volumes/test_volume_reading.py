"""Files of volumes: what is read, and one sentence with the cure for what cannot be."""

import zipfile

import numpy as np
import pytest
from volume_files import SPACING, save, write_series

from polyclinic.data.volumes.preparation import Intensities, Preparation
from polyclinic.data.volumes.reading import CaseFiles, read_case
from polyclinic.data.volumes.volume import RawVolume

SHAPE = (6, 5, 4)
VOXELS = np.arange(120, dtype=np.int16).reshape(SHAPE)
STRUCTURES = {"whole": (1, 2), "core": (2,)}


def case(root, mask=None, **channels):
    return CaseFiles("case-7", channels, mask)


def test_channels_mask_and_spacing_of_nifti(root):
    mask = (VOXELS > 60).astype(np.uint8) + (VOXELS > 100)
    files = case(
        root,
        flair=save(root / "f.nii.gz", VOXELS),
        t1=save(root / "t.nii", VOXELS + 1),
        mask=save(root / "m.nii.gz", mask),
    )
    raw = read_case(files, ("flair", "t1"), STRUCTURES)
    np.testing.assert_array_equal(raw.image, np.stack([VOXELS, VOXELS + 1]))
    np.testing.assert_array_equal(raw.mask, mask)
    assert raw.spacing == SPACING


def test_archives_with_spacing_or_affine(root):
    np.savez(root / "a.npz", image=VOXELS, spacing=SPACING)
    np.savez(root / "b.npz", image=VOXELS[None], affine=np.diag([*SPACING, 1]), mask=VOXELS > 60)
    for name in "ab":
        raw = read_case(CaseFiles(name, archive=root / f"{name}.npz"), ("image",), {})
        assert raw.image.shape == (1, *SHAPE)
        assert raw.spacing == SPACING
    assert raw.mask.sum() == (VOXELS > 60).sum()


def test_a_dicom_series_is_rescaled_ordered_and_turned(root):
    """DICOM grows to the left and back, so that x and y of a volume to the right and front are reversed."""
    raw = read_case(case(root, ct=write_series(root / "ct", VOXELS)), ("ct",), {})
    assert raw.spacing == pytest.approx(SPACING)
    prepared = Preparation(normalise="fixed", intensities=(Intensities(low=-2000, high=2000),)).prepare(raw)
    np.testing.assert_array_equal(prepared.image[0], (VOXELS * 2 - 1000)[::-1, ::-1])


def sheared():
    affine = np.diag([*SPACING, 1.0])
    affine[0, 1] = 1.5
    return affine


def moved():
    affine = np.diag([*SPACING, 1.0])
    affine[0, 3] = 20
    return affine


def turned():
    affine = np.diag([*SPACING, 1.0])
    affine[:2, :2] = [[0.8, -1.2], [0.6, 1.6]]
    return affine


def truncated(path):
    save(path, np.random.default_rng(0).integers(0, 999, (30, 30, 30)).astype(np.int16))
    path.write_bytes(path.read_bytes()[:2000])
    return path


def colours(path):
    return save(path, np.zeros(SHAPE, [("R", "u1"), ("G", "u1"), ("B", "u1")]))


def flat_spacing(path):
    save(path, VOXELS)
    content = bytearray(path.read_bytes())
    content[80:84] = np.float32(0).tobytes()  # pixdim[1]
    path.write_bytes(content)
    return path


BAD = {
    "another channel is missing": (lambda r: case(r, flair=save(r / "f.nii", VOXELS)), "no channel 't1'"),
    "a channel of another shape": (
        lambda r: case(r, flair=save(r / "f.nii", VOXELS), t1=save(r / "t.nii", VOXELS[:-1])),
        "t1 has 5 x 5 x 4 voxels, and flair has 6 x 5 x 4",
    ),
    "a channel somewhere else": (
        lambda r: case(r, flair=save(r / "f.nii", VOXELS), t1=save(r / "t.nii", VOXELS, moved())),
        "t1 lies or is turned otherwise",
    ),
    "a mask that is turned": (
        lambda r: case(r, mask=save(r / "m.nii", VOXELS * 0, turned()), **both(r)),
        "the mask lies or is turned otherwise",
    ),
    "a mask of another shape": (lambda r: case(r, mask=save(r / "m.nii", VOXELS[1:] * 0), **both(r)), "the mask has 5"),
    "a mask with an unknown value": (
        lambda r: case(r, mask=save(r / "m.nii", np.full(SHAPE, 4, np.uint8)), **both(r)),
        "the value 4, which data.structures does not name",
    ),
    "a mask of fractions": (
        lambda r: case(r, mask=save(r / "m.nii", np.full(SHAPE, 0.5, np.float32)), **both(r)),
        "no whole numbers",
    ),
    "values that are not numbers": (
        lambda r: case(r, flair=save(r / "f.nii", np.full(SHAPE, np.nan, np.float32)), t1=save(r / "t.nii", VOXELS)),
        "not numbers",
    ),
    "four dimensions": (
        lambda r: case(r, flair=save(r / "f.nii", np.stack([VOXELS] * 2, -1)), t1=save(r / "t.nii", VOXELS)),
        "f.nii: it has 4 dimensions",
    ),
    "a sheared affine": (
        lambda r: case(r, flair=save(r / "f.nii", VOXELS, sheared()), t1=save(r / "t.nii", VOXELS, sheared())),
        "sheared",
    ),
    "a truncated file": (lambda r: case(r, flair=truncated(r / "f.nii.gz"), t1=save(r / "t.nii", VOXELS)), "damaged"),
    "a spacing of zero": (
        lambda r: case(r, flair=flat_spacing(r / "f.nii"), t1=save(r / "t.nii", VOXELS)),
        "a spacing of 0",
    ),
    "no NIfTI at all": (lambda r: case(r, flair=text(r / "f.nii"), t1=save(r / "t.nii", VOXELS)), "f.nii"),
    "a file that is gone": (lambda r: case(r, flair=r / "gone.nii", t1=save(r / "t.nii", VOXELS)), "does not exist"),
    "two series": (lambda r: case(r, flair=mixed_series(r / "ct"), t1=save(r / "t.nii", VOXELS)), "ct holds 2 series"),
    "a missing slice": (
        lambda r: case(r, flair=write_series(r / "ct", VOXELS, skip=(2,)), t1=save(r / "t.nii", VOXELS)),
        "ct lacks slices after 3.0 mm",
    ),
    "a doubled slice": (
        lambda r: case(r, flair=write_series(r / "ct", VOXELS, twice=(1,)), t1=save(r / "t.nii", VOXELS)),
        "two slices at 3.0 mm",
    ),
    "an archive without a spacing": (lambda r: archive(r / "a.npz", image=VOXELS), "image and spacing"),
    "an archive packed as numpy never does": (
        lambda r: bzipped(archive(r / "a.npz", image=np.stack([VOXELS] * 2), spacing=SPACING)),
        "damaged",
    ),
    "an archive with other channels": (lambda r: archive(r / "a.npz", image=VOXELS, spacing=SPACING), "not 2 channels"),
    "an archive with an affine of one row": (
        lambda r: archive(r / "a.npz", image=np.stack([VOXELS] * 2), affine=np.ones(4)),
        "a spacing of 0 mm, or none",
    ),
    "an archive with a mask of texts": (
        lambda r: archive(r / "a.npz", image=np.stack([VOXELS] * 2), spacing=SPACING, mask=np.full(SHAPE, "tumour")),
        "one plain number for each voxel",
    ),
    "colours": (lambda r: case(r, flair=colours(r / "f.nii"), t1=save(r / "t.nii", VOXELS)), "f.nii: it holds colours"),
    "complex numbers": (
        lambda r: case(r, flair=save(r / "f.nii", VOXELS.astype(np.complex64)), t1=save(r / "t.nii", VOXELS)),
        "f.nii: it holds colours, texts or complex numbers",
    ),
    "nothing but air": (lambda r: archive(r / "a.npz", image=np.zeros((2, *SHAPE)), spacing=SPACING), "0 everywhere"),
    "no voxels": (lambda r: archive(r / "a.npz", image=np.zeros((2, 0, 5, 4)), spacing=SPACING), "has no voxels"),
    "an archive that is none": (lambda r: CaseFiles("case-7", archive=text(r / "a.npz")), "cut off or damaged"),
}


def both(root):
    return {"flair": save(root / "f.nii", VOXELS), "t1": save(root / "t.nii", VOXELS)}


def text(path):
    path.write_text("no volume" * 99)
    return path


def bzipped(files: CaseFiles) -> CaseFiles:
    with zipfile.ZipFile(files.archive) as packed:
        content = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(files.archive, "w", zipfile.ZIP_BZIP2) as packed:
        for name, array in content.items():
            packed.writestr(name, array)
    return files


def archive(path, **arrays):
    np.savez(path, **arrays)
    return CaseFiles("case-7", archive=path)


def mixed_series(folder):
    write_series(folder, VOXELS[:, :, :2], series="1.2.3")
    (folder / "000.dcm").rename(folder / "100.dcm")
    write_series(folder, VOXELS[:, :, 2:3], series="1.2.4")
    return folder


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what, root):
    make, words = BAD[what]
    with pytest.raises(ValueError, match=r"[a-z]") as said:
        read_case(make(root), ("flair", "t1"), STRUCTURES)
    assert words in str(said.value)
    assert "\n" not in str(said.value)


class TestPreparation:
    def raw(self):
        image = np.zeros((2, 12, 10, 8), np.float32)
        image[:, 2:10, 2:8, 2:6] = np.random.default_rng(0).normal(500, 50, (2, 8, 6, 4))
        return RawVolume(image, (image[0] > 520).astype(np.uint8), np.diag([1.0, 1.0, 2.0, 1.0]))

    def test_each_channel_has_mean_0_and_deviation_1_where_it_is_not_empty(self):
        found = Preparation().prepare(self.raw())
        assert found.image.shape == (2, 8, 6, 4)  # what is empty around it is cut off
        np.testing.assert_allclose(found.image.astype(float).mean((1, 2, 3)), 0, atol=1e-3)
        np.testing.assert_allclose(found.image.astype(float).std((1, 2, 3)), 1, atol=1e-3)
        assert found.mask.shape == (8, 6, 4)

    def test_resampled_to_the_spacing_that_is_wanted(self):
        found = Preparation(spacing=(2, 2, 2)).prepare(self.raw())
        assert found.image.shape == (2, 4, 4, 4)
        assert found.spacing == (2, 2, 2)
        assert set(np.unique(found.mask)) == {0, 1}

    def test_fixed_intensities_are_cut_and_scaled(self):
        fixed = (Intensities(low=0, high=510, mean=500, deviation=10), Intensities(low=490, high=9e3))
        raw = self.raw()
        found = Preparation(normalise="fixed", intensities=fixed).prepare(raw).image.astype(float)
        assert found[0].max() == 1
        assert found[0].min() == -50
        assert found[1].min() == 490
        assert raw.image.min() == 0


def test_intensities_that_16_bits_do_not_hold_are_told_and_never_infinite():
    raw = RawVolume(np.full((1, *SHAPE), 70_000, np.float32) + VOXELS, None, np.eye(4))
    with pytest.raises(ValueError, match=r"65,504.*preparation\.normalise"):
        Preparation(normalise="none").prepare(raw)
    assert np.isfinite(Preparation().prepare(raw).image).all()
