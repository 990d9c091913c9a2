"""Epsilon from both sides: no alarm in right runs, and an alarm for mistakes that are planted in the real code."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from polyclinic.attacks import canaries as attack
from polyclinic.audits.canaries import audit_epsilon
from polyclinic.data.parts import prepare
from polyclinic.models import Backbone
from polyclinic.privacy import dp_sgd
from polyclinic.privacy.account import certainty_in_words
from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.privacy.epsilon import gaussian_epsilon
from polyclinic.runner.run.assembly import Assembly
from polyclinic.training import image_draws, private_steps

HEAD = {"model.backbone": "efficientnet-lite0-1280", "privacy.noise_multiplier": 2.0, "privacy.accountant": "prv"}
NETWORK = {"sites.count": 1, "data.samples": 48, "privacy.noise_multiplier": 1.0}


@pytest.fixture
def audited(tiny, tmp_path):
    def figures(method="fedavg", changes=None, count=300, **settings):
        study = tiny(method, {**(HEAD if method == "private-head" else NETWORK), **(changes or {})}, **settings)
        assembly = Assembly(study, prepare(study.data, study.sites), tmp_path)
        return audit_epsilon(assembly, assembly.prepared.names[0], count)

    return figures


def test_scores_and_bounds_by_hand():
    seen = np.array([[1.0, 0.0]])
    assert attack.likelihoods(seen, 1.0, 1.0).tolist() == [0.5, -0.5]
    half = math.log(0.5 + 0.5 * math.exp(0.5))
    assert attack.likelihoods(seen, 1.0, 0.5)[0] == pytest.approx(half)
    inside, outside = np.ones(1000), np.zeros(1000)
    # 1,000 of 1,000 on the right side: log of the lower end of one rate over the upper end of the other
    tail = 0.05 / (4 * len(attack.THRESHOLDS))
    wanted = math.log(tail ** (1 / 1000) / (1 - tail ** (1 / 1000)))
    assert attack.lower_bound(inside, outside, 0.0) == pytest.approx(wanted)
    assert attack.lower_bound(inside[:1], outside[:1], 1e-5) == 0
    assert "at most 74 %" in certainty_in_words(1.0, 1e-5)
    assert "all but certain" in certainty_in_words(8.0, 1e-5)


def test_the_lower_bound_is_near_the_upper_one_for_gaussian_noise():
    rng, upper = np.random.default_rng(0), gaussian_epsilon(1.5, 1e-5)
    inside, outside = rng.standard_normal(4000) + 1.5, rng.standard_normal(4000)
    assert 0.3 * upper < attack.lower_bound(inside, outside, 1e-5) < upper
    assert 0.85 * upper < attack.gaussian_bound(inside, outside, lambda mu: gaussian_epsilon(mu, 1e-5)) < upper


def test_thirty_right_runs_raise_no_alarm(audited):
    for seed in range(15):
        for batch in ("full", "poisson"):
            found = audited("private-head", {"seed": seed}, phantoms=10, numbers=4, rounds=4, batch=batch)
            assert not found["alarm"], found["words"]
            assert 0 <= found["lower"] <= found["upper"]


@pytest.mark.parametrize("unit", [{}, {"privacy.clipping": "stored"}, {"optimizer.augment": ["flip"]}])
def test_right_training_raises_no_alarm(audited, unit):
    found = audited(changes=unit, rounds=2)
    assert not found["alarm"], found["words"]
    assert [one["name"] for one in found["checks"]][:3] == ["noise", "fresh noise", "sampling"]


def _reused_noise(patch):
    real = dp_sgd.noise_from
    patch.setattr(dp_sgd, "noise_from", lambda device, *address: lambda like: real(device, 0)(like))


def _shuffled(patch):
    def draw(self, rate, address, *, by_name):
        size = max(1, round(rate * len(self)))
        while True:
            yield from torch.randperm(len(self)).split(size)

    patch.setattr(private_steps.Units, "draw", draw)


def _clipped_by_batch(patch):
    real = ClippedSums.total

    def total(self, losses, pieces, clip, parameters):
        found = real(self, losses, pieces, 1e20, parameters)
        length = torch.cat([one.flatten() for one in found]).norm()
        return [one * (clip / length.clamp(min=clip)) for one in found]

    patch.setattr(ClippedSums, "total", total)


def _augmented_by_place(patch):
    patch.setattr(image_draws, "image_seeds", lambda names, index, *address: torch.arange(len(index)) + 7)


def _wrong_number_of_images(patch):
    real = private_steps.enter_steps
    patch.setattr(private_steps, "enter_steps", lambda site, noise, rate, steps: real(site, noise, rate / 3, steps))


def _noise_before_the_mean(patch):
    real = dp_sgd.NoisyMean.of
    patch.setattr(
        dp_sgd.NoisyMean, "of", lambda self, totals: real(dataclasses.replace(self, noise=self.noise / 3), totals)
    )


def _charged_once(patch):
    real, charged = private_steps.enter_steps, []

    def enter(site, noise, rate, steps):
        charged.append(steps)
        _, address = real(site, noise, rate, 1)
        return steps, address

    patch.setattr(private_steps, "enter_steps", enter)


def _divided_by_the_batch(patch):
    real = dp_sgd.NoisyMean.of
    sizes = iter(np.random.default_rng(0).poisson(20, 10**6).clip(1))
    patch.setattr(
        dp_sgd.NoisyMean,
        "of",
        lambda self, totals: [one * 20 / int(size) for size in [next(sizes)] for one in real(self, totals)],
    )


def _images_mixed(patch):
    real = Backbone.forward
    patch.setattr(Backbone, "forward", lambda self, images: real(self, images - images.mean(0)))


@pytest.mark.parametrize(("mistake", "changes", "words"), [
    (_reused_noise, {}, "fresh noise"),
    (_shuffled, {}, "sampling"),
    (_clipped_by_batch, {}, "change by one"),
    (_images_mixed, {"privacy.clipping": "stored"}, "change by one"),
    (_augmented_by_place, {"optimizer.augment": ["flip", "turn"]}, "change by one"),
    (_wrong_number_of_images, {}, "sampling"),
    (_noise_before_the_mean, {}, "noise"),
    (_charged_once, {}, "steps that nobody charged"),
    (_divided_by_the_batch, {}, "noise"),
])  # fmt: skip
def test_a_planted_mistake_is_found(audited, monkeypatch, mistake, changes, words):
    mistake(monkeypatch)
    found = audited(changes=changes, rounds=3)
    assert found["alarm"]
    assert words in found["words"] or "there is a mistake" in found["words"]


def test_other_private_parts_are_not_tested_with_the_reason(tiny, tmp_path):
    study = tiny("fedavg", NETWORK)
    assembly = Assembly(study, prepare(study.data, study.sites), tmp_path)
    assert audit_epsilon(assembly, assembly.prepared.names[0]) is not None
    plain = tiny("fedavg")
    found = audit_epsilon(Assembly(plain, prepare(plain.data, plain.sites), tmp_path), "site-1")
    assert found == {"alarm": None, "words": "not tested: the study has no differential privacy"}
