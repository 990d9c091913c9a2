"""Membership of models and generators, with its power."""

import shutil
from types import SimpleNamespace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from small_audits import first_view
from torch import Tensor, nn

from polyclinic.attacks.attack import ThreatModel
from polyclinic.attacks.membership import rmia
from polyclinic.audits import attack_membership, attack_site
from polyclinic.audits import attack_membership as module
from polyclinic.audits.attack import Finding, NotTried, Seen
from polyclinic.audits.attack_site import ORIGIN, Asked, SiteInferenceAttack, gains, image_finding, origin_finding
from polyclinic.audits.truth import Truth, truth_of_asked
from polyclinic.audits.verdicts import run_with_power
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import VQVAE2, Generator, GeneratorModel
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.metrics.perceptual import Pixels
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.study.tables import Audit
from polyclinic.tasks import Target

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.5, "data.samples": 160, "optimizer.momentum": 0.0}


def draws(count: int, name: str, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(count, generator=torch_rng("rmia", name)).double()


def test_rmia_by_hand_finds_members_that_reference_models_do_not_explain():
    """Ratios 2, 1 and 0.25; the last two are the population: the member beats both, each of them ties with itself."""
    observed = torch.tensor([0.8, 0.4, 0.1]).log()
    shadows = torch.tensor([[0.4, 0.4, 0.4], [0.4, 0.4, 0.4]]).log()
    population = torch.tensor([False, True, True])
    assert rmia(observed, shadows, population).tolist() == [1.0, 0.75, 0.25]
    alike = rmia(torch.zeros(6), torch.zeros(4, 6), torch.arange(6) >= 3)
    assert len(set(alike.tolist())) == 1  # nobody is told by a tie
    with pytest.raises(BadInput, match="RMIA takes scores"):
        rmia(observed, shadows, population & False)
    # Images differ in difficulty by far more than membership does; the ratio to reference models removes that.
    difficulty, count = 5 * draws(200, "difficulty"), 100
    shadows = difficulty + 0.2 * torch.stack([draws(200, f"shadow {n}") for n in range(4)])
    observed = difficulty + 0.2 * draws(200, "observed")
    observed[:count] += 1.0
    found = rmia(observed, shadows, torch.arange(200) >= count)
    assert float(found[:count].mean()) > 0.9
    assert float(found[count:].mean()) == pytest.approx(0.5, abs=0.01)


@pytest.fixture(scope="module")
def sent(tiny, undisturbed, tmp_path_factory):
    """A kept release of a short run, as its receiver sees it."""
    done = undisturbed(tiny("fedavg", STUDY, rounds=1))
    folder = tmp_path_factory.mktemp("membership") / "run"
    shutil.copytree(done.folder, folder)
    return first_view(folder, "weights", ("site-1",))


def test_a_planted_memory_is_no_copy_and_reference_models_give_both_scores(sent):
    seen, truth = sent
    (planted,) = attack_membership.LossMembershipAttack().planted(seen, truth)
    held_out, _ = truth.held_out(1000)
    members, _ = planted.truth.members(1000)
    assert len(members) == len(held_out) // 2
    assert float(planted.words.rsplit(" ", 1)[1]) >= attack_membership.WEAKEST - 0.2
    assert planted.seen.parcel.digest != seen.parcel.digest
    assert planted.seen.parcel.tensors.keys() == seen.parcel.tensors.keys()
    rmia_found, lira_found = attack_membership.ReferenceMembershipAttack().attack(*sent)
    assert isinstance(rmia_found, Finding)
    assert isinstance(lira_found, Finding)
    assert (rmia_found.attack, lira_found.attack) == ("rmia", "lira")
    for found in (rmia_found, lira_found):
        assert found.question == "membership"
        assert found.verdict.evidence["hits_rare_low"] <= found.verdict.evidence["hits_rare"]
        assert 0 <= found.verdict.evidence["auc"] <= 1


def test_sites_that_are_alike_cannot_be_told_and_a_planted_site_is_weak(sent):
    seen, truth = sent
    image, origin = SiteInferenceAttack().attack(seen, truth)
    assert isinstance(image, Finding)
    assert isinstance(origin, Finding)
    assert (image.question, origin.question) == ("site", "origin")
    assert not image.verdict.leak
    assert not origin.verdict.leak
    assert [peer.site for peer in seen.peers()] == ["site-2"]  # whose update of the same round is compared with
    (planted,) = SiteInferenceAttack().planted(seen, truth)
    held_out, _ = truth.held_out(150)
    assert len(planted.truth.held_out(150)[0]) == len(held_out) // 2


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
        image_shape=(1, SIDE, SIDE), what="labels", trained={},
    )  # fmt: skip
    parcel = Parcel("synthetic-images", {"images": made}, {})
    return Seen("north", parcel, (parcel,), lambda kind: {}, 1, 0, tools)


