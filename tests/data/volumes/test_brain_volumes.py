"""The drawn brain: seeded, nested, different at every institution, and not told by one slice."""

import numpy as np
import pytest

from polyclinic.data.volumes.brain import CHANNELS, FIELD, draw_brain

SHAPE = (36, 36, 24)


@pytest.fixture(scope="module")
def brains():
    return [draw_brain(0, number, SHAPE) for number in range(12)]


def test_a_case_is_the_same_whenever_it_is_drawn(brains):
    again = draw_brain(0, 3, SHAPE)
    np.testing.assert_array_equal(again.image, brains[3].image)
    np.testing.assert_array_equal(again.mask, brains[3].mask)
    assert not np.array_equal(draw_brain(1, 3, SHAPE).mask, again.mask)


def test_channels_regions_and_millimetres(brains):
    for brain in brains:
        assert brain.image.shape == (len(CHANNELS), *brain.mask.shape)
        assert np.isfinite(brain.image).all()
        np.testing.assert_allclose(np.multiply(brain.spacing, brain.mask.shape), FIELD, rtol=1e-6)
        sizes = [int((brain.mask >= value).sum()) for value in (1, 2, 3)]
        assert sizes[0] > sizes[1] >= sizes[2]
        assert sizes[0] > 0


def test_institutions_scan_with_voxels_of_their_own(brains):
    spacings = {brain.institution: brain.spacing for brain in brains}
    assert len(set(spacings.values())) == len(spacings) > 1


def test_a_vessel_looks_like_the_tumour_in_every_slice():
    """By brightness alone, a slice has as much that looks like a tumour outside of it, and slices without it have,
    too."""
    brain = next(one for one in (draw_brain(0, n, (72, 72, 48)) for n in range(9)) if one.institution.endswith("1"))
    flair, inside = brain.image[0].astype(float), brain.mask > 0
    bright = flair > np.quantile(flair[inside], 0.2)
    assert (bright & ~inside).sum() > 0.3 * (bright & inside).sum()
    without = ~inside.any((0, 1)) & (flair > 0).any((0, 1))
    assert bright[:, :, without].any()


def test_the_shape_of_fets_has_voxels_of_a_millimetre():
    usual = next(n for n in range(20) if draw_brain(0, n, SHAPE).institution == "institution-1")
    brain = draw_brain(0, usual, (240, 240, 155))
    assert brain.mask.shape == (240, 240, 155)
    assert brain.spacing == (1.0, 1.0, 1.0)
