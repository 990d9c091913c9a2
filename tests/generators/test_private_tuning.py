"""Privacy-preserving training of GANs: the loss against all pairs, when each phase ends, and what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_tuning import COARSE, TINY, TUNING, build, data, rng

from polyclinic.generators.gan.model import GANSteps, Learner
from polyclinic.generators.private_tuning import (
    Meter,
    Phases,
    PrivateTuning,
    fit,
    mean_pairwise,
    measured_steps,
    privacy_loss,
    warning_about,
)
from polyclinic.metrics.distribution import frechet_distance, kernel_distance
from polyclinic.metrics.perceptual import Pixels

pytestmark = pytest.mark.usefixtures("coarse_features")


# --- the loss of Eq. 3 -------------------------------------------------------------------------------


def test_the_mean_over_all_pairs_from_means_alone():
    real, made = (torch.randn(n, 5, generator=rng(n), dtype=torch.float64) for n in (4, 6))
    every = [(a - b).square().sum() for a, b in itertools.product(real, made)]
    assert torch.allclose(mean_pairwise(real, made), torch.stack(every).mean())


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_eq_3_and_4_by_hand(scale):
    real, made = torch.rand(3, 1, 8, 8), torch.rand(3, 1, 8, 8)
    distance = Pixels()
    pairs = [float(distance(a[None], b[None])) for a, b in itertools.product(real, made)]
    loss = privacy_loss(PrivateTuning(alpha=2.0, scale=scale), distance)(real, made)
    expected = sum(pairs) / 9 if scale == "mean" else sum(pairs) / 3
    assert float(loss) == pytest.approx(-2 * expected, rel=1e-5)


# --- the phases --------------------------------------------------------------------------------------


class Counting:
    """A model whose state is how often it was trained, and whose distance is read from a list."""

    def __init__(self, distances):
        self.distances, self.at, self.losses = distances, 0, []

    def step(self, extra=None):
        self.at += 1
        self.losses.append(extra)

    def state(self):
        return {"at": self.at}

    def load(self, state):
        self.at = state["at"]

    def meter(self, _):
        return self.distances[max(0, self.at // 10 - 1)]


def test_phase_one_ends_when_nothing_gets_better_and_keeps_the_best():
    model = Counting([9, 5, 6, 4, 7, 8, 5, 1, 1])
    assert Phases(model, model, model.meter, TUNING.lengths()).until_it_stays() == 70
    assert model.at == 40  # the fourth measurement, 4, was the best; 30 steps without a better one
    assert set(model.losses) == {None}


def test_phase_one_ends_in_any_case():
    model = Counting([9 - k / 100 for k in range(200)])
    assert Phases(model, model, model.meter, TUNING.lengths()._replace(most_steps=55)).until_it_stays() == 55


def test_phase_two_ends_beyond_the_limit_and_keeps_what_was_within():
    model, loss = Counting([4, 5, 9.9, 10.1, 3]), object()
    told = []
    phases = Phases(model, model, model.meter, TUNING.lengths(), lambda *said: told.append(said))
    assert (*phases.until_it_grows(loss, 10.0), model.at) == (40, 30, 30)
    assert set(model.losses) == {loss}
    assert [said[1] for said in told] == [1, 2, 5, 10, 20, 30, 40]
    assert [said[3] for said in told][3:] == [4, 5, 9.9, 10.1]


@pytest.mark.parametrize(
    ("every", "most", "steps"),
    [
        (500, 1300, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1300]),
        (7, 14, [1, 2, 5, 7, 14]),
        (500, 30, [1, 2, 5, 10, 20, 30]),
        (1, 3, [1, 2, 3]),
        (2, 1, [1]),
    ],
)
def test_phase_two_is_measured_early(every, most, steps):
    assert list(measured_steps(every, most)) == steps


def test_a_loss_that_is_soon_too_strong_still_gains_something():
    """The first look was after `check_every` steps: a generator beyond the limit by then was never tuned."""

    class Growing(Counting):
        def meter(self, _):
            return 1.0 + self.at  # twice the first phase's after one step, beyond 10 after ten

    model = Growing([])
    phases = Phases(model, model, model.meter, PrivateTuning(preset="paper").lengths())
    assert (*phases.until_it_grows(object(), 10.0), model.at) == (10, 5, 5)


def test_a_tuning_that_gained_nothing_warns():
    figures = {"kept_step": 5, "phase1_distance": 0.5, "phase2_distance": 0.6}
    assert warning_about(figures) is None
    assert warning_about({}) is None  # phase 1 only, or no phases
    assert "kept the generator of phase 1" in warning_about(figures | {"kept_step": 0})
    assert "no farther from real ones" in warning_about(figures | {"phase2_distance": 0.5})


def test_the_mean_distance_is_that_of_all_pairs_of_a_batch():
    images, labels = data()
    meter = Meter(images, labels, PrivateTuning(measured=20), rng(), torch.device("cpu"))
    model, distance = build(), Pixels()
    pairs = [
        float(distance(a[None].float() / 255, b[None].float() / 255))
        for a, b in itertools.product(meter.images, meter.sample(model))
    ]
    assert meter.mean_distance(model, distance) == pytest.approx(sum(pairs) / 400, rel=1e-4)


def test_phase_two_whose_first_step_is_too_far_keeps_phase_one_and_says_so():
    model, (images, labels) = build(), data()
    tuning = {"check_every": 2, "most_steps": 2, "most_tuning_steps": 4, "distance": "pixels", "growth": 1.0}
    loud = TUNING.model_copy(update={**tuning, "alpha": 1e6})
    found = fit(model, images, labels, rng(), loud)
    assert (found["kept_step"], found["phase2_steps"]) == (0, 1)
    assert found["phase2_fd"] == found["phase1_fd"]
    assert warning_about(found)


def test_both_phases_of_a_gan_and_what_is_told_about_them():
    model, (images, labels) = build(), data()
    settings = TUNING.model_copy(
        update={"check_every": 2, "most_steps": 4, "most_tuning_steps": 4, "distance": "pixels", "growth": 1e6}
    )
    found = fit(model, images, labels, rng(), settings)
    names = ("steps", "fd", "fd_half", "fd_floor", "kid", "kid_floor")
    both = {f"phase{k}_{name}" for k in (1, 2) for name in (*names, "distance")}
    assert set(found) == both | {"kept_step"}
    assert (found["phase1_steps"], found["phase2_steps"], found["kept_step"]) == (4, 4, 4)
    assert found["phase1_fd"] > found["phase1_fd_floor"] > 0
    plain = fit(build(), images, labels, rng(), settings.model_copy(update={"alpha": 0.0}))
    assert plain == {name: found[name] for name in (f"phase1_{name}" for name in names)}


def test_phase_two_may_go_to_growth_times_the_distance_of_phase_one(monkeypatch):
    limits = []

    monkeypatch.setattr(Phases, "until_it_grows", lambda self, loss, limit: limits.append(limit) or (0, 0))
    settings = TUNING.model_copy(update={"most_steps": 2, "distance": "pixels", "growth": 3.0})
    found = fit(build(), *data(), rng(), settings)
    assert limits == [pytest.approx(3 * found["phase1_fd"])]


def test_an_extra_loss_of_a_gan_sees_images_between_0_and_1():
    images = torch.cat([torch.zeros(12, 1, 28, 28), torch.full((12, 1, 28, 28), 255)]).byte()
    steps, seen = GANSteps([Learner(build(), images, data()[1], rng())]), []
    steps.step(lambda real, made: seen.append((real, made.detach())) or made.sum())
    ((real, made),) = seen
    assert (float(real.min()), float(real.max())) == (0.0, 1.0)
    assert 0 <= float(made.min()) < 0.5 < float(made.max()) <= 1


def test_the_privacy_loss_moves_a_gan_away_from_its_images():
    images = torch.full((24, 1, 28, 28), 128, dtype=torch.uint8)
    labels = torch.arange(24) % 2
    apart = {}
    for alpha in (0.0, 2000.0):
        model = build(TINY.model_copy(update={"lr": 0.01, "average": 0.0}))
        steps = GANSteps([Learner(model, images, labels, rng())])
        loss = privacy_loss(PrivateTuning(alpha=alpha), Pixels()) if alpha else None
        for _ in range(30):
            steps.step(loss)
        made = model.sample(labels, rng(1)).float() / 255
        apart[alpha] = float(mean_pairwise(Pixels().embed(images.float() / 255), Pixels().embed(made)))
    assert apart[2000.0] > 1.3 * apart[0.0]


def test_steps_of_a_gan_are_those_of_its_fit():
    images, labels = data()
    whole, stepped = build(), build()
    whole.fit(images, labels, rng(4))
    steps = stepped.begin(images, labels, rng(4))
    for _ in range(TINY.steps):
        steps.step()
    first, second = whole.state(), stepped.state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_figures_of_a_meter_are_of_the_sets_that_they_name():
    images, labels = data()
    meter = Meter(images, labels, PrivateTuning(measured=20), rng(), torch.device("cpu"))
    asked = []

    class Model:
        def sample(self, labels, rng):
            asked.append(labels)
            return images[: len(labels)].flip(2)

    found, made, real = meter.summary(Model()), COARSE(images[:20].flip(2)), meter.real
    assert torch.equal(asked[0], meter.labels)
    chosen = [int((COARSE(images) - one).abs().sum(1).argmin()) for one in real]
    assert torch.equal(labels[chosen], meter.labels)  # made images have the labels of the real ones
    assert found == {
        "fd": frechet_distance(real, made),
        "fd_half": frechet_distance(real[:10], made[10:]),
        "fd_floor": frechet_distance(real[:10], real[10:]),
        "kid": kernel_distance(real, made),
        "kid_floor": kernel_distance(real[:10], real[10:]),
    }
