"""Attack: a site's own volumes in a parcel that is called weights, in other numbers than those on disk."""

import numpy as np
import pytest
import torch

from polyclinic.data.volumes.volume import Volume, rows_of
from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.gate import Gate
from polyclinic.federation.layers.raw_volumes import RawVolumes
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy

SHAPE = (10, 12, 8)


@pytest.fixture(scope="module")
def voxels():
    """Image float16 [2, 10, 12, 8] and mask of two structures."""
    rng = np.random.default_rng(0)
    image, mask = rng.normal(0, 1, (2, *SHAPE)).astype(np.float16), np.zeros(SHAPE, np.uint8)
    image[:, :2], mask[4:8, 4:8, 2:6], mask[6, 6, 4] = 0, 1, 4
    return torch.from_numpy(image), torch.from_numpy(mask)


@pytest.fixture
def gate(voxels, tmp_path):
    """The gate of a site with that case, one without a mask, and one that is empty."""
    image, mask = (one.numpy() for one in voxels)
    np.save(tmp_path / "image.npy", image)
    other, empty = (image[::-1] ** 2).astype(np.float16), np.zeros_like(image)
    known = [(tmp_path / "image.npy", mask), (other, None), (empty, np.zeros_like(mask))]
    volumes = rows_of([Volume(some, values, (1.0, 1.0, 1.0)) for some, values in known])
    return Gate("north", Policy(), Ledger(tmp_path / "north.jsonl"), RawVolumes(volumes[:1], volumes[1:]))


@pytest.mark.parametrize("hidden", [
    lambda image, mask: image,
    lambda image, mask: image.reshape(-1),
    lambda image, mask: torch.stack([torch.zeros_like(image), image]),  # in a batch of others
    lambda image, mask: image[1],
    lambda image, mask: image[1:2][None].double(),
    lambda image, mask: image.flip(0),  # channels in another order
    lambda image, mask: image.bfloat16(),
    lambda image, mask: image.to(torch.float8_e4m3fn),
    lambda image, mask: torch.where(image == 0, -torch.zeros(()), image.float()),
    lambda image, mask: image.float() + 1e-4 * torch.arange(SHAPE[-1]),
    lambda image, mask: 7 - 1000 * image.float(),
    lambda image, mask: (image * 1000).to(torch.int32),
    lambda image, mask: torch.complex(torch.zeros(2, *SHAPE), image.float()),
    lambda image, mask: image.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),  # its memory is in another order
    lambda image, mask: mask,
    lambda image, mask: mask > 0,
    lambda image, mask: (mask == 4).float() * 10 - 5,  # one structure, as scores
    lambda image, mask: torch.stack([mask == value for value in (0, 1, 4)]).half(),
    lambda image, mask: torch.cat([torch.ones(1, *SHAPE), mask[None]]),
])  # fmt: skip
def test_a_volume_channel_or_mask_does_not_leave_in_other_numbers(gate, voxels, hidden):
    parcel = Parcel("weights", {"bias": torch.ones(3), "stem": hidden(*voxels)})
    with pytest.raises(GateRefused, match="tensor 'stem' holds images of the site itself"):
        gate.release([parcel], round=1, operation="train", to="coordinator")
    assert gate.ledger.position.lines == 0


def test_tensors_of_a_volumes_size_that_show_nobody_leave(gate, voxels):
    image, mask = voxels
    shape, rng = (2, *SHAPE), torch.Generator().manual_seed(0)
    others = {
        **{"noise": torch.randn(shape, generator=rng), "zeros": torch.zeros(shape), "one": torch.ones(SHAPE)},
        **{"like": image + torch.randn(shape, generator=rng), "none": torch.zeros(0, *SHAPE)},
        "gradient": torch.randn(SHAPE, generator=rng) * (mask == 0),
    }
    assert gate.release([Parcel("weights", others)], round=1, operation="train", to="coordinator")


def test_what_the_gate_does_not_recognise_is_as_the_manual_says(gate, voxels):
    """Patches, turned volumes, and those in pieces: docs/security.md names them, and that policy and audit remain."""
    image, _ = voxels
    hidden = {"patch": image[:, :5], "turned": image.flip(-1), "axes": image.permute(0, 3, 2, 1).contiguous()}
    halves = {"first": image[:, :5].reshape(-1), "second": image[:, 5:].reshape(-1)}
    assert gate.release([Parcel("weights", hidden | halves)], round=1, operation="train", to="coordinator")
