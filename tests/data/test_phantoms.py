"""Phantoms, seeded and labelled with what is drawn, and the cameras of their sites."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from polyclinic.data.acquisition import Style, _vignette, acquire, apply_styles, crop_masks, draw_style, zoom_centre
from polyclinic.data.datasets import SOURCES
from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.data.datasets.phantoms.skin import LESIONS, SkinPhantom
from polyclinic.randomness import numpy_rng

PHANTOMS = {
    "fundus-phantom": FundusPhantom,
    "hand-phantom": HandPhantom,
    "chest-phantom": ChestPhantom,
    "brain-phantom": BrainPhantom,
    "skin-phantom": SkinPhantom,
}


def shrink(images, size):
    """Mean over blocks: [N, C, H, W] to [N, C, size, size]."""
    n, channels, side, _ = images.shape
    block = side // size
    return images.reshape(n, channels, size, block, size, block).mean(axis=(3, 5))


@pytest.mark.parametrize("name", PHANTOMS)
class TestEveryPhantom:
    def test_they_are_drawn_once_for_every_way_to_spread_them(self, name):
        kind = PHANTOMS[name]
        one = kind(samples=10, size=28).load_shared()
        assert kind(samples=10, size=28, fold="1/2", acquisition=0.5, test=0.3).load_shared() is one
        with pytest.raises(ValueError, match="read-only"):
            one.images[0] = 0
        other = kind(samples=10, size=28, seed=1).load_shared()
        assert not np.array_equal(other.images, one.images)
        assert np.array_equal(one.images, kind(samples=10, size=28).load().images)

    def test_more_samples_continue_the_same_series(self, name):
        few, many = (PHANTOMS[name](samples=n, size=28).load() for n in (12, 20))
        np.testing.assert_array_equal(few.images, many.images[:12])
        np.testing.assert_array_equal(few.labels, many.labels[:12])

    def test_the_same_anatomy_at_every_size(self, name):
        small, large = (PHANTOMS[name](samples=10, size=size).load() for size in (32, 256))
        np.testing.assert_array_equal(small.labels, large.labels)
        ours, theirs = small.images.astype(float), shrink(large.images, 32)
        alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs, strict=True)]
        unlike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs[::-1], strict=True)]
        assert min(alike) > 0.9
        assert min(alike) > max(unlike)


def test_labels_of_hands_chests_brains_and_skin():
    hands = HandPhantom(samples=400, size=28).load()
    assert (hands.labels.dtype, hands.unit, hands.label_range, hands.classes) == (np.float32, "months", (0, 228), ())
    chests = ChestPhantom(samples=300, size=28).load()
    assert (set(chests.site), chests.classes) == ({"scanner-a", "scanner-b"}, ("normal", "tuberculosis"))
    assert set(ChestPhantom(samples=20, size=28, scanner_b=0).load().site) == {"scanner-a"}
    brains = BrainPhantom(samples=120, size=28, slices=4).load()
    assert len(set(brains.patient)) == 30
    assert len(set(zip(brains.patient.tolist(), brains.site.tolist(), strict=True))) == 30
    np.testing.assert_array_equal(brains.masks.any(axis=(1, 2)), brains.labels == 1)
    skin = SkinPhantom(samples=400, size=28).load()
    assert skin.classes == ("benign", "malignant")
    for lesion, (its_class, _) in LESIONS.items():
        of_it = skin.subgroup == lesion
        assert set(skin.labels[of_it]) == {its_class}
        assert 70 < of_it.sum() < 130


RECORDED = Path(__file__).with_name("recorded_phantoms.json")
CASES = {
    "fundus-phantom": {},
    "fundus-phantom, five grades": {"grades": 5},
    "hand-phantom": {},
    "chest-phantom": {},
    "brain-phantom": {"slices": 2},
    "skin-phantom": {},
    "skin-phantom, as frequent": {"balanced": False},
}


def drawn(case):
    """The mean of each quarter of each image, its label, and the area of its mask."""
    name = case.partition(",")[0]
    data = SOURCES[name](source=name, samples=40, size=28, seed=3, **CASES[case]).load()
    quarters = data.images.astype(float).mean(axis=1).reshape(-1, 2, 14, 2, 14).mean(axis=(2, 4)).reshape(-1, 4)
    areas = np.zeros(len(quarters)) if data.masks is None else (data.masks == 1).mean(axis=(1, 2)) * 100
    return np.column_stack([quarters, data.labels, areas])


@pytest.mark.parametrize("case", CASES)
def test_they_are_drawn_as_recorded(case):
    known = json.loads(RECORDED.read_text(encoding="utf-8"))[case]
    np.testing.assert_allclose(drawn(case), known, rtol=0, atol=0.03)


if __name__ == "__main__":
    rows = {name: [json.dumps([round(float(x), 2) for x in row]) for row in drawn(name)] for name in CASES}
    tables = [f"{json.dumps(name)}: [\n" + ",\n".join(row) + "\n]" for name, row in rows.items()]
    RECORDED.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")


def images(n=4, channels=3, size=32, seed=0):
    coarse = np.random.default_rng(seed).integers(60, 200, (n, channels, 4, 4))
    return np.kron(coarse, np.ones((1, 1, size // 4, size // 4))).astype(np.uint8)


def through(**changes):
    return acquire(images(), Style(**changes), np.random.default_rng(0))


def test_colours_act_on_their_channels_and_a_grey_image_takes_their_mean():
    np.testing.assert_array_equal(through(), images())
    out = through(colour=(0.5, 1.0, 1.0))
    np.testing.assert_array_equal(out[:, 1:], images()[:, 1:])
    np.testing.assert_allclose(out[:, 0], images()[:, 0] / 2, atol=1)
    grey = images(channels=1)
    out = acquire(grey, Style(colour=(0.5, 0.7, 0.9)), np.random.default_rng(0))
    np.testing.assert_allclose(out, grey * 0.7, atol=1)


def test_a_camera_has_its_noise_and_strength_and_works_in_chunks():
    grey = np.full((8, 1, 64, 64), 128, np.uint8)
    out = acquire(grey, Style(noise=0.05), np.random.default_rng(0))
    assert out.std() / 255 == pytest.approx(0.05, rel=0.05)
    assert draw_style(np.random.default_rng(0), 0.0) == Style()
    np.testing.assert_array_equal(apply_styles(images(), (0,), 0.0), images())
    few = images(n=3, size=8)
    many = np.repeat(few, 200, axis=0)
    out = acquire(many, Style(contrast=1.2, gamma=0.8), np.random.default_rng(0))
    np.testing.assert_array_equal(out[::200], acquire(few, Style(contrast=1.2, gamma=0.8), np.random.default_rng(0)))


def test_a_site_keeps_its_camera_over_splits_and_sites_differ():
    address = (0, "style", "site-1")
    style = draw_style(np.random.default_rng(0), 1.0)
    assert style != draw_style(np.random.default_rng(1), 1.0)
    train = apply_styles(images(), address, 0.8, split="train")
    np.testing.assert_array_equal(train, apply_styles(images(), address, 0.8, split="train"))
    test = apply_styles(images(), address, 0.8, split="test")
    other = apply_styles(images(), (0, "style", "site-2"), 0.8, split="train")
    assert np.abs(train.astype(int) - test).mean() < np.abs(train.astype(int) - other).mean()


def test_a_style_has_the_strength_that_is_asked_for():
    drawn = []

    def uniform(low, high, count):
        drawn.append((low, high, count))
        return np.arange(1.0, count + 1)

    numbered = draw_style(SimpleNamespace(uniform=uniform), 1.0)
    assert drawn == [(-1, 1, 5), (0, 1, 4)], "no number more: all that is drawn later would be another"
    assert np.log([numbered.gamma, numbered.contrast, *numbered.colour]) == pytest.approx([0.45, 0.7, 0.66, 0.88, 1.1])
    assert (numbered.blur, numbered.noise, numbered.vignette) == pytest.approx((0.015, 0.12, 1.8))
    assert numbered.crop == pytest.approx(0.2)


def test_vignette_zoom_gamma_and_contrast_by_hand():
    factor = _vignette(4, 0.5)
    # pixels lie at -0.75, -0.25, 0.25, 0.75
    assert factor[0, 0] == pytest.approx(1 - 0.5 * 0.5625)
    assert factor[1, 2] == pytest.approx(1 - 0.5 * 0.0625)
    assert factor[0, 1] == pytest.approx(1 - 0.5 * (0.5625 + 0.0625) / 2)
    ramp = np.arange(5.0)[None] + np.zeros((5, 1))
    np.testing.assert_allclose(zoom_centre(ramp, 0.5, order=1)[0], [1, 1.5, 2, 2.5, 3])
    np.testing.assert_allclose(zoom_centre(ramp.T[:, :3], 0.5, order=1)[:, 1], [1, 1.5, 2, 2.5, 3])
    assert zoom_centre(ramp, 1, order=1) is ramp
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
