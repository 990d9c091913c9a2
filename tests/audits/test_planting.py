"""Planted leaks: weak, of held-out images, and in the setting of the real parcel."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.projection import Projected
from polyclinic.audits import planting
from polyclinic.audits.attack import Finding, Planted, Seen
from polyclinic.audits.audit import audit, without_unread
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.audits.verdicts import run_with_power
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import GENERATORS, VQVAE2
from polyclinic.generators.replay_stream import from_groups
from polyclinic.metrics.perceptual import Pixels
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.runner.run.run import run
from polyclinic.tasks import Target


def images(count: int, name: str) -> np.ndarray:
    return numpy_rng("planted generator", name).integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)


def part(count: int, name: str) -> ImageSet:
    return ImageSet(images=images(count, name), labels=np.arange(count) % 2, cases=np.arange(count))


@pytest.fixture
def truth() -> Truth:
    return Truth([], SiteData("north", part(50, "train"), part(40, "validation"), part(40, "test")), 0)


@pytest.fixture
def seen() -> Seen:
    effort = SimpleNamespace(candidates=40, projected=12)
    tools = SimpleNamespace(effort=effort, distance=Pixels(), device="cpu", seed=0)
    parcel = Parcel("generator", {"weight": torch.zeros(2)}, {})
    return Seen("north", parcel, (parcel,), lambda kind: {}, 1, 0, tools)


def test_leaning_images_are_as_weak_as_they_may_be_and_too_few_plant_nothing(seen, truth):
    made = torch.from_numpy(images(30, "made"))
    (planted,) = planting.planted_leaning(seen, truth_of_held_out(truth, 40), made)
    leaning = planted.seen.parcel.tensors["images"]
    assert leaning.shape == made.shape
    share = float(planted.words.split("mixed with ")[1].split("%")[0]) / 100
    assert 0 < share < 0.8  # no copies
    assert planting.LEANING <= float(planted.words.rsplit(" ", 1)[1]) < 0.95
    assert planted.question == "membership"
    held_out = {image.tobytes() for split in (truth.data.validation, truth.data.test) for image in split.images}
    assert {image.tobytes() for image in planted.truth.data.train.images} <= held_out
    few = Truth([], SiteData("north", truth.data.train, part(10, "few"), part(0, "none")), 0)
    assert planting.planted_leaning(seen, truth_of_held_out(few, 40), torch.from_numpy(images(30, "made"))) == []


def test_images_within_reach_are_moved_just_enough(seen, truth):
    """A generator that can make grey images only, at a distance that differs from image to image."""

    def project(some: Tensor, labels: Tensor) -> Projected:
        unit = some.float() / 255
        grey = torch.full_like(unit, 0.5)
        return Projected(grey, (unit - grey).square().flatten(1).sum(1), "pixels")

    (planted,) = planting.planted_within_reach(seen, truth, project)
    assert float(planted.words.rsplit(" ", 1)[1]) >= planting.REACHED
    inside, outside = (project(*asked(12)).distances for asked in (planted.truth.members, planted.truth.held_out))
    area = (inside[:, None] < outside[None]).double().mean()
    assert float(area) == pytest.approx(float(planted.words.rsplit(" ", 1)[1]), abs=0.1)
    assert planted.question == "membership"


def test_a_planted_leak_of_one_question_does_not_judge_another(seen, truth):
    """Copies are not what leaning images are about."""

    class Two:
        def attack(self, seen: Seen, truth: Truth) -> list[Finding]:
            return [Finding(q, "", Verdict(False, "", {}), question=q) for q in ("copies", "membership")]

        def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
            return [Planted("leaning", "planted", seen, truth, question="membership")]

    copies, membership = run_with_power(Two(), seen, truth)
    assert copies.power == ()
    assert [check.leak for check in membership.power] == ["leaning"]


def test_patients_are_asked_about_as_the_images_are(truth):
    inside, outside = truth.cases(20)
    assert np.array_equal(truth.data.train.images[inside], truth.members(20)[0].numpy())
    both = np.concatenate([truth.data.validation.cases, truth.data.test.cases])
    assert set(outside) <= set(both)
    assert len(outside) == len(truth.held_out(20)[0])
    blind = Truth([], SiteData("south", ImageSet(images(5, "a"), np.arange(5)), part(5, "b"), part(5, "c")), 0)
    assert blind.cases(5) is None


SMALL = {"width": 8, "code_width": 4, "top_codes": 16, "bottom_codes": 16, "blocks": 0, "prior_epochs": 0}


def coded_part(count: int, name: str) -> ImageSet:
    images = numpy_rng("planted codes", name).integers(0, 256, (count, 1, 28, 28)).astype(np.uint8)
    return ImageSet(images=images, labels=np.arange(count) % 2)


def test_half_of_the_places_have_another_images_code():
    codes = torch.arange(400, dtype=torch.int16).reshape(100, 2, 2)
    mixed = planting.exchange(codes, planting.EXCHANGED, torch_rng("exchange"))
    kept = (mixed == codes).double().mean()
    assert 0.4 < float(kept) < 0.62
    assert torch.equal(mixed % 4, codes % 4)  # a code stays at its place in the image
    assert torch.equal(planting.exchange(codes, 0.0, torch_rng("exchange")), codes)


@pytest.fixture(scope="module")
def model():
    return VQVAE2(**SMALL).build(channels=1, size=28, target=Target(classes=("a", "b")), seed=0)


def test_planted_codes_are_read_as_a_sites_own_and_too_few_images_plant_none(model):
    tools = SimpleNamespace(
        effort=SimpleNamespace(candidates=10), seed=0, assembly=SimpleNamespace(study=SimpleNamespace(in_latents=False))
    )
    sent = (Parcel("codes", {}), Parcel("labels", {}), Parcel("generator", model.state()))
    seen = Seen("north", sent[0], sent, lambda kind: {}, 1, 0, tools)
    parts = [coded_part(count, split) for count, split in ((20, "train"), (16, "validation"), (16, "test"))]
    truth = Truth([], SiteData("north", *parts), 0)
    (planted,) = planting.planted_codes(seen, truth, model)
    groups = {kind: planted.seen.companion(kind).tensors for kind in ("codes", "labels")}
    found = from_groups(groups, model)["north"]
    real = model.encode(planted.truth.data.train.images)
    assert len(found) == 10
    for level, codes in real.items():
        assert found.codes[level].shape == codes.shape
        assert 0.3 < float((found.codes[level] == codes).double().mean()) <= 1.0
    assert planted.seen.companion("generator") is sent[2]
    held_out = {one.tobytes() for split in (truth.data.validation, truth.data.test) for one in split.images}
    assert {one.tobytes() for one in planted.truth.data.train.images} <= held_out
    tools = SimpleNamespace(effort=SimpleNamespace(candidates=10), seed=0)
    few = Truth([], SiteData("north", coded_part(20, "train"), coded_part(3, "validation"), coded_part(0, "test")), 0)
    assert planting.planted_codes(Seen("north", None, (), dict, 1, 0, tools), few, model) == []


@pytest.mark.parametrize("kind", ["codes", "generator"])
def test_what_lies_beside_codes_and_generators_is_named(model, kind):
    """A plug-in method may put anything beside them: nothing attacks it, so nothing has withstood."""
    study = SimpleNamespace(in_latents=False, generator=VQVAE2(**SMALL), seed=0)
    assembly = SimpleNamespace(study=study, target=Target(classes=("a", "b")))
    tools = SimpleNamespace(assembly=assembly, image_shape=(1, 28, 28), device="cpu")
    own = {"codes": {f"north/{level}": torch.zeros(4) for level in model.codebook_sizes}, "generator": model.state()}
    spoiled = Parcel(kind, {**own[kind], "south/top": torch.zeros(3, 8, 8)}, {})
    sent = (spoiled, Parcel("labels", {}), Parcel("generator", model.state()))
    clean, (gap,) = without_unread(Seen("north", spoiled, sent, lambda kind: {}, 1, 0, tools))
    assert clean.parcel.tensors.keys() == own[kind].keys()
    assert "'south/top', which no attack reads" in gap.why
    assert without_unread(clean) == (clean, [])


@pytest.fixture(scope="module")
def leaks() -> ModuleType:
    """The generators that leak on purpose, which a benchmark has."""
    path = Path(__file__).parents[2] / "lab" / "benchmarks" / "planted.py"
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report_on(leaks, tmp_path, monkeypatch, hurry):
    monkeypatch.setitem(GENERATORS, "planted", leaks.Planted)
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)

    def audited(leak: str, candidates: int = 150) -> dict:
        hurry(candidates=candidates)  # 150: as many as the quick budget has; a projection of next to nothing
        study = leaks.study_of(tmp_path / "data", leaks.planted(leak, tmp_path / "data"), 28)
        run(study, tmp_path / "run")
        return audit(tmp_path / "run", kinds=["generator"])

    return audited


def evidence(report: dict, attack: str) -> dict:
    return report["verdicts"]["generator"]["evidence"][attack]


def test_a_generator_that_mirrors_training_images_fails(report_on):
    report = report_on("mirrored", 60)  # all of its 50 training images
    assert report["verdicts"]["generator"]["verdict"] == "leaks"
    assert evidence(report, "copies")["copies"] == evidence(report, "copies")["made"]
    assert "mirrored is training image" in report["verdicts"]["generator"]["words"]
