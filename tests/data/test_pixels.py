"""Intensities as bytes; sizes and spacings of images as their files have them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from medical_files import write_dicom
from PIL import Image

from polyclinic.data import listing as listings
from polyclinic.data.parts import open_site, prepare
from polyclinic.data.pixels import Fit, crop_centre, fit_image, fit_mask, is_colour, make_square, structures, to_uint8
from polyclinic.questions.inspect import SPACINGS, side_bins, spacing_bins
from polyclinic.study import parse_study

VALUES = [-0.2, 0.0, 0.1, 0.5, 0.999, 1.0, 7.0]  # times 255: 25.5, 127.5, 254.745


def test_values_are_clipped_and_rounded():
    assert to_uint8(np.array(VALUES)).tolist() == [0, 0, 26, 128, 255, 255, 255]
    assert to_uint8(torch.tensor(VALUES, dtype=torch.float64)).tolist() == [0, 0, 26, 128, 255, 255, 255]


def test_halves_go_up_in_arrays_and_to_even_in_tensors():
    """0.3 times 255 is 76.5 in float32."""
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


def test_width_height_and_spacing_are_those_of_the_files(part):
    found = np.asarray(part.geometry)
    known = found[:, 0] == 70
    assert 4 < known.sum() < len(found) - 4
    assert np.allclose(found[known], [70, 40, 0.6, 0.4])
    assert (found[~known][:, :2] == [300, 200]).all()
    assert np.isnan(found[~known][:, 2:]).all()


def test_bins_of_sizes_and_spacings(part):
    known = np.asarray(part.geometry)[:, 0] == 70
    assert (side_bins(part) == np.where(known, 1, 3)).all()  # 64 to 128, and 256 to 384 pixels
    assert (spacing_bins(part) == np.where(known, 5, len(SPACINGS) + 1)).all()  # 0.5 to 0.75 mm, and unknown


def numbered(height, width):
    return np.arange(height * width, dtype=np.uint8).reshape(height, width)


def test_an_oblong_image_is_padded_or_cropped_around_its_middle():
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


def test_the_middle_of_a_short_edge_is_all_of_it():
    np.testing.assert_array_equal(crop_centre(numbered(2, 6), 3), numbered(2, 6)[:, 1:4])
    np.testing.assert_array_equal(crop_centre(numbered(7, 2), 4), numbered(7, 2)[1:5])
    np.testing.assert_array_equal(crop_centre(numbered(9, 9), 3), numbered(9, 9)[3:6, 3:6])


def test_colour_is_where_channels_differ():
    grey = np.full((2, 2, 3), 9, np.uint8)
    assert not is_colour(grey)
    assert not is_colour(grey[..., 0])
    for channel in (1, 2):
        differs = grey.copy()
        differs[0, 0, channel] = 8
        assert is_colour(differs)


def test_an_image_of_the_size_keeps_its_pixels():
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
