"""Batches from images that are kept on a device are those that are read from disk, whether they fit there or not."""

import gc

import numpy as np
import pytest
import torch

from polyclinic.training.device_images import DeviceImages

CPU = torch.device("cpu")
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 5), dtype=np.uint8)
INDEX = np.array([7, 0, 7, 3])


@pytest.mark.parametrize("room", [0, IMAGES.nbytes - 1, IMAGES.nbytes])
def test_a_batch_is_the_images_at_the_index(room):
    images = DeviceImages(CPU, room)
    for _ in range(2):
        found = images.images(IMAGES, INDEX)
        assert torch.equal(found, torch.from_numpy(IMAGES[INDEX]))
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert images.bytes == (IMAGES.nbytes if room >= IMAGES.nbytes else 0)


def test_labels_and_masks_come_as_they_are():
    images, labels, masks = DeviceImages(CPU, 10**6), np.arange(10.0), IMAGES[:, 0]
    assert images.rows(labels, INDEX).tolist() == [7, 0, 7, 3]
    assert torch.equal(images.rows(masks, INDEX), torch.from_numpy(masks[INDEX]))


def test_what_comes_first_is_kept_and_the_rest_is_copied():
    images, other = DeviceImages(CPU, IMAGES.nbytes), IMAGES + 1
    images.images(IMAGES, INDEX)
    assert torch.equal(images.images(other, INDEX), torch.from_numpy(other[INDEX]))
    assert images.bytes == IMAGES.nbytes


def test_a_file_that_is_opened_again_is_not_copied_again(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    images = DeviceImages(CPU, 10**6)
    for _ in range(3):
        mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
        assert torch.equal(images.images(mapped, INDEX), torch.from_numpy(IMAGES[INDEX]))
    assert images.bytes == IMAGES.nbytes


def test_a_part_of_a_file_is_not_taken_for_the_whole(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    mapped, images = np.load(tmp_path / "images.npy", mmap_mode="r"), DeviceImages(CPU, 10**6)
    images.images(mapped, INDEX)
    part = mapped[5:]
    assert torch.equal(images.images(part, np.array([0, 4])), torch.from_numpy(IMAGES[[5, 9]]))


def test_an_array_that_is_gone_leaves_its_room():
    images = DeviceImages(CPU, 10**6)
    array = IMAGES.copy()
    images.images(array, INDEX)
    del array
    gc.collect()
    assert images.bytes == 0
