"""Networks of other packages as backbones: MONAI's for real, what cannot be used, cuts, batch norm, privacy, a run."""

import pytest
import torch
from torch import nn

import polyclinic
from polyclinic.errors import BadInput
from polyclinic.models import build, find, norm_names, split
from polyclinic.models.imported import bound
from polyclinic.privacy.dp_sgd import try_gradients
from polyclinic.runner.run.run import run

NETS = "monai.networks.nets:"
SMALL_UNET = {"channels": [4, 8, 16], "strides": [2, 2]}
SMALL_VIT = {"patch_size": 16, "hidden_size": 16, "mlp_dim": 32, "num_layers": 1, "num_heads": 2}
SMALL_VIT["classification"] = True
#: networks of MONAI with the arguments that they cannot do without (docs/extend.md lists them)
CLASSIFIERS = {
    "DenseNet121": {}, "resnet10": {},
    "ResNet": {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 16, 32]}, "SEResNet50": {},
    "EfficientNetBN": {"model_name": "efficientnet-b0"}, "ViT": SMALL_VIT,
    "Classifier": {"channels": [4, 8], "strides": [2, 2]}, "Regressor": {"channels": [4, 8], "strides": [2, 2]},
}  # fmt: skip
SEGMENTERS = {
    "UNet": SMALL_UNET, "AttentionUnet": SMALL_UNET, "BasicUNet": {"features": [4, 4, 8, 8, 16, 4]},
    "BasicUNetPlusPlus": {"features": [4, 4, 8, 8, 16, 4]}, "SegResNet": {}, "SegResNetDS": {"init_filters": 8},
    "DynUNet": {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "FlexibleUNet": {"backbone": "efficientnet-b0"}, "SwinUNETR": {"feature_size": 12},
    "UNETR": {"hidden_size": 16, "mlp_dim": 32, "num_heads": 2}, "HighResNet": {},
}  # fmt: skip
#: of these, networks whose gradients per image fail or that Opacus does not know
NOT_PRIVATE = {"resnet10", "ResNet", "ViT", "SegResNet", "SegResNetDS", "DynUNet", "SwinUNETR"}


@pytest.mark.parametrize("name", [*CLASSIFIERS, *SEGMENTERS])
def test_networks_of_monai_work(name):
    arguments = (CLASSIFIERS | SEGMENTERS)[name]
    kind = find(NETS + name, size=64, arguments=arguments)
    assert kind.dense == (name in SEGMENTERS)
    network = build(NETS + name, channels=3, outputs=4, size=64, arguments=arguments).eval()
    output = network(torch.zeros(2, 3, 64, 64))
    assert output.shape == ((2, 4, 64, 64) if kind.dense else (2, 4))
    output.sum().backward()
    assert any(weight.grad is not None for weight in network.parameters())
    grouped = build(NETS + name, channels=3, outputs=4, size=64, arguments=arguments, norm="group")
    assert norm_names(grouped) == set()
    assert not any(getattr(layer, "inplace", False) for layer in grouped.modules())


@pytest.mark.parametrize("name", ["Classifier", "UNet", "AttentionUnet", "resnet10", "ViT"])
def test_which_can_be_trained_with_differential_privacy(name):
    kind = find(NETS + name, size=32, arguments=(CLASSIFIERS | SEGMENTERS)[name])
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    problem = try_gradients(kind.sample(32, "group"), images)
    assert (problem is not None) == (name in NOT_PRIVATE), problem


def test_what_we_know_is_passed_where_it_is_named():
    def make(in_channels, num_classes, img_size, spatial_dims, other=3) -> nn.Module: ...

    assert bound(make, (3, 5, 64)) == {"in_channels": 3, "num_classes": 5, "img_size": (64, 64), "spatial_dims": 2}
    from monai.networks.nets import EfficientNetBN, SEResNet50, resnet10

    assert bound(EfficientNetBN, (3, 5, 64))["pretrained"] is False
    assert bound(resnet10, (3, 5, 64))["n_input_channels"] == 3  # behind its **kwargs
    assert bound(SEResNet50, (3, 5, 64))["num_classes"] == 5


@pytest.mark.parametrize(("target", "arguments", "words"), [
    ("no.such.package:Net", {}, "'no.such.package' cannot be imported"),
    ("monai.networks.nets:NoNet", {}, "'monai.networks.nets' has no 'NoNet'"),
    ("os:system", {"command": "exit 1"}, "'os:system' is neither a torch.nn.Module nor a function"),
    ("pathlib:Path", {}, "'pathlib:Path' is neither a torch.nn.Module nor a function"),
    (NETS + "DenseNet121", {"growth": 3}, "model.arguments: .* cannot be built: TypeError"),
    (NETS + "DenseNet121", {"spatial_dims": 3}, "cannot take images of 1 x 32 x 32"),
    (NETS + "ViT", {**SMALL_VIT, "classification": False}, r"gives \(2, 4, 16\) for 2 images of 32 px, and must"),
    ("small-cnn", {"width": 3}, "model.arguments: are for importable networks, and 'small-cnn' takes none"),
])  # fmt: skip
def test_what_cannot_be_used_is_said_with_the_cure(target, arguments, words):
    with pytest.raises(BadInput, match=words):
        find(target, size=32, arguments=arguments)


def test_arguments_that_contradict_the_images_are_refused():
    with pytest.raises(BadInput, match=r"model\.arguments\.in_channels: is 3, and the study needs 1"):
        build(NETS + "DenseNet121", channels=1, outputs=2, size=32, arguments={"in_channels": 3})
    with pytest.raises(BadInput, match="out channels should be divisible by in_channels"):
        build(NETS + "VNet", channels=3, outputs=2, size=32)


class Lines(nn.Sequential):
    """A convolution and a linear layer, one after the other."""

    def __init__(self, in_channels: int, num_classes: int, img_size: tuple[int, int]) -> None:
        side = img_size[0]
        first, last = nn.Conv2d(in_channels, 2, 1), nn.Linear(2 * side * side, num_classes)
        layers = {"first": first, "flat": nn.Flatten(), "last": last}
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def test_a_sequential_network_is_cut_between_its_layers():
    network = build(f"{__name__}:Lines", channels=1, outputs=2, size=8)
    assert network.cuts == ("first", "flat")
    front, rest = split(network, "first")
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(rest(front(images)), network(images))
    assert find(f"{__name__}:Lines", size=8) is type(network)


def study(tiny, method="fedavg", **changes):
    settings = {"model.backbone": NETS + "Classifier", "model.arguments": CLASSIFIERS["Classifier"]}
    return tiny(method, {**settings, **changes}, rounds=1)


def test_cuts_and_privacy_are_tried_before_a_run(tiny):
    with pytest.raises(BadInput, match=r"nets:Classifier' cannot be cut, and 'splitnn' cuts the network"):
        study(tiny, "splitnn")
    with pytest.raises(BadInput, match=r"cannot be cut, and the study sets model\.cut"):
        study(tiny, **{"model.cut": "conv1"})
    assert study(tiny, **{"privacy.noise_multiplier": 1.0})
    dense = {"model.backbone": NETS + "DenseNet121", "model.arguments": {}, "data.size": 32}
    dense["privacy.noise_multiplier"] = 1.0
    with pytest.raises(BadInput, match=r"batch norm mixes the images of a batch.*set model\.norm = 'group'"):
        study(tiny, **dense)
    resnet = {**dense, "model.backbone": NETS + "resnet10", "model.norm": "group"}
    with pytest.raises(BadInput, match=r"resnet10 cannot be trained with gradients per image .*; choose another"):
        study(tiny, **resnet)


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_a_run_with_a_network_of_monai_is_resumed_and_predicts(tiny, tmp_path, batch_norm):
    settings = {"model.arguments": {**CLASSIFIERS["Classifier"], "norm": "batch"}, "model.batch_norm": batch_norm}
    chosen = study(tiny, **settings)
    first = run(chosen, tmp_path / "one")
    assert first["weights_sha256"] == run(chosen, tmp_path / "two")["weights_sha256"]
    tables = chosen.as_tables()["model"]
    assert tables["arguments"] == settings["model.arguments"]
    if batch_norm == "average":
        import numpy as np
        from PIL import Image

        Image.fromarray(np.zeros((28, 28, 3), np.uint8)).save(tmp_path / "black.png")
        [said] = polyclinic.predict(tmp_path / "one", [tmp_path / "black.png"], allow_import=["monai.networks"])
        assert "class" in said.values
