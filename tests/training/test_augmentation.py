"""Augmentation against arithmetic by hand: shape, grey values, mixup, and draws that belong to an image."""

import numpy as np
import pytest
import torch
from test_loop import TARGET, make_trainer, numbered, rng
from torch import nn
from torch.nn import functional as F

from polyclinic.data.parts import ImageSet
from polyclinic.errors import WorkFailed
from polyclinic.tasks import TASKS, Target
from polyclinic.training import augmentation
from polyclinic.training.augmentation import AUGMENTATIONS, augment, mix
from polyclinic.training.image_draws import dropout_by_row, image_names, image_seeds, joined_seeds
from polyclinic.training.optimizer import Optimizer

EACH = tuple(kind for kind in AUGMENTATIONS if kind != "mixup")
SHAPES = ("crop", "rotate")
GREY = ("brightness", "contrast", "noise")


def pictures(count=40, size=16):
    return torch.rand(count, 1, size, size, generator=rng())


@pytest.mark.parametrize("kind", EACH)
def test_images_change_within_0_to_1_by_draws_that_do_not_depend_on_the_others(kind):
    images = pictures()
    changed, _ = augment(images, None, (kind,), rng())
    assert changed.shape == images.shape
    assert not torch.equal(changed, images)
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    # What differential privacy needs: without one image, the others are changed as before, bit for bit.
    images, seeds = pictures(8), torch.arange(1000, 1008)
    masks = (images[:, 0] > 0.5).to(torch.uint8)
    left = torch.tensor([0, 1, 3, 6, 7])
    changed, changed_masks = augment(images, masks, (kind,), seeds)
    alone, alone_masks = augment(images[left], masks[left], (kind,), seeds[left])
    assert torch.equal(changed[left], alone)
    assert torch.equal(changed_masks[left], alone_masks)
    again, _ = augment(images, masks, (kind,), seeds + 1)
    assert not torch.equal(changed, again)


@pytest.mark.parametrize("kinds", [("crop",), ("rotate",), ("crop", "rotate"), EACH])
def test_masks_follow_their_images(kinds):
    """A bright square on black, far from all borders: it is bright where the mask says so, but for its outline."""
    images = torch.zeros(30, 1, 32, 32)
    images[:, :, 12:20, 12:20] = 1.0
    masks = images[:, 0].to(torch.uint8)
    changed, moved = augment(images, masks, kinds, rng())
    assert moved.dtype == torch.uint8
    wrong = ((changed[:, 0] > 0.5).to(torch.uint8) != moved).sum((1, 2))
    assert int(wrong.max()) <= 20
    assert len({tuple(mask.flatten().tolist()) for mask in moved}) > 3


def test_brightness_contrast_and_noise_by_hand(monkeypatch):
    drawn = torch.tensor([[1.0, -1.0, 0.0]])
    monkeypatch.setattr(augmentation, "_uniform", lambda *_: drawn)
    image = torch.tensor([[[[0.4, 0.6]]]])
    brighter, _ = augment(image, None, ("brightness",), rng())
    assert brighter.flatten().tolist() == pytest.approx([0.4 - 0.15, 0.6 - 0.15])
    steeper, _ = augment(image, None, ("contrast",), rng())
    assert steeper.flatten().tolist() == pytest.approx([0.5 - 1.3 * 0.1, 0.5 + 1.3 * 0.1])
    monkeypatch.setattr(augmentation, "_uniform", lambda *_: torch.ones(1, 3))
    noisy, _ = augment(torch.full((1, 1, 200, 200), 0.5), None, ("noise",), rng())
    assert float(noisy.std()) == pytest.approx(0.05, rel=0.03)
    seeds = []
    monkeypatch.setattr(augmentation, "device_rng", lambda device, seed, _: seeds.append(seed) or rng())
    augment(image, None, ("noise",), rng())
    assert seeds[0] > 2**50  # few seeds would be few patterns of noise


def test_the_smallest_window_and_the_largest_angle_by_hand(monkeypatch):
    corner = torch.tensor([[1.0, 0.0, 1.0, -1.0]])  # the smallest window, not rotated, at the upper right
    monkeypatch.setattr(augmentation, "_uniform", lambda *_: corner)
    ramp = torch.linspace(0, 1, 10).expand(1, 1, 10, 10)  # from left to right
    cropped, _ = augment(ramp, None, ("crop",), rng())
    places = (torch.arange(10) + 0.5) / 10 * 0.7 + 0.3  # of pixel centres, as shares of the old side
    assert cropped[0, 0, 4].tolist() == pytest.approx(((places * 10 - 0.5) / 9).clamp(max=1).tolist(), abs=1e-5)
    turned = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    monkeypatch.setattr(augmentation, "_uniform", lambda *_: turned)
    affine = augmentation._affine(1, ("rotate",), rng())
    cosine, sine = np.cos(np.radians(15)), np.sin(np.radians(15))
    assert affine.flatten().tolist() == pytest.approx([cosine, -sine, 0, sine, cosine, 0])


