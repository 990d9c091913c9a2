"""Pixels out of files and as bytes: pictures, DICOM windows by hand, NIfTI slices the right way up, and sizes."""

import io
from types import SimpleNamespace

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from medical_files import write_dicom, write_nifti
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, RLELossless

from polyclinic.data import listing as listings
from polyclinic.data.parts import open_site, prepare
from polyclinic.data.pixels import Fit, crop_centre, fit_image, fit_mask, is_colour, make_square, structures, to_uint8
from polyclinic.data.reading import Reader, _in_window, count_slices, is_image_name, load_volume, window_to_uint8
from polyclinic.questions.inspect import SPACINGS, side_bins, spacing_bins
from polyclinic.study import parse_study


def test_dicom_windows_by_hand(tmp_path):
    """Stored 0..4, slope 10, intercept -20: -20..20. Window 0.5 wide 41: black at -20, white at 20."""
    values = np.array([[0, 1, 2, 3, 4]], np.int16)
    tags = {"RescaleSlope": 10, "RescaleIntercept": -20, "WindowCenter": 0.5, "WindowWidth": 41}
    file = write_dicom(tmp_path / "a.dcm", values, **tags)
    assert Reader().pixels(file).tolist() == [[0, 64, 128, 191, 255]]
    file = write_dicom(tmp_path / "a.dcm", np.array([[0, 5, 10]], np.int16), WindowCenter=100, WindowWidth=2)
    assert Reader().pixels(file).tolist() == [[0, 0, 0]]
    assert Reader(window=(5.5, 11)).pixels(file).tolist() == [[0, 128, 255]]
    several = {"WindowCenter": [5.5, 900], "WindowWidth": [11, 2]}
    file = write_dicom(tmp_path / "b.dcm", np.array([[0, 5, 10]], np.int16), **several)
    assert Reader().pixels(file).tolist() == [[0, 128, 255]]
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


def test_slices_and_spread_of_a_volume(tmp_path):
    file = write_nifti(tmp_path / "v.nii", np.ones((2, 2, 5), np.float32))
    assert Reader(slices="all").frames(file) == (0, 1, 2, 3, 4)
    assert Reader(slices=(1, -1)).frames(file) == (1, -1)
    assert Reader(slices="middle").frames(file) == Reader(slices="all").frames(tmp_path / "a.png") == (None,)
    (tmp_path / "broken.nii").write_bytes(b"no")
    assert Reader(slices="all").frames(tmp_path / "broken.nii") == (0,)
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


def test_pictures_of_every_kind_become_bytes_the_right_way_up(tmp_path):
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
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it clockwise by a quarter
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    turned = Reader().pixels(tmp_path / "turned.png")
    assert turned.shape == (4, 2, 3)
    assert turned[0, 1, 0] == 255


def test_files_without_an_image_say_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Reader().pixels(tmp_path / "none.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50), np.uint8)).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match="truncated"):
        Reader().pixels(tmp_path / "half.png")
    for name in ("a.png", "a.dcm", "a.nii"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"^the file is empty$"):
            Reader().pixels(tmp_path / name)
    file = write_dicom(tmp_path / "a.dcm", np.zeros((2, 2), np.uint8))
    header = pydicom.dcmread(file)
    del header.PixelData
    header.save_as(file)
    with pytest.raises(ValueError, match="holds no image"):
        Reader().pixels(file)


@pytest.mark.parametrize(
    ("name", "is_image"),
    [("a.PNG", True), ("a.nii.gz", True), ("a.txt", False), (".hidden.png", False), ("notes", False), ("x.dcm", True)],
)
def test_images_are_told_by_their_names(tmp_path, name, is_image):
    (tmp_path / name).write_bytes(b"text")
    assert is_image_name(tmp_path / name) == is_image


def test_windows_of_one_value_and_of_a_volume(tmp_path):
    assert _in_window(np.array([9.0, 10.0]), (10.0, 1.0)).tolist() == [0, 255]
    assert _in_window(np.array([-1.0, 0.0, 49.5, 99.0]), (50.0, 100.0)).tolist() == [0, 0, 128, 255]
    assert window_to_uint8(np.array([3.0, 3.0]), 3.0, 3.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="values that are not numbers"):
        window_to_uint8(np.array([np.inf]), 0, 1)
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


def test_a_nifti_of_two_dimensions_is_one_slice_and_turned_as_its_header_says(tmp_path):
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
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    plain, mirrored = (write_nifti(tmp_path / f"{flip}.nii", values, flips=(flip, 1, 1)) for flip in (1, -1))
    assert np.array_equal(Reader().pixels(mirrored), Reader().pixels(plain)[:, ::-1])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_colour_dicom_stays_in_colour_as_bytes(tmp_path, kind):
    pixels = np.array([[[255, 0, 128], [1, 2, 3]]], kind)
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0, "Rows": 1, "Columns": 2}
    stored = pixels * (257 if kind is np.uint16 else 1)
    file = write_dicom(tmp_path / "a.dcm", stored.astype(kind), **tags, NumberOfFrames=1)
    assert Reader().pixels(file).tolist() == pixels.tolist()


