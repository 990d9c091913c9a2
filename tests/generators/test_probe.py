"""The probe finds artefacts where there are some, and none where there are none."""

import pytest
import torch
from torch.nn import functional as F

from polyclinic.data.plots import coloured
from polyclinic.errors import BadInput
from polyclinic.generators import probe
from polyclinic.generators.probe import gather, real_or_replayed, which_site
from polyclinic.generators.vqvae2.autoencoder import noise_images


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "STEPS", 50)
    monkeypatch.setattr(probe, "BATCH", 32)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, seed: int) -> torch.Tensor:
    sharp = noise_images(count, 1, 28, rng(seed)) + 0.1 * torch.randn(count, 1, 28, 28, generator=rng(seed + 1))
    return sharp.clamp(0, 1).mul(255).to(torch.uint8)


def blurred(images: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(images.float(), 3, stride=1, padding=1, count_include_pad=False).to(torch.uint8)


def test_blur_gives_replayed_images_away_and_pairs_stay_on_one_side_of_a_fold():
    real = pictures(90, 0)
    found = real_or_replayed(real, blurred(real), rng(), paired=True)
    assert found["auc"] > 0.95
    assert found["chance"] == 0.5
    count = probe.PER_GROUP + 20
    numbers = torch.arange(count).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    images, labels, folds = gather({"real": numbers, "replayed": numbers}, rng(), paired=True)
    assert labels.bincount().tolist() == [probe.PER_GROUP] * 2
    fold_of = [
        dict(zip(images[labels == g, 0, 0, 0].tolist(), folds[labels == g].tolist(), strict=True)) for g in (0, 1)
    ]
    assert fold_of[0] == fold_of[1]


def test_faults_are_named():
    with pytest.raises(BadInput, match="two groups or more"):
        which_site({"a": pictures(9, 0)}, rng())
    with pytest.raises(BadInput, match="cannot be pairs"):
        real_or_replayed(pictures(9, 0), pictures(8, 0), rng(), paired=True)


def test_codes_are_drawn_with_a_colour_each_and_as_large_as_images():
    codes = torch.tensor([[[0, 15], [7, 0]]], dtype=torch.int16)
    (picture,) = coloured(codes, 16, 6)
    assert picture.shape == (3, 6, 6)
    quarters = [picture[:, :3, :3], picture[:, :3, 3:], picture[:, 3:, :3], picture[:, 3:, 3:]]
    assert all((one == one[:, :1, :1]).all() for one in quarters)
    colours = [tuple(one[:, 0, 0].tolist()) for one in quarters]
    assert colours[0] == colours[3] == (68, 1, 84)  # the two ends of viridis
    assert colours[1] == (253, 231, 37)
    assert len(set(colours)) == 3
