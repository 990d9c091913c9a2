"""Pixels out of files: pictures, DICOM windows worked out by hand, NIfTI slices the right way up."""

import io

import nibabel
import numpy as np
import pydicom
import pytest
from medical_files import write_dicom, write_nifti
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, RLELossless

from polyclinic.data.reading import Reader, _in_window, count_slices, is_image_name, load_volume, window_to_uint8


def test_dicom_is_rescaled_and_windowed_as_the_file_says(tmp_path):
    """Stored 0..4, slope 10, intercept -20: -20..20. Window 0.5 wide 41: black at -20, white at 20."""
    values = np.array([[0, 1, 2, 3, 4]], np.int16)
    tags = {"RescaleSlope": 10, "RescaleIntercept": -20, "WindowCenter": 0.5, "WindowWidth": 41}
    file = write_dicom(tmp_path / "a.dcm", values, **tags)
    assert Reader().pixels(file).tolist() == [[0, 64, 128, 191, 255]]


def test_the_studys_window_goes_before_the_files(tmp_path):
    file = write_dicom(tmp_path / "a.dcm", np.array([[0, 5, 10]], np.int16), WindowCenter=100, WindowWidth=2)
    assert Reader().pixels(file).tolist() == [[0, 0, 0]]
    assert Reader(window=(5.5, 11)).pixels(file).tolist() == [[0, 128, 255]]
    several = {"WindowCenter": [5.5, 900], "WindowWidth": [11, 2]}
    file = write_dicom(tmp_path / "b.dcm", np.array([[0, 5, 10]], np.int16), **several)
    assert Reader().pixels(file).tolist() == [[0, 128, 255]]


def test_monochrome1_is_inverted_and_no_window_means_darkest_to_brightest(tmp_path):
    values = np.array([[100, 150, 200]], np.uint16)
    assert Reader().pixels(write_dicom(tmp_path / "a.dcm", values)).tolist() == [[0, 128, 255]]
    inverted = write_dicom(tmp_path / "b.dcm", values, PhotometricInterpretation="MONOCHROME1")
    assert Reader().pixels(inverted).tolist() == [[255, 127, 0]]


def test_frames_of_a_dicom_are_slices_and_the_suffix_may_be_missing(tmp_path):
    frames = np.stack([np.full((2, 2), value, np.uint8) for value in (10, 20, 30)])
    file = write_dicom(tmp_path / "IM0001", frames, WindowCenter=128, WindowWidth=256)
    assert is_image_name(file)
    assert count_slices(file) == 3
    assert Reader().pixels(file)[0, 0] == 20
    assert [Reader().pixels(file, k)[0, 0] for k in (0, 2, -1)] == [10, 30, 30]
    assert Reader(slices="all").frames(file) == (0, 1, 2)
    with pytest.raises(IndexError, match="no slice 3: the volume has 3"):
        Reader().pixels(file, 3)


def test_a_dicom_without_an_image_says_so(tmp_path):
    file = write_dicom(tmp_path / "a.dcm", np.zeros((2, 2), np.uint8))
    header = pydicom.dcmread(file)
    del header.PixelData
    header.save_as(file)
    with pytest.raises(ValueError, match="holds no image"):
        Reader().pixels(file)


@pytest.mark.parametrize("syntax", [RLELossless, JPEGBaseline8Bit])
def test_compressed_dicom(tmp_path, syntax):
    values = np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None], 32, axis=0)
    file = write_dicom(tmp_path / "a.dcm", values, WindowCenter=128, WindowWidth=256)
    header = pydicom.dcmread(file)
    if syntax == RLELossless:
        header.compress(syntax)
    else:
        encoded = io.BytesIO()
        Image.fromarray(values).save(encoded, "JPEG", quality=95)
        header.PixelData = encapsulate([encoded.getvalue()])
        header.file_meta.TransferSyntaxUID = syntax
    header.save_as(file)
    assert np.abs(Reader().pixels(file).astype(int) - values).max() <= 4