VALUES = [-0.2, 0.0, 0.1, 0.5, 0.999, 1.0, 7.0]  # times 255: 25.5, 127.5, 254.745


def test_values_are_clipped_and_rounded():
    assert to_uint8(np.array(VALUES)).tolist() == [0, 0, 26, 128, 255, 255, 255]
    assert to_uint8(torch.tensor(VALUES, dtype=torch.float64)).tolist() == [0, 0, 26, 128, 255, 255, 255]
    # 0.3 times 255 is 76.5 in float32.
    half = np.array([0.3], np.float32)
    assert half * np.float32(255) == 76.5
    assert to_uint8(half).tolist() == [77]
    assert to_uint8(torch.from_numpy(half)).tolist() == [76]


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """Ten pictures of 300 x 200 pixels, and ten DICOM images of 70 x 40 with 0.4 mm between rows and 0.6 between
    columns."""
    top = tmp_path_factory.mktemp("scans")
    for name in ("clear", "ill"):
        (top / name).mkdir()
        for number in range(5):
            Image.fromarray(np.full((200, 300), 9 * number, np.uint8)).save(top / name / f"{number}.png")
            values = np.arange(70 * 40, dtype=np.int16).reshape(40, 70) + number
            write_dicom(top / name / f"{number}.dcm", values, PixelSpacing=[0.4, 0.6])
    data = {"source": "folder", "path": str(top), "size": 16, "validation": 0.0, "test": 0.1}
    study = parse_study({"data": data, "sites": {"partition": "iid", "count": 1}, "method": {"name": "fedavg"}})
    parts = prepare(study.data, study.sites, cache=tmp_path_factory.mktemp("cache"))
    return open_site(parts.folder, parts.names[0]).train


def test_sizes_and_spacings_are_those_of_the_files_and_have_bins(part):
    found = np.asarray(part.geometry)
    known = found[:, 0] == 70
    assert 4 < known.sum() < len(found) - 4
    assert np.allclose(found[known], [70, 40, 0.6, 0.4])
    assert (found[~known][:, :2] == [300, 200]).all()
    assert np.isnan(found[~known][:, 2:]).all()
    known = np.asarray(part.geometry)[:, 0] == 70
    assert (side_bins(part) == np.where(known, 1, 3)).all()  # 64 to 128, and 256 to 384 pixels
    assert (spacing_bins(part) == np.where(known, 5, len(SPACINGS) + 1)).all()  # 0.5 to 0.75 mm, and unknown


def numbered(height, width):
    return np.arange(height * width, dtype=np.uint8).reshape(height, width)


