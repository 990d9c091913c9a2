"""Figures of feature vectors against arithmetic, and their floor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics.distribution import (
    Extractor,
    efficientnet_features,
    fidelity,
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from polyclinic.randomness import torch_rng


def cloud(count: int, width: int = 6, shift: float = 0.0, name: str = "a") -> Tensor:
    return torch.randn(count, width, generator=torch_rng("features", name), dtype=torch.float64) + shift


@pytest.fixture(scope="module")
def means() -> Extractor:
    """Features that need no network: means of the four quarters of each channel."""
    return Extractor(lambda images: torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1), "means", side=8)


@pytest.mark.parametrize(("n", "m"), [(40, 60), (5, 4), (40, 4)])
def test_frechet_distance_is_the_formula(n: int, m: int):
    a, b = cloud(n).numpy(), cloud(m, shift=0.5, name="b").numpy() * 1.5
    root = linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    found = frechet_distance(torch.from_numpy(a), torch.from_numpy(b))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_frechet_distance_of_a_set_to_itself_and_to_itself_moved():
    a = cloud(30)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 2) == pytest.approx(4 * 6)


def test_kernel_distance_by_hand():
    a, b = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    # k(x, y) = (xy + 1)³: within a: k(0, 1) = 1; within b: k(1, 2) = 27; across: 1, 1, 8, 27
    assert kernel_distance(a, b) == pytest.approx(1 + 27 - 2 * (1 + 1 + 8 + 27) / 4)


def test_kernel_distance_is_unbiased():
    values = [kernel_distance(cloud(20, name=f"a{i}"), cloud(20, name=f"b{i}")) for i in range(200)]
    deviation = np.std(values) / np.sqrt(len(values))
    assert min(values) < 0
    assert abs(np.mean(values)) < 3 * deviation


def test_precision_and_recall_by_hand():
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]])  # radii to the nearest other: 1, 1, 1, 8
    made = torch.tensor([[0.5], [20.0]])  # radii: 19.5, 19.5
    found = precision_recall(real, made, neighbours=1)
    # 0.5 lies in the balls of 0 and 1; 20 in none; recall: both balls of made are large and hold all real ones
    assert found == {"precision": 0.5, "recall": 1.0, "density": 1.0, "coverage": 0.5}


def test_coverage_by_hand():
    """Real at 0..9 on a line, k = 1, so all balls have radius 1; made ones at 0.1, 0.3 and 5.5."""
    real = torch.arange(10.0)[:, None]
    made = torch.tensor([[0.1], [0.3], [5.5]])
    found = precision_recall(real, made, neighbours=1)
    assert found["precision"] == 1.0
    assert found["coverage"] == pytest.approx(4 / 10)  # 0, 1, 5 and 6 have a made one nearer than 1
    assert found["density"] == pytest.approx((2 + 2 + 2) / 3)
    # balls of made ones: 0.2 around 0.1 and 0.3, 5.2 around 5.5: they hold 0 and 1..9 less 0.3 - 5.2
    assert found["recall"] == pytest.approx(10 / 10)


def test_a_vector_on_the_edge_of_a_ball_is_inside():
    """Kynkäänniemi's equation 1 has <=. Real at 0, 1, 2, 10 with k = 1: 3 lies on the edge of the ball of 2."""
    real, made = torch.tensor([[0.0], [1.0], [2.0], [10.0]]), torch.tensor([[3.0], [40.0]])
    found = precision_recall(real, made, neighbours=1)
    assert found["precision"] == 0.5
    assert found["coverage"] == 0.5  # of 2, at its edge, and of 10, whose ball reaches to 2


def test_a_set_covers_itself_even_where_images_repeat():
    """Balls of images that occur often are points: equal vectors must have a distance of exactly 0."""
    real = (cloud(10, width=40) * 1e3).repeat(8, 1)
    assert precision_recall(real, real.clone()) == {"precision": 1, "recall": 1, "density": 8 / 5, "coverage": 1}


@pytest.mark.parametrize("rows", [7, 10_000])
def test_precision_and_recall_are_those_of_scikit_learns_neighbours(rows: int, monkeypatch):
    """In chunks and at once, against a plain loop over scikit-learn's nearest neighbours."""
    monkeypatch.setattr("polyclinic.metrics.distribution.ROWS", rows)
    real, made = cloud(60, width=3), cloud(45, width=3, shift=0.4, name="b")
    radii = []
    for vectors in (real, made):
        distances, _ = NearestNeighbors(n_neighbors=6).fit(vectors).kneighbors(vectors)
        radii.append(distances[:, 5])
    away = np.linalg.norm(real.numpy()[:, None] - made.numpy()[None], axis=2)
    expected = {
        "precision": (away <= radii[0][:, None]).any(0).mean(),
        "recall": (away <= radii[1][None]).any(1).mean(),
        "density": (away <= radii[0][:, None]).sum(0).mean() / 5,
        "coverage": (away.min(1) <= radii[0]).mean(),
    }
    assert precision_recall(real.float(), made.float()) == pytest.approx(expected)


def test_half_of_the_space_is_half_covered_and_collapse_covers_nothing():
    real, other = cloud(400, width=2), cloud(400, width=2, name="b")
    whole = precision_recall(real, other)["coverage"]
    half = precision_recall(real, other[other[:, 0] > 0])["coverage"]
    collapsed = precision_recall(real, other[:1] + 1e-4 * cloud(50, width=2, name="tiny"))["coverage"]
    assert whole > 0.85
    assert 0.35 < half < 0.65
    assert collapsed < 0.1
    with pytest.raises(BadInput, match="more than 5 images"):
        precision_recall(real, other[:4])


def test_fidelity_has_a_floor_and_names_its_features(means: Extractor):
    rng = torch_rng("features", "images")
    real, alike, unlike = (noise_images(80, 1, 16, rng) for _ in range(3))
    good, bad = fidelity(real, alike, means), fidelity(real, unlike * 0.5, means)
    assert good.images == 40
    assert good.made["FD"] < 5 * good.floor["FD"]
    assert bad.made["FD"] > 20 * bad.floor["FD"]
    assert bad.made["KID"] > 5 * bad.made["KID deviation"]
    assert {"FD-means", "FD-means floor", "KID-means", "recall-means", "coverage-means floor"} <= set(good.summary())
    assert good.summary()["features"] == "means at 8 px"
    assert "FID" not in str(good.summary())


def test_fidelity_takes_held_out_images_for_the_floor(means: Extractor):
    rng = torch_rng("features", "held out")
    real, held_out, made = (noise_images(count, 1, 16, rng) for count in (30, 25, 40))
    found = fidelity(real, made, means, other_real=held_out)
    assert found.images == 25
    assert found == fidelity(real, made, means, other_real=held_out)
    with pytest.raises(BadInput, match="10 or more"):
        fidelity(real, made[:5], means)


def test_efficientnet_features_of_grey_bytes():
    images = (noise_images(3, 1, 28, torch_rng("features", "grey")) * 255).to(torch.uint8)
    extractor = efficientnet_features(side=64)
    vectors = extractor(images.numpy())
    assert vectors.shape == (3, 1280)
    assert extractor.name == "EffLite0"
    torch.testing.assert_close(vectors, extractor(images.expand(-1, 3, -1, -1).float() / 255))
