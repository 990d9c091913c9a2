"""Patches of volumes and sliding windows: what is drawn, from which seed, and what is scored."""

import numpy as np
import pytest
import torch

from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.volume import Volume, rows_of
from polyclinic.models import build
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target, VolumeSegmentation
from polyclinic.training.loop import TrainerSpec
from polyclinic.training.optimizer import Optimizer
from polyclinic.training.volumes import VolumeTrainer

PATCH = (16, 16, 8)
TARGET = Target(structures=tuple((name, tuple(values)) for name, values in BrainVolumes().structures.items()))


def trainer(channels=1, augment=(), **task):
    torch.manual_seed(0)
    shape = {"outputs": 3, "size": PATCH, "norm": "instance", "arguments": {"filters": [4, 8, 8]}}
    model = build("dynunet", channels=channels, **shape)
    settings = VolumeSegmentation(**task)
    optimizer = Optimizer(batch_size=2, augment=augment)
    return VolumeTrainer(model, TrainerSpec(task=settings, target=TARGET, optimizer=optimizer, patch=PATCH))


def part_of(shapes, structure=slice(2, 5)):
    """Volumes whose voxels are numbered, each with a cube of structure 3."""
    volumes = []
    for shape in shapes:
        image = (np.arange(np.prod(shape)).reshape(1, *shape) % 2001).astype(np.float16)
        mask = np.zeros(shape, np.uint8)
        mask[structure, structure, structure] = 3
        volumes.append(Volume(image, mask, (1.0, 1.0, 2.0)))
    return ImageSet(rows_of(volumes), np.zeros(len(volumes), np.float32))


def test_a_patch_is_a_window_of_image_and_mask():
    part = part_of([(30, 20, 12)])
    whole, mask = part.images[0].image.astype(np.float32)[0], part.images[0].mask
    windows = {
        np.lib.stride_tricks.sliding_window_view(whole, PATCH)[x, y, z].tobytes(): (x, y, z)
        for x in range(15)
        for y in range(5)
        for z in range(5)
    }
    images, targets = trainer().batch(part, torch.tensor([0, 0, 0]), torch_rng("batch"))
    assert images.shape == (3, 1, *PATCH)
    assert targets.shape == (3, 1, *PATCH)
    for image, values in zip(images, targets, strict=True):
        x, y, z = windows[image[0].numpy().tobytes()]
        np.testing.assert_array_equal(values[0], mask[x : x + 16, y : y + 16, z : z + 8])


def test_draws_depend_on_the_address_only():
    part = part_of([(30, 20, 12), (24, 24, 9)])
    own = trainer(augment=("flip", "rotate", "brightness", "contrast", "noise", "crop"))
    first = [images.clone() for images, _ in zip_batches(own, part, 3)]
    np.random.default_rng(5)
    torch.rand(7)
    again = [images for images, _ in zip_batches(trainer(augment=own.optimizer.augment), part, 3)]
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    other = next(iter(own.batches(part, torch_rng("another"))))[0]
    assert not torch.equal(other, first[0])


def zip_batches(own, part, count):
    batches = own.batches(part, torch_rng("site", "round 1"))
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 1.0, 1.0), (0.0, 0.0, 0.6)])
def test_foreground_is_drawn_as_often_as_wanted(share, least, most):
    """A structure in one corner of a large volume: of patches anywhere few show it."""
    part = part_of([(64, 64, 32)], structure=slice(0, 2))
    own = trainer(foreground=share)
    seen = [bool((own.patch_of(part.images[0], seed)["mask"] > 0).any()) for seed in range(20)]
    assert least <= np.mean(seen) <= most


def test_a_volume_smaller_than_the_patch_is_filled_with_zeros():
    part = part_of([(10, 20, 5)])
    images, _ = trainer().batch(part, torch.tensor([0]), torch_rng("batch"))
    assert images.shape == (1, 1, *PATCH)
    assert (images != 0).sum() <= 10 * 16 * 5


def test_a_pass_takes_so_many_patches_of_every_case():
    part = part_of([(16, 16, 8)] * 5)
    own = trainer(patches=4)
    assert own.steps_in(part) == 10
    with own.note_batches() as noted:
        batches = own.batches(part, torch_rng("a"))
        for _ in range(10):
            next(batches)
    assert torch.cat(noted).bincount().tolist() == [4] * 5
    assert trainer(patches=1).steps_in(part_of([(16, 16, 8)])) == 1


def test_whole_volumes_are_scored_by_case_in_millimetres():
    part = part_of([(30, 20, 12), (17, 19, 9)], structure=slice(2, 6))
    own = trainer()

    own.model.forward = lambda images: (images > 0).float().expand(-1, 3, -1, -1, -1) * 20 - 10
    volumes = []
    for volume in part.images:
        guess = np.zeros((1, *volume.mask.shape), np.float16)
        guess[0, 2:6, 2:6, 3:7] = 1
        volumes.append(Volume(guess, volume.mask, volume.spacing))
    found = own.task.finish(own.evaluate(ImageSet(rows_of(volumes), part.labels)))
    assert found["dice_whole"] == pytest.approx(0.75)
    assert found["hd95_whole"] == pytest.approx(2.0)  # one voxel of 2 mm


def test_training_lowers_the_loss():
    brains = BrainVolumes(samples=4, shape=(24, 24, 16), size=(16, 16, 8))
    volumes = []
    for number, case in enumerate(brains.cases()):
        prepared = brains.preparation.prepare(brains.read(number, case))
        volumes.append(Volume(prepared.image, prepared.mask, prepared.spacing))
    part, own = ImageSet(rows_of(volumes), np.zeros(4, np.float32)), trainer(channels=4)
    optimizer = torch.optim.Adam(own.model.parameters(), lr=0.01)
    batches = own.batches(part, torch_rng("train"))
    losses = [own.train(batches, 8, optimizer) for _ in range(4)]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("structure", [slice(0, 0), slice(None)])
def test_a_case_without_structures_or_without_anything_else_has_patches_and_no_warning(structure):
    images, _ = next(trainer().batches(part_of([(20, 20, 10)], structure=structure), torch_rng("site")))
    assert images.shape == (2, 1, *PATCH)


def test_many_cases_take_no_more_memory_and_change_no_patch(monkeypatch):
    part, index = part_of([(20, 20, 10)] * 5), torch.arange(5).repeat(2)
    wanted, _ = trainer().batch(part, index, torch_rng("site"))
    monkeypatch.setattr("polyclinic.training.volumes.MOST_KEPT", 2)
    own = trainer()
    found, _ = own.batch(part, index, torch_rng("site"))
    assert torch.equal(found, wanted)
    assert len(own._middles) == 2
    assert all(one.base is None for both in own._middles.values() for one in both)  # a view would keep all voxels


def test_a_batch_in_parts_takes_the_same_step():
    part, found = part_of([(20, 20, 10)] * 3), []
    for parts in (1, 2, 9):
        own = trainer(accumulate=parts).with_optimizer(Optimizer(batch_size=3))
        seen = []
        own.model.register_forward_hook(lambda module, given, output, seen=seen: seen.append(len(given[0])))
        optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)
        loss = own.train(own.batches(part, torch_rng("train")), 1, optimizer)
        found.append((loss, own.weights()["output_block.conv.conv.weight"]))
        assert seen == {1: [3], 2: [2, 1], 9: [1, 1, 1]}[parts]
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(weights, found[0][1])
