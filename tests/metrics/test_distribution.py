"""Figures of feature vectors against arithmetic, and their floor."""

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import linalg
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn import functional as F

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics import distribution
from polyclinic.metrics.networks import inception, weights
from polyclinic.metrics.networks.inception import FIDInception, mixed_a, mixed_e
from polyclinic.models import initial_weights
from polyclinic.randomness import torch_rng


def cloud(count: int, width: int = 6, shift: float = 0.0, name: str = "a") -> Tensor:
    return torch.randn(count, width, generator=torch_rng("features", name), dtype=torch.float64) + shift


@pytest.fixture(scope="module")
def means() -> distribution.Extractor:
    """Features that need no network: means of the four quarters of each channel."""
    return distribution.Extractor(
        lambda images: torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1), "means", side=8
    )


@pytest.mark.parametrize(("n", "m"), [(40, 60), (5, 4), (40, 4)])
def test_frechet_distance_is_the_formula(n: int, m: int):
    a, b = cloud(n).numpy(), cloud(m, shift=0.5, name="b").numpy() * 1.5
    root = linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    found = distribution.frechet_distance(torch.from_numpy(a), torch.from_numpy(b))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_kernel_distance_by_hand():
    a, b = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    # k(x, y) = (xy + 1)³: within a: k(0, 1) = 1; within b: k(1, 2) = 27; across: 1, 1, 8, 27
    assert distribution.kernel_distance(a, b) == pytest.approx(1 + 27 - 2 * (1 + 1 + 8 + 27) / 4)


def test_precision_and_recall_by_hand_at_the_edge_of_a_ball_too():
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]])  # radii to the nearest other: 1, 1, 1, 8
    made = torch.tensor([[0.5], [20.0]])  # radii: 19.5, 19.5
    found = distribution.precision_recall(real, made, neighbours=1)
    # 0.5 lies in the balls of 0 and 1; 20 in none; recall: both balls of made are large and hold all real ones
    assert found == {"precision": 0.5, "recall": 1.0, "density": 1.0, "coverage": 0.5}
    # Kynkäänniemi's equation 1 has <=. Real at 0, 1, 2, 10 with k = 1: 3 lies on the edge of the ball of 2.
    real, made = torch.tensor([[0.0], [1.0], [2.0], [10.0]]), torch.tensor([[3.0], [40.0]])
    found = distribution.precision_recall(real, made, neighbours=1)
    assert found["precision"] == 0.5
    assert found["coverage"] == 0.5  # of 2, at its edge, and of 10, whose ball reaches to 2
    with pytest.raises(BadInput, match="more than 1 images"):
        distribution.precision_recall(real, made[:1], neighbours=1)


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
    assert distribution.precision_recall(real.float(), made.float()) == pytest.approx(expected)


def test_fidelity_has_a_floor_of_held_out_images_where_given_and_names_its_features(means: distribution.Extractor):
    rng = torch_rng("features", "images")
    real, alike, unlike = (noise_images(80, 1, 16, rng) for _ in range(3))
    good, bad = distribution.fidelity(real, alike, means), distribution.fidelity(real, unlike * 0.5, means)
    assert good.images == 40
    assert good.made["FD"] < 5 * good.floor["FD"]
    assert bad.made["FD"] > 20 * bad.floor["FD"]
    assert bad.made["KID"] > 5 * bad.made["KID deviation"]
    assert {"FD-means", "FD-means floor", "KID-means", "recall-means", "coverage-means floor"} <= set(good.summary())
    assert good.summary()["features"] == "means at 8 px"
    assert "FID" not in str(good.summary())
    rng = torch_rng("features", "held out")
    real, held_out, made = (noise_images(count, 1, 16, rng) for count in (30, 25, 40))
    found = distribution.fidelity(real, made, means, other_real=held_out)
    assert found.images == 25
    assert found == distribution.fidelity(real, made, means, other_real=held_out)
    with pytest.raises(BadInput, match="10 or more"):
        distribution.fidelity(real, made[:5], means)


def test_efficientnet_features_of_grey_bytes():
    images = (noise_images(3, 1, 28, torch_rng("features", "grey")) * 255).to(torch.uint8)
    extractor = distribution.efficientnet_features(side=64)
    vectors = extractor(images.numpy())
    assert vectors.shape == (3, 1280)
    assert extractor.name == "EffLite0"
    torch.testing.assert_close(vectors, extractor(images.expand(-1, 3, -1, -1).float() / 255))


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Weights drawn at random, in the layout of FID's file."""
    found = initial_weights(FIDInception, 0)
    last = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    return {name: tensor for name, tensor in found.items() if "num_batches" not in name} | last


@pytest.fixture(scope="module")
def network(tensors, tmp_path_factory) -> FIDInception:
    file = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_file(tensors, file)
    return inception.fid_inception(file)


