"""Intensities as bytes, with each kind of array's own rule for halves."""

import numpy as np
import torch

from polyclinic.data.pixels import to_uint8

VALUES = [-0.2, 0.0, 0.1, 0.5, 0.999, 1.0, 7.0]  # times 255: 25.5, 127.5, 254.745


def test_values_are_clipped_and_rounded():
    assert to_uint8(np.array(VALUES)).tolist() == [0, 0, 26, 128, 255, 255, 255]
    assert to_uint8(torch.tensor(VALUES, dtype=torch.float64)).tolist() == [0, 0, 26, 128, 255, 255, 255]


def test_halves_go_up_in_arrays_and_to_even_in_tensors():
    """0.3 times 255 is 76.5 in float32."""
    half = np.array([0.3], np.float32)
    assert half * np.float32(255) == 76.5
    assert to_uint8(half).tolist() == [77]
    assert to_uint8(torch.from_numpy(half)).tolist() == [76]


def test_bytes_of_every_grey_value_come_back():
    grey = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_uint8(grey / np.float32(255)), grey)
    assert torch.equal(to_uint8(torch.from_numpy(grey) / 255), torch.from_numpy(grey))
