"""Small files are read as NumPy reads them, and refused as NumPy refuses them."""

from __future__ import annotations

import numpy as np
import pytest

from polyclinic.data.parts import read_small_array

ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.array([1.5, -2], dtype=np.float32),
    np.array(7, dtype=np.int64),
    np.array(["old", "young é"]),
    np.zeros((0, 3, 4), dtype=np.uint8),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda one: f"{one.dtype}-{one.shape}")
def test_a_file_gives_what_numpy_gives(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    found = read_small_array(tmp_path / "a.npy", 2**17)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    assert not found.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


def damaged(whole):
    header = whole.replace(b"'shape'", b"'shap3'")
    return {"cut off": whole[:-5], "no header": whole[:9], "odd header": header, "empty": b""}


@pytest.mark.parametrize("how", ["cut off", "no header", "odd header", "empty"])
def test_a_damaged_file_is_refused(how, tmp_path):
    np.save(tmp_path / "a.npy", ARRAYS[0])
    (tmp_path / "a.npy").write_bytes(damaged((tmp_path / "a.npy").read_bytes())[how])
    with pytest.raises((ValueError, EOFError)):
        read_small_array(tmp_path / "a.npy", 2**17)


def test_an_array_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        read_small_array(tmp_path / "a.npy", 2**17)


def test_a_file_that_is_larger_than_asked_for_is_left_to_others(tmp_path):
    np.save(tmp_path / "a.npy", ARRAYS[0])
    size = (tmp_path / "a.npy").stat().st_size
    assert read_small_array(tmp_path / "a.npy", size - 1) is None
    assert np.array_equal(read_small_array(tmp_path / "a.npy", size), ARRAYS[0])
