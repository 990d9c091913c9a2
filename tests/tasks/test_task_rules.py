"""Small rules of tasks, each by hand: mutants of them lived until these tests were written."""

import pytest
import torch

from polyclinic.tasks.segmentation import outline_distances


def test_the_hausdorff_distance_leaves_out_the_farthest_twentieth():
    """Lines of 100 and 50 pixels that begin at the same place: the 100 are 50 times 0, then 1 to 50 pixels away."""
    predicted, true = torch.zeros(2, 1, 1, 4, 100, dtype=torch.bool)
    predicted[..., 1, :], true[..., 1, :50] = True, True
    [[hausdorff, average, counted]] = outline_distances(predicted, true).tolist()
    assert hausdorff == pytest.approx(45 + 0.05)
    assert average == pytest.approx(sum(range(51)) / 150)
    assert counted == 1
