"""FID's Inception-v3: layer shapes, its pooling by hand, and which files of weights are taken for FID's."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.metrics.distribution import Extractor, fidelity, inception_features
from polyclinic.metrics.networks import inception, weights
from polyclinic.metrics.networks.inception import FIDInception, mixed_a, mixed_e
from polyclinic.models import initial_weights
from polyclinic.randomness import torch_rng


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
    assert found == {
        "Conv2d_1a_3x3": (32, 149, 149),
        "Conv2d_2a_3x3": (32, 147, 147),
        "Conv2d_2b_3x3": (64, 147, 147),
        "Conv2d_3b_1x1": (80, 73, 73),
        "Conv2d_4a_3x3": (192, 71, 71),
        "Mixed_5b": (256, 35, 35),
        "Mixed_5c": (288, 35, 35),
        "Mixed_5d": (288, 35, 35),
        "Mixed_6a": (768, 17, 17),
        "Mixed_6b": (768, 17, 17),
        "Mixed_6c": (768, 17, 17),
        "Mixed_6d": (768, 17, 17),
        "Mixed_6e": (768, 17, 17),
        "Mixed_7a": (1280, 8, 8),
        "Mixed_7b": (2048, 8, 8),
        "Mixed_7c": (2048, 8, 8),
    }
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
    extractor = Extractor(network, network.name, side=inception.SIDE, antialias=False)
    grey = images.expand(-1, 3, -1, -1) / 255
    expected = network(F.interpolate(grey, size=(299, 299), mode="bilinear", align_corners=False))
    assert torch.allclose(extractor(images), expected.double(), atol=1e-5)


def test_only_with_its_own_features_a_distance_is_called_fid():
    rng = torch_rng("called")
    real, made = (torch.randint(256, (12, 1, 8, 8), generator=rng, dtype=torch.uint8) for _ in range(2))
    names = {}
    for features in ("Inception", "EffLite0"):
        extractor = Extractor(lambda images: images.mean(2).flatten(1), features, side=8)
        names[features] = set(fidelity(real, made, extractor, other_real=real).summary())
    assert {"FID", "KID", "FID floor", "precision"} <= names["Inception"]
    assert {"FD-EffLite0", "KID-EffLite0"} <= names["EffLite0"]
    assert not {name for name in names["EffLite0"] if "FID" in name}


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
    assert inception_features().figure == "FID"
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
