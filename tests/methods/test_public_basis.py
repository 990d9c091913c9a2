"""The public basis against a plain principal component analysis, and what counts as the same basis."""

import numpy as np
import pytest
import torch

from polyclinic.methods.shared.public_basis import basis_of, is_same_basis, pictures
from polyclinic.randomness import torch_rng

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


def test_directions_that_phantoms_do_not_have_are_left_out():
    flat = FEATURES.clone()
    flat[:, 5] = 2.0
    assert basis_of(flat, 100, 1.0)["matrix"].shape == (40, 29)  # thirty images around their mean
    assert torch.isfinite(basis_of(flat, 100, 1.0)["matrix"]).all()
    assert basis_of(flat, 29, 1.0)["matrix"][5].abs().max() < 1e-3
    assert basis_of(FEATURES, 4, 0.0)["mean"].tolist() == pytest.approx(FEATURES.mean(0).tolist(), rel=1e-5)
    assert pictures("hand-phantom", 10).shape[2:] == (64, 64)
    assert pictures("hand-phantom", 10, 32).shape[2:] == (32, 32)


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
