"""Gaussian heads: densities, class sums and shrinkage against plain arithmetic, and what does not change them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import MultivariateNormal, Normal
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, GateRefusedData, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import gaussian_heads
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import RESOLUTION
from polyclinic.models.encoders import QuadraticHead
from polyclinic.randomness import numpy_rng
from polyclinic.runner.predict.predict import load_predictor

RNG = numpy_rng("gaussian heads")
LABELS = torch.tensor([0] * 300 + [1] * 100)
ROWS = (RNG.standard_normal((400, 3)) * np.where(LABELS[:, None] == 1, [2, 1, 1], [1, 1, 3]) + 5).astype(np.float32)
ROWS[LABELS == 1] += [1, 2, 0]
SHARES = torch.tensor([0.75, 0.25], dtype=torch.float64).log()


def logits_of(weights, rows, diagonal):
    head = QuadraticHead(3, 2, diagonal=diagonal)
    head.load_state_dict({name.removeprefix("fc."): tensor for name, tensor in weights.items()})
    return head(torch.from_numpy(rows)).detach().double()


def same_probabilities(logits, wanted):
    assert torch.allclose(logits.softmax(1), wanted.softmax(1), atol=0.002)


def test_naive_bayes_by_hand():
    sums = class_sums("naive-bayes", ROWS, LABELS)
    found = logits_of(gaussian_heads.naive_bayes(*sums.values()), ROWS, diagonal=True)
    rows = torch.from_numpy(ROWS).double()
    parts = [rows[label == LABELS] for label in (0, 1)]
    variances = [own.var(0, correction=0) for own in parts]
    pooled = 0.75 * variances[0] + 0.25 * variances[1]
    wanted = []
    for own, variance in zip(parts, variances, strict=True):
        spread = ((len(own) * variance + 2 * pooled) / (len(own) + 2)).sqrt()
        wanted.append(Normal(own.mean(0), spread).log_prob(rows).sum(1))
    same_probabilities(found, torch.stack(wanted, 1) + SHARES)


@pytest.mark.parametrize("priors", [True, False])
def test_linear_discriminant_by_hand(monkeypatch, priors):
    monkeypatch.setattr(gaussian_heads, "shrunk", lambda covariance, count: covariance)
    sums = one_round.moments(ROWS, F.one_hot(LABELS).double())
    head = gaussian_heads.discriminant(*gaussian_heads.class_moments(sums), priors=priors)
    rows = torch.from_numpy(ROWS).double()
    means = torch.stack([rows[label == LABELS].mean(0) for label in (0, 1)])
    within = torch.cov((rows - means[LABELS]).T, correction=0)
    wanted = torch.stack([MultivariateNormal(mean, within).log_prob(rows) for mean in means], 1)
    same_probabilities(head[0] + rows @ head[1:], wanted + (SHARES if priors else 0))


@pytest.mark.parametrize("rule", ["lda", "fisher", "naive-bayes", "qda"])
def test_every_rule_runs_and_does_not_depend_on_the_partition(tiny_run, rule):
    found = [
        tiny_run({"name": "gaussian-heads", "rule": rule}, sites={"partition": "iid", "count": count})
        for count in (1, 3)
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0].metrics["test"]["accuracy"] > 0.5
    told = [any("sums over a class of fewer than 10 images" in one for one in run["warnings"]) for run in found]
    assert told == [False, True]  # 24 images of each class at one site, or 8 at each of three


def test_a_projection_is_for_linear_heads(study_of):
    with pytest.raises(BadInput, match=r"method: numbers: a projection is for rule lda and fisher, not qda"):
        study_of({"name": "gaussian-heads", "rule": "qda", "numbers": 8})


def test_a_quadratic_head_predicts_from_its_file(tiny_run, tmp_path):
    result = tiny_run({"name": "gaussian-heads", "rule": "naive-bayes"})
    Image.fromarray(np.full((28, 28, 3), 90, np.uint8)).save(tmp_path / "scan.png")
    [prediction] = load_predictor(result.folder).predict([tmp_path / "scan.png"])
    shares = [value for value in prediction.values.values() if isinstance(value, float)]
    assert sum(shares) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("rule", ["naive-bayes", "qda"])
@pytest.mark.parametrize(
    ("name", "place", "lie"),
    [("counts", 0, 2**24), ("counts", 0, 2**62), ("counts", 0, 3), ("first", 1, 2**40), ("second", 0, -1)],
)
def test_class_sums_that_no_images_have_are_refused(rule, name, place, lie):
    """Of three sites; the second class has no image."""
    parts = [numpy_rng("lies").standard_normal((count, 2)).astype(np.float32) for count in (5, 0)]
    sent = pairs_of(rule, parts)
    check_sums(rule, sent, 5)
    wrong = sent | {name: sent[name].clone()}
    wrong[name].view(-1)[place] = lie
    with pytest.raises(ParcelRejected, match="statistics: "):
        check_sums(rule, wrong, 5)
    for count in (0, 2**24):  # whatever `samples` says
        with pytest.raises(ParcelRejected, match="of no image or of more than"):
            check_sums(
                rule, {name: 0 * one for name, one in sent.items()} | {"counts": torch.tensor([count, 0])}, count
            )


FEW_LABELS = torch.tensor([0] * 30 + [1] * 12)
FEW_ROWS = numpy_rng("rules").standard_normal((42, 3)).astype(np.float32) + FEW_LABELS[:, None].numpy() * [1, 0.5, 0]
FEW_ROWS[FEW_LABELS == 1] *= [2, 1, 0.5]


def probabilities(rule, rows):
    """What a rule says about the images that it is made of."""
    rows = np.asarray(rows, np.float32)
    if rule == "lda":
        sums = one_round.moments(rows, F.one_hot(FEW_LABELS).double())
        head = gaussian_heads.discriminant(*gaussian_heads.class_moments(sums), priors=True)
        return (head[0] + torch.from_numpy(rows).double() @ head[1:]).softmax(1)
    make = gaussian_heads.naive_bayes if rule == "naive-bayes" else gaussian_heads.quadratic
    weights = make(*class_sums(rule, rows, FEW_LABELS).values())
    return logits_of(weights, rows, diagonal=rule == "naive-bayes").softmax(1)


@pytest.mark.parametrize("rule", ["lda", "naive-bayes", "qda"])
def test_the_unit_and_the_origin_of_a_feature_change_nothing(rule):
    """Millimetres or inches, with shrinkage; up to the rounding of features."""
    found, other = probabilities(rule, FEW_ROWS), probabilities(rule, FEW_ROWS * [8, 1, 2] + [0, 3, -2])
    assert torch.allclose(found, other, atol=0.004)


def test_shrinkage_by_hand():
    """Towards features without correlation in units of all classes, and then towards what the classes share."""
    parts = [FEW_ROWS[label == FEW_LABELS].astype(np.float64) for label in (0, 1)]
    covariances = [torch.from_numpy(np.cov(own.T, bias=True)) for own in parts]
    pooled = (30 * covariances[0] + 12 * covariances[1]) / 42
    scale = pooled.diag().sqrt()
    values, vectors = torch.linalg.eigh(gaussian_heads.shrunk(pooled / torch.outer(scale, scale), 42))
    whiten = vectors @ torch.diag(values**-0.5) @ vectors.T @ torch.diag(1 / scale)
    rows = torch.from_numpy(FEW_ROWS).double() @ whiten.T
    wanted = []
    for own, covariance, share in zip(parts, covariances, (30 / 42, 12 / 42), strict=True):
        mean = whiten @ torch.from_numpy(own.mean(0))
        spread = gaussian_heads.shrunk(whiten @ covariance @ whiten.T, len(own))
        wanted.append(MultivariateNormal(mean, spread).log_prob(rows) + np.log(share))
    assert torch.allclose(probabilities("qda", FEW_ROWS), torch.stack(wanted, 1).softmax(1), atol=0.002)
    covariance = torch.diag(torch.tensor([1.0, 1.0, 2.0, 4.0], dtype=torch.float64))
    # OAS with p = 4: trace 8, of the square 22; the share is (22 / 2 + 64) / ((31 + 1 - 1 / 2) * (22 - 64 / 4))
    share = 75 / 189
    wanted = [(1 - share) * own + share * 2 for own in (1, 1, 2, 4)]
    assert gaussian_heads.shrunk(covariance, 31).diag().tolist() == pytest.approx(wanted)
    assert gaussian_heads.shrunk(covariance, 5).tolist() == (2 * torch.eye(4)).tolist(), "all of it"
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    assert gaussian_heads.shrunk(nothing, 9).diag().tolist() == [gaussian_heads.LEAST_VARIANCE] * 2


def test_classes_of_one_image_and_of_none_by_hand():
    """One feature: class 0 has 1 and 3, class 1 has 7, and class 2 no image."""
    counts = torch.tensor([2, 1, 0])
    first = torch.tensor([[4.0], [7.0], [0.0]]) / RESOLUTION
    second = torch.tensor([[10.0], [49.0], [0.0]]) / RESOLUTION**2
    weights = gaussian_heads.naive_bayes(counts, first, second)
    pooled = 2 / 3  # of the three images: the class without one does not count
    variances = [(2 + 2 * pooled) / 4, 2 * pooled / 3]
    center = float(weights["fc.center"])
    assert center == pytest.approx(11 / 3)
    means = [2 - center, 7 - center]
    assert weights["fc.weight"][:2].flatten().tolist() == pytest.approx(
        [m / v for m, v in zip(means, variances, strict=True)]
    )
    assert weights["fc.products"][:2].flatten().tolist() == pytest.approx([-0.5 / v for v in variances])
    gap = np.log(2 / 1) - 0.5 * (
        np.log(variances[0] / variances[1]) + means[0] ** 2 / variances[0] - means[1] ** 2 / variances[1]
    )
    assert float(weights["fc.bias"][0] - weights["fc.bias"][1]) == pytest.approx(gap, rel=1e-4)
    assert float(weights["fc.bias"][2]) < -50
    quadratic = gaussian_heads.quadratic(counts, first, second)
    assert float(quadratic["fc.bias"][2]) < -50
    assert quadratic["fc.center"].tolist() == pytest.approx([11 / 3])
    assert all(tensor.isfinite().all() for tensor in quadratic.values())
    peaks = quadratic["fc.center"] + quadratic["fc.weight"][:2, 0] / (-2 * quadratic["fc.products"][:2, 0, 0])
    assert peaks.tolist() == pytest.approx([2, 7]), "a class is most likely at its mean"
    # A class of one image, and one of none
    sums = one_round.moments(
        np.array([[1.0], [3.0], [7.0]], np.float32), torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0]])
    )
    counts, means, within = gaussian_heads.class_moments(sums)
    assert counts.tolist() == [2, 1, 0]
    assert means.flatten().tolist() == [2, 7, 0]
    assert within.tolist() == [[2 / 3]]
    # four steps of rounding, squared; below that a feature is mostly rounding
    rows = np.full((5, 1), 2.0, np.float32)
    first, squares = one_round.sums_and_squares(rows)
    weights = gaussian_heads.naive_bayes(torch.tensor([5, 0]), torch.stack([first] * 2), torch.stack([squares] * 2))
    assert weights["fc.products"][0].tolist() == pytest.approx([-0.5 / (4 / 4096) ** 2])


def class_sums(rule, rows, labels):
    return pairs_of(rule, [rows[labels == label] for label in (0, 1)])


def sites_with(**more):
    """What a check of class sums asks of a federation of three sites."""
    return SimpleNamespace(
        sums=SimpleNamespace(settings=SimpleNamespace(sum="float"), covered=()), chosen=["a", "b", "c"], **more
    )


def check_sums(rule, sent, samples):
    method = gaussian_heads.GaussianHeads(rule=rule)
    method.check_class_sums(sites_with(), "give_class_sums", Parcel("statistics", sent, {"samples": samples}))


def heads_federation(monkeypatch, replies=()):
    monkeypatch.setattr(gaussian_heads, "head_shape", lambda federation: (3, 2))
    said = []
    return sites_with(ask_all=lambda _: replies, warn=said.append, said=said)


@pytest.mark.parametrize("rule", ["naive-bayes", "qda"])
@pytest.mark.parametrize("lie", [
    lambda sent: {**sent, "counts": sent["counts"][:1]},
    lambda sent: {**sent, "first": sent["first"][:, :2]},
    lambda sent: {**sent, "second": sent["second"][:, :-1]},
    lambda sent: {**sent, "second": torch.cat([sent["second"]] * 2, 1)},
    lambda sent: {**sent, "first": sent["first"].double()},
    lambda sent: {**sent, "more": sent["counts"].double()},
    lambda sent: {name: tensor for name, tensor in sent.items() if name != "second"},
    lambda sent: {**sent, "counts": torch.tensor([-1, 43])},
])  # fmt: skip
def test_class_sums_of_another_form_are_refused(monkeypatch, rule, lie):
    method, federation = gaussian_heads.GaussianHeads(rule=rule), heads_federation(monkeypatch)
    sent = class_sums(rule, FEW_ROWS.astype(np.float32), FEW_LABELS)

    def check(tensors, operation="give_class_sums"):
        reply = Reply("north", (Parcel("statistics", tensors, {"samples": 42}),))
        method.check_reply(federation, Call("north", operation, 1), reply)

    check(sent)
    empty = {**sent, "counts": torch.tensor([42, 0]), "first": sent["first"].clone(), "second": sent["second"].clone()}
    empty["first"][1], empty["second"][1] = 0, 0
    check(empty)
    check(lie(sent), "evaluate")
    with pytest.raises(ParcelRejected, match="statistics: the sums are of another form than"):
        check(lie(sent))


@pytest.mark.parametrize("rule", ["naive-bayes", "qda"])
def test_class_sums_of_sites_add_up_to_those_of_all_images(monkeypatch, rule):
    rows, labels = FEW_ROWS.astype(np.float32), FEW_LABELS.numpy()
    some = np.arange(42) % 3 == 0
    replies = [
        Reply(name, (Parcel("statistics", class_sums(rule, rows[chosen], labels[chosen])),))
        for name, chosen in (("small", some), ("large", ~some))
    ]
    federation = heads_federation(monkeypatch, replies)
    found = gaussian_heads.GaussianHeads(rule=rule).collect_by_class(federation)
    whole = class_sums(rule, rows, labels)
    for one, other in zip(found, whole.values(), strict=True):
        assert torch.equal(one, other)
    assert len(federation.said) == 1
    assert federation.said[0].startswith("sites 'small', 'large': sums over a class of fewer than 10 images")


def test_class_sums_of_one_image_pass_and_larger_products_do_not():
    sent = pairs_of("naive-bayes", [np.ones((1, 2), np.float32), np.ones((0, 2), np.float32)])
    check_sums("naive-bayes", sent, 1)
    for name, factor in (("first", 1.01), ("second", 0.98)):
        with pytest.raises(ParcelRejected, match="those of no images"):
            check_sums("naive-bayes", {**sent, name: (sent[name] * factor).long()}, 1)
    features = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    sent = one_round.moments(features, torch.zeros(2, 1)).tensors()
    unit = 2.0**24
    most = (1.25 * 13) ** 0.5 * unit
    for factor, fits in ((0.999, True), (1.001, False)):
        products = sent["products"].clone()
        products[4] = int(most * factor)
        sums = one_round.Moments(products, sent["cross"], sent["squares"])
        assert one_round._possible(sums) is fits
    counts = torch.tensor([0, 3, 1])
    assert gaussian_heads.log_priors(counts)[1:].tolist() == pytest.approx(np.log([0.75, 0.25]).tolist())
    assert gaussian_heads.log_priors(counts, equal=True)[1:].tolist() == [0.0, 0.0]
    assert all(gaussian_heads.log_priors(counts, equal=equal)[0] < -50 for equal in (False, True))


@pytest.mark.parametrize("rule", ["naive-bayes", "qda"])
def test_the_largest_class_sums_pass_and_larger_ones_do_not(rule):
    sent = pairs_of(rule, [np.full((count, 2), 1e9, np.float32) for count in (3, 2)])
    check_sums(rule, sent, 5)
    for place in range(sent["second"].numel()):
        lie = sent["second"].clone()
        lie.view(-1)[place] += 1
        with pytest.raises(ParcelRejected, match="those of no images"):
            check_sums(rule, {**sent, "second": lie}, 5)


@pytest.mark.parametrize(("rule", "few", "refused"), [("qda", 3, True), ("qda", 4, False), ("naive-bayes", 3, False)])
def test_sums_of_each_class_are_of_its_images(monkeypatch, rule, few, refused):
    """Sums of products of three features need four images of a class."""
    rows, labels = np.round(FEW_ROWS[: 5 + few] * 4) / 4, np.array([1] * 5 + [0] * few)
    monkeypatch.setattr(gaussian_heads.GaussianHeads, "features", lambda self, site: rows.astype(np.float32))
    monkeypatch.setattr(gaussian_heads, "check_classes", lambda site: None)
    site = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(labels=labels)),
        trainer=SimpleNamespace(device="cpu", target=SimpleNamespace(classes=("no", "yes", "nobody"))),
        policy=SimpleNamespace(few_images="refuse"),
    )
    method = gaussian_heads.GaussianHeads(rule=rule)
    if refused:
        with pytest.raises(GateRefusedData, match="sums of products of 3 features of 3 images"):
            method.give_class_sums(site)
        return
    found = method.give_class_sums(site)
    assert found.metadata == {"samples": 5 + few}
    assert found.tensors["counts"].tolist() == [few, 5, 0]
    of_classes = [rows[labels == place] for place in range(3)]
    first = np.stack([some.sum(0) for some in of_classes])
    assert (found.tensors["first"] * RESOLUTION).numpy() == pytest.approx(first)
    upper = np.triu_indices(3)
    products = [(some**2).sum(0) if rule == "naive-bayes" else (some.T @ some)[upper] for some in of_classes]
    assert (found.tensors["second"] * RESOLUTION**2).numpy() == pytest.approx(np.stack(products))


def pairs_of(rule, parts):
    """Counts and sums of classes with these features."""
    sums = one_round.sums_and_squares if rule == "naive-bayes" else one_round.sums_and_products
    first, second = (torch.stack(list(one)) for one in zip(*(sums(rows) for rows in parts), strict=True))
    return {"counts": torch.tensor([len(rows) for rows in parts]), "first": first, "second": second}
