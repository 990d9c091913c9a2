"""Data sets of computer vision by name: MNIST, CIFAR-10."""

import gzip
import struct

import numpy as np
import pytest
from dataset_files import load

from polyclinic.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_cache")


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
