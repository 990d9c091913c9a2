"""PSNR, SSIM and principal components against libraries and arithmetic."""

import math

import numpy as np
import pytest
import torch
from monai.metrics import PSNRMetric, SSIMMetric
from sklearn.decomposition import PCA

from polyclinic.metrics.images import (
    MOST_DECIBELS,
    mean_squared_error,
    pooled_psnr,
    principal_components,
    psnr,
    psnr_from_error,
    ssim,
)
from polyclinic.randomness import torch_rng


def pictures(*shape: int, name: str = "a") -> torch.Tensor:
    return torch.rand(*shape, generator=torch_rng("scoring", name), dtype=torch.float64)


def test_errors_and_psnr_by_hand():
    truth, found = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2)
    found[0, 0, 0, 0] = 0.2
    assert mean_squared_error(found, truth).tolist() == pytest.approx([0.01, 0.0])
    assert psnr(found, truth).tolist() == [pytest.approx(20.0, abs=1e-4), math.inf]
    errors = torch.tensor([1.0, 0.1, 1e-15, 0.0], dtype=torch.float64)
    assert psnr_from_error(errors, most=120).tolist() == pytest.approx([0, 10, 120, 120])
    assert psnr_from_error(errors).tolist() == [pytest.approx(0), pytest.approx(10), pytest.approx(150), math.inf]
    assert float(psnr_from_error(100 * errors[0], data_range=10)) == pytest.approx(0)
    black = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    grey = torch.stack([black[0] + 51, black[0]])  # errors 0.2 squared and 0
    assert pooled_psnr(black, grey, data_range=255) == pytest.approx(-10 * math.log10(0.04 / 2))
    assert pooled_psnr(black, black, data_range=255) == pytest.approx(MOST_DECIBELS)


def test_psnr_is_monais_and_that_of_bytes_the_same():
    a, b = pictures(3, 2, 9, 7), pictures(3, 2, 9, 7, name="b")
    assert psnr(a, b).tolist() == pytest.approx(PSNRMetric(max_val=1.0)(a, b)[:, 0].tolist())
    a, b = ((255 * one).round().to(torch.uint8) for one in (a, b))
    assert psnr(a, b, data_range=255).tolist() == pytest.approx(psnr(a / 255, b / 255).tolist())
    assert pooled_psnr(a, b, data_range=255) == pytest.approx(pooled_psnr(a / 255, b / 255))


def test_ssim_is_monais_with_a_window_of_11():
    a, b = pictures(3, 2, 20, 17), pictures(3, 2, 20, 17, name="b")
    expected = SSIMMetric(2, data_range=1.0, win_size=11)(a.float(), b.float())[:, 0]
    torch.testing.assert_close(ssim(a, b, window=11).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "flat"), [(7, True), (11, False)])
def test_ssim_window_by_window(window: int, flat: bool):
    """The definition written out: every window inside the image, sample covariance where it is flat."""
    a, b = pictures(1, 1, 14, 13), pictures(1, 1, 14, 13, name="b")
    line = np.ones(7) if flat else np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weight = np.outer(line, line) / line.sum() ** 2
    factor, values = (49 / 48 if flat else 1), []
    for i in range(14 - window + 1):
        for j in range(13 - window + 1):
            x, y = (image[0, 0, i : i + window, j : j + window].numpy() for image in (a, b))
            mx, my = (weight * x).sum(), (weight * y).sum()
            vx, vy, vxy = (
                factor * (weight * s * t).sum() for s, t in ((x - mx, x - mx), (y - my, y - my), (x - mx, y - my))
            )
            values.append((2 * mx * my + 1e-4) * (2 * vxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert float(ssim(a, b, window=window)) == pytest.approx(np.mean(values), abs=1e-12)


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 6, 6), generator=torch_rng("pca", count), dtype=torch.uint8)


def test_components_keep_distances_and_are_scikit_learns_up_to_the_sign():
    at = principal_components(images(12), 50).project(images(12))
    assert at.shape == (12, 11)
    flat = images(12).flatten(1).float() / 255
    torch.testing.assert_close(torch.cdist(at, at), torch.cdist(flat, flat), rtol=1e-3, atol=1e-3)
    known, other = images(40), images(9)
    ours = principal_components(known, 5).project(other).numpy()
    theirs = PCA(5, svd_solver="full").fit(known.flatten(1).numpy() / 255).transform(other.flatten(1).numpy() / 255)
    np.testing.assert_allclose(np.abs(ours), np.abs(theirs), atol=1e-4)
