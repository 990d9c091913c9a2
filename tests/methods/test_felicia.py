"""FELICIA: what its paper says, and its central half."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from felicia_studies import SITES, gan_of
from pydantic import ValidationError
from run_folders import lines_of
from torch import Tensor, nn

from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.generators.gan.model import StepDraws, both_steps
from polyclinic.generators.gan.trainer import GANNetworks, GANTrainer, RealBatches
from polyclinic.methods.felicia import Felicia, _share_of_step
from polyclinic.methods.shared.central_discriminator import CentralDiscriminator, ImagesOfSites
from polyclinic.privacy.account import EVERYTHING
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target

SETTINGS = {"learner_steps": 2}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("schedule", ["synchronous", "local"])
def test_only_synthetic_images_leave_and_scores(felicia, undisturbed, schedule):
    result = undisturbed(felicia(schedule=schedule, exchange_every=1))
    for site in SITES:
        lines = lines_of(result, site)
        trained = [line for line in lines if line["kind"] != "metrics"]
        assert {line["kind"] for line in trained} == {"synthetic-images"}
        assert len(trained) == 4  # one for each of two steps of two rounds
        assert {line["operation"] for line in lines if line["kind"] == "metrics"} <= {
            "evaluate_utility",
            "evaluate",
            "test_sums",
        }
    sent = result["communication"]["by_operation"]
    down = result["communication"]["by_kind"]
    assert {"gradients" if schedule == "synchronous" else "generator", "synthetic-images"} <= down.keys()
    assert sent["start_round" if schedule == "synchronous" else "train_locally"] > 2 * 8 * 3 * 28 * 28 * 4


def test_a_policy_that_lets_out_nothing_but_synthetic_images_and_scores_is_enough(felicia, tmp_path):
    study = felicia({"policy.kinds": ["synthetic-images", "metrics"]}, rounds=1)
    assert run(study, tmp_path / "run")["failures"] == []


def test_bytes_of_a_step_are_those_of_images_up_and_gradients_down(felicia, undisturbed):
    pixels = 8 * 3 * 28 * 28
    kinds = undisturbed(felicia())["communication"]["by_kind"]
    steps = 2 * 2 * 2  # sites, rounds, steps
    assert kinds["gradients"] == pytest.approx(steps * pixels * 4, rel=0.01)
    assert kinds["synthetic-images"] == pytest.approx(steps * pixels * 4, rel=0.01)
    small = undisturbed(felicia(wire="small"))["communication"]["by_kind"]
    assert small["gradients"] == pytest.approx(steps * pixels * 2, rel=0.02)
    assert small["synthetic-images"] < kinds["synthetic-images"] / 3


def test_the_central_discriminator_sees_what_left_and_nothing_else(felicia, tmp_path, monkeypatch):
    """Everything it is ever given is an image that some site's gate let out before."""
    released, seen = set(), []
    whole = Felicia.gather_images

    def watch(self, federation, replies):
        released.update(image.numpy().tobytes() for reply in replies for image in reply.synthetic_images["images"])
        batch = whole(self, federation, replies)
        seen.extend(image.numpy().tobytes() for image in batch.images)
        return batch

    monkeypatch.setattr(Felicia, "gather_images", watch)
    study = felicia(rounds=1)
    run(study, tmp_path / "run")
    assert seen
    assert set(seen) <= released
    parts = prepare(study.data, study.sites)
    real = {
        (np.asarray(image, dtype=np.float32) / 127.5 - 1).tobytes()
        for site in parts.names
        for image in open_site(parts.folder, site).train.images
    }
    assert not real & set(seen)


def local_gan(study: Study, name: str) -> dict[str, torch.Tensor]:
    """A site's GAN trained by a loop of its own, without a federation."""
    parts = prepare(study.data, study.sites)
    part = open_site(parts.folder, name).train
    target = Target(classes=tuple(parts.info["classes"]))
    own = seed_of(study.seed, name, "first weights")
    model = study.generator.build(channels=3, size=28, target=target, seed=own)
    trainer = GANTrainer(GANNetworks(model.networks), model.settings)
    for number in (1, 2):
        rng = torch_rng(study.seed, name, "gan", number)
        drawn = StepDraws(model, RealBatches(model, np.asarray(part.images), np.asarray(part.labels), rng), rng)
        for _ in range(2):
            both_steps(trainer, *drawn.for_both(trainer))
    return model.state()


@pytest.mark.parametrize(
    "generator", [{"name": "gan"}, {"name": "dcgan"}, {"name": "dcgan", "condition": "apart"}], ids=str
)
def test_with_lambda_0_sites_are_local_gans_bit_for_bit(felicia, undisturbed, generator):
    study = felicia({f"generator.{key}": value for key, value in generator.items()}, weight=0.0)
    result = undisturbed(study)
    assert "synthetic-images" not in result["communication"]["by_kind"]
    for site in SITES:
        assert same(gan_of(result, site), local_gan(study, site))


