"""Membership inference: the measure by hand and against a library; attacks on models that overfit or did not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.membership import (
    DiscriminatorScore,
    LossThreshold,
    Memberships,
    NearestSynthetic,
    ShadowModels,
    lira,
    log_odds,
    shadow_memberships,
)
from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics.perceptual import Pixels
from polyclinic.metrics.roc import auc_interval, separation
from polyclinic.randomness import numpy_rng, torch_rng


def images(count: int, name: str, size: int = 12) -> Tensor:
    return noise_images(count, 1, size, torch_rng("membership", name))


def labels(count: int, name: str) -> Tensor:
    return torch.randint(2, (count,), generator=torch_rng("membership", "labels", name))


def test_hits_at_few_false_alarms_and_a_perfect_separation_by_hand():
    others = np.arange(200.0)  # 2 may be false alarms: a threshold of 197 lets 198 and 199 through
    members = np.array([197.0, 197.5, 150.0, 300.0])
    assert separation(members, others).hits == 0.5
    assert separation(members, others[:99]).hits == 1.0
    found = separation(np.arange(10.0) + 100, np.arange(20.0))
    assert found.auc == 1
    assert found.auc_low == pytest.approx(0.7, abs=0.001)
    assert separation(np.arange(10.0) + 100, np.arange(20.0), confidence=0.99).auc_low == pytest.approx(0.54, abs=0.001)
    assert found.significant
    assert not separation(np.array([5.0, 6.0]), np.array([1.0, 2.0])).significant


def test_the_interval_covers_the_truth():
    rng = numpy_rng("membership", "coverage")
    truth = 0.714  # of two Gaussians 0.8 apart
    inside = 0
    for _ in range(300):
        _, low, high = auc_interval(rng.normal(0.8, 1, 40), rng.normal(0, 1, 60))
        inside += low <= truth <= high
    assert 0.91 <= inside / 300 <= 0.99


@pytest.mark.parametrize("scores", [np.array([1.0]), np.array([[1.0, 2.0]]), np.array([1.0, np.nan])])
def test_scores_that_are_none_are_refused(scores: np.ndarray):
    with pytest.raises(BadInput, match="membership"):
        separation(scores, np.array([1.0, 2.0]))


def test_a_generator_that_mirrors_its_training_images_is_found_and_one_of_others_not():
    members, others = images(60, "members"), images(60, "others")
    noise = torch.randn(members.shape, generator=torch_rng("membership", "noise"))
    synthetic = (members.flip(-1) + 0.05 * noise).clamp(0, 1)
    found = NearestSynthetic().run(synthetic, members, others, Pixels())
    assert found.separation.auc > 0.99
    assert found.separation.hits > 0.9
    assert found.verdict().leak
    assert found.features == "pixels"
    unturned = NearestSynthetic(turn=False).run(synthetic, members, others, Pixels())
    assert unturned.separation.auc < 0.75
    members, others, synthetic = images(80, "members"), images(80, "others"), images(100, "synthetic")
    found = NearestSynthetic().run(synthetic, members, others, Pixels())
    assert not found.verdict().leak
    assert str(found.verdict()).startswith("Nothing found: members cannot be told")


def test_calibration_takes_away_what_is_close_to_anything():
    """Images of little contrast are close to anything, of much contrast to nothing; that hides a weak leak."""
    contrast = torch.linspace(0.2, 1.5, 60)[:, None, None, None]
    members, others, reference = (
        (0.5 + contrast * (images(60, name) - 0.5)).clamp(0, 1) for name in ("members", "others", "reference")
    )
    synthetic = 0.7 * members + 0.3 * (0.5 + contrast * (images(60, "blend") - 0.5)).clamp(0, 1)
    plain = NearestSynthetic().run(synthetic, members, others, Pixels())
    calibrated = NearestSynthetic().run(synthetic, members, others, Pixels(), reference=reference)
    assert plain.separation.auc < 0.8
    assert calibrated.separation.auc > plain.separation.auc + 0.1


def test_a_discriminator_that_knows_its_images_is_found():
    members, others = images(40, "members"), images(40, "others")

    def overfitted(candidates: Tensor, _: Tensor) -> Tensor:
        return -torch.cdist(candidates.flatten(1), members.flatten(1)).amin(1, keepdim=True)

    y = torch.zeros(40)
    found = DiscriminatorScore().run(overfitted, members, others, member_labels=y, other_labels=y)
    assert found.separation.auc == 1
    blind = DiscriminatorScore().run(lambda x, _: x.new_zeros(len(x)), members, others, member_labels=y, other_labels=y)
    assert blind.separation.auc == 0.5
    assert not blind.verdict().leak


def fitted(x: Tensor, y: Tensor, seed: int, steps: int = 150) -> nn.Module:
    """A linear model with more weights than images: it learns random labels by heart."""
    rng = torch_rng("membership", "model", seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2))
    nn.init.normal_(model[1].weight, 0, 0.01, generator=rng)
    nn.init.zeros_(model[1].bias)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x - 0.5), y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def victim() -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """A model fitted to its members' random labels, the members and the others."""
    x, z, y, w = images(40, "x"), images(40, "z"), labels(40, "x"), labels(40, "z")
    return fitted(x, y, 0), x, z, y, w


