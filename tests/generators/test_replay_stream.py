"""Replayed images as batches, on the fly, from a buffer, mixed with real ones; the probe finds their artefacts."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.data.plots import coloured
from polyclinic.errors import BadInput
from polyclinic.generators import probe
from polyclinic.generators.probe import gather, tell_apart
from polyclinic.generators.replay_stream import Buffer, FromCodes, FromSamples, fill, stream
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.generators.vqvae2.model import VQVAE2, VQVAE2Model
from polyclinic.tasks import Segmentation, Target

TARGET = Target(classes=("a", "b"))
LABELS = torch.arange(10) % 2


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return noise_images(10, 1, 28, rng()).mul(255).to(torch.uint8)


@pytest.fixture
def model(images: Tensor) -> VQVAE2Model:
    settings = VQVAE2(
        epochs=1, width=8, blocks=1, code_width=4, top_codes=8, bottom_codes=16, prior_width=8, prior_layers=1,
        prior_epochs=1, batch_size=5,
    )  # fmt: skip
    model = settings.build(channels=1, size=28, target=TARGET, seed=0)
    model.fit(images, LABELS, rng())
    return model


def take(batches, number: int) -> tuple[Tensor, Tensor]:
    images, labels = zip(*itertools.islice(batches, number), strict=True)
    return torch.cat(images), torch.cat(labels)


def test_streams_and_buffers_of_codes_are_every_decoded_image_once_by_the_decoder_as_it_was(model, images):
    source = FromCodes(model, model.encode(images), torch.arange(10))
    made, labels = take(stream(source, 5, rng(1)), 4)
    assert sorted(labels[:10].tolist()) == list(range(10)) == sorted(labels[10:].tolist())
    assert labels[:10].tolist() != labels[10:].tolist()
    assert torch.equal(made, model.decode(model.encode(images))[labels].float() / 255)
    source = FromCodes(model, model.encode(images), LABELS)
    buffer = fill(source, rng(7))
    for one, other in zip(take(stream(source, 4, rng(1)), 5), take(stream(buffer, 4, rng(1)), 5), strict=True):
        assert torch.equal(one, other)
    source = FromCodes(model, model.encode(images), LABELS)
    before = source.images(torch.arange(10), rng())
    model.fit_codes(images, rng(5))
    assert torch.equal(source.images(torch.arange(10), rng()), before)


def test_samples_are_new_each_time_and_a_buffer_of_them_is_not(model):
    source = FromSamples(model, LABELS)
    made = list(itertools.islice(stream(source, 256, rng(1)), 4))
    assert all(batch.shape == (256, 1, 28, 28) for batch, _ in made)
    assert not torch.equal(made[0][0], made[1][0])
    buffer = fill(source, rng(1))
    drawn, _ = take(stream(buffer, 10, rng(2)), 2)
    assert torch.equal(drawn[:10].flatten(1).sum(1).sort().values, drawn[10:].flatten(1).sum(1).sort().values)


def test_replayed_images_have_the_grey_values_of_real_ones_and_are_augmented_like_them(model, images):
    source = FromCodes(model, model.encode(images), torch.arange(10))
    made, labels = take(stream(source, 10, rng(1), augmentation=["flip"]), 4)
    steps = made * 255
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    plain = model.decode(model.encode(images))[labels].float() / 255
    flipped = [not torch.equal(one, other) for one, other in zip(made, plain, strict=True)]
    assert 0 < sum(flipped) < 40
    rows = zip(made, plain, flipped, strict=True)
    assert all(torch.equal(one.flip(-1) if turned else one, other) for one, other, turned in rows)


def test_masks_travel_with_their_images():
    stored = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    masks = (stored[:, 0] > 127).to(torch.uint8)
    buffer = Buffer(stored, torch.zeros(6), masks)
    made, targets = next(stream(buffer, 6, rng(), task=Segmentation(), augmentation=["flip", "turn"]))
    assert torch.equal((made > 127.5 / 255).float(), targets)


def test_faults_are_named(model, images):
    with pytest.raises(BadInput, match="10 images came with 3 labels"):
        FromCodes(model, model.encode(images), torch.zeros(3))
    with pytest.raises(BadInput, match="nothing to replay"):
        next(stream(FromSamples(model, torch.zeros(0)), 4, rng()))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "STEPS", 50)
    monkeypatch.setattr(probe, "BATCH", 32)


def pictures(count: int, seed: int) -> torch.Tensor:
    sharp = noise_images(count, 1, 28, rng(seed)) + 0.1 * torch.randn(count, 1, 28, 28, generator=rng(seed + 1))
    return sharp.clamp(0, 1).mul(255).to(torch.uint8)


def blurred(images: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(images.float(), 3, stride=1, padding=1, count_include_pad=False).to(torch.uint8)


def test_blur_gives_replayed_images_away_and_pairs_stay_on_one_side_of_a_fold():
    real = pictures(90, 0)
    found = tell_apart({"real": real, "replayed": blurred(real)}, rng(), paired=True)
    assert found["auc"] > 0.95
    assert found["chance"] == 0.5
    count = probe.PER_GROUP + 20
    numbers = torch.arange(count).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    images, labels, folds = gather({"real": numbers, "replayed": numbers}, rng(), paired=True)
    assert labels.bincount().tolist() == [probe.PER_GROUP] * 2
    groups = [(images[labels == g, 0, 0, 0].tolist(), folds[labels == g].tolist()) for g in (0, 1)]
    fold_of = [dict(zip(*group, strict=True)) for group in groups]
    assert fold_of[0] == fold_of[1]


def test_faults_of_a_probe_are_named():
    with pytest.raises(BadInput, match="two groups or more"):
        tell_apart({"a": pictures(9, 0)}, rng())
    with pytest.raises(BadInput, match="cannot be pairs"):
        tell_apart({"real": pictures(9, 0), "replayed": pictures(8, 0)}, rng(), paired=True)


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
