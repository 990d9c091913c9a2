"""Segmentation of volumes against arithmetic by hand: classes and regions, millimetres, empty structures, sums."""

import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.tasks import TASKS, Target, VolumeSegmentation

REGIONS = Target(structures=(("whole", (1, 2, 3)), ("core", (2, 3)), ("enhancing", (3,))))
CLASSES = Target(structures=(("liver", (1,)), ("tumour", (2, 5))))
TASK = TASKS["volume-segmentation"](name="volume-segmentation")


def cube(start, stop, value=1, side=12):
    """A mask with a cube of this value."""
    mask = torch.zeros(1, 1, side, side, side, dtype=torch.int64)
    mask[..., start:stop, start:stop, start:stop] = value
    return mask


def logits_of(mask, target):
    """Logits that say exactly what a mask has."""
    values = torch.cat([torch.isin(mask, torch.tensor(some)) for _, some in target.structures], 1).float() * 20 - 10
    if target is REGIONS:
        return values
    return torch.cat([-values.amax(1, keepdim=True), values], 1)


@pytest.mark.parametrize("target", [REGIONS, CLASSES], ids=["regions", "classes"])
def test_a_perfect_prediction(target):
    mask = cube(2, 9) + cube(3, 8) + cube(4, 6) if target is REGIONS else cube(2, 6) + cube(8, 11, value=5)
    assert TASK.outputs(target) == 3
    output = logits_of(mask, target)
    found = TASK.observe_case(output, mask, target, (1, 1, 1))
    assert found[0, 0] < 0.02  # the loss
    scores = found[0, 1:].reshape(-1, 3)
    torch.testing.assert_close(scores, torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64).expand(len(scores), 3))


def test_structures_are_values_and_are_needed():
    mask = cube(2, 6, value=2) + cube(8, 10, value=5)
    both = TASK.predicted(logits_of(mask, CLASSES), CLASSES)
    assert both[0, 1].sum() == 4**3 + 2**3
    assert not both[0, 0].any()
    with pytest.raises(BadInput, match=r"data.structures: missing"):
        TASK.outputs(Target())


def test_dice_and_millimetres_by_hand():
    """Cubes of side 4, moved by 2 voxels along every axis: 8 of 64 voxels in common; voxels of 1 x 1 x 3 mm."""
    one = Target(structures=(("lesion", (1,)),))
    output = torch.cat([-(cube(4, 8) * 20.0 - 10), cube(4, 8) * 20.0 - 10], 1)
    dice, hd95, surface = TASK.observe_case(output, cube(2, 6), one, (1.0, 1.0, 3.0))[0, 1:].tolist()
    assert dice == pytest.approx(2 * 8 / 128)
    # the far corner lies 2, 2 and 6 mm away; 95 % of the surface is nearer, but more than the 2 mm of a side
    assert 6 <= hd95 <= (2**2 + 2**2 + 6**2) ** 0.5 + 1e-6
    assert 0 < surface < 0.5
    wide = VolumeSegmentation(tolerance=7.0).observe_case(output, cube(2, 6), one, (1.0, 1.0, 3.0))
    assert wide[0, 3] == 1.0


class TestEmptyStructures:
    one = Target(structures=(("lesion", (1,)),))

    def scores(self, guess, truth, **settings):
        values = guess * 20.0 - 10
        output = torch.cat([-values, values], 1)
        return VolumeSegmentation(**settings).observe_case(output, truth, self.one, (1.0, 1.0, 1.0))[0, 1:].tolist()

    def test_in_neither(self):
        assert self.scores(cube(0, 0), cube(0, 0)) == [1.0, 0.0, 1.0]
        assert all(value != value for value in self.scores(cube(0, 0), cube(0, 0), empty="left out"))

    def test_in_one_of_them_only(self):
        for guess, truth in ((cube(2, 6), cube(0, 0)), (cube(0, 0), cube(2, 6))):
            dice, hd95, surface = self.scores(guess, truth, empty="left out")
            assert (dice, surface) == (0.0, 0.0)
            assert hd95 == pytest.approx(12 * 3**0.5)


def test_sums_of_sites_add_and_finish_by_structure():
    nan = torch.nan
    observed = torch.tensor([[0.2, 0.8, 4.0, 0.9, 0.5, 6.0, 0.4], [0.4, 0.6, 2.0, 0.7, nan, nan, nan]])
    one, other = (TASK.sums(observed[i : i + 1].double(), torch.zeros(1), None, CLASSES) for i in (0, 1))
    total = TASK.add(one, other)
    TASK.check_sums(total, CLASSES)
    found = TASK.finish(total)
    assert found == pytest.approx(
        {
            **{"loss": 0.3, "dice": (0.7 + 0.5) / 2, "hd95": (3.0 + 6.0) / 2, "surface_dice": (0.8 + 0.4) / 2},
            **{"dice_liver": 0.7, "dice_tumour": 0.5, "hd95_liver": 3.0, "hd95_tumour": 6.0},
            **{"surface_dice_liver": 0.8, "surface_dice_tumour": 0.4},
        }
    )
    assert TASK.rank(found) > TASK.rank({**found, "dice": 0.1})
    with pytest.raises(ValueError, match="dice of 'liver'"):
        TASK.check_sums({**total, "dice/liver": torch.tensor(3.0, dtype=torch.float64)}, CLASSES)
    coarse = TASK.coarse(total, 2, CLASSES)
    assert TASK.finish(coarse)["dice_liver"] == pytest.approx(0.7, abs=0.5)


@pytest.mark.parametrize("target", [REGIONS, CLASSES], ids=["regions", "classes"])
def test_the_loss_falls_towards_the_mask_and_takes_several_heads(target):
    nested = cube(2, 9) + cube(3, 8) + cube(4, 6)
    mask = (
        torch.cat([nested, nested.flip(2)]) if target is REGIONS else torch.cat([cube(2, 6) + cube(8, 11, value=5)] * 2)
    )
    right, wrong = logits_of(mask, target), -logits_of(mask, target)
    good, bad = TASK.losses(right, mask, target), TASK.losses(wrong, mask, target)
    assert good.shape == (2,)
    assert (good < 0.1).all()
    assert (bad > 1).all()
    heads = torch.stack([right, right], 1)
    assert TASK.losses(heads, mask, target).shape == (2,)
    deep = TASK.losses(torch.stack([right, wrong], 1), mask, target)
    other = TASK.losses(torch.stack([wrong, right], 1), mask, target)
    assert (deep < other).all()  # the first head counts most