def test_loss_threshold_finds_an_overfitted_model(victim: tuple):
    model, x, z, y, w = victim

    def loss(candidates: Tensor, theirs: Tensor) -> Tensor:
        return F.cross_entropy(model(candidates - 0.5), theirs, reduction="none")

    found = LossThreshold().run(loss, x, z, member_labels=y, other_labels=w)
    assert found.separation.auc > 0.7  # 0.75 to 0.9 with other images
    assert found.verdict().leak
    untrained = fitted(x, y, 0, steps=0)
    nothing = LossThreshold().run(
        lambda a, b: F.cross_entropy(untrained(a - 0.5), b, reduction="none"), x, z, member_labels=y, other_labels=w
    )
    assert not nothing.verdict().leak


def half_easy(name: str) -> tuple[Tensor, Tensor]:
    """Images with labels: half of them bright or dark as their label says, half as it comes. The easy ones have a low
    loss whether they were trained on or not, which a threshold takes for membership."""
    x, y = images(40, name), labels(40, name)
    x[:20] = 0.5 + 0.2 * (x[:20] - 0.5) + 0.4 * (y[:20, None, None, None] - 0.5)
    return x.clamp(0, 1), y


def test_shadow_models_beat_the_loss_threshold_where_some_images_are_easy():
    (x, y), (z, w) = half_easy("x0"), half_easy("z0")
    model = fitted(x, y, 0)
    pool, classes = torch.cat([x, z]), torch.cat([y, w])

    def says(network: nn.Module):
        return lambda candidates, theirs: log_odds(network(candidates - 0.5), theirs)

    def train(index: Tensor, seed: int):
        return says(fitted(pool[index], classes[index], seed))

    loss = LossThreshold().run(
        lambda a, b: F.cross_entropy(model(a - 0.5), b, reduction="none"), x, z, member_labels=y, other_labels=w
    )
    assert not loss.verdict().leak
    for online, better in ((True, 0.1), (False, 0.02)):
        attack = ShadowModels(count=8, online=online)
        found = attack.run(says(model), train, x, z, member_labels=y, other_labels=w)
        assert found.separation.auc > loss.separation.auc + better
        assert found.verdict().leak