def test_images_become_squares_and_keep_their_colour_by_hand():
    pixels = numbered(2, 5)
    assert make_square(pixels, "squash") is pixels
    padded = make_square(pixels, "pad")
    assert padded.shape == (5, 5)
    np.testing.assert_array_equal(padded[1:3], pixels)
    assert padded[[0, 3, 4]].max() == 0
    np.testing.assert_array_equal(make_square(pixels, "crop"), [[1, 2], [6, 7]])
    tall = make_square(pixels.T, "pad")
    assert tall.shape == (5, 5)
    np.testing.assert_array_equal(tall[:, 1:3], pixels.T)
    colour = np.repeat(pixels[..., None], 3, 2)
    assert make_square(colour, "pad").shape == (5, 5, 3)
    square = numbered(3, 3)
    assert make_square(square, "pad") is square
    np.testing.assert_array_equal(crop_centre(numbered(2, 6), 3), numbered(2, 6)[:, 1:4])
    np.testing.assert_array_equal(crop_centre(numbered(7, 2), 4), numbered(7, 2)[1:5])
    np.testing.assert_array_equal(crop_centre(numbered(9, 9), 3), numbered(9, 9)[3:6, 3:6])
    grey = np.full((2, 2, 3), 9, np.uint8)
    assert not is_colour(grey)
    assert not is_colour(grey[..., 0])
    for channel in (1, 2):
        differs = grey.copy()
        differs[0, 0, channel] = 8
        assert is_colour(differs)
    pixels = numbered(4, 4)
    np.testing.assert_array_equal(fit_image(pixels, Fit(4), 1), pixels[None])
    np.testing.assert_array_equal(fit_image(pixels, Fit(4), 3), np.stack([pixels] * 3))
    assert fit_image(numbered(4, 8), Fit(2), 1).shape == (1, 2, 2)
    flat = np.full((6, 3), 77, np.uint8)
    assert set(fit_image(flat, Fit(5), 1).ravel()) == {77}


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((2, 2), float, r"pixels must be uint8 \[H, W\]"),
        ((4,), np.uint8, r"pixels must be uint8 \[H, W\]"),
        ((2, 2, 4), np.uint8, r"pixels must be uint8 \[H, W\]"),
        ((2, 2, 3, 1), np.uint8, r"pixels must be uint8 \[H, W\]"),
        ((0, 3), np.uint8, "empty"),
        ((0, 2, 3), np.uint8, "empty"),
    ],
)
def test_other_arrays_are_no_images(shape, kind, words):
    with pytest.raises(ValueError, match=words):
        fit_image(np.zeros(shape, kind), Fit(2), 1)


def test_a_pixel_is_inside_a_mask_when_most_of_it_is():
    """Of four pixels that become one, three are inside, or two, or one."""
    mask = np.zeros((2, 6))
    mask[0, 0] = mask[0, 1] = mask[1, 0] = 1
    mask[0, 2] = mask[1, 3] = 1
    mask[0, 4] = 1
    wide = np.vstack([mask, np.zeros((4, 6))])
    np.testing.assert_array_equal(fit_mask(wide, Fit(3))[0], [1, 1, 0])  # halves are inside: 127.5 is rounded up
    np.testing.assert_array_equal(fit_mask(wide, Fit(6)), wide > 0)
    assert fit_mask(wide, Fit(6)).dtype == np.uint8
    with pytest.raises(ValueError, match=r"a mask must be \[H, W\]"):
        fit_mask(np.zeros((2, 2, 1)), Fit(2))


@pytest.mark.parametrize(
    ("values", "several"),
    [
        ([0, 1], ""),
        ([0, 255], ""),
        ([0, 1, 2, 4], "1, 2, 4"),
        ([0, 85, 170, 255], "85, 170, 255"),
        ([0, 0.5, 1], "0.5, 1"),
        ([0, *[255] * 30, 64, 128, 191], ""),  # soft edges
        ([0, 1, 2, *[253, 254, 255] * 5], ""),  # JPEG's noise
        (list(range(200)), ""),
    ],
)
def test_a_mask_of_several_structures_is_refused(values, several):
    mask = np.array([values], float)
    assert structures(mask) == several
    if several:
        with pytest.raises(ValueError, match=f"has the values {several}, which are several structures"):
            fit_mask(mask, Fit(2))


def test_a_mask_that_cannot_be_read_is_a_problem():
    def broken(number):
        raise ValueError("no mask")

    for mask, problem in ((None, None), (lambda number: numbered(2, 2) > 1, None), (broken, ("3", "no mask"))):
        listing = SimpleNamespace(picture=lambda number: numbered(2, 2), mask=mask, name=str)
        assert listings.look_at(listing, 3).problem == problem


def test_images_with_the_same_problem_share_a_line():
    few = listings.unreadable([("a.png", "byte 3 is wrong"), ("b.png", "byte 55 is wrong"), ("c.png", "empty")], 9)
    assert few.splitlines() == [
        "data.path: 3 of 9 images cannot be read; repair or remove them:",
        "  a.png: byte 3 is wrong",
        "  b.png: byte 55 is wrong",
        "  c.png: empty",
    ]
    twenty = [(f"{n}.png", f"byte {n} is wrong") for n in range(21)]
    assert len(listings.unreadable(twenty[:20], 30).splitlines()) == 21
    assert listings.unreadable(twenty, 30).splitlines()[1:] == ["  21 of 30 images, such as 0.png: byte 0 is wrong"]
    words = ["".join(chr(97 + int(digit)) for digit in str(n)) for n in range(201)]
    many = listings.unreadable([(word, word) for word in words], 300).splitlines()
    assert len(many) == 202
    assert many[-1] == "  and 1 more"
    assert len(listings.unreadable([(word, word) for word in words[:200]], 300).splitlines()) == 201
