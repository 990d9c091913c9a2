"""Data sets of computer vision by name: MedMNIST, MNIST, CIFAR-10."""

import gzip
import struct

import numpy as np
import pytest
from dataset_files import load

from polyclinic.data.datasets import SOURCES
from polyclinic.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_cache")


def write_medmnist(file, shape, columns=1, highest=1):
    arrays = {}
    for name, count in {"train": 4, "val": 2, "test": 2}.items():
        arrays[f"{name}_images"] = np.arange(count * int(np.prod(shape))).reshape(count, *shape).astype(np.uint8)
        arrays[f"{name}_labels"] = np.tile([[0], [highest]], (count // 2, columns)).astype(np.uint8)
        arrays[f"{name}_labels"][:, :-1] = 0  # of several columns, the last one counts
    np.savez(file, **arrays)


def test_medmnist_reads_the_file_of_the_nearest_larger_size(root):
    write_medmnist(root / "pneumoniamnist.npz", (28, 28))
    write_medmnist(root / "pneumoniamnist_64.npz", (64, 64))
    data = load("medmnist", root)
    assert data.images.shape == (8, 1, 28, 28)
    assert data.split.tolist() == ["train"] * 4 + ["validation"] * 2 + ["test"] * 2
    assert data.labels.tolist() == [0, 1] * 4
    assert data.classes == ("normal", "pneumonia")
    assert SOURCES["medmnist"](path=root, size=40).files() == [root / "pneumoniamnist_64.npz"]
    assert SOURCES["medmnist"](path=root, size=128).files() == [root / "pneumoniamnist_64.npz"]
    with pytest.raises(BadInput, match=r"there is no 'bloodmnst' \(did you mean 'bloodmnist'\?\)"):
        load("medmnist", root, subset="bloodmnst")


def test_medmnist_in_colour_in_three_dimensions_and_with_many_labels(root):
    write_medmnist(root / "bloodmnist.npz", (28, 28, 3), highest=7)
    blood = load("medmnist", root, subset="bloodmnist")
    assert blood.images.shape == (8, 3, 28, 28)
    assert len(blood.classes) == 8
    write_medmnist(root / "nodulemnist3d.npz", (28, 28, 28))
    nodule = load("medmnist", root, subset="nodulemnist3d")
    with np.load(root / "nodulemnist3d.npz") as archive:
        assert np.array_equal(nodule.images[0, 0], archive["train_images"][0, 14])
    write_medmnist(root / "chestmnist.npz", (28, 28), columns=14)
    chest = load("medmnist", root, subset="chestmnist", finding="hernia")
    assert chest.classes == ("other", "hernia")
    assert chest.labels.tolist() == [0, 1] * 4


def write_idx(file, values):
    content = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def test_mnist_from_idx_files(root):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    write_idx(root / "train-images-idx3-ubyte.gz", pixels[:3])
    write_idx(root / "train-labels-idx1-ubyte.gz", np.array([5, 0, 4], np.uint8))
    write_idx(root / "t10k-images-idx3-ubyte", pixels[3:])
    write_idx(root / "t10k-labels.idx1-ubyte", np.array([7, 2], np.uint8))
    data = load("mnist", root)
    assert np.array_equal(data.images[:, 0], pixels)
    assert data.labels.tolist() == [5, 0, 4, 7, 2]
    assert data.split.tolist() == ["train"] * 3 + ["test"] * 2
    (root / "train-images-idx3-ubyte.gz").write_bytes(b"no")
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte\.gz: cannot be read as idx"):
        load("mnist", root)


def test_cifar10_from_the_binary_version(root):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (12, 3073), np.uint8)
    records[:, 0] = np.arange(12) % 10
    for n in range(5):
        (root / f"data_batch_{n + 1}.bin").write_bytes(records[2 * n : 2 * n + 2].tobytes())
    (root / "test_batch.bin").write_bytes(records[10:].tobytes())
    (root / "batches.meta.txt").write_text(
        "\n".join(["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
    )
    data = load("cifar10", root)
    assert np.array_equal(data.images, records[:, 1:].reshape(-1, 3, 32, 32))
    assert data.labels.tolist() == [*range(10), 0, 1]
    assert data.classes[3] == "cat"
    assert data.split.tolist() == ["train"] * 10 + ["test"] * 2
    animals = load("cifar10", root, labels="animals")
    assert np.array_equal(animals.images, data.images[[3, 4, 5, 7]])
    assert (animals.labels.tolist(), animals.classes) == ([0, 1, 0, 1], ("cat or dog", "deer or horse"))
    assert animals.subgroup.tolist() == ["cat", "deer", "dog", "horse"]
    (root / "test_batch.bin").write_bytes(b"pickled")
    with pytest.raises(BadInput, match="not of the binary version"):
        load("cifar10", root)
