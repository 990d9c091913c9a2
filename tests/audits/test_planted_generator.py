"""Plants for generators: as weak as the verdict claims to exclude, and asked about under their own question."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.projection import Projected
from polyclinic.audits import ATTACKS
from polyclinic.audits.attack import Finding, Planted, Seen
from polyclinic.audits.audit import count_tests
from polyclinic.audits.planting import LEANING, REACHED, planted_leaning, planted_within_reach
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.audits.verdicts import run_with_power
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.perceptual import Pixels
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import numpy_rng, torch_rng


def images(count: int, name: str) -> np.ndarray:
    return numpy_rng("planted generator", name).integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)


def part(count: int, name: str) -> ImageSet:
    return ImageSet(images=images(count, name), labels=np.arange(count) % 2, cases=np.arange(count))


@pytest.fixture
def truth() -> Truth:
    return Truth([], SiteData("north", part(50, "train"), part(40, "validation"), part(40, "test")), 0)


@pytest.fixture
def seen() -> Seen:
    tools = SimpleNamespace(
        effort=SimpleNamespace(candidates=40, projected=12), distance=Pixels(), device="cpu", seed=0
    )
    parcel = Parcel("generator", {"weight": torch.zeros(2)}, {})
    return Seen("north", parcel, (parcel,), lambda kind: {}, 1, 0, tools)


def test_leaning_images_are_as_weak_as_they_may_be(seen, truth):
    made = torch.from_numpy(images(30, "made"))
    (planted,) = planted_leaning(seen, truth_of_held_out(truth, 40), made)
    leaning = planted.seen.parcel.tensors["images"]
    assert leaning.shape == made.shape
    share = float(planted.words.split("mixed with ")[1].split("%")[0]) / 100
    assert 0 < share < 0.8  # no copies
    assert LEANING <= float(planted.words.rsplit(" ", 1)[1]) < 0.95
    assert planted.question == "membership"
    held_out = {image.tobytes() for split in (truth.data.validation, truth.data.test) for image in split.images}
    assert {image.tobytes() for image in planted.truth.data.train.images} <= held_out


def test_too_few_held_out_images_plant_nothing(seen, truth):
    few = Truth([], SiteData("north", truth.data.train, part(10, "few"), part(0, "none")), 0)
    assert planted_leaning(seen, truth_of_held_out(few, 40), torch.from_numpy(images(30, "made"))) == []


def test_images_within_reach_are_moved_just_enough(seen, truth):
    """A generator that can make grey images only, at a distance that differs from image to image."""

    def project(some: Tensor, labels: Tensor) -> Projected:
        unit = some.float() / 255
        grey = torch.full_like(unit, 0.5)
        return Projected(grey, (unit - grey).square().flatten(1).sum(1), "pixels")

    (planted,) = planted_within_reach(seen, truth, project)
    assert float(planted.words.rsplit(" ", 1)[1]) >= REACHED
    inside, outside = (project(*asked(12)).distances for asked in (planted.truth.members, planted.truth.held_out))
    area = (inside[:, None] < outside[None]).double().mean()
    assert float(area) == pytest.approx(float(planted.words.rsplit(" ", 1)[1]), abs=0.1)
    assert planted.question == "membership"


def test_a_planted_leak_of_one_question_does_not_judge_another(seen, truth):
    """Copies are not what leaning images are about."""

    class Two:
        def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
            return [Planted("leaning", "planted", seen, truth, question="membership")]

    def run(seen: Seen, truth: Truth) -> list:
        return [Finding(q, "", Verdict(False, "", {}), question=q) for q in ("copies", "membership")]

    copies, membership = run_with_power(Two(), seen, truth, run)
    assert copies.power == ()
    assert [check.leak for check in membership.power] == ["leaning"]


def test_every_test_of_an_attack_has_its_part_of_the_level():
    """A generator is asked six times (copies, nearest, projection, near copies, and twice beside reference generators),
    so each counts a sixth of 1 %."""
    generators = [SimpleNamespace(parcel=SimpleNamespace(kind="generator"), attacks=())]
    assert count_tests(generators) == 6
    assert count_tests(2 * generators) == 12
    assert sum(attack.tests for attack in ATTACKS.working().values() if "weights" in attack.kinds) == 7


def test_the_honest_alarm_of_old_is_none():
    """33 images on either side with an area of 0.69 had been an alarm: the exact chance is above a quarter of 1 %."""
    rng = torch_rng("planted generator", "alarm")
    others = torch.randn(33, generator=rng).double()
    shifts = torch.linspace(0, 1.2, 241)
    noise = torch.randn(33, generator=rng).double()
    areas = [float((noise[:, None] + s > others[None]).double().mean()) for s in shifts]
    nearest = min(range(len(areas)), key=lambda place: abs(areas[place] - 0.69))
    assert 0.0025 < chance_of_order(noise + shifts[nearest], others) < 0.01


def test_patients_are_asked_about_as_the_images_are(truth):
    inside, outside = truth.cases(20)
    assert np.array_equal(truth.data.train.images[inside], truth.members(20)[0].numpy())
    both = np.concatenate([truth.data.validation.cases, truth.data.test.cases])
    assert set(outside) <= set(both)
    assert len(outside) == len(truth.held_out(20)[0])
    blind = Truth([], SiteData("south", ImageSet(images(5, "a"), np.arange(5)), part(5, "b"), part(5, "c")), 0)
    assert blind.cases(5) is None