def test_mixup_and_its_losses_by_hand():
    images, labels = torch.eye(6).reshape(6, 1, 1, 6), torch.arange(6)
    targets = TASKS["classification"]().mixable(labels, Target(tuple("abcdef")))
    mixed, shares = mix(images, targets, rng())
    assert torch.allclose(mixed.reshape(6, 6), shares)
    assert torch.allclose(shares.sum(1), torch.ones(6))
    assert ((shares > 0).sum(1) <= 2).all()
    assert (shares.max(1).values < 1).any()
    task, output = TASKS["classification"](), torch.tensor([[1.0, -0.5]])
    first, second = (F.cross_entropy(output, torch.tensor([label])) for label in (0, 1))
    mixed = task.losses(output, torch.tensor([[0.25, 0.75]]), TARGET)
    assert float(mixed) == pytest.approx(0.25 * float(first) + 0.75 * float(second))
    trainer, output = make_trainer(), torch.tensor([[1.0, -0.5], [0.0, 0.3]])
    targets, weights = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([2.0, 4.0])
    each = trainer.task.losses(output, targets, TARGET)
    by_hand = (3.5 * each[0] + 2.0 * each[1]) / 5.5
    assert float(trainer.loss(output, targets, weights)) == pytest.approx(float(by_hand))


def test_balanced_batches_draw_rare_classes_as_often_as_common_ones():
    part = numbered(100)
    part.labels[:] = np.arange(100) < 5  # 5 images of class 1
    trainer = make_trainer(batch_size=50, balanced_batches=True)
    batches = trainer.batches(part, rng())
    labels = torch.cat([next(batches)[1] for _ in range(20)])
    assert len(labels) == 1000
    assert float(labels.float().mean()) == pytest.approx(0.5, abs=0.05)
    plain = make_trainer(batch_size=50).batches(part, rng())
    assert float(torch.cat([next(plain)[1] for _ in range(20)]).float().mean()) == pytest.approx(0.05)


def test_label_smoothing_by_hand_and_not_in_the_metrics():
    task, output = TASKS["classification"](label_smoothing=0.2), torch.tensor([[2.0, 0.0]])
    log = output.log_softmax(1)[0]
    smoothed = task.losses(output, torch.tensor([0]), TARGET)
    assert float(smoothed) == pytest.approx(-(0.9 * float(log[0]) + 0.1 * float(log[1])))
    sums = task.sums(output.double(), torch.tensor([0]), None, TARGET)
    assert float(sums["loss"]) == pytest.approx(-float(log[0]))


@pytest.mark.parametrize(("settings", "rounds", "by_hand"), [
    ({"lr": 2.0, "schedule": "cosine"}, 4, [2.0, 1 + np.cos(np.pi / 4), 1.0, 1 - np.cos(np.pi / 4)]),
    ({"lr": 1.0, "warmup": 3, "decay_every": 0}, 5, [0.25, 0.5, 0.75, 1.0, 1.0]),  # rises evenly
    ({"lr": 1.0, "warmup": 1, "schedule": "cosine"}, 3, [0.5, 1.0, 0.5]),
])  # fmt: skip
def test_the_learning_rate_follows_its_schedule_at_every_site(settings, rounds, by_hand):
    table = Optimizer(**settings, batch_sizes={"a": 3}).over(rounds)
    for one in (table, table.at_site("a"), table.at_site("b")):
        assert [one.lr_in(number) for number in range(1, rounds + 1)] == pytest.approx(by_hand)
    assert (table.at_site("a").batch_size, table.at_site("b").batch_size) == (3, table.batch_size)


IMAGES = np.random.default_rng(0).integers(0, 255, (6, 1, 4, 4), dtype=np.uint8)
LABELS = np.arange(6) % 2


def test_names_and_seeds_belong_to_the_image_and_the_address():
    names = image_names(ImageSet(IMAGES, LABELS))
    kept = [0, 1, 3, 4, 5]
    assert image_names(ImageSet(IMAGES[kept], LABELS[kept])) == [names[place] for place in kept]
    assert image_names(ImageSet(IMAGES, 1 - LABELS)) != names
    assert len(set(names)) == 6
    names = image_names(ImageSet(IMAGES, LABELS))
    seeds = image_seeds(names, torch.tensor([4, 2]), 0, "north", 1)
    assert seeds.tolist() == image_seeds(names, torch.tensor([2, 4]), 0, "north", 1).flip(0).tolist()
    assert not set(seeds.tolist()) & set(image_seeds(names, torch.tensor([4, 2]), 0, "north", 2).tolist())
    assert joined_seeds(3, 0, "north").tolist()[:2] == joined_seeds(2, 0, "north").tolist()


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_dropout_by_row_is_the_same_in_any_company_and_keeps_the_mean(layer):
    network, rows = nn.Sequential(layer), torch.ones(400, 8, 3, 3)
    seeds = torch.arange(400)
    with dropout_by_row(network, seeds):
        together = network(rows)
    with dropout_by_row(network, seeds[7:8]):
        assert torch.equal(network(rows[7:8])[0], together[7])
    assert set(together.unique().tolist()) == {0.0, 2.0}
    assert float(together.mean()) == pytest.approx(1.0, abs=0.1)
    if isinstance(layer, nn.Dropout2d):
        assert bool((together == together[:, :, :1, :1]).all())
    assert not torch.equal(network(rows), together)  # afterwards torch draws again
    network.eval()
    with dropout_by_row(network, seeds):
        assert torch.equal(network(rows), rows)


def test_layers_and_passes_drop_differently_and_over_anything_but_images_not_at_all():
    network, rows = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), torch.ones(4, 64)
    with dropout_by_row(network, torch.arange(4)):
        first, second = network[0](rows), network[0](rows)
        other = network[1](rows)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    network = nn.Sequential(nn.Flatten(0, 1), nn.Dropout(0.5))
    with (
        pytest.raises(WorkFailed, match="drops numbers of 12 rows where a batch has 4 images"),
        dropout_by_row(network, torch.arange(4)),
    ):
        network(torch.ones(4, 3, 5))