def test_members_of_a_generator_that_remembers_are_found():
    made = remembered(TRUTH.members(40)[0], 0.5, torch_rng("made"))
    found = attack_membership.ReferenceGeneratorsAttack().attack(seen_of(made), TRUTH)
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
    attack = attack_membership.ReferenceGeneratorsAttack()
    found = run_with_power(attack, seen_of(made), TRUTH)
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
    (gap,) = attack_membership.ReferenceGeneratorsAttack().attack(seen, TRUTH)
    assert isinstance(gap, NotTried)
    assert not isinstance(gap, Finding)
    assert gap.question == "membership"


def test_a_reference_generator_is_trained_as_the_study_has_it_or_shorter():
    short = VQVAE2(epochs=2, prior_epochs=1)
    assert attack_membership.shortened(short, 64, 100)[0] is short
    longer, words = attack_membership.shortened(VQVAE2(epochs=300, prior_epochs=20), 64, 100)
    assert (longer.epochs, longer.prior_epochs) == (50, 20)
    assert "epochs 50;" in words
    assert attack_membership.shortened(DCGAN(steps=4000), 64, 100)[0].steps == 100
    assert attack_membership.shortened(DCGAN(), 64, 1000)[0].steps is None


NAMES = ["east"] * 20 + ["west"] * 20


def drawn(count: int, name: str, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(count, generator=torch_rng("site of update", name)).double()


def seen(level: float = 0.001) -> SimpleNamespace:
    return SimpleNamespace(tools=SimpleNamespace(level=level), where="north, weights, round 1")


def asked(own: float, east: float, west: float) -> Asked:
    others = torch.cat([drawn(20, "east", east), drawn(20, "west", west)])
    return Asked(drawn(30, "own", own), others, NAMES, None, None)


def test_an_update_points_to_its_site_where_it_stands_out_from_every_other():
    found = origin_finding(seen(), asked(3.0, 0.0, 0.0))
    assert found.verdict.leak
    assert (found.attack, found.question) == (ORIGIN, "origin")
    assert (found.verdict.evidence["place_of_site"], found.verdict.evidence["sites_compared"]) == (1, 3)
    # West's images gain as much as the site's own: images can be told from most others, but two sites are left.
    rows = asked(3.0, -5.0, 3.0)
    assert image_finding(seen(), rows).verdict.leak
    found = origin_finding(seen(), rows)
    assert not found.verdict.leak
    assert found.verdict.evidence["nearest_site"] == "west"
    assert found.verdict.evidence["order_by_chance"] == pytest.approx(chance_of_order(rows.own, rows.others[20:]))


def test_what_any_update_gives_an_image_does_not_count(monkeypatch):
    """Some images gain by everybody's update; only what this one gives beyond the others' is the site's."""
    difficulty = torch.tensor([5.0, 0.0, 2.0], dtype=torch.float64)
    extra = {"north": torch.tensor([0.0, 0.0, 1.0]), "east": torch.zeros(3), "west": torch.zeros(3)}
    monkeypatch.setattr(attack_site, "gains_by", lambda one, images, answers: difficulty + extra[one.site])
    monkeypatch.setattr(attack_site, "unsent_names", lambda one: set())
    peers = tuple(SimpleNamespace(site=name) for name in ("east", "west"))
    own = SimpleNamespace(site="north", peers=lambda: peers)
    assert gains(own, torch.zeros(3), torch.zeros(3)).tolist() == [0.0, 0.0, 1.0]
    alone = SimpleNamespace(site="north", peers=tuple)
    assert gains(alone, torch.zeros(3), torch.zeros(3)).tolist() == [5.0, 0.0, 3.0]
