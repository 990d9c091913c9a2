"""Intensities as bytes; sizes and spacings of images as their files have them."""

from __future__ import annotations

import math

import nibabel
import numpy as np
import pytest
import torch
from medical_files import write_dicom
from PIL import Image

from polyclinic.data.parts import open_site, prepare
from polyclinic.data.pixels import to_uint8
from polyclinic.data.reading import Reader
from polyclinic.questions.inspect import SPACINGS, side_bins, spacing_bins
from polyclinic.study import parse_study

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


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """Ten pictures of 300 x 200 pixels, and ten DICOM images of 70 x 40 with 0.4 mm between rows and 0.6 between
    columns."""
    top = tmp_path_factory.mktemp("scans")
    for name in ("clear", "ill"):
        (top / name).mkdir()
        for number in range(5):
            Image.fromarray(np.full((200, 300), 9 * number, np.uint8)).save(top / name / f"{number}.png")
            values = np.arange(70 * 40, dtype=np.int16).reshape(40, 70) + number
            write_dicom(top / name / f"{number}.dcm", values, PixelSpacing=[0.4, 0.6])
    data = {"source": "folder", "path": str(top), "size": 16, "validation": 0.0, "test": 0.1}
    study = parse_study({"data": data, "sites": {"partition": "iid", "count": 1}, "method": {"name": "fedavg"}})
    parts = prepare(study.data, study.sites, cache=tmp_path_factory.mktemp("cache"))
    return open_site(parts.folder, parts.names[0]).train


def test_width_height_and_spacing_are_those_of_the_files(part):
    found = np.asarray(part.geometry)
    known = found[:, 0] == 70
    assert 4 < known.sum() < len(found) - 4
    assert np.allclose(found[known], [70, 40, 0.6, 0.4])
    assert (found[~known][:, :2] == [300, 200]).all()
    assert np.isnan(found[~known][:, 2:]).all()


def test_bins_of_sizes_and_spacings(part):
    known = np.asarray(part.geometry)[:, 0] == 70
    assert (side_bins(part) == np.where(known, 1, 3)).all()  # 64 to 128, and 256 to 384 pixels
    assert (spacing_bins(part) == np.where(known, 5, len(SPACINGS) + 1)).all()  # 0.5 to 0.75 mm, and unknown


def test_the_spacing_of_a_volume_is_that_of_its_slices(tmp_path):
    file = tmp_path / "head.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5, 6), np.float32), np.diag([0.5, 0.75, 3.0, 1.0])), file)
    assert Reader().spacing(file) == (0.5, 0.75)
    (tmp_path / "broken.dcm").write_bytes(b"no image")
    assert all(math.isnan(one) for one in Reader().spacing(tmp_path / "broken.dcm"))
