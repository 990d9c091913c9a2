"""Analytic: the ridge head of all images together, whatever the partition; its penalty, by hand."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods import METHODS
from polyclinic.methods.analytic import PENALTIES, best_penalty, solve, within_training
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import RESOLUTION, project, projection
from polyclinic.models.encoders import ENCODERS, Encoder
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.runner.predict.model_file import digest_of_weights

AGES = {
    "data": {"source": "hand-phantom", "samples": 60},
    "sites": {"partition": "iid", "count": 3},
    "task": {"name": "regression"},
}


def ridge_by_hand(features: np.ndarray, targets: np.ndarray, penalty: float) -> np.ndarray:
    """Offset and slopes: normal equations of features with mean 0 and variance 1."""
    mean, scale = features.mean(0), features.std(0)
    rows, goal = (features - mean) / scale, targets - targets.mean(0)
    system = rows.T @ rows + penalty * len(rows) * np.eye(rows.shape[1])
    slopes = np.linalg.solve(system, rows.T @ goal) / scale[:, None]
    return np.concatenate([(targets.mean(0) - mean @ slopes)[None], slopes])


def test_the_head_is_that_of_ridge_regression_by_hand():
    rng = numpy_rng("ridge")
    features = rng.standard_normal((50, 4)) * [1, 2, 3, 0.5] + [0, 5, -1, 2]
    targets = features @ rng.standard_normal((4, 2)) * 0.1 + 0.1 * rng.standard_normal((50, 2))
    penalty, head = solve(one_round.moments(features.astype(np.float32), torch.from_numpy(targets)), 0.3)
    assert penalty == 0.3
    assert np.allclose(head, ridge_by_hand(features, targets, 0.3), atol=2e-3)
    # Two values that are 8 steps apart have a deviation of 4 steps, 9 one of 4.5.
    steps = np.array([[0, 0, 0], [8, 9, 9000]] * 20) * RESOLUTION
    targets = torch.arange(40).double()[:, None] % 2
    _, head = solve(one_round.moments(steps.astype(np.float32), targets), 0.1)
    assert head[1].tolist() == [0.0]
    assert float(head[2]) > 1
    assert 0 < float(head[3]) < 1


def test_one_hundred_partitions_of_images_give_one_head():
    """With the real encoder: uneven sites, a site with one image, and all images in one place."""
    images = torch.randint(0, 256, (40, 1, 32, 32), generator=torch_rng("partitions"), dtype=torch.uint8)
    encoder = ENCODERS["efficientnet-lite0-1024"](side=32)
    features = encoder.features(images).numpy()
    assert np.array_equal(encoder.features(images[7:8]).numpy()[0], features[7])  # alone, and among others
    assert np.array_equal(encoder.features(images[5:]).numpy(), features[5:])
    rows = project(features, projection(1024, 24))
    targets = torch.from_numpy(numpy_rng("targets").uniform(-1, 1, (40, 1)))
    digests = {digest_of_weights({"head": solve(one_round.moments(rows, targets), None)[1]})}
    for number in range(100):
        rng = numpy_rng("partition", number)
        order = rng.permutation(40)
        cuts = np.unique([1, *rng.integers(1, 40, int(rng.integers(1, 8)))])
        sums = [one_round.moments(rows[part], targets[part]) for part in np.split(order, cuts)]
        total = sums[0]
        for one in sums[1:]:
            total = total + one
        digests.add(digest_of_weights({"head": solve(total, None)[1]}))
    assert len(digests) == 1


def test_the_released_model_is_the_same_for_any_sites_and_only_upper_triangles_leave(tiny_run):
    spreads = [{"partition": "iid", "count": count} for count in (1, 2, 5)]
    spreads.append({"partition": "label-skew", "count": 3, "target_ks": 0.4})
    runs = [tiny_run({"name": "analytic", "numbers": 20}, **{**AGES, "sites": sites}) for sites in spreads]
    assert len({run["weights_sha256"] for run in runs}) == 1
    assert len({run["communication"]["total_bytes"] for run in runs}) > 1
    result = tiny_run({"name": "analytic", "numbers": 30}, **AGES)
    sent = result["communication"]["by_kind"]["statistics"]
    numbers = 3 * (31 * 32 // 2 + 31 + 1)
    assert 8 * numbers < sent < 8 * numbers + 3 * 1024
    [warning] = [one for one in result["warnings"] if "features" in one]
    assert "'site-1', 'site-2', 'site-3'" in warning
    assert "30 features over at most 30 images" in warning
    assert "federation.sum = 'secure'" in warning
    few = tiny_run({"name": "analytic", "numbers": 4}, **AGES).values
    assert not any("features" in one for one in few.get("warnings", []))


def test_rounds_are_one_and_a_trained_backbone_is_refused(study_of):
    assert METHODS["analytic"](rounds=20).rounds == 1
    study = study_of({"name": "analytic"})
    with pytest.raises(BadInput, match=r"model\.backbone: 'analytic' fits a head .* efficientnet-lite0-1024"):
        study.with_settings({"model.backbone": "lenet5"})
    with pytest.raises(BadInput, match=r"'analytic' sends exact sums"):
        study.with_settings({"privacy.noise_multiplier": 1.0})


class Means(Encoder):
    """The mean and the deviation of each channel."""

    width: ClassVar[int] = 6

    def encode(self, images):
        return torch.cat([images.mean((2, 3)), images.std((2, 3))], 1)


@pytest.mark.parametrize("method", ["analytic", "fedavg"])
def test_an_encoder_from_outside_is_a_backbone(tiny_run, monkeypatch, method):
    monkeypatch.setitem(ENCODERS, "means", Means)
    result = tiny_run({"name": method}, **AGES, model={"backbone": "means"}, optimizer={"augment": []})
    assert 0 < result.metrics["test"]["mae"] < 228
    assert result.weights()["fc.weight"].shape == (1, 6)


def test_penalties_that_cannot_be_scored_or_believed():
    """Of one image all degrees of freedom are used up."""
    assert best_penalty(torch.ones(1), torch.ones(1, 1), 1.0, 1) == PENALTIES[-1] == 100
    assert len(PENALTIES) == 33
    assert PENALTIES[0] == pytest.approx(1e-6)

    def sums(count):
        return one_round.Moments(torch.tensor([count]), torch.zeros(1, 1), torch.zeros(1))

    assert (sums(one_round.MOST_IMAGES - 3) + sums(3)).count == one_round.MOST_IMAGES
    with pytest.raises(WorkFailed, match="can overflow"):
        sums(one_round.MOST_IMAGES - 3) + sums(4)
    # Five features of six images: with next to no penalty the head passes through all targets.
    rng = numpy_rng("interpolation")
    rows = rng.standard_normal((6, 5))
    rows = (rows - rows.mean(0)) / rows.std(0)
    goal = rng.standard_normal((6, 1))
    goal -= goal.mean(0)
    values, vectors = torch.linalg.eigh(torch.from_numpy(rows.T @ rows / 6))
    turned = vectors.T @ torch.from_numpy(rows.T @ goal / 6)
    chosen = best_penalty(values, turned, float((goal**2).mean()) - 1e-12, 6)  # as rounding leaves it
    freedom = float((values / (values + chosen)).sum()) + 1
    assert freedom / 6 < 0.99

    def sums(count):
        return SimpleNamespace(count=count)

    most = 10 * 7 + 100  # ten times as many, and a hundred more
    failed = []
    federation = SimpleNamespace(note_failures=failed.extend)
    train = {site: sums(7) for site in ("north", "south", "west")}
    held_out = {"north": sums(most), "south": sums(most + 1), "west": sums(1)}
    assert within_training(federation, train, held_out).keys() == {"north", "west"}
    assert [failure.site for failure in failed] == ["south"]
    assert f"{most + 1} validation images beside 7 training images" in failed[0].reason


@pytest.mark.parametrize("number", range(12))
def test_the_penalty_has_the_lowest_score_of_cross_validation(number):
    """(RSS / n) / (1 - degrees of freedom / n)^2, from the hat matrix of 9 to 31 images."""
    rng = numpy_rng("scores", number)
    count, width = 9 + 2 * number, 5
    features = rng.standard_normal((count, width)) * [1, 1, 2, 3, 0.5]
    targets = features[:, :2] * (0.2 + number / 6) + rng.standard_normal((count, 2))
    rows, goal = (features - features.mean(0)) / features.std(0), targets - targets.mean(0)

    def score(penalty: float) -> float:
        hat = rows @ np.linalg.solve(rows.T @ rows + penalty * count * np.eye(width), rows.T)
        return float(((goal - hat @ goal) ** 2).sum() / count / (1 - (np.trace(hat) + 1) / count) ** 2)

    values, vectors = torch.linalg.eigh(torch.from_numpy(rows.T @ rows / count))
    turned = vectors.T @ torch.from_numpy(rows.T @ goal / count)
    assert best_penalty(values, turned, float((goal**2).sum() / count), count) == min(PENALTIES, key=score)