@given(count=st.sampled_from([4, 6, 10]), pool=st.integers(4, 40))
@settings(max_examples=20)
def test_every_image_is_inside_half_of_the_shadow_models(count: int, pool: int):
    inside = shadow_memberships(count, pool, seed=1)
    assert (inside.sum(0) == count // 2).all()
    assert torch.equal(inside[1::2], ~inside[::2])  # the models of a pair share the pool
    assert torch.equal(inside, shadow_memberships(count, pool, seed=1))


def test_likelihood_ratio_and_log_odds_by_hand():
    shadows = torch.tensor([[3.0], [5.0], [0.0], [2.0]])
    inside = torch.tensor([[True], [True], [False], [False]])
    # inside: mean 4, variance 2; outside: mean 1, variance 2
    expected = ((2.5 - 1) ** 2 - (2.5 - 4) ** 2) / 4
    assert lira(torch.tensor([2.5]), shadows, inside)[0] == pytest.approx(expected)
    assert lira(torch.tensor([4.0]), shadows, inside)[0] == pytest.approx(9 / 4)
    assert lira(torch.tensor([4.0]), shadows, inside, online=False)[0] == pytest.approx(3 / 2**0.5)
    # inside: mean 4, variance 8; outside: mean 1, variance 2; so the densities' own factors count, too
    wider = torch.tensor([[2.0], [6.0], [0.0], [2.0]])
    density = [stats.norm(mean, variance**0.5).logpdf(3.5) for mean, variance in ((4, 8), (1, 2))]
    assert lira(torch.tensor([3.5]), wider, inside)[0] == pytest.approx(density[0] - density[1])
    found = log_odds(torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([1]))
    p = np.exp(3) / (np.exp(1) + np.exp(3) + 1)
    assert float(found) == pytest.approx(np.log(p / (1 - p)), rel=1e-6)


def test_membership_counts_at_the_level_asked_for_and_scores_are_one_for_each_image():
    x, y = images(4, "x"), torch.zeros(4)
    with pytest.raises(BadInput, match="one number for each"):
        LossThreshold().run(lambda a, _: a.mean(), x, x, member_labels=y, other_labels=y)
    with pytest.raises(BadInput, match="labels for 8 images"):
        LossThreshold().run(lambda a, _: a.mean((1, 2, 3)), x, x, member_labels=y, other_labels=y[:2])
    rng = torch.Generator().manual_seed(0)
    found = Memberships(torch.randn(60, generator=rng) + 0.55, torch.randn(60, generator=rng), "")
    assert found.verdict().leak
    assert not found.verdict(1e-6).leak


def test_no_attack_knows_who_is_a_member():
    """Whatever is called a member, and wherever it stands: every image keeps its score."""
    x, z, y, w = images(12, "x"), images(12, "z"), labels(12, "x"), labels(12, "z")

    def brightness(candidates: Tensor, theirs: Tensor) -> Tensor:
        return candidates.mean((1, 2, 3)) + theirs

    def fitted_to(pool: Tensor, classes: Tensor):
        """A shadow model that knows the mean of what it saw."""
        return lambda index, _: (
            lambda a, b: (a - pool[index].mean(0)).square().mean((1, 2, 3)) + b * classes[index].sum()
        )

    def scores(attack, members: Tensor, others: Tensor, of_members: Tensor, of_others: Tensor):
        if isinstance(attack, NearestSynthetic):
            return attack.run(images(30, "synthetic"), members, others, Pixels())
        pool, classes = torch.cat([members, others]), torch.cat([of_members, of_others])
        more = (fitted_to(pool, classes),) if isinstance(attack, ShadowModels) else ()
        known = {"member_labels": of_members, "other_labels": of_others}
        return attack.run(brightness, *more, members, others, **known)

    shadows = (ShadowModels(count=4), ShadowModels(count=4, online=False))
    for attack in (NearestSynthetic(), DiscriminatorScore(), LossThreshold(), *shadows):
        first, swapped = scores(attack, x, z, y, w), scores(attack, z.flip(0), x, w.flip(0), y)
        torch.testing.assert_close(first.members, swapped.others, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first.others, swapped.members.flip(0), rtol=1e-4, atol=1e-5)
        assert first.separation.auc == pytest.approx(1 - swapped.separation.auc)