def test_a_central_term_that_does_not_act_yet_changes_no_bit_though_images_travel(felicia, undisturbed):
    alone, joined = undisturbed(felicia(weight=0.0)), undisturbed(felicia(weight=3.0, warm_up=100))
    assert joined["communication"]["by_kind"]["synthetic-images"] > 0
    for site in SITES:
        assert same(gan_of(alone, site), gan_of(joined, site))


def test_one_site_has_no_central_term(felicia, undisturbed):
    results = [undisturbed(felicia({"sites.count": 1}, weight=weight)) for weight in (0.0, 5.0)]
    assert same(*(gan_of(result, "site-1") for result in results))
    assert results[1]["communication"]["by_kind"].keys() == {"metrics"}


@pytest.mark.parametrize("schedule", ["synchronous", "local"])
def test_classes_with_networks_of_their_own(felicia, undisturbed, schedule):
    apart = {"generator.condition": "apart", "generator.balance": True}
    states = []
    for weight in (0.0, 3.0):
        result = undisturbed(felicia(apart, schedule=schedule, exchange_every=1, weight=weight))
        assert {line["kind"] for line in lines_of(result, "site-1")} <= {"synthetic-images", "metrics"}
        states.append(gan_of(result, "site-1"))
    moved = {name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])}
    for label in (0, 1):  # the central term reaches the generators of both classes
        assert any(name.startswith(f"generator.of_class.{label}.") for name in moved)


def test_a_site_with_fewer_images_than_its_picture_has_columns(felicia, tmp_path):
    few = {"task.name": "regression", "data.source": "hand-phantom", "data.samples": 12, "optimizer.batch_size": 2}
    result = run(felicia(few, rounds=1, learner_steps=1), tmp_path / "run")
    assert result["data"]["counts"]["site-1"]["train"] < 8
    assert result["failures"] == []


def test_three_sites_and_a_wasserstein_gan(felicia, tmp_path):
    settings = {"sites.count": 3, "generator.name": "wgan-gp", "generator.critic_steps": 2}
    result = run(felicia(settings, rounds=1, weight=1.0), tmp_path / "run")
    assert result["failures"] == []
    assert set(result.metrics["diets"]) == {"site-1", "site-2", "site-3"}


def test_every_image_sent_is_seen_once_and_each_site_in_every_step():
    site = torch.tensor([0] * 6 + [1] * 6)
    shares = [_share_of_step(site, place, 3) for place in range(3)]
    assert torch.stack(shares).sum(0).tolist() == [1] * 12
    assert all(site[share].bincount().tolist() == [2, 2] for share in shares)


def test_with_privacy_images_are_covered_and_the_account_grows(felicia, undisturbed):
    private = {"privacy.on": ["generator"], "generator.labels": "even", "generator.critic_steps": 2}
    result = undisturbed(felicia(private))
    lines = [line for line in lines_of(result, "site-1") if line["kind"] == "synthetic-images"]
    assert [line["privacy"]["steps"] for line in lines] == [2, 4, 6, 8]
    assert lines[0]["privacy"]["covers"] == ["images made by the generator"]
    assert lines[-1]["privacy"]["epsilon"] > lines[0]["privacy"]["epsilon"] > 0
    assert result["privacy"]["covers"] != [EVERYTHING]  # its scores come from networks that saw real images


def test_the_result_says_what_each_training_set_is_worth_in_all_and_by_subgroup(felicia, undisturbed):
    result = undisturbed(felicia(weigh_every=1))
    assert [line["round"] for line in result["worth"]] == [1, 2]
    figures = result["worth"][-1]["sites"]["site-1"]
    assert {f"{split}_{diet}" for split in ("validation", "test") for diet in ("real", "synthetic", "augmented")} <= (
        figures.keys()
    )
    assert 0 <= figures["coverage"] <= 1
    of_site = result.metrics["diets"]["site-1"]
    assert set(of_site["real"]["subgroups"]) == {"nevus", "benign-keratosis", "melanoma", "basal-cell-carcinoma"}
    chosen = of_site["released"]
    assert chosen == ("augmented" if figures["validation_augmented"] > figures["validation_real"] else "real")
    for site in SITES:
        assert (result.folder / "sites" / site / "samples.png").stat().st_size > 1000
    released = result.metrics["across_sites"]["site-1"]
    pooled = of_site[chosen]["test"]["accuracy"]
    counts = result["data"]["counts"]
    weights = [counts[site]["test"] for site in released]
    assert pooled == pytest.approx(np.average([released[site]["accuracy"] for site in released], weights=weights))


AGES = {"task.name": "regression", "data.source": "hand-phantom"}


@pytest.mark.parametrize(("tables", "method", "words"), [
    ({**AGES, "generator.condition": "apart"}, {}, r"generator\.condition: 'apart' needs classes"),
    (AGES, {"central": "per-class"}, r"method\.central: 'per-class' needs classes.*choose 'one'"),
    (
        {"generator.condition": "none"},
        {"central": "per-class"},
        "'per-class' needs images that are made for a class",
    ),
    *(({}, {"weight": weight}, "weight") for weight in (-1.0, float("inf"), float("nan"))),
    ({"tuning.on": True}, {}, "take the table out"),
    ({"privacy.on": ["generator"]}, {}, r"generator\.labels"),
    ({"sites.count": 1}, {"share_images": True}, r"method\.share_images: there is no other site to share with"),
    ({}, {"release": "augmented-all"}, r"release 'augmented-all' needs.*set share_images = true"),
    (
        {"data.source": "brain-phantom", "task.name": "segmentation", "model.backbone": "unet"},
        {},
        "'felicia' is for classification, regression, not segmentation; choose one",
    ),
])  # fmt: skip
def test_studies_that_felicia_cannot_run_are_refused(felicia, tables, method, words):
    with pytest.raises((BadInput, ValidationError), match=words):
        felicia(tables, **method)


