"""Defences against arithmetic, and that they make an attack worse."""

import pytest
import torch

from polyclinic.attacks import scoring
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.federation.layers import defence_and_poisoning as defences
from polyclinic.federation.layers.defence_and_poisoning import Defence
from polyclinic.federation.ledger.archive import releases
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng

GRADIENTS = {"a": torch.tensor([3.0, -0.1]), "b": torch.tensor([[4.0, 0.2], [0.0, -0.3]])}


HALF = {"a": [3.0, 0.0], "b": [[4.0, 0.0], [0.0, pytest.approx(-0.3)]]}
LINE, TWO = {"x": torch.tensor([2.0, -5.0, 1.0])}, {"a": torch.tensor([-3.0, -1.2, 1.4, 3.0])}


@pytest.mark.parametrize(("made", "expected"), [
    (lambda: defences.sparsify(GRADIENTS, keep=0.5), HALF),  # the largest of all
    (lambda: defences.sparsify(GRADIENTS, keep=1e-6), {"a": [0, 0], "b": [[4, 0], [0, 0]]}),  # one at least
    (lambda: defences.prune(GRADIENTS, fraction=0.5), HALF),  # within each tensor
    (lambda: defences.prune(LINE, fraction=0.99), {"x": [0, -5, 0]}),  # one of each tensor at least
    (lambda: defences.prune({"x": torch.tensor([2.0])}, fraction=0.99), {"x": [2]}),
    (lambda: defences.quantise(TWO, bits=2), {"a": [-3, 0, 0, 3]}),  # one level on each side of 0
    (lambda: defences.quantise(TWO, bits=3), {"a": [-3, -1, 1, 3]}),
    (lambda: defences.quantise({"b": torch.zeros(3)}), {"b": [0, 0, 0]}),
])  # fmt: skip
def test_defences_by_hand(made, expected):
    assert {name: tensor.tolist() for name, tensor in made().items()} == expected


def test_quantisation_has_255_levels_and_a_secure_sum_is_the_gradient_of_all_images():
    values = {"a": torch.linspace(-1, 1, 1001)}
    rounded = defences.quantise(values)
    assert len(rounded["a"].unique()) == 255
    assert float((rounded["a"] - values["a"]).abs().max()) <= 0.5 / 127 + 1e-7
    other = {name: -tensor for name, tensor in GRADIENTS.items()}
    assert defences.secure_sum([GRADIENTS, other])["b"].abs().max() == 0
    three = [{"w": torch.tensor([value, 2.0])} for value in (1.0, 2.0, 6.0)]
    assert defences.secure_sum(three)["w"].tolist() == [3.0, 2.0]


def test_defences_hold_off_an_attack(lenet, smooth_images, sent):
    """The same image in the clear, with noise, and as one of four in a sum: only the first comes back."""
    images, labels = smooth_images(4)[:, None], torch.tensor([[0], [1], [2], [3]])
    parcels = sent(lenet, images, labels)
    clear = dict(parcels[0].tensors)
    length, rng = float(torch.cat([one.flatten() for one in clear.values()]).norm()), torch_rng("noise")
    noisy = {name: one / max(1, length) + 0.05 * torch.randn(one.shape, generator=rng) for name, one in clear.items()}
    summed = defences.secure_sum([parcel.tensors for parcel in parcels])
    attacked = [Parcel("gradients", tensors) for tensors in (clear, noisy, summed)]
    known = Knowledge(lenet, (1, 16, 16), classes=5)
    found = GradientInversion(lr=1.0, iterations=8).run(attacked, known)
    errors = scoring.score(found.images, images[[0, 0, 0]], found.start).mse.nan_to_num(torch.inf)
    assert errors[0] < 1e-4
    assert float(errors[1:].min()) > 1e-2


KEEP = {"audit.keep_parcels": 0, "sites.count": 2}


def first_release(result):
    kept = releases(result.folder / "sites" / "site-1" / "kept")
    return next(one for one in kept if one.operation != "evaluate")


def test_only_the_largest_entries_of_a_gradient_leave(tiny, undisturbed):
    plain = first_release(undisturbed(tiny("fedsgd", KEEP, rounds=1)))
    changes = {**KEEP, "defence.name": "sparsify", "defence.keep": 0.05}
    defended = first_release(undisturbed(tiny("fedsgd", changes, rounds=1)))
    expected = defences.sparsify(plain.parcel("gradients").tensors, keep=0.05)
    for name, tensor in defended.parcel("gradients").tensors.items():
        torch.testing.assert_close(tensor, expected[name])
    assert defended.parcel("statistics").digest == plain.parcel("statistics").digest


@pytest.mark.parametrize("name", ["sparsify", "prune", "quantise"])
def test_weights_are_defended_through_their_change(tiny, undisturbed, name):
    plain = first_release(undisturbed(tiny("fedavg", KEEP, rounds=1)))
    defended = first_release(undisturbed(tiny("fedavg", {**KEEP, "defence.name": name}, rounds=1)))
    start = plain.received("weights")
    moved = {n: t - start[n] for n, t in plain.parcel("weights").tensors.items()}
    expected = Defence(name=name).applied(moved)
    for key, tensor in defended.parcel("weights").tensors.items():
        torch.testing.assert_close(tensor - start[key], expected[key], atol=1e-6, rtol=1e-4)
    assert plain.parcel("weights").digest != defended.parcel("weights").digest
    assert defended.parcel("weights").metadata == plain.parcel("weights").metadata


def test_other_kinds_and_counters_among_weights_are_left_alone():
    parcel = Parcel("latents", {"latents": torch.rand(3)})
    assert Defence(name="prune")(parcel, {}) is parcel
    weights = Parcel("weights", {"w": torch.rand(3)})
    assert Defence(name="prune")(weights, {}) is weights
    # Batch norm counts its batches in whole numbers; weights that the site was not sent have no difference.
    start = Parcel("weights", {"w": torch.zeros(4), "n": torch.tensor(3)})
    sent = Parcel("weights", {"w": torch.tensor([4.0, 3.0, 2.0, 1.0]), "n": torch.tensor(300), "own": torch.ones(2)})
    found = Defence(name="prune", fraction=0.5)(sent, {"weights": start}).tensors
    assert found["w"].tolist() == [4, 3, 0, 0]
    assert (found["n"].item(), found["n"].dtype) == (300, torch.int64)
    assert found["own"].tolist() == [1, 1]
    rounded = Defence(name="quantise", bits=2)(sent, {"weights": start}).tensors
    assert rounded["w"].tolist() == [4, 4, 0, 0]  # three levels; half of one rounds to the even one
    assert rounded["n"].dtype == torch.int64
