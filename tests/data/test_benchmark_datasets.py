"""Data sets of computer vision by name: MNIST, CIFAR, SVHN, Omniglot."""

import gzip
import struct

import numpy as np
import pytest
from dataset_files import load, save
from scipy.io import savemat

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


def test_cifar100_has_fine_and_coarse_labels(root):
    records = np.random.default_rng(0).integers(0, 256, (3, 3074), np.uint8)
    records[:, 0], records[:, 1] = (19, 1, 2), (99, 10, 20)
    (root / "train.bin").write_bytes(records[:2].tobytes())
    (root / "test.bin").write_bytes(records[2:].tobytes())
    (root / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    (root / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)))
    data = load("cifar100", root)
    assert data.labels.tolist() == [99, 10, 20]
    assert np.array_equal(data.images[2], records[2, 2:].reshape(3, 32, 32))
    assert load("cifar100", root, labels="coarse").labels.tolist() == [19, 1, 2]


def test_svhn_calls_zero_ten(root):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), np.uint8)
    savemat(root / "train_32x32.mat", {"X": pixels[..., :3], "y": np.array([[1], [10], [9]], np.uint8)})
    savemat(root / "test_32x32.mat", {"X": pixels[..., 3:], "y": np.array([[10]], np.uint8)})
    data = load("svhn", root)
    assert data.labels.tolist() == [1, 0, 9, 0]
    assert data.split.tolist() == ["train"] * 3 + ["test"]
    assert np.array_equal(data.images[3], pixels[..., 3].transpose(2, 0, 1))
    (root / "test_32x32.mat").write_bytes(b"no")
    with pytest.raises(BadInput, match="cannot be read as cropped digits"):
        load("svhn", root)


def test_omniglot_is_labelled_by_character_or_alphabet(root):
    for place in ("images_background/Greek/character01/0394_01", "images_background/Greek/character02/0395_20"):
        save(root / f"{place}.png", np.eye(105) * 255)
    save(root / "images_evaluation" / "Japanese_(katakana)" / "character01" / "1600_01.png", np.eye(105) * 255)
    data = load("omniglot", root)
    assert data.classes == ("Greek/character01", "Greek/character02", "Japanese_(katakana)/character01")
    assert data.images.shape == (3, 1, 28, 28)
    assert data.site.tolist() == ["Greek", "Greek", "Japanese_(katakana)"]
    assert load("omniglot", root, labels="alphabet").labels.tolist() == [0, 0, 1]
