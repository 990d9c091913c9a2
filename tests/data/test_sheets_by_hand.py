"""Contact sheets and cameras, by hand: where an image lies, which colour a code has, what a style does."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic.data.acquisition import Style, _vignette, acquire, crop_masks, draw_style, zoom_centre
from polyclinic.data.contact_sheet import coloured, contact_sheet, label_words, mosaic, outlined
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng


def test_a_mosaic_has_its_images_in_rows():
    rows = [np.full((2, 1, 3, 4), 7, np.uint8), np.full((1, 3, 3, 4), 9, np.uint8)]
    sheet = mosaic(rows)
    assert sheet.shape == (10, 12, 3)
    wanted = np.full((10, 12, 3), 255)
    wanted[0:3, 0:4] = wanted[0:3, 6:10] = 7
    wanted[5:8, 0:4] = 9
    np.testing.assert_array_equal(sheet, wanted)
    assert mosaic(rows, gap=0).shape == (6, 8, 3)
    assert mosaic([rows[0][:0]]).shape == (5, 6, 3)


def test_codes_have_the_colours_of_viridis():
    found = coloured(torch.tensor([[[0, 16], [8, 1]]]), 17, 2)[0].permute(1, 2, 0)
    assert found[0].tolist() == [[68, 1, 84], [253, 231, 37]]
    assert found[1].tolist() == [[33, 145, 140], [70, 23, 104]]  # half way between the first two
    assert coloured(torch.zeros(1, 1, 1, dtype=torch.int64), 1, 4).shape == (1, 3, 4, 4)
    steps = coloured(torch.arange(9).reshape(1, 3, 3), 9, 3)[0].flatten(1).T.tolist()
    assert steps == [
        *([68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140]),
        *([40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]),
    ]


def test_the_edge_of_a_mask_is_drawn():
    mask = np.zeros((1, 6, 6))
    mask[0, 1:5, 1:5] = 1
    drawn = outlined(np.full((1, 1, 6, 6), 3, np.uint8), mask)[0]
    edge = np.zeros((6, 6), bool)
    edge[1:5, 1:5] = True
    edge[2:4, 2:4] = False
    for channel, value in enumerate((255, 190, 0)):
        np.testing.assert_array_equal(drawn[channel], np.where(edge, value, 3))


def test_labels_in_words():
    assert label_words([1, 0], ("no", "yes")) == ["yes", "no"]
    assert label_words([12.34567], (), "months") == ["12.35 months"]
    assert label_words([2.0], ()) == ["2"]
    assert label_words([0, 1], ("x" * 26, "y" * 27)) == ["x" * 26, "y" * 25 + "…"]


@pytest.mark.parametrize(
    ("title", "captions", "size", "left_top"),
    [
        ("", [], (126 + 2 * 114, 7 + 114), (126, 7)),
        ("", ["a", "b"], (126 + 2 * 114, 7 + 18 + 114), (126, 25)),
        ("one line", ["two words that wrap", "b"], (480, 7 + 18 + 36 + 114), (126, 61)),
    ],
)
def test_a_sheet_has_room_for_its_words(tmp_path, title, captions, size, left_top):
    """Images of 28 pixels are enlarged four times."""
    images = np.zeros((2, 1, 28, 28), np.uint8)
    contact_sheet({"real": images}, tmp_path / "sheet.png", captions, title)
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == size
    left, top = left_top
    pixels = np.asarray(sheet)[:, :, 0]
    assert (pixels[top : top + 112, left : left + 112] == 0).all()
    assert (pixels[top : top + 112, left + 112 : left + 114] == 255).all()
    assert (pixels[:top, left : left + 5] > 0).all()
    if captions:  # above the middle of its image, between the title and the images
        above = pixels[7 + 18 * bool(title) : top, left + 114 : left + 228] < 128
        rows, columns = np.nonzero(above)
        assert abs(columns.mean() - 56) < 5
        assert abs(rows.mean() - len(above) / 2) < 5
    words = pixels[top : top + 114, :left] < 128  # the name of the row, in the middle of its height, beside the images
    rows, columns = np.nonzero(words)
    assert abs(rows.mean() - 57) < 8
    assert columns.max() < left - 4


def test_a_sheet_of_nothing_is_refused(tmp_path):
    with pytest.raises(BadInput, match="there are no images to show"):
        contact_sheet({"real": np.zeros((0, 1, 8, 8), np.uint8)}, tmp_path / "sheet.png")


def test_an_image_is_enlarged_by_its_longer_side(tmp_path):
    contact_sheet({"real": np.zeros((1, 1, 20, 56), np.uint8)}, tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (126 + 114, 7 + 42)
    contact_sheet({"real": np.zeros((1, 1, 56, 20), np.uint8)}, tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (126 + 42, 7 + 114)


def test_a_large_image_stays_as_it_is(tmp_path):
    contact_sheet({"real": np.zeros((1, 1, 200, 300), np.uint8)}, tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (126 + 302, 7 + 202)


def test_a_style_has_the_strength_that_is_asked_for():
    most = SimpleNamespace(uniform=lambda low, high, count: np.full(count, float(high)))
    style = draw_style(most, 0.5)
    assert style.gamma == pytest.approx(np.exp(0.225))
    assert style.contrast == pytest.approx(np.exp(0.175))
    assert style.colour == pytest.approx([np.exp(0.11)] * 3)
    assert (style.blur, style.noise, style.vignette, style.crop) == pytest.approx((0.0075, 0.03, 0.3, 0.9))
    least = SimpleNamespace(uniform=lambda low, high, count: np.full(count, float(low)))
    assert draw_style(least, 0.5).gamma == pytest.approx(np.exp(-0.225))
    assert draw_style(least, 0.5).crop == 1
    drawn = []

    def uniform(low, high, count):
        drawn.append((low, high, count))
        return np.arange(1.0, count + 1)

    numbered = draw_style(SimpleNamespace(uniform=uniform), 1.0)
    assert drawn == [(-1, 1, 5), (0, 1, 4)], "no number more: all that is drawn later would be another"
    assert np.log([numbered.gamma, numbered.contrast, *numbered.colour]) == pytest.approx([0.45, 0.7, 0.66, 0.88, 1.1])
    assert (numbered.blur, numbered.noise, numbered.vignette) == pytest.approx((0.015, 0.12, 1.8))
    assert numbered.crop == pytest.approx(0.2)


def test_corners_are_darker_by_the_vignette():
    factor = _vignette(4, 0.5)
    # pixels lie at -0.75, -0.25, 0.25, 0.75
    assert factor[0, 0] == pytest.approx(1 - 0.5 * 0.5625)
    assert factor[1, 2] == pytest.approx(1 - 0.5 * 0.0625)
    assert factor[0, 1] == pytest.approx(1 - 0.5 * (0.5625 + 0.0625) / 2)


def test_the_middle_is_enlarged_by_hand():
    ramp = np.arange(5.0)[None] + np.zeros((5, 1))
    np.testing.assert_allclose(zoom_centre(ramp, 0.5, order=1)[0], [1, 1.5, 2, 2.5, 3])
    np.testing.assert_allclose(zoom_centre(ramp.T[:, :3], 0.5, order=1)[:, 1], [1, 1.5, 2, 2.5, 3])
    assert zoom_centre(ramp, 1, order=1) is ramp


def test_images_are_enlarged_evenly_and_masks_by_the_nearest_pixel():
    ramp = np.broadcast_to(np.arange(0, 250, 50, dtype=np.uint8), (1, 1, 5, 5)).copy()
    found = acquire(ramp, Style(crop=0.5), np.random.default_rng(0))
    assert found[0, 0, 2].tolist() == [50, 75, 100, 125, 150]
    steep = np.zeros((1, 1, 5, 5), np.uint8)
    steep[..., 2] = 200
    curved = acquire(steep, Style(crop=0.5), np.random.default_rng(0))[0, 0, 2]
    assert curved.tolist() == [0, 100, 200, 100, 0], "straight lines between pixels"
    mask = np.zeros((1, 9, 9), np.uint8)
    mask[0, :, :5] = 200
    address = (3, "style", "site-1")
    assert draw_style(numpy_rng(*address), 1.0).crop < 0.95
    assert set(crop_masks(mask, address, 1.0).ravel()) == {0, 200}


def test_a_bright_image_through_gamma_and_contrast_by_hand():
    grey = np.full((1, 1, 4, 4), 64, np.uint8)
    wanted = ((64 / 255) ** 2 - 0.5) * 0.8 + 0.5
    found = acquire(grey, Style(gamma=2.0, contrast=0.8), np.random.default_rng(0))
    assert set(found.ravel()) == {round(255 * wanted)}


def test_blur_below_a_tenth_of_a_pixel_is_none():
    step = np.zeros((1, 1, 20, 20), np.uint8)
    step[..., 10:] = 255
    for blur, blurred in ((0.0049, False), (0.02, True)):
        found = acquire(step, Style(blur=blur), np.random.default_rng(0))
        assert np.array_equal(found, step) is not blurred
        assert np.array_equal(found[:, :, :1], found[:, :, 10:11])
    # a Gaussian of one pixel lets 0.5 less half of its middle tap pass at the last dark pixel
    taps = np.exp(-0.5 * np.arange(-4, 5) ** 2.0)
    taps /= taps.sum()
    found = acquire(step, Style(blur=0.05), np.random.default_rng(0))
    assert found[0, 0, 5, 9] == pytest.approx(255 * taps[5:].sum(), abs=1)
    turned = acquire(step.swapaxes(2, 3), Style(blur=0.05), np.random.default_rng(0))
    assert turned[0, 0, 9, 5] == pytest.approx(255 * taps[5:].sum(), abs=1)
