"""Membership of generators beside reference generators: found where one remembers, silent where none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import ThreatModel
from polyclinic.audits import attack_membership as module
from polyclinic.audits.attack import Finding, NotTried, Seen
from polyclinic.audits.attack_membership import ReferenceGeneratorsAttack, shortened
from polyclinic.audits.truth import Truth, truth_of_asked
from polyclinic.audits.verdicts import run_with_power
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import VQVAE2, Generator, GeneratorModel
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.metrics.perceptual import Pixels
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.study.tables import Audit
from polyclinic.tasks import Target

SIDE = 28


class Blurred(Generator):
    """A generator that mixes images that it saw with noise; it trains in no time."""

    name: Literal["blurred"] = "blurred"
    steps: int = 500
    share: float = 0.5
    summary: ClassVar[str] = "a test's"

    def build(self, *, channels, size, target, seed, device="cpu", precision="fp32"):
        return BlurredModel(self, channels=channels, size=size, target=target, device=device)

    def dp_obstacle(self) -> str | None:
        return None


class BlurredModel(GeneratorModel):
    def __init__(self, settings: Blurred, **options) -> None:
        super().__init__({"nothing": nn.Identity()}, **options)
        self.settings, self.seen = settings, torch.zeros(0)

    def fit(self, images, labels, rng, options=None) -> dict[str, float]:
        self.seen = images
        return {}

    def sample(self, labels, rng) -> Tensor:
        rows = torch.randint(len(self.seen), (len(labels),), generator=rng)
        return remembered(self.seen[rows], self.settings.share, rng)


def remembered(images: Tensor, share: float, rng: torch.Generator) -> Tensor:
    return to_uint8(share * images.float() / 255 + (1 - share) * torch.rand(images.shape, generator=rng))


def part(count: int, name: str) -> ImageSet:
    """Images of very different brightness: the nearest distance alone says little."""
    rng = numpy_rng("generator membership", name)
    light = rng.uniform(0.1, 1.0, (count, 1, 1, 1))
    images = (light * rng.integers(0, 256, (count, 1, SIDE, SIDE))).astype(np.uint8)
    return ImageSet(images=images, labels=np.arange(count) % 2)


TRUTH = Truth([], SiteData("north", part(40, "train"), part(40, "validation"), part(40, "test")), 0)


def seen_of(made: Tensor, level: float = 0.002) -> Seen:
    study = SimpleNamespace(
        generator=Blurred(), task=SimpleNamespace(dense=False), in_latents=False, audit=Audit(), replay=None
    )
    assembly = SimpleNamespace(study=study, target=Target(classes=("a", "b")))
    effort = SimpleNamespace(candidates=40, references=4, generator_steps=100)
    tools = SimpleNamespace(
        assembly=assembly, effort=effort, distance=Pixels(), device="cpu", seed=0, threat=ThreatModel(), level=level,
        image_shape=(1, SIDE, SIDE), what="labels", references={}, planted={},
    )  # fmt: skip
    parcel = Parcel("synthetic-images", {"images": made}, {})
    return Seen("north", parcel, (parcel,), lambda kind: {}, 1, 0, tools)


def test_members_of_a_generator_that_remembers_are_found():
    made = remembered(TRUTH.members(40)[0], 0.5, torch_rng("made"))
    found = ReferenceGeneratorsAttack().attack(seen_of(made), TRUTH)
    assert [one.attack for one in found] == ["rmia-generators", "lira-generators"]
    for one in found:
        assert one.question == "membership"
        assert one.verdict.leak
        assert one.verdict.evidence["hits_rare_low"] <= one.verdict.evidence["hits_rare"]
        assert one.verdict.evidence["auc_class_0"] > 0.7
        (words,) = one.assumed
        assert words.startswith("reference generators are trained for less than the study's own: steps 100;")


def test_images_of_others_are_no_leak_and_the_planted_one_is_found_with_the_same_references(monkeypatch):
    made, trained = remembered(torch.from_numpy(part(40, "strangers").images), 0.5, torch_rng("made")), []
    train = module.reference_scorer
    monkeypatch.setattr(module, "reference_scorer", lambda *given: trained.append(1) or train(*given))
    attack = ReferenceGeneratorsAttack()
    found = run_with_power(attack, seen_of(made), TRUTH, attack.attack)
    assert [one.finding.verdict.leak for one in found] == [False, False]
    assert len(trained) == 4  # what is planted is asked about images that the references know already
    (check,) = found[0].power
    assert (check.leak, check.found) == ("leaning images", True)


def test_planted_truth_asks_about_images_of_the_same_pool():
    other = truth_of_asked(TRUTH, 40)
    pool = {image.numpy().tobytes() for image in TRUTH.held_out(40)[0]}
    inside, outside = ({one.numpy().tobytes() for one in asked(40)[0]} for asked in (other.members, other.held_out))
    assert inside | outside == pool
    assert not inside & outside
    assert truth_of_asked(TRUTH, 10) is None


@pytest.mark.parametrize("word", ["dense", "in_latents"])
def test_what_is_no_image_is_not_tried(word):
    seen = seen_of(torch.zeros(4, 1, SIDE, SIDE, dtype=torch.uint8))
    study = seen.tools.assembly.study
    study.task, study.in_latents = SimpleNamespace(dense=word == "dense"), word == "in_latents"
    (gap,) = ReferenceGeneratorsAttack().attack(seen, TRUTH)
    assert isinstance(gap, NotTried)
    assert not isinstance(gap, Finding)
    assert gap.question == "membership"


def test_a_reference_generator_is_trained_as_the_study_has_it_or_shorter():
    short = VQVAE2(epochs=2, prior_epochs=1)
    assert shortened(short, 64, 100)[0] is short
    longer, words = shortened(VQVAE2(epochs=300, prior_epochs=20), 64, 100)
    assert (longer.epochs, longer.prior_epochs) == (50, 20)
    assert "epochs 50;" in words
    assert shortened(DCGAN(steps=4000), 64, 100)[0].steps == 100
    assert shortened(DCGAN(), 64, 1000)[0].steps is None