@pytest.mark.parametrize("flips", [(1, 1, 1), (-1, -1, 1), (-1, 1, -1)])
def test_axial_slices_are_face_up_whatever_the_files_orientation(tmp_path, flips):
    """The brightest voxel is at the patient's right, front, head; it belongs in the upper left of the last slice."""
    voxels = np.ones((4, 6, 3), np.float32)
    voxels[3, 5, 2] = 100
    stored = voxels[:: flips[0], :: flips[1], :: flips[2]]
    file = write_nifti(tmp_path / "v.nii.gz", np.ascontiguousarray(stored), flips)
    pixels = Reader(window=(50, 100)).pixels(file, 2)
    assert pixels.shape == (6, 4)
    assert np.unravel_index(pixels.argmax(), pixels.shape) == (0, 0)
    assert Reader().pixels(file, 1).max() == Reader().pixels(file, 1).min()
    assert Reader().mask(file, -1)[0, 0] == 100


def test_slices_of_a_volume_are_counted_from_its_header(tmp_path):
    file = write_nifti(tmp_path / "v.nii", np.ones((2, 2, 5), np.float32))
    assert Reader(slices="all").frames(file) == (0, 1, 2, 3, 4)
    assert Reader(slices=(1, -1)).frames(file) == (1, -1)
    assert Reader(slices="middle").frames(file) == Reader(slices="all").frames(tmp_path / "a.png") == (None,)
    (tmp_path / "broken.nii").write_bytes(b"no")
    assert Reader(slices="all").frames(tmp_path / "broken.nii") == (0,)


def test_pictures_of_every_kind_become_bytes(tmp_path):
    grey = np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert np.array_equal(Reader().pixels(tmp_path / "grey.png"), grey)
    deep = (np.arange(4, dtype=np.uint16) * 1000).reshape(2, 2)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert Reader().pixels(tmp_path / "deep.png").tolist() == [[0, 85], [170, 255]]
    colour = np.random.default_rng(0).integers(0, 256, (4, 4, 4), np.uint8)
    Image.fromarray(colour, "RGBA").save(tmp_path / "alpha.png")
    assert np.array_equal(Reader().pixels(tmp_path / "alpha.png"), colour[..., :3])
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.png")
    assert np.array_equal(Reader().pixels(tmp_path / "palette.png")[..., 0], grey)
    assert np.array_equal(Reader().mask(tmp_path / "palette.png"), grey)


def test_a_photograph_is_turned_as_its_camera_held_it(tmp_path):
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it clockwise by a quarter
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    turned = Reader().pixels(tmp_path / "turned.png")
    assert turned.shape == (4, 2, 3)
    assert turned[0, 1, 0] == 255


