"""Sums in whole numbers, and heads from them: by hand, and the same for any partition and order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import one_round
from polyclinic.methods.shared.one_round import LIMIT, MOST_IMAGES, RESOLUTION, TARGET_RESOLUTION, OneRound, moments
from polyclinic.randomness import numpy_rng

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


def test_what_a_site_sends_is_checked():
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
