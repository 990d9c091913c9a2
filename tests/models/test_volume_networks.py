"""Networks of volumes: the same outputs as MONAI's with the same weights, cuts, and nnU-Net's stages."""

import pytest
import torch
from monai.networks import nets

from polyclinic import models
from polyclinic.errors import BadInput
from polyclinic.models.topology import topology

SIZE = (32, 32, 16)
SMALL = {"filters": [4, 8, 16, 16]}


def built(backbone, **arguments):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.build(backbone, channels=2, outputs=3, size=SIZE, norm="instance", arguments=arguments).eval()


def monai_dynunet(heads=0):
    stages, instance = topology(SIZE), ("instance", {"affine": True})
    deep = {"deep_supervision": heads > 0, "deep_supr_num": max(heads, 1)}
    shape = {"kernel_size": stages.kernels, "strides": stages.strides, "upsample_kernel_size": stages.strides[1:]}
    return nets.DynUNet(3, 2, 3, **shape, filters=[4, 8, 16, 16], norm_name=instance, **deep)


@pytest.fixture
def volume():
    return torch.randn(1, 2, *SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [0, 2])
def test_dynunet_is_monais(volume, heads):
    ours, theirs = built("dynunet", **SMALL, deep_supervision=heads), monai_dynunet(heads)
    known = theirs.state_dict()
    assert {*ours.state_dict()} == {name for name in known if not name.startswith("skip_layers.")}
    # MONAI's has its layers twice, under two names
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for training in (False, True):
        with torch.no_grad():
            found, wanted = ours.train(training)(volume), theirs.train(training)(volume)
        torch.testing.assert_close(found, wanted)
    assert found.shape == ((1, heads + 1, 3, *SIZE) if heads else (1, 3, *SIZE))


def test_segresnet_is_monais(volume):
    ours = built("segresnet", init_filters=8, blocks_down=[1, 1, 2], blocks_up=[1, 1])
    instance = ("instance", {"affine": True})
    theirs = nets.SegResNet(3, 8, 2, 3, norm=instance, blocks_down=(1, 1, 2), blocks_up=(1, 1)).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(volume), theirs(volume))


@pytest.mark.parametrize("name", ["dynunet", "segresnet"])
def test_they_can_be_cut(volume, name):
    network = built(name, **(SMALL if name == "dynunet" else {"init_filters": 8}))
    front, rest = models.split(network, "block1")
    with torch.no_grad():
        torch.testing.assert_close(rest(front(volume)), network(volume))


@pytest.mark.parametrize(
    ("name", "size", "arguments", "words"),
    [
        ("dynunet", (30, 32, 16), {}, "data.size: 30 voxels"),
        ("dynunet", SIZE, {"width": 3}, "dynunet takes kernels, strides"),
        ("dynunet", SIZE, {"strides": [[1, 1, 1], [2, 2, 2]], "kernels": [3, 3]}, "no less than 3"),
        ("dynunet", SIZE, {"deep_supervision": 9}, "from 0 to 2, not 9"),
        ("segresnet", SIZE, {"blocks_up": 3}, "model.arguments"),
        ("resnet18", 64, {"filters": [1]}, "takes none"),
    ],
)
def test_what_cannot_be(name, size, arguments, words):
    with pytest.raises(BadInput, match=words):
        models.build(name, channels=1, outputs=2, size=size, norm="instance", arguments=arguments)


def test_a_norm_that_they_have_not():
    with pytest.raises(BadInput, match="'frozen' needs public weights"):
        models.build("dynunet", channels=1, outputs=2, size=SIZE, norm="frozen")


class TestTopology:
    """Stages that nnU-Net gives for data sets whose plans are published."""

    def test_brats(self):
        """Task 43 (BraTS): 1 mm, patches of 128: five times halved."""
        found = topology((128, 128, 128), (1.0, 1.0, 1.0))
        assert found.strides == ((1, 1, 1), *[(2, 2, 2)] * 5)
        assert found.filters == (32, 64, 128, 256, 320, 320)

    def test_prostate(self):
        """Task 5 (prostate): 3.6 x 0.62 x 0.62 mm, patches of 20 x 320 x 256."""
        found = topology((20, 320, 256), (3.6, 0.62, 0.62))
        assert found.strides[:4] == ((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2))
        assert found.kernels[:3] == ((1, 3, 3), (1, 3, 3), (3, 3, 3))

    def test_an_axis_is_not_halved_below_four(self):
        found = topology((64, 64, 8))
        assert found.strides == ((1, 1, 1), (2, 2, 2), (2, 2, 1), (2, 2, 1), (2, 2, 1))
        assert found.divisor == (16, 16, 2)
