"""Cameras: each step changes what it says, a site's camera is always the same, and strength 0 is no camera."""

import numpy as np
import pytest

from polyclinic.data.acquisition import Style, acquire, apply_styles, crop_masks, draw_style, zoom_centre
from polyclinic.randomness import numpy_rng


def images(n=4, channels=3, size=32, seed=0):
    coarse = np.random.default_rng(seed).integers(60, 200, (n, channels, 4, 4))
    return np.kron(coarse, np.ones((1, 1, size // 4, size // 4))).astype(np.uint8)


def through(**changes):
    return acquire(images(), Style(**changes), np.random.default_rng(0))


def test_the_plain_style_changes_nothing():
    np.testing.assert_array_equal(through(), images())


def test_contrast_by_hand():
    # (100 / 255 - 0.5) * 0.5 + 0.5 = 0.4461, of 255: 113.75
    grey = np.full((1, 1, 4, 4), 100, np.uint8)
    assert set(acquire(grey, Style(contrast=0.5), np.random.default_rng(0)).ravel()) == {114}


def test_gamma_below_one_brightens():
    assert through(gamma=0.7).mean() > images().mean() + 5


def test_colour_acts_on_its_channel():
    out = through(colour=(0.5, 1.0, 1.0))
    np.testing.assert_array_equal(out[:, 1:], images()[:, 1:])
    np.testing.assert_allclose(out[:, 0], images()[:, 0] / 2, atol=1)


def test_a_grey_image_takes_the_mean_colour():
    grey = images(channels=1)
    out = acquire(grey, Style(colour=(0.5, 0.7, 0.9)), np.random.default_rng(0))
    np.testing.assert_allclose(out, grey * 0.7, atol=1)


def test_blur_smooths():
    def edges(x):
        return np.abs(np.diff(x.astype(float), axis=3)).max()

    assert edges(through(blur=0.05)) < 0.5 * edges(images())


def test_noise_has_its_size():
    grey = np.full((8, 1, 64, 64), 128, np.uint8)
    out = acquire(grey, Style(noise=0.05), np.random.default_rng(0))
    assert out.std() / 255 == pytest.approx(0.05, rel=0.05)


def test_vignette_darkens_the_corners_only():
    grey = np.full((1, 1, 65, 65), 200, np.uint8)
    out = acquire(grey, Style(vignette=0.5), np.random.default_rng(0))[0, 0]
    assert out[32, 32] == 200
    assert int(out[0, 0]) == pytest.approx(100, abs=4)


def test_crop_enlarges_the_middle():
    mask = np.zeros((1, 40, 40), np.uint8)
    mask[:, 10:30, 10:30] = 1
    assert zoom_centre(mask, 0.5, order=0).all()
    assert zoom_centre(mask, 0.8, order=0).mean() == pytest.approx(0.25 / 0.64, rel=0.1)


def test_a_site_keeps_its_camera_over_splits_and_sites_differ():
    address = (0, "style", "site-1")
    style = draw_style(np.random.default_rng(0), 1.0)
    assert style != draw_style(np.random.default_rng(1), 1.0)
    train = apply_styles(images(), address, 0.8, split="train")
    np.testing.assert_array_equal(train, apply_styles(images(), address, 0.8, split="train"))
    test = apply_styles(images(), address, 0.8, split="test")
    other = apply_styles(images(), (0, "style", "site-2"), 0.8, split="train")
    assert np.abs(train.astype(int) - test).mean() < np.abs(train.astype(int) - other).mean()


def test_strength_zero_is_no_camera():
    assert draw_style(np.random.default_rng(0), 0.0) == Style()
    np.testing.assert_array_equal(apply_styles(images(), (0,), 0.0), images())


def test_more_strength_changes_more():
    changes = [
        np.mean([np.abs(apply_styles(images(), (s,), k).astype(int) - images()).mean() for s in range(8)])
        for k in (0.2, 0.6, 1.0)
    ]
    assert changes[0] < changes[1] < changes[2]


def test_masks_are_cropped_like_their_images():
    blob = np.zeros((1, 64, 64), np.uint8)
    blob[:, 10:20, 40:60] = 1
    for site in range(5):
        image = acquire(blob[:, None] * 255, Style(crop=draw_style_of(site).crop), np.random.default_rng(0))
        mask = crop_masks(blob, (site, "style"), 1.0)
        assert np.mean((image[:, 0] > 127) != mask) < 0.02


def draw_style_of(site):
    return draw_style(numpy_rng(site, "style"), 1.0)


def test_many_images_are_done_in_chunks():
    few = images(n=3, size=8)
    many = np.repeat(few, 200, axis=0)
    out = acquire(many, Style(contrast=1.2, gamma=0.8), np.random.default_rng(0))
    np.testing.assert_array_equal(out[::200], acquire(few, Style(contrast=1.2, gamma=0.8), np.random.default_rng(0)))
