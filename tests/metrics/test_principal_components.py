"""Principal components against scikit-learn."""

import numpy as np
import torch
from sklearn.decomposition import PCA

from polyclinic.metrics.images import principal_components
from polyclinic.randomness import torch_rng


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 6, 6), generator=torch_rng("pca", count), dtype=torch.uint8)


def test_components_keep_distances_of_images_that_they_span():
    at = principal_components(images(12), 50).project(images(12))
    assert at.shape == (12, 11)
    flat = images(12).flatten(1).float() / 255
    torch.testing.assert_close(torch.cdist(at, at), torch.cdist(flat, flat), rtol=1e-3, atol=1e-3)


def test_coordinates_are_scikit_learns_up_to_the_sign():
    known, other = images(40), images(9)
    ours = principal_components(known, 5).project(other).numpy()
    theirs = PCA(5, svd_solver="full").fit(known.flatten(1).numpy() / 255).transform(other.flatten(1).numpy() / 255)
    np.testing.assert_allclose(np.abs(ours), np.abs(theirs), atol=1e-4)