def test_a_generator_without_a_discriminator_is_refused(tiny):
    with pytest.raises(BadInput, match="felicia trains GANs; choose one of gan, dcgan, wgan-gp, privgan, stylegan2"):
        tiny("felicia", {"generator.name": "vqvae2"})


TRAINER: Any = SimpleNamespace(
    target=Target(classes=("dark", "bright")), device=torch.device("cpu"), precision="fp32", graphs=False
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def central(sites: int = 2, rate: float = 2e-4, **method: Any) -> CentralDiscriminator:
    settings = GENERATORS["dcgan"](width=4, latent=4, loss="log", lr=rate)
    at: Any = SimpleNamespace(generator=settings, trainer=TRAINER, seed=0)
    return CentralDiscriminator(Felicia(**method), at, (1, 1, 28, 28), sites)


def no_labels(images: Tensor) -> Tensor:
    return torch.zeros(len(images))


class Mean(nn.Module):
    """Logits of two sites from the mean of an image: the brighter, the likelier the second site's."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        mean = images.mean((1, 2, 3))
        return torch.stack([-4 * mean, 4 * mean], 1)


@pytest.mark.parametrize("towards", ["away", "other"])
def test_the_gradient_points_where_a_site_is_less_recognisable(towards):
    found = central(towards=towards)
    found.network = Mean()
    site = torch.tensor([0, 0, 1, 1])
    gradient = found.image_gradient(torch.zeros(4, 1, 2, 2), site, found.other_sites(site, rng()), no_labels(site))
    assert (gradient[:2] < 0).all()  # the first site's images must become brighter, so its gradient is negative
    assert (gradient[2:] > 0).all()


def test_it_learns_to_identify_sites_and_every_other_comes():
    found = central(central_lr=5e-3)
    images = torch.cat([torch.full((8, 1, 28, 28), -0.5), torch.full((8, 1, 28, 28), 0.5)])
    images = images + 0.1 * torch.randn(images.shape, generator=rng())
    site = torch.tensor([0] * 8 + [1] * 8)
    for _ in range(40):
        share = found.step(images, site, no_labels(images))
    assert float(share) == 1.0
    site = torch.tensor([0, 1, 2]).repeat(200)
    other = central(3, towards="other").other_sites(site, rng())
    assert (other != site).all()
    assert (torch.bincount(site * 3 + other, minlength=9) > 0).sum() == 6
    assert central(towards="other").other_sites(torch.tensor([0, 1]), rng()).tolist() == [1, 0]


@pytest.mark.parametrize(("learn", "act"), [(True, True), (True, False), (False, True), (False, False)])
def test_it_moves_where_it_learns_and_answers_where_it_acts(learn, act):
    found = central()
    before = [parameter.detach().clone() for parameter in found.network.parameters()]
    images, site = torch.randn(4, 1, 28, 28, generator=rng()), torch.tensor([0, 0, 1, 1])
    batch = ImagesOfSites(images, site, no_labels(images), turns=True)
    gradient = found.step_and_gradient(batch, site, learn=learn, act=act)
    after = list(found.network.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == learn
    assert (gradient is not None) == act
    if act:
        torch.testing.assert_close(gradient, found.image_gradient(images, site, site, no_labels(images)))


def of_classes(labels: Tensor, turns: bool) -> tuple[CentralDiscriminator, ImagesOfSites]:
    images, site = torch.randn(len(labels), 1, 28, 28, generator=rng()), torch.arange(len(labels)) // 4
    return central(central="per-class"), ImagesOfSites(images, site, labels, turns)


def test_an_image_moves_only_the_discriminator_of_its_class_in_turns_or_sorted():
    found, batch = of_classes(torch.ones(8, dtype=torch.long), turns=False)
    before = [network.head.layer.weight.detach().clone() for network in found.network.of_class]
    found.step(batch.images, batch.site, batch.labels)
    after = [network.head.layer.weight for network in found.network.of_class]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    labels = torch.arange(8) % 2
    found = []
    for turns in (True, False):
        one, batch = of_classes(labels, turns)
        found.append(one.step_and_gradient(batch, batch.site, learn=True, act=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("central", "condition", "expected"),
    [("auto", "apart", True), ("auto", "projection", False), ("one", "apart", False), ("per-class", "plane", True)],
)
def test_where_classes_are_trained_apart_each_has_a_central_discriminator(central, condition, expected):
    generator: Any = GENERATORS["dcgan"](condition=condition)
    assert Felicia(central=central).is_per_class(generator) == expected