def test_layers_have_the_shapes_of_inception_v3(network):
    found = {}
    for name, layer in network.named_children():
        layer.register_forward_hook(lambda _, given, made, name=name: found.update({name: tuple(made.shape[1:])}))
    with torch.no_grad():
        assert network(torch.rand(1, 3, 299, 299)).shape == (1, 2048)
    stem = [(32, 149), (32, 147), (64, 147), (80, 73), (192, 71)]
    blocks = [(256, 35), (288, 35), (288, 35), *[(768, 17)] * 5, (1280, 8), (2048, 8), (2048, 8)]
    assert list(found.values()) == [(channels, side, side) for channels, side in stem + blocks]
    # of the published network without its last layer and its auxiliary outputs
    assert sum(parameter.numel() for parameter in network.parameters()) == 21_785_568


@torch.no_grad()
def test_a_block_is_its_branches_side_by_side():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block, x = mixed_a(192, 32).eval(), torch.rand(1, 192, 5, 5)
    for name in ("branch1x1", "branch_pool"):
        block.get_submodule(name).bn.bias.fill_(0.1)
    sums = [F.avg_pool2d(F.pad(one, (1, 1, 1, 1)), 3, 1) for one in (x, torch.ones(1, 1, 5, 5))]
    pooled = sums[0] / sums[1]
    expected = [
        block.branch1x1(x),
        block.branch5x5_2(block.branch5x5_1(x)),
        block.branch3x3dbl_3(block.branch3x3dbl_2(block.branch3x3dbl_1(x))),
        block.branch_pool(pooled),  # pixels beyond the border do not count
    ]
    assert torch.allclose(block(x), torch.cat(expected, 1), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("pool", ["average", "max"])
def test_the_last_block_takes_the_largest_pixel_where_the_published_network_takes_the_mean(pool):
    block = mixed_e(2048, pool).eval()
    layer = block.branch_pool
    layer.conv.weight.zero_()
    layer.conv.weight[0, 0] = 1.0  # lets the first channel pass
    x = torch.zeros(1, 2048, 4, 4)
    x[0, 0, 1, 1] = 9.0
    found = block(x)[0, -192]
    spread = torch.zeros(4, 4)
    # the nine pixels around it: all of it, or its share of as many pixels as lie inside
    inside = torch.tensor([[4.0, 6, 6], [6, 9, 9], [6, 9, 9]])
    spread[:3, :3] = 9.0 if pool == "max" else 9 / inside
    assert torch.allclose(found, spread / (1 + inception.EPS) ** 0.5, atol=1e-4)


def test_features_are_taken_at_299_px_as_fid_does(network):
    images = torch.randint(256, (2, 1, 32, 32), generator=torch_rng("inception"), dtype=torch.uint8)
    extractor = distribution.Extractor(network, network.name, side=inception.SIDE, antialias=False)
    grey = images.expand(-1, 3, -1, -1) / 255
    expected = network(F.interpolate(grey, size=(299, 299), mode="bilinear", align_corners=False))
    assert torch.allclose(extractor(images), expected.double(), atol=1e-5)


@pytest.mark.slow
def test_a_file_of_weights_is_kept_and_found(tensors, tmp_path, monkeypatch, capsys):
    file = tmp_path / inception.FILE
    torch.save(tensors, file)
    with pytest.raises(BadInput, match=r"is not the file of FID's weights; give pt_inception-2015-12-05-6726825d\.pth"):
        weights.get("inception-fid", source=file, folder=tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(inception, "SHA256_BEGINS", digest[:8])
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    assert run_app(["weights", "get", "inception-fid", "--from", str(file)]) == 0
    kept = weights.find("inception-fid", tmp_path)
    assert all(torch.equal(load_file(kept)[name], tensor) for name, tensor in tensors.items())
    assert distribution.inception_features().figure == "FID"
    assert run_app(["weights", "list"]) == 0
    assert f"inception-fid  Inception-v3 of FID, 95 MB       {kept}" in capsys.readouterr().out


def test_other_weights_are_refused(tensors, tmp_path):
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("Mixed_5b.branch1x1")}
    cases = {
        "torchvision": (tensors | {"fc.weight": torch.zeros(1000, 2048)}, "of other classes than FID's 1,008"),
        "part": (without, "does not hold FID's Inception-v3 .Mixed_5b.branch1x1.conv.weight"),
    }
    for name, (given, words) in cases.items():
        save_file(given, tmp_path / f"{name}.safetensors")
        with pytest.raises(BadInput, match=words):
            inception.read_weights(tmp_path / f"{name}.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    with pytest.raises(BadInput, match="cannot be read"):
        inception.read_weights(tmp_path / "text.safetensors")


def test_missing_weights_say_where_they_are(tmp_path):
    for attempt in (weights.find, lambda name, folder: weights.get(name, folder=folder)):
        with pytest.raises(BadInput, match=r"https://.*pt_inception-2015-12-05-6726825d\.pth"):
            attempt("inception-fid", tmp_path)
