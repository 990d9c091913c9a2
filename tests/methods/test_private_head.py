"""The private head: its sums by hand, its noise, its account, what leaves; and its basis against a plain PCA."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import lines_of
from stand_ins import Coordinator, rebuild, site_with_state

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import private_head
from polyclinic.methods.private_head import PrivateHead, clipped_sum
from polyclinic.methods.shared import public_basis
from polyclinic.methods.shared.public_basis import basis_of, is_same_basis, pictures
from polyclinic.models.encoders import ENCODERS, Encoder
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.randomness import torch_rng
from polyclinic.study import parse_study
from polyclinic.training import private_steps

AGES = {
    "data": {"source": "hand-phantom", "samples": 120, "size": 28},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression", "criterion": "mse"},
    "model": {"backbone": "thumbnail"},
    "privacy": {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "delta": 1e-5},
}
FEW = {"name": "private-head", "rounds": 3, "numbers": 5, "phantoms": 10}


class Thumbnail(Encoder):
    """The image at 4 x 4 pixels."""

    width = 16
    side = None

    def encode(self, images):
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 4).flatten(1)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(ENCODERS, "thumbnail", Thumbnail)


def test_a_clipped_sum_by_hand():
    """Gradients (3, 4), of length 5, and (0.3, 0.4), of length 0.5: the first is scaled to length 1. As one patient's
    they have the length 5.5 together."""
    slopes, vectors = torch.tensor([[1.0], [0.1], [0.1]]), torch.tensor([[3.0, 4.0]] * 3)
    assert clipped_sum(slopes[:2], vectors[:2], 1.0).flatten().tolist() == pytest.approx([0.6 + 0.3, 0.8 + 0.4])
    together = clipped_sum(slopes, vectors, 1.0, torch.tensor([0, 1, 0]))
    assert together.flatten().tolist() == pytest.approx([0.6 + 0.3, 0.8 + 0.4])
    rng = torch.Generator().manual_seed(0)
    slopes, vectors = torch.randn(50, 3, generator=rng), torch.randn(50, 7, generator=rng)
    whole = clipped_sum(slopes, vectors, 0.7)
    for left_out in range(50):  # one image more moves the sum by the clipping norm at most
        kept = [place for place in range(50) if place != left_out]
        assert float((whole - clipped_sum(slopes[kept], vectors[kept], 0.7)).norm()) <= 0.7 + 1e-5


def test_patients_classes_and_kept_features(tiny_run):
    """Brain phantoms have several images of a patient; epsilon is for one of them with all images."""
    brains = {"source": "brain-phantom", "samples": 90, "size": 28}
    by_patient = {**AGES, "data": brains, "task": {"name": "classification"}}
    result = tiny_run(FEW, **{**by_patient, "privacy": {**AGES["privacy"], "unit": "patient"}})
    assert result["privacy"]["unit"] == "patient"
    assert result["privacy"]["epsilon"] == pytest.approx(compute_epsilon(1.0, 1.0, 3, 1e-5))
    eyes = {
        **AGES,
        "data": {"source": "fundus-phantom", "samples": 120, "size": 28},
        "task": {"name": "classification"},
    }
    result = tiny_run(FEW, **eyes)
    assert 0 <= result.metrics["test"]["accuracy"] <= 1
    assert result.weights()["fc.weight"].shape == (2, 16)
    # The released model, image by image, gives the result's error.
    result = tiny_run(FEW, **AGES)
    run = rebuild(result)
    run.trainer.load(result.weights())
    sums = [run.trainer.evaluate(data.test) for data in run.sites.values()]
    by_hand = run.study.task.finish(run.study.task.add(*sums))["mae"]
    assert result.metrics["test"]["mae"] == pytest.approx(by_hand, rel=1e-4)


def test_the_basis_of_phantoms_by_hand():
    features = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 13)
    basis = public_basis.basis_of(features, 5, whitening=0.0)
    vectors = (features.float() - basis["mean"]) @ basis["matrix"]
    assert vectors.shape == (40, 5)
    products = vectors.T @ vectors
    assert float((products - products.diag().diag()).abs().max()) < 1e-3
    assert (products.diag().diff() < 0).all()  # the largest variance first
    assert float(vectors.norm(dim=1).median()) == pytest.approx(1.0, rel=0.05)
    flat = FEATURES.clone()
    flat[:, 5] = 2.0
    assert basis_of(flat, 100, 1.0)["matrix"].shape == (40, 29)  # thirty images around their mean
    assert torch.isfinite(basis_of(flat, 100, 1.0)["matrix"]).all()
    assert basis_of(flat, 29, 1.0)["matrix"][5].abs().max() < 1e-3
    assert basis_of(FEATURES, 4, 0.0)["mean"].tolist() == pytest.approx(FEATURES.mean(0).tolist(), rel=1e-5)
    assert pictures("hand-phantom", 10).shape[2:] == (64, 64)
    assert pictures("hand-phantom", 10, 32).shape[2:] == (32, 32)


def test_steps_without_noise_are_those_of_a_bare_loop(tiny_run, monkeypatch):
    """Two sites, momentum, the mean of the last two heads: the same from all images in one place."""
    monkeypatch.setattr(private_steps, "release_sum", bare_sum)
    kept = {}

    def remember(self, site):
        kept[site.name] = project(self, site)
        return kept[site.name]

    project = PrivateHead.vectors
    monkeypatch.setattr(PrivateHead, "vectors", remember)
    result = tiny_run({**FEW, "rounds": 4, "average": 0.5, "server_lr": 0.5, "beta": 0.9}, **AGES)
    parts = [data.train for data in rebuild(result).sites.values()]
    targets = (torch.cat([torch.from_numpy(one.labels.copy()) for one in parts]).float() - 114) / 114
    vectors = torch.cat([kept["site-1"], kept["site-2"]])
    head, velocity, heads = torch.zeros(vectors.shape[1]), torch.zeros(vectors.shape[1]), []
    for _ in range(4):
        each = (2 * (vectors @ head - targets))[:, None] * vectors
        each = each * (0.5 / each.norm(dim=1).clamp(min=0.5))[:, None]
        velocity = 0.9 * velocity + each.sum(0) / len(vectors)
        head = head - 0.5 / 0.5 * velocity  # a learning rate of 0.5 for gradients as long as the clipping norm, 0.5
        heads.append(head)
    released = result.weights()
    features = torch.cat([Thumbnail().features(torch.from_numpy(one.images.copy())) for one in parts])
    by_model = features @ released["fc.weight"][0] + released["fc.bias"][0]
    torch.testing.assert_close(by_model, vectors @ torch.stack(heads[2:]).mean(0), rtol=1e-3, atol=1e-4)


def bare_sum(site, total, batch_size, share):
    return total(torch.arange(len(site.data.train)), None), float(len(site.data.train))


def test_noise_and_budgets_of_sites_are_told(tiny_run):
    shared = tiny_run({**FEW, "noise": "shared"}, **AGES)["privacy"]
    assert private_head.SHARED in shared["does_not_cover"]
    assert private_head.SHARED not in tiny_run(FEW, **AGES)["privacy"]["does_not_cover"]
    assert PrivateHead.give_shared_gradient.operation.partner == "simulator"
    target = compute_epsilon(1.0, 1.0, 2, 1e-5) * 1.001
    result = tiny_run(FEW, **{**AGES, "privacy": {**AGES["privacy"], "target_epsilon": target}})
    assert result["privacy"]["steps"] == 2
    assert result["privacy"]["epsilon"] <= target
    silent = {"evaluation": {"every": 0, "select": "last", "final": "none"}}
    covered = {**AGES, "privacy": {**AGES["privacy"], "cover": "all"}, **silent}
    result = tiny_run(FEW, **covered)
    left = [line for site in ("site-1", "site-2") for line in lines_of(result, site)]
    assert {line["kind"] for line in left} == {"gradients"}
    assert result["privacy"]["covers"] == ["everything released"]
    assert all(line["privacy"]["epsilon"] > 0 for line in left)
    full = tiny_run(FEW, **AGES)["privacy"]
    assert full["epsilon"] == pytest.approx(compute_epsilon(1.0, 1.0, 3, 1e-5))
    assert full["steps"] == 3
    assert tiny_run({**FEW, "batch": "poisson"}, **AGES)["privacy"]["epsilon"] < full["epsilon"]


def test_it_needs_a_table_of_privacy_and_an_encoder():
    with pytest.raises(BadInput, match=r"privacy: 'private-head' trains with noise; add the table \[privacy\]"):
        parse_study({**{name: table for name, table in AGES.items() if name != "privacy"}, "method": FEW})
    with pytest.raises(BadInput, match=r"model\.backbone"):
        parse_study({**AGES, "model": {"backbone": "lenet5"}, "method": FEW})


@pytest.mark.parametrize("operation", ["give_gradient", "give_shared_gradient", "give_share_of_sum"])
def test_a_reply_says_of_how_many_images_its_sum_is(operation):
    head = {"head": torch.zeros(1, 3)}
    call = SimpleNamespace(operation=operation, parcels={"statistics": Parcel("statistics", head)})

    def reply(**metadata):
        parcel = Parcel("gradients", head, metadata)
        return SimpleNamespace(site="north", parcel=lambda kind: parcel, parcels=(parcel,), metadata=metadata)

    PrivateHead().check_reply(None, call, reply(expected=4.0))
    with pytest.raises(ParcelRejected, match=r"does not say how many images it is of \('expected'\)"):
        PrivateHead().check_reply(None, call, reply(samples=4))


@pytest.mark.parametrize("patients", [None, torch.tensor([0, 1, 2])])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_image_without_a_finite_gradient_adds_nothing(patients, wrong):
    """Gradients (3, 4) and (0.3, 0.4) beside one that is not finite, in its slope or in its vector."""
    for slope, vector in ((wrong, [3.0, 4.0]), (1.0, [wrong, 1.0])):
        slopes, vectors = torch.tensor([[1.0], [slope], [0.1]]), torch.tensor([[3.0, 4.0], vector, [3.0, 4.0]])
        assert clipped_sum(slopes, vectors, 1.0, patients).flatten().tolist() == pytest.approx([0.9, 1.2])


COORDINATOR_BASIS = {"mean": torch.tensor([1.0, 2.0]), "matrix": torch.tensor([[2.0], [1.0]])}


def private_run(monkeypatch, rounds, **settings):
    """Each round two sites send gradients 1 and 3 of 2 and 6 images, for one slope and the constant."""
    model = SimpleNamespace(outputs=1)
    monkeypatch.setattr("polyclinic.methods.private_head._encoded", lambda given: model)
    replies = [
        [
            SimpleNamespace(metadata={"expected": 2.0}, gradients={"head": torch.tensor([[1.0, 0.0]])}),
            SimpleNamespace(metadata={"expected": 6.0}, gradients={"head": torch.tensor([[3.0, 8.0]])}),
        ]
    ] * rounds
    federation = Coordinator(
        replies=replies,
        once=lambda name, work: COORDINATOR_BASIS,
        trainer=SimpleNamespace(model=model, privacy=SimpleNamespace(max_grad_norm=0.25)),
        sums=SimpleNamespace(settings=SimpleNamespace(sum=settings.pop("sum", "float"))),
    )
    found = PrivateHead(rounds=rounds, server_lr=0.5, beta=0.5, bias=0.25, **settings).run(federation)
    return federation, found


def heads_by_hand(rounds):
    """Gradients of 0.5 and 1 an image; a rate of 0.5 / 0.25; momentum 0.5."""
    head, velocity, heads = np.zeros(2), np.zeros(2), []
    for _ in range(rounds):
        velocity = 0.5 * velocity + np.array([4.0, 8.0]) / 8
        head = head - 2 * velocity
        heads.append(head)
    return heads


@pytest.mark.parametrize(("average", "averaged"), [(0.5, 2), (0.0, 1), (1.0, 4), (0.75, 3), (0.3, 2)])
def test_the_private_head_is_the_mean_of_the_last_rounds(monkeypatch, average, averaged):
    federation, found = private_run(monkeypatch, 4, average=average)
    mean = np.mean(heads_by_hand(4)[-averaged:], axis=0)
    slope = mean[0] * np.array([2.0, 1.0])
    assert found["fc.weight"].tolist() == [pytest.approx(slope.tolist())]
    assert found["fc.bias"].tolist() == [pytest.approx(0.25 * mean[1] - slope @ [1.0, 2.0])]
    assert len(federation.scored) == 1, "the mean is there at the end only"
    assert torch.equal(federation.scored[0]["fc.weight"], found["fc.weight"])
    assert federation.kept.averaged == averaged
    assert federation.asked[1][1]["statistics"]["head"].tolist() == [pytest.approx(heads_by_hand(1)[0].tolist())]


@pytest.mark.parametrize(("noise", "summed", "operation"), [
    ("each-site", "float", "give_gradient"),
    ("each-site", "secure", "give_gradient"),
    ("shared", "float", "give_shared_gradient"),
    ("shared", "secure", "give_share_of_sum"),
])  # fmt: skip
def test_who_adds_the_noise_follows_from_the_sum(monkeypatch, noise, summed, operation):
    federation, _ = private_run(monkeypatch, 1, noise=noise, sum=summed)
    assert [asked for asked, _ in federation.asked] == [operation]


def test_the_noise_of_a_sum_is_shared_by_its_sites(monkeypatch):
    shares = []
    monkeypatch.setattr(PrivateHead, "_noisy_gradient", lambda self, own, head, share, limits=(): shares.append(share))
    monkeypatch.setattr("polyclinic.methods.private_head.honest_sites", lambda own: 4)
    own = site_with_state("a", **{"basis/sites": torch.tensor(9)})
    method, head = PrivateHead(), {"head": torch.zeros(1)}
    method.give_gradient(own, head)
    method.give_shared_gradient(own, head)
    method.give_share_of_sum(own, head)
    assert shares == pytest.approx([1, 1 / 3, 1 / 2])


FEATURES = torch.randn(30, 40, generator=torch_rng("features"), dtype=torch.float64) * torch.logspace(0, 1, 40) + 3


def plain(features, numbers, whitening):
    """Components of the covariance matrix [D, D] of features of unit variance."""
    rows = features.numpy()
    scaled = (rows - rows.mean(0)) / rows.std(0, ddof=1)
    values, vectors = np.linalg.eigh(scaled.T @ scaled / len(rows))
    values, vectors = values[::-1][:numbers], vectors[:, ::-1][:, :numbers]
    projected = scaled @ vectors * (values + 0.01 * values[0]) ** (-whitening / 2)
    return projected / np.median(np.linalg.norm(projected, axis=1))


@pytest.mark.parametrize(("numbers", "whitening"), [(3, 0.0), (5, 0.75), (2, 1.0), (29, 0.5)])
def test_it_is_a_principal_component_analysis(numbers, whitening):
    basis = basis_of(FEATURES, numbers, whitening)
    found = ((FEATURES - basis["mean"]) @ basis["matrix"].double()).numpy()
    wanted = plain(FEATURES, numbers, whitening)
    signs = np.sign((found * wanted).sum(0))
    # torch's median of an even number of lengths is the lower of the middle two
    lengths = np.linalg.norm(wanted, axis=1)
    np.testing.assert_allclose(found * signs, wanted / np.sort(lengths)[(len(lengths) - 1) // 2], atol=2e-4)


@pytest.mark.parametrize("size", [0.01, 1000.0])
def test_the_unit_of_features_changes_nothing(size):
    found, same = (basis_of(unit * FEATURES, 5, 0.5) for unit in (size, 1.0))
    assert torch.allclose(size * found["matrix"], same["matrix"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rank", [1, 2])
def test_directions_of_next_to_no_variance_are_left_out(rank):
    """One or two directions, and rounding of a millionth in all others."""
    rng = torch_rng("strong directions")
    strong = torch.randn(30, rank, generator=rng, dtype=torch.float64) @ torch.randn(rank, 40, generator=rng).double()
    rounding = 1e-6 * torch.randn(30, 40, generator=rng, dtype=torch.float64)
    assert basis_of(strong + rounding, 10, 1.0)["matrix"].shape == (40, rank)


@pytest.fixture(scope="module")
def own():
    return basis_of(FEATURES, 6, 0.5)


def changed(own, **changes):
    return is_same_basis({**own, **changes}, own)


def test_a_rotation_is_the_same_basis_and_another_is_not(own):
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch_rng("turn")))
    assert changed(own, matrix=own["matrix"] @ turn)
    assert changed(own, matrix=own["matrix"] * 1.2)
    assert changed(own, matrix=own["matrix"] / 1.2)
    assert changed(own, mean=own["mean"] * 1.09)
    assert changed(own, matrix=own["matrix"][:, :5]), "a direction of next to no variance may be lost"
    stretched = torch.ones(6)
    stretched[2] = 1.3
    assert not changed(own, matrix=own["matrix"] * stretched)
    assert not changed(own, matrix=own["matrix"] / stretched)
    assert not changed(own, mean=own["mean"] * 1.11)
    assert not changed(own, mean=own["mean"] * 0.89)
    assert not changed(own, mean=own["mean"][:-1])
    assert not changed(own, matrix=own["matrix"][:-1])
    assert not changed(own, matrix=own["matrix"][:, :4])
    assert not changed(own, matrix=own["matrix"][0])
    assert not is_same_basis({"mean": own["mean"]}, own)
    elsewhere = own["matrix"] + 0.2 * own["matrix"].norm() / 40**0.5 / 6**0.5 * torch.ones(40, 6)
    assert not changed(own, matrix=elsewhere)
    came = plain_basis(99)
    came["matrix"][:, 98] = 0
    assert is_same_basis(came, plain_basis(100))
    came["matrix"][:, 97] = 0
    assert not is_same_basis(came, plain_basis(100))
    came = plain_basis(100)
    came["matrix"][:, 99] = 0
    assert not is_same_basis(came, plain_basis(100))


def plain_basis(width, size=1.0):
    """The first so many of 120 features, as they are."""
    return {"mean": torch.ones(120), "matrix": size * torch.eye(120)[:, :width]}


@pytest.mark.parametrize(
    ("width", "came", "same"), [(100, 98, True), (100, 97, False), (99, 98, True), (99, 97, False)]
)
def test_one_of_fifty_directions_may_be_lost_or_found(width, came, same):
    assert is_same_basis(plain_basis(came), plain_basis(width)) is same
    # a direction that is only there in one of them has no length in the other
    found = plain_basis(width + width - came)
    found["matrix"][:, width:] = 0
    assert is_same_basis(found, plain_basis(width)) is same


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_what_is_outside_of_a_basis_counts_in_its_own_unit(size):
    own = plain_basis(4, size)
    for outside, same in ((0.08, True), (0.12, False)):
        came = {"mean": own["mean"], "matrix": own["matrix"].clone()}
        came["matrix"][4, 0] = 2 * size * outside  # the matrix has the length 2 x size
        assert is_same_basis(came, own) is same
