"""Small rules of synthetic images at a site: scores, parts, sheets, labels and buffers by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods.shared import utility


def images(labels, **more):
    labels = np.asarray(labels)
    pixels = np.broadcast_to(np.arange(len(labels), dtype=np.uint8)[:, None, None, None], (len(labels), 1, 4, 4))
    return ImageSet(pixels.copy(), labels, **more)


def trainer_of(metrics, metric="accuracy", better="higher"):
    task = SimpleNamespace(finish=lambda sums: metrics, metric=metric, better=better)
    return SimpleNamespace(task=task, evaluate=lambda part: {}, load=lambda weights: None)


def test_a_score_is_larger_where_it_is_better_and_ties_go_by_the_loss():
    score = utility.score
    assert score(trainer_of({"accuracy": 0.5, "auc": 0.75, "loss": 2.0}), None) == pytest.approx(0.75 - 2e-6, abs=1e-9)
    assert score(trainer_of({"accuracy": 0.5}), None) == 0.5
    assert score(trainer_of({"mae": 3.0, "loss": 1.0}, "mae", "lower"), None) == pytest.approx(-3 - 1e-6, abs=1e-9)
    site = SimpleNamespace(trainer=trainer_of({"accuracy": 0.5}), data=SimpleNamespace(test=images([])))
    assert np.isnan(utility.test_score(site, utility.TrainedNetwork({}, 0.0)))
    site.data.test = images([1])
    assert utility.test_score(site, utility.TrainedNetwork({}, 0.0)) == 0.5


def test_a_subset_keeps_what_is_known_of_each_image():
    whole = images([0, 1, 2], cases=np.array([7, 8, 9]), subgroup=np.array(["a", "b", "c"]))
    some = whole.take(np.array([2, 0]))
    assert (some.labels.tolist(), some.cases.tolist(), some.subgroup.tolist()) == ([2, 0], [9, 7], ["c", "a"])
    assert (some.images[:, 0, 0, 0].tolist(), some.masks) == ([2, 0], None)


def test_coverage_needs_more_images_than_neighbours():
    site = SimpleNamespace(data=SimpleNamespace(validation=images([]), test=images([]), train=images([0] * 30)))
    assert utility.measure_coverage(site, images([0] * 30)) == {}
    rng = np.random.default_rng(0)

    def noise(count):
        return ImageSet(rng.integers(0, 256, (count, 1, 4, 4), dtype=np.uint8), np.zeros(count))

    enough = utility.NEIGHBOURS + 1
    site.data = SimpleNamespace(validation=noise(3), test=noise(enough - 3), train=noise(30))
    assert set(utility.measure_coverage(site, noise(enough))) >= {"precision", "recall"}
    assert utility.measure_coverage(site, noise(enough - 1)) == {}
    site.data.validation = noise(2)
    assert utility.measure_coverage(site, noise(enough)) == {}


@pytest.mark.parametrize(
    "tensors",
    [{}, {"images": torch.zeros(2, 1, 4, 4)}, {"images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}],
)
def test_images_of_others_are_like_the_sites_own(tensors):
    site = SimpleNamespace(data=SimpleNamespace(train=images([0])), trainer=SimpleNamespace(target=None))
    with pytest.raises(WorkFailed, match="synthetic images of other sites are"):
        utility.received_part(site, tensors)


@pytest.mark.parametrize("count", [1, 2])
def test_images_of_others_have_labels(count):
    target = SimpleNamespace(classes=())
    site = SimpleNamespace(data=SimpleNamespace(train=images([0])), trainer=SimpleNamespace(target=target))
    others = {"images": torch.zeros(count, 1, 4, 4, dtype=torch.uint8)}
    with pytest.raises(BadInput, match="give one each"):
        utility.received_part(site, others)
    found = utility.received_part(site, {**others, "labels": torch.arange(count)})
    assert found.labels.tolist() == list(range(count))
