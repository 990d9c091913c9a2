"""Predicted masks of series of DICOM slices."""

import importlib.util
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
from volume_files import write_series

from polyclinic.data.reading import read_dicom
from polyclinic.data.volumes.reading import CaseFiles, dicom_slices, read_case
from polyclinic.errors import Notice
from polyclinic.runner.predict.volumes import frames_of, write_volume_masks


def volume_of_slices(tmp_path, sides=(6, 5, 8)):
    """A folder of slices whose files are in no order, what is read of it, and a mask of its own grid."""
    voxels = np.random.default_rng(0).integers(0, 1000, sides).astype(np.int16)
    folder = write_series(tmp_path / "cases" / "ct", voxels)
    raw = read_case(CaseFiles("ct", {"image": folder}), ("image",), {})
    mask = (raw.image[0] > raw.image[0].mean()).astype(np.uint8) + (raw.image[0] > 0)
    one = SimpleNamespace(file=folder, values={"case": "ct"}, mask=mask, affine=raw.affine)
    return one, raw


def test_the_mask_of_a_volume_lies_on_its_slices_whatever_their_order(tmp_path):
    one, raw = volume_of_slices(tmp_path)
    slices = [read_dicom(file) for file in dicom_slices(one.file)]
    frames = frames_of(raw.image[0], raw.affine, slices)
    for frame, header in zip(frames, slices, strict=True):
        np.testing.assert_allclose(frame, header.pixel_array * float(header.RescaleSlope) + header.RescaleIntercept)


def test_a_series_gets_a_segmentation_or_nifti_and_the_name_of_the_extra(tmp_path):
    one, _ = volume_of_slices(tmp_path)
    structures = {"body": (1, 2), "bright": (2,)}
    with pytest.warns(Notice) as said:
        [written] = write_volume_masks([one], tmp_path / "masks", structures)
    assert written.name == "ct.nii.gz"  # these made slices lack what a DICOM SEG needs
    assert "NIfTI is written instead of DICOM SEG" in str(said[0].message)
    if importlib.util.find_spec("highdicom") is None:
        assert "polyclinic[dicom-seg]" in str(said[0].message)
    np.testing.assert_array_equal(np.asarray(nibabel.load(written).dataobj), one.mask)
