"""Loading: images that stay on a GPU, and what frozen layers give for images."""

import gc

import numpy as np
import pytest
import torch

from polyclinic.models import build
from polyclinic.models.encoders import Encoder, kept_features
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.training.batches import DeviceImages, FrozenFront, identity_of

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


def test_what_comes_first_is_kept_the_rest_copied_labels_and_masks_as_they_are():
    images, labels, masks = DeviceImages(CPU, 10**6), np.arange(10.0), IMAGES[:, 0]
    assert images.rows(labels, INDEX).tolist() == [7, 0, 7, 3]
    assert torch.equal(images.rows(masks, INDEX), torch.from_numpy(masks[INDEX]))
    images, other = DeviceImages(CPU, IMAGES.nbytes), IMAGES + 1
    images.images(IMAGES, INDEX)
    assert torch.equal(images.images(other, INDEX), torch.from_numpy(other[INDEX]))
    assert images.bytes == IMAGES.nbytes


def test_a_file_that_is_opened_again_is_not_copied_again_and_a_part_of_it_not_taken_for_it(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    images = DeviceImages(CPU, 10**6)
    for _ in range(3):
        mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
        assert torch.equal(images.images(mapped, INDEX), torch.from_numpy(IMAGES[INDEX]))
    assert images.bytes == IMAGES.nbytes
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


TABLES = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 40, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "iid", "count": 2}, "model": {"backbone": "small-cnn", "freeze": "conv2"},
    "optimizer": {"lr": 0.05, "batch_size": 8}, "engine": {"workers": 1, "device": "cpu"},
}  # fmt: skip


def frozen_run(folder, method, monkeypatch, *, kept: bool):
    """A run, and how many batches of images went through the frozen layers."""
    counted = []
    of_batch = Encoder._of_batch
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "_of_batch", lambda self, images: counted.append(1) or of_batch(self, images))
        if not kept:
            kind = type(parse_study({**TABLES, "method": {"name": method}}).method)
            patch.setattr(kind, "traits", kind.traits.__class__(takes_frozen_features=False))
        study = parse_study({**TABLES, "method": {"name": method, "rounds": 3}})
        return run(study, folder / str(kept), cache=folder / f"cache-{kept}"), len(counted)


@pytest.mark.parametrize("method", ["fedavg", "cwt"])
def test_three_rounds_cost_one_pass_and_give_the_same_model(tmp_path, monkeypatch, method):
    kept, passes = frozen_run(tmp_path, method, monkeypatch, kept=True)
    plain, none = frozen_run(tmp_path, method, monkeypatch, kept=False)
    # two sites; training, validation and test images, a batch each; the last two once more, for the cases that are kept
    assert passes == 2 * 3 + 2 * 2
    assert none == 0
    found, wanted = kept.weights(), plain.weights()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
    assert kept.metrics["test"] == pytest.approx(plain.metrics["test"], abs=1e-3)


def test_other_weights_have_another_identity():
    front = build("small-cnn", channels=1, outputs=2, size=28, freeze="conv1")
    before = identity_of(front, torch.device("cpu"))
    assert before == identity_of(front, torch.device("cpu"))
    with torch.no_grad():
        front.conv1.weight.add_(1e-3)
    assert identity_of(front, torch.device("cpu")) != before


def test_features_of_an_image_do_not_depend_on_others(tmp_path):
    model = build("small-cnn", channels=1, outputs=2, size=28, freeze="conv1").train()
    front = FrozenFront(model, torch.device("cpu"), (1, 28, 28))
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(front.features(images)[3:4], front.features(images[3:4]))
    nothing = kept_features(front, images[:0].numpy(), tmp_path)  # of a site without test images
    assert nothing.shape == (0, *front.features(images).shape[1:])
    assert kept_features(front, images[:0].numpy(), tmp_path).shape == nothing.shape  # out of the file
