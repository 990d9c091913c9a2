"""FedPFT, and the moments of features."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedpft import FedPFT, Mixture, _is_mixture, _received, fit
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import LIMIT, MOST_IMAGES, RESOLUTION, TARGET_RESOLUTION, OneRound, moments
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.training.optimizer import Optimizer

ROWS = torch.tensor([[0.0, 1.0], [2.0, 1.0], [10.0, 5.0], [12.0, 7.0]], dtype=torch.float64)


def test_it_learns_and_warns_of_small_classes(tiny_run, monkeypatch):
    made, make = [], Optimizer.make
    monkeypatch.setattr(Optimizer, "make", lambda self, of, number: made.append(number) or make(self, of, number))
    result = tiny_run({"name": "fedpft", "components": 2, "passes": 10}, optimizer={"name": "adam", "lr": 0.01})
    assert made == list(range(1, 11)), "one pass after the other, and no more"
    assert result.metrics["test"]["accuracy"] > 0.5
    assert set(result["communication"]["by_kind"]) >= {"statistics"}
    assert any("fewer than 10 images of some class" in one for one in result["warnings"])


@pytest.mark.parametrize(
    ("counts", "warned"), [([9, 0], True), ([1, 10], True), ([10, 10], False), ([0, 10], False), ([10, 9], True)]
)
def test_a_class_of_one_to_nine_images_is_warned_of(monkeypatch, counts, warned):
    """As many features are drawn as the site has images, around the mean of their class."""
    warnings, tensors = [], {}
    for label, count in enumerate(counts):
        if count:
            far = {"means": torch.full((1, 2), 100.0 * label), "variances": torch.full((1, 2), 0.01)}
            parts = {"shares": torch.ones(1), **far}
            tensors |= {f"{label}/{name}": part for name, part in parts.items()}
    reply = Reply("north", (Parcel("statistics", tensors, {"counts": counts}),))
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    monkeypatch.setattr("polyclinic.methods.fedpft.head_shape", lambda federation: (2, 2))
    federation = SimpleNamespace(ask_all=lambda operation: [reply], warn=warnings.append, rng=torch_rng)
    rows, labels = FedPFT().draw(federation)
    assert bool(warnings) is warned
    assert all(one.startswith("site 'north': it has fewer than 10 images of some class") for one in warnings)
    assert labels.tolist() == [0] * counts[0] + [1] * counts[1]
    assert (rows[:, 0] / 100).round().tolist() == labels.tolist()


@pytest.mark.parametrize(("samples", "fits"), [(7, True), (8, False), (None, False)])
def test_the_images_of_all_classes_are_as_many_as_the_site_says(monkeypatch, samples, fits):
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    monkeypatch.setattr("polyclinic.methods.fedpft.head_shape", lambda federation: (2, 2))
    parcel = Parcel("statistics", mixture(torch.ones(1), 2), {"counts": [7, 0], "samples": samples})
    call, reply = SimpleNamespace(operation="give_mixtures"), Reply("north", (parcel,))
    if fits:
        FedPFT().check_reply(None, call, reply)
    else:
        with pytest.raises(ParcelRejected, match="are not 'samples' together"):
            FedPFT().check_reply(None, call, reply)
        FedPFT().check_reply(None, SimpleNamespace(operation="other"), reply)


def mixture(shares, width):
    return {"0/shares": shares, "0/means": torch.ones(1, width), "0/variances": torch.ones(1, width)}


@pytest.mark.parametrize(("tensors", "metadata"), [
    ({}, {}),
    ({}, {"counts": [1]}),
    *(({}, {"counts": [count, 0]}) for count in (True, -1, 1.0, "1")),
    ({"0/shares": torch.ones(1)}, {"counts": [1, 0]}),
    (mixture(torch.ones(1), 3), {"counts": [1, 0]}),
    (mixture(-torch.ones(1), 2), {"counts": [1, 0]}),
])  # fmt: skip
def test_what_a_site_sends_is_checked(tensors, metadata):
    with pytest.raises(WorkFailed, match="site 'north' sent no"):
        list(_received(Parcel("statistics", tensors, metadata), "north", 2, 2))


def test_what_a_mixture_is_and_how_dense():
    half, ones = torch.full((2,), 0.5), torch.ones(2, 3)
    assert _is_mixture(Mixture(half, ones, ones / 2), 3)
    assert _is_mixture(Mixture(torch.tensor([0.0, 1.0]), ones, ones), 3)
    assert not _is_mixture(Mixture(half, ones, 0 * ones), 3)
    assert not _is_mixture(Mixture(torch.ones(1, 1), ones[:1], ones[:1]), 3), "shares are a list"
    assert not _is_mixture(Mixture(half[:0], ones[:0], ones[:0]), 3)
    assert not _is_mixture(Mixture(half, ones, ones), 2)
    dense = Mixture(torch.tensor([0.25, 0.75]).double(), ROWS[:2], torch.tensor([[1.0, 2.0], [4.0, 1.0]]).double())
    wanted = Normal(dense.means, dense.variances.sqrt()).log_prob(ROWS[:, None]).sum(2) + dense.shares.log()
    assert torch.allclose(dense.log_densities(ROWS), wanted)
    found = fit(ROWS, 1, 5, torch_rng("fedpft"))
    assert found.means.tolist() == [[6.0, 3.5]]
    assert found.variances.flatten().tolist() == pytest.approx([26.0, 6.75])
    sent = {name.replace("0/", "1/"): tensor for name, tensor in mixture(torch.ones(1), 2).items()}
    [(label, count, found)] = _received(Parcel("statistics", sent, {"counts": [0, 4]}), "north", 2, 2)
    assert (label, count) == (1, 4)
    assert found.means.tolist() == [[1.0, 1.0]]


def steps_by_hand(rows, means, iterations):
    """Expectation-maximisation, one row and one component after the other."""
    count = len(rows)
    variance = rows.var(0)
    shares, variances = np.full(len(means), 1 / len(means)), np.stack([variance] * len(means))
    for _ in range(iterations):
        weights = np.zeros((count, len(means)))
        for place, row in enumerate(rows):
            densities = [
                share * np.prod(np.exp(-((row - m) ** 2) / (2 * v)) / np.sqrt(2 * np.pi * v))
                for share, m, v in zip(shares, means, variances, strict=True)
            ]
            weights[place] = np.array(densities) / sum(densities)
        sizes = weights.sum(0)
        means = np.stack([(w[:, None] * rows).sum(0) / w.sum() for w in weights.T])
        own = np.stack([(w[:, None] * (rows - m) ** 2).sum(0) for w, m in zip(weights.T, means, strict=True)])
        variances = (own + 2 * variance) / (sizes[:, None] + 2)  # two images' worth of the variance of all
        shares = sizes / count
    return shares, means, variances


def test_a_mixture_is_fitted_step_by_step():
    rows = torch.randn(14, 2, generator=torch_rng("rows"), dtype=torch.float64) + torch.arange(14)[:, None] % 2 * 3
    start = rows[torch.randperm(14, generator=torch_rng("start"))[:3]]
    found = fit(rows, 3, 4, torch_rng("start"))
    wanted = steps_by_hand(rows.numpy(), start.numpy(), 4)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6)


@pytest.mark.parametrize("components", [1, 2])
def test_a_number_that_never_varies_keeps_a_variance(components):
    """A deviation of about four steps of rounding; without it a density would divide by zero."""
    rows = torch.tensor([[2.0, float(place)] for place in range(20)], dtype=torch.float64)
    found = fit(rows, components, 3, torch_rng("flat"))
    assert ((found.variances[:, 0].sqrt() / RESOLUTION).round() == 4).all()
    assert (found.variances[:, 1] > 1).all()


def mixtures_of(monkeypatch, counts, least, components=3):
    """What a site sends: features of classes with so many images, in groups of ten that lie far apart."""
    rows = [np.linspace(0, 1, count)[:, None] + 50 * (np.arange(count) // 10)[:, None] for count in counts]
    labels = np.repeat(np.arange(len(counts)), counts)
    monkeypatch.setattr(FedPFT, "features", lambda self, site: np.concatenate(rows))
    monkeypatch.setattr("polyclinic.methods.fedpft.check_classes", lambda site: None)
    target = SimpleNamespace(classes=tuple("abcd"[: len(counts)]))
    site = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(labels=labels)),
        trainer=SimpleNamespace(target=target),
        min_cohort=least,
        rng=torch_rng,
    )
    return FedPFT(components=components, iterations=20).give_mixtures(site)


def test_a_component_has_ten_images_or_as_many_as_the_policy_wants(monkeypatch):
    sent = mixtures_of(monkeypatch, [9, 20, 59, 0], least=0)
    assert sent.metadata == {"samples": 88, "counts": [9, 20, 59, 0]}
    assert [len(sent.tensors[f"{label}/shares"]) for label in (0, 1, 2)] == [1, 2, 3]
    assert not any(name.startswith("3/") for name in sent.tensors)
    coarse = mixtures_of(monkeypatch, [9, 20, 59, 0], least=20)
    assert [len(coarse.tensors[f"{label}/shares"]) for label in (0, 1, 2)] == [1, 1, 2]


def test_no_component_is_of_fewer_images_than_the_policy_wants(monkeypatch):
    for seed in range(4):
        sent = mixtures_of(monkeypatch, [39 + seed, 57], least=12, components=4)
        for label, count in enumerate((39 + seed, 57)):
            shares = sent.tensors[f"{label}/shares"]
            assert len(shares) == 1 or float(shares.min()) * count >= 12 - 1e-3


def test_rows_of_a_mixture_are_drawn_around_its_means():
    mixture = Mixture(
        torch.tensor([0.25, 0.75]).double(),
        torch.tensor([[0.0, 10.0], [100.0, 200.0]]).double(),
        torch.tensor([[1.0, 4.0], [9.0, 16.0]]).double(),
    )
    drawn, rng = mixture.sample(6, torch_rng("rows")), torch_rng("rows")
    chosen = torch.multinomial(mixture.shares, 6, replacement=True, generator=rng)
    noise = torch.randn(6, 2, generator=rng, dtype=torch.float64)
    for row, place, own in zip(drawn, chosen.tolist(), noise, strict=True):
        mean, deviation = ([0.0, 10.0], [1.0, 2.0]) if place == 0 else ([100.0, 200.0], [3.0, 4.0])
        assert row.tolist() == pytest.approx([m + d * float(e) for m, d, e in zip(mean, deviation, own, strict=True)])


FEATURES = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
TARGETS = torch.tensor([[1.0], [-0.5]])


def test_sums_by_hand_and_of_one_class():
    found = one_round.moments(FEATURES, TARGETS)
    unit = round(1 / RESOLUTION)
    assert found.count == 2
    assert found.width == 2
    # the upper triangle of (1, f1, f2) times itself: 2, 1.5, 1, 1.25, -0.5, 13
    assert found.products.tolist() == [2, 1.5 * unit, unit, 1.25 * unit**2, -0.5 * unit**2, 13 * unit**2]
    goal = round(1 / TARGET_RESOLUTION)
    assert found.cross.flatten().tolist() == [0.5 * goal, 0.75 * unit * goal, -3.5 * unit * goal]
    assert found.squares.tolist() == [1.25 * goal**2]
    matrix, cross, squares = found.in_units()
    assert matrix.tolist() == [[2, 1.5, 1], [1.5, 1.25, -0.5], [1, -0.5, 13]]
    assert cross.flatten().tolist() == [0.5, 0.75, -3.5]
    assert squares.tolist() == [1.25]
    first, triangle = one_round.sums_and_products(FEATURES)
    again, squares = one_round.sums_and_squares(FEATURES)
    assert torch.equal(first, again)
    assert torch.equal(one_round.full(triangle, 2).diag(), squares)
    assert torch.equal(one_round.upper(one_round.full(triangle, 2)), triangle)
    whole = one_round.whole_features(torch.tensor([0.3 * RESOLUTION, 1e9, -1e9]))
    assert (whole * RESOLUTION).tolist() == [0, LIMIT, -LIMIT]
    assert MOST_IMAGES * (LIMIT / RESOLUTION) ** 2 < 2**63
    assert one_round.PIECE * (LIMIT / RESOLUTION) ** 2 < 2**53  # of one product, in float64


def test_any_partition_and_order_gives_the_same_sums():
    rng = numpy_rng("moments")
    features = (20 * rng.standard_normal((5000, 6))).astype(np.float32)
    targets = torch.from_numpy(rng.uniform(-1, 1, (5000, 2)))
    whole = one_round.moments(features, targets).tensors()
    order = rng.permutation(5000)
    cuts = np.sort(rng.integers(0, 5001, 4))
    parts = [one_round.moments(features[p], targets[p]) for p in np.split(order, [1, *cuts]) if len(p)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert all(torch.equal(whole[name], tensor) for name, tensor in total.tensors().items())


def test_moments_that_a_site_sends_are_checked():
    sent = one_round.moments(FEATURES, TARGETS).tensors()
    assert one_round.checked(sent, "north", 2, 1).count == 2
    none = sent | {"products": torch.zeros_like(sent["products"])}
    for wrong in (sent | {"cross": sent["cross"].double()}, sent | {"more": sent["cross"]}, {}, none):
        with pytest.raises(WorkFailed, match="site 'north'"):
            one_round.checked(wrong, "north", 2, 1)
    with pytest.raises(WorkFailed, match="site 'north' sent sums of another form"):
        one_round.checked(sent, "north", 3, 1)
    with pytest.raises(WorkFailed, match="sums are of 2 images, and the limit is 1"):
        one_round.checked(sent, "north", 2, 1, most=1)
    with pytest.raises(WorkFailed, match="can overflow"):
        one_round.check_count(MOST_IMAGES + 1)


@pytest.mark.parametrize(("name", "place", "lie"), [
    ("products", 3, -1),  # the square of the first feature
    ("products", 3, 2 * 2**38 + 1),
    ("products", 1, 2**40),
    ("products", 4, -(2**63)),
    ("squares", 0, -1),
    ("squares", 0, 2 * 2**34 + 1),
    ("cross", 1, 2**62),
    ("cross", 0, 3 * 2**15),
])  # fmt: skip
def test_sums_that_no_images_have_are_refused(name, place, lie):
    sent = {key: tensor.clone() for key, tensor in one_round.moments(FEATURES, TARGETS).tensors().items()}
    sent[name].view(-1)[place] = lie
    with pytest.raises(WorkFailed, match="site 'north' sent sums that no 2 images have"):
        one_round.checked(sent, "north", 2, 1)


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_the_largest_features_and_targets_pass(count):
    signs = np.where(numpy_rng("signs").random((count, 3)) < 0.5, -1e9, 1e9).astype(np.float32)
    sent = one_round.moments(signs, torch.full((count, 2), -100.0)).tensors()
    assert one_round.checked(sent, "north", 3, 2).count == count


def test_the_counts_of_classes_are_read_from_the_sums_of_targets():
    """A target is 1 for its class: site a has 12 and 9 images of two classes, site b 10 and 11."""
    warned = []

    def sent(first, second):
        goals = torch.tensor([[1.0, 0.0]] * first + [[0.0, 1.0]] * second)
        features = np.linspace(-1, 1, 2 * len(goals), dtype=np.float32).reshape(-1, 2)
        return (Parcel("statistics", moments(features, goals).tensors()),)

    model = SimpleNamespace(encoder_class=SimpleNamespace(width=2), outputs=2)
    trainer = SimpleNamespace(model=model, task=SimpleNamespace(like="classification"))
    federation = SimpleNamespace(
        trainer=trainer,
        ask_all=lambda operation: [Reply("a", sent(12, 9)), Reply("b", sent(10, 11))],
        sums=SimpleNamespace(settings=SimpleNamespace(sum="float")),
        warn=warned.append,
    )
    method = SimpleNamespace(width=lambda own: 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_round, "Encoded", SimpleNamespace)
        found = OneRound.collect_each(method, federation)
        assert {site: sums.count for site, sums in found.items()} == {"a": 21, "b": 21}
        assert [words.split(":")[0] for words in warned] == ["site 'a'"]
        trainer.task.like = "regression"
        OneRound.collect_each(method, federation)
        assert len(warned) == 1


def encoder_of(width, outputs):
    model = SimpleNamespace(encoder_class=SimpleNamespace(width=width), outputs=outputs)
    return SimpleNamespace(trainer=SimpleNamespace(model=model))


@pytest.mark.parametrize(("numbers", "width"), [(None, 8), (3, 3), (8, 8), (20, 8)])
def test_sums_are_about_all_features_or_so_many_numbers(monkeypatch, numbers, width):
    monkeypatch.setattr(one_round, "Encoded", SimpleNamespace)
    assert OneRound.width(SimpleNamespace(numbers=numbers), encoder_of(8, 2)) == width
    assert one_round.head_shape(encoder_of(8, 2)) == (8, 2)


def test_a_head_on_projected_numbers_is_one_on_features(monkeypatch):
    """Offset first; a slope of a number is one of every feature, with its sign."""
    monkeypatch.setattr(one_round, "Encoded", SimpleNamespace)
    head = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).double()
    found = OneRound.linear_head(SimpleNamespace(numbers=None), encoder_of(2, 2), head)
    assert found["fc.bias"].tolist() == [1.0, 2.0]
    assert found["fc.weight"].tolist() == [[3.0, 5.0], [4.0, 6.0]]
    signs = one_round.projection(4, 2)
    found = OneRound.linear_head(SimpleNamespace(numbers=2), encoder_of(4, 2), head)
    features = torch.tensor([[0.5, -1.0, 2.0, 0.25]]).double()
    wanted = features @ signs @ head[1:] + head[0]
    said = features @ found["fc.weight"].double().T + found["fc.bias"]
    assert torch.allclose(said, wanted)


def test_a_projection_of_many_rows_is_that_of_each(monkeypatch):
    rows = np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3)
    signs = torch.tensor([[0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]]).double()
    whole = one_round.project(rows, signs)
    monkeypatch.setattr(one_round, "PIECE", 2)
    np.testing.assert_array_equal(one_round.project(rows, signs), whole)