def test_missing_and_truncated_files_raise_with_a_reason(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Reader().pixels(tmp_path / "none.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50), np.uint8)).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match="truncated"):
        Reader().pixels(tmp_path / "half.png")


@pytest.mark.parametrize(
    ("name", "is_image"),
    [("a.PNG", True), ("a.nii.gz", True), ("a.txt", False), (".hidden.png", False), ("notes", False), ("x.dcm", True)],
)
def test_images_are_told_by_their_names(tmp_path, name, is_image):
    (tmp_path / name).write_bytes(b"text")
    assert is_image_name(tmp_path / name) == is_image


def test_an_empty_file_is_called_empty(tmp_path):
    for name in ("a.png", "a.dcm", "a.nii"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"^the file is empty$"):
            Reader().pixels(tmp_path / name)


def test_a_window_of_one_value_is_a_step():
    assert _in_window(np.array([9.0, 10.0]), (10.0, 1.0)).tolist() == [0, 255]
    assert _in_window(np.array([-1.0, 0.0, 49.5, 99.0]), (50.0, 100.0)).tolist() == [0, 0, 128, 255]
    assert window_to_uint8(np.array([3.0, 3.0]), 3.0, 3.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="values that are not numbers"):
        window_to_uint8(np.array([np.inf]), 0, 1)


def test_the_spread_of_a_volume_is_that_of_what_is_not_zero(tmp_path):
    voxels = np.zeros((10, 10, 12), np.float32)
    voxels.reshape(-1)[:1001] = np.arange(1, 1002)
    volume, (low, high) = load_volume(write_nifti(tmp_path / "v.nii", voxels))
    assert (low, high) == pytest.approx((6, 996))
    assert volume.shape == (10, 10, 12)
    empty = write_nifti(tmp_path / "e.nii", np.zeros((2, 2, 2), np.float32))
    assert load_volume(empty)[1] == (0, 1)
    flat = write_nifti(tmp_path / "f.nii", np.zeros((2, 2, 2, 2), np.float32))
    with pytest.raises(ValueError, match="the volume has 4 dimensions instead of 3"):
        load_volume(flat)


def test_a_window_of_a_volume_is_around_its_centre(tmp_path):
    file = write_nifti(tmp_path / "v.nii", np.array([0, 40, 50, 60, 100], np.float32).reshape(5, 1, 1))
    assert Reader(window=(50, 20)).pixels(file).tolist() == [[255, 255, 128, 0, 0]]


def test_distances_between_columns_come_first(tmp_path):
    scan = write_dicom(tmp_path / "a.dcm", np.zeros((2, 2), np.uint8), PixelSpacing=[0.5, 0.25])
    assert Reader().spacing(scan) == (0.25, 0.5)
    film = write_dicom(tmp_path / "b.dcm", np.zeros((2, 2), np.uint8), ImagerPixelSpacing=[2, 3])
    assert Reader().spacing(film) == (3, 2)
    assert np.isnan(Reader().spacing(write_dicom(tmp_path / "c.dcm", np.zeros((2, 2), np.uint8)))).all()
    (tmp_path / "broken.dcm").write_bytes(b"no image")
    assert np.isnan(Reader().spacing(tmp_path / "broken.dcm")).all()
    volume = write_nifti(tmp_path / "v.nii", np.zeros((2, 2, 2), np.float32), flips=(2, 3, 5))
    assert Reader().spacing(volume) == (2, 3)


def test_a_nifti_of_two_dimensions_is_one_slice(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    flat = write_nifti(tmp_path / "flat.nii.gz", values)
    volume = write_nifti(tmp_path / "volume.nii.gz", values[..., None])
    assert Reader(slices="all").frames(flat) == (0,)
    assert Reader().spacing(flat) == (1, 1)
    for frame in (None, 0):
        assert Reader().pixels(flat, frame).tolist() == Reader().pixels(volume).tolist()
        assert Reader().mask(flat, frame).tolist() == [[5, 3, 1], [4, 2, 0]]
    sagittal = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]])
    nibabel.save(nibabel.Nifti1Image(values, sagittal), tmp_path / "side.nii")
    assert Reader().mask(tmp_path / "side.nii").shape == (2, 3)
    assert count_slices(tmp_path / "side.nii") == 1


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_colour_dicom_stays_in_colour_as_bytes(tmp_path, kind):
    pixels = np.array([[[255, 0, 128], [1, 2, 3]]], kind)
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0, "Rows": 1, "Columns": 2}
    stored = pixels * (257 if kind is np.uint16 else 1)
    file = write_dicom(tmp_path / "a.dcm", stored.astype(kind), **tags, NumberOfFrames=1)
    assert Reader().pixels(file).tolist() == pixels.tolist()


def test_a_flat_nifti_is_turned_as_its_header_says(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    plain, mirrored = (write_nifti(tmp_path / f"{flip}.nii", values, flips=(flip, 1, 1)) for flip in (1, -1))
    assert np.array_equal(Reader().pixels(mirrored), Reader().pixels(plain)[:, ::-1])
