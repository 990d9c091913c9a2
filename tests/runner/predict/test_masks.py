"""Predicted masks in the images' own size: preparation undone, NIfTI with its affine, DICOM SEG, PNG."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from polyclinic.data.pixels import Fit, fit_mask
from polyclinic.data.reading import Reader
from polyclinic.errors import BadInput
from polyclinic.runner.predict.masks import in_own_size, write_masks


def blob(height: int, width: int) -> np.ndarray:
    """A mask off the centre, and not symmetric."""
    rows, columns = np.mgrid[:height, :width]
    return (rows - 0.4 * height) ** 2 / (0.12 * height) ** 2 + (columns - 0.55 * width) ** 2 / (0.1 * width) ** 2 < 1


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * (a & b).sum() / (a.sum() + b.sum())


@pytest.mark.parametrize("shape", ["squash", "pad", "crop"])
@pytest.mark.parametrize("size", [(120, 80), (81, 121), (96, 96)])
def test_a_mask_goes_back_to_where_it_was(shape, size):
    mask = blob(*size)
    prepared = fit_mask(mask, Fit(64, shape)).astype(np.float32)
    back = in_own_size(prepared, size, shape) > 0.5
    assert back.shape == size
    assert overlap(back, mask) > 0.9  # measured: 0.967 or more; a shift by 5 pixels gives 0.75 or less
    assert overlap(np.roll(back, 5, 1), mask) < 0.85


def test_what_was_cut_off_is_empty():
    whole = in_own_size(np.ones((8, 8), np.float32), (20, 10), "crop")
    assert whole[:5].sum() == 0
    assert whole[5:15].all()
    assert whole[15:].sum() == 0


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR", "SAL"])
def test_a_volume_gets_a_mask_in_its_own_voxels(tmp_path, axes):
    """The volume is bright where the mask shall be, whatever the order of its axes."""
    nibabel = pytest.importorskip("nibabel")
    volume = np.zeros((20, 24, 5), np.float32)
    volume[3:9, 10:20, 2] = volume[4:6, 3:8, 4] = 100.0
    plain = nibabel.Nifti1Image(volume, np.array([[2, 0, 0, -7], [0, 3, 0, 5], [0, 0, 4, 9], [0, 0, 0, 1.0]]))
    turned = plain.as_reoriented(
        nibabel.orientations.ornt_transform(
            nibabel.orientations.axcodes2ornt("RAS"), nibabel.orientations.axcodes2ornt(axes)
        )
    )
    file = tmp_path / "scan.v1.nii.gz"
    nibabel.save(turned, file)
    reader = Reader((50, 100), "all")
    found = [SimpleNamespace(file=file, frame=f, mask=reader.pixels(file, f) > 128) for f in reader.frames(file)]
    [written] = write_masks(found, tmp_path / "masks")
    assert written.name == "scan.v1.nii.gz"
    mask = nibabel.load(written)
    assert np.array_equal(np.asarray(mask.dataobj) > 0, np.asarray(turned.dataobj) > 0)
    assert np.allclose(mask.affine, turned.affine)


def test_a_nifti_of_two_dimensions_gets_a_mask_of_two(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    values = np.zeros((6, 8), np.float32)
    values[1, 2] = 1
    nibabel.save(nibabel.Nifti1Image(values, np.diag([-1, 2, 3, 1.0])), tmp_path / "a.nii")
    one = SimpleNamespace(file=tmp_path / "a.nii", frame=None, mask=Reader().mask(tmp_path / "a.nii") > 0)
    [written] = write_masks([one], tmp_path / "masks")
    assert np.array_equal(np.asarray(nibabel.load(written).dataobj), values)


def test_the_middle_slice_stands_in_the_middle(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.ones((6, 8, 5), np.float32), np.eye(4)), tmp_path / "a.nii")
    one = SimpleNamespace(file=tmp_path / "a.nii", frame=None, mask=np.ones((8, 6), bool))
    [written] = write_masks([one], tmp_path / "masks")
    assert np.asarray(nibabel.load(written).dataobj).sum((0, 1)).tolist() == [0, 0, 48, 0, 0]


def test_masks_have_the_names_of_their_images_and_a_number_where_two_share_one(tmp_path):
    files = ["a/scan.png", "b/SCAN.jpg", "a/other.png", "a/other-0001.png", "ä;=1+1.jpg", "no-suffix", "two.dots.png"]
    found = [SimpleNamespace(file=tmp_path / name, frame=None, mask=blob(30, 20)) for name in files]
    written = write_masks(found, tmp_path / "masks")
    numbered = ["00001-scan.png", "00002-SCAN.png", "other.png", "00004-other-0001.png"]
    assert [file.name for file in written] == [*numbered, "ä;=1+1.png", "no-suffix.png", "two.dots.png"]
    assert np.array_equal(np.asarray(Image.open(written[0])) > 0, blob(30, 20))
    with pytest.raises(BadInput, match="the images lie there, and masks have their names; name another folder"):
        write_masks(found, tmp_path / "masks" / ".." / "a")


def dicom(path: Path, *, complete: bool) -> None:
    """A CT slice; `complete`: with all that a DICOM SEG has to refer to."""
    from pydicom import Dataset
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    one = Dataset()
    one.file_meta = FileMetaDataset()
    one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one.SOPClassUID = one.file_meta.MediaStorageSOPClassUID = CTImageStorage
    one.SOPInstanceUID = one.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    one.Rows, one.Columns, one.SamplesPerPixel, one.PhotometricInterpretation = 30, 20, 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 0
    one.PixelData = np.zeros((30, 20), np.uint16).tobytes()
    if complete:
        one.PatientID, one.PatientName, one.PatientBirthDate, one.PatientSex = "p1", "A^B", "", ""
        one.StudyInstanceUID, one.SeriesInstanceUID = generate_uid(), generate_uid()
        one.FrameOfReferenceUID, one.PositionReferenceIndicator = generate_uid(), ""
        one.StudyID, one.StudyDate, one.StudyTime, one.AccessionNumber = "", "", "", ""
        one.ReferringPhysicianName, one.Modality, one.SeriesNumber, one.InstanceNumber = "", "CT", 1, 1
        one.ImagePositionPatient, one.ImageOrientationPatient = [0, 0, 0], [1, 0, 0, 0, 1, 0]
        one.PixelSpacing, one.SliceThickness = [1, 1], 2
    one.save_as(path, enforce_file_format=True)


def test_a_dicom_image_gets_a_dicom_segmentation(tmp_path):
    pytest.importorskip("highdicom")
    import pydicom

    dicom(tmp_path / "ct.dcm", complete=True)
    one = SimpleNamespace(file=tmp_path / "ct.dcm", frame=None, mask=blob(30, 20))
    [written] = write_masks([one], tmp_path / "masks")
    found = pydicom.dcmread(written)
    assert found.SOPClassUID.name == "Segmentation Storage"
    assert found.PatientID == "p1"
    assert np.array_equal(found.pixel_array.reshape(30, 20) > 0, blob(30, 20))


def test_a_dicom_image_without_the_facts_of_a_segmentation_gets_a_picture(tmp_path, recwarn):
    dicom(tmp_path / "ct.dcm", complete=False)
    one = SimpleNamespace(file=tmp_path / "ct.dcm", frame=None, mask=blob(30, 20))
    [written] = write_masks([one], tmp_path / "masks")
    assert written.name == "ct.png"
    import importlib.util

    if importlib.util.find_spec("highdicom"):
        assert "no DICOM SEG can be written" in str(recwarn[0].message)
