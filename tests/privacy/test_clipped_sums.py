"""Sums of clipped gradients of rows and of patients, by hand."""

import pytest
import torch
from torch import nn

from polyclinic.errors import WorkFailed
from polyclinic.privacy import clipped_sums
from polyclinic.privacy.clipped_sums import ClippedSums, PatientSums


def scale() -> nn.Linear:
    """The gradient of a row's output is the row itself."""
    return nn.Linear(2, 1, bias=False)


def total(sums: ClippedSums, losses, rows: list[torch.Tensor], clip: float = 1.0) -> torch.Tensor:
    with sums.following():
        [found] = sums.total(losses, [(one,) for one in rows], clip, list(sums.module.parameters()))
    return found


def losses_of(model: nn.Module, seen: list[int] | None = None):
    def losses(rows: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen.append(len(rows))
        return model(rows).flatten(1).sum(1)

    return losses


@pytest.mark.parametrize(("rows", "pieces"), [(256, [256]), (257, [256, 1]), (600, [256, 256, 88])])
@pytest.mark.parametrize("clipping", ["ghost", "stored"])
def test_no_more_than_256_rows_go_through_together(clipping, rows, pieces):
    model, seen = scale(), []
    found = total(ClippedSums(model, clipping), losses_of(model, seen), [torch.full((rows, 2), 0.1)])
    assert seen == ([1, *pieces] if clipping == "ghost" else pieces)  # one row to know what it takes
    assert found.tolist() == [pytest.approx([rows / 10, rows / 10], rel=1e-4)]


@pytest.mark.parametrize("clipping", ["ghost", "stored"])
def test_a_row_that_does_not_fit_goes_through_alone(clipping, monkeypatch):
    monkeypatch.setattr(clipped_sums, "ROOM", {"cpu": 1})
    model, seen = scale(), []
    total(ClippedSums(model, clipping), losses_of(model, seen), [torch.ones(3, 2)])
    assert seen[-3:] == [1, 1, 1]


class Recorded:
    """A graph that overwrites what its last replay gave, as a CUDA graph does."""

    def __init__(self, function) -> None:
        self.function, self.outputs, self.calls = function, {}, []

    def __call__(self, counted: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(counted.tolist())
        found = self.function(counted, *rows)
        kept = self.outputs.setdefault(len(counted), [one.clone() for one in found])
        for one, new in zip(kept, found, strict=True):
            one.copy_(new)
        return kept


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_sums_of_recorded_pieces_add_up_though_each_overwrites_the_last(pieces):
    model, recorded = scale(), []

    def record(function):
        recorded.append(Recorded(function))
        return recorded[-1]

    given = [torch.full((3, 2), 0.1 * (piece + 1)) for piece in range(pieces)]
    sums = ClippedSums(model, record=record)
    found = total(sums, losses_of(model), given)
    wanted = 0.3 * sum(range(1, pieces + 1))
    assert found.tolist() == [pytest.approx([wanted, wanted], rel=1e-4)]
    [graph] = recorded
    assert graph.calls == [[True] * 3 + [False] * 13] * pieces
    total(sums, losses_of(model), given)
    assert len(recorded) == 1
    total(sums, losses_of(model), given, clip=2.0)  # the clipping norm is part of what is recorded
    assert len(recorded) == 2


@pytest.mark.parametrize("way", ["ghost", "stored", "patients"])
@pytest.mark.parametrize("length", [0.0, 5e-7, 1e-3, 0.9])
def test_a_short_gradient_stays_as_it_is_however_short(way, length):
    model, rows = scale(), length * torch.tensor([[0.6, 0.8]])
    if way == "patients":
        [found] = PatientSums().total(losses_of(model), [(rows, torch.tensor([0]))], 1.0, list(model.parameters()))
    else:
        found = total(ClippedSums(model, way), losses_of(model), [rows])
    assert found.tolist() == [pytest.approx(rows[0].tolist(), rel=1e-4, abs=1e-12)]


@pytest.mark.parametrize("clipping", ["ghost", "stored"])
@pytest.mark.parametrize(("losses", "shape"), [(0, r"\(\)"), (1, r"\(3, 1\)")])
def test_losses_are_one_for_each_row_and_the_sentence_says_what_came(clipping, losses, shape):
    model = scale()
    wrong = (lambda rows: model(rows).sum(), lambda rows: model(rows).expand(3, 1))[losses]
    with pytest.raises(ValueError, match=f"^losses gave {shape} for . rows; give one loss a row$"):
        total(ClippedSums(model, clipping), wrong, [torch.ones(3, 2)])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = scale(), nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


@pytest.mark.parametrize("clipping", ["ghost", "stored"])
def test_weights_that_stand_in_no_loss_and_batches_without_rows_have_sums_of_zeros(clipping):
    model, rows = Unused(), torch.tensor([[0.3, 0.4]])
    sums, unused = ClippedSums(model, clipping), list(model.unused.parameters())
    with sums.following():
        alone = sums.total(losses_of(model), [(rows,)], 1.0, unused)
        found = sums.total(losses_of(model), [(rows,)], 1.0, list(model.parameters()))
    assert [one.tolist() for one in alone] == [[[0.0] * 3] * 2, [0.0] * 2]
    assert [one.shape for one in found] == [one.shape for one in model.parameters()]
    assert found[0].tolist() == [pytest.approx([0.3, 0.4], rel=1e-4)]
    assert not any(bool(one.any()) for one in found[1:])
    model = Unused()
    sums = ClippedSums(model, clipping)
    with sums.following():
        for pieces in ([], [(torch.zeros(0, 2),)]):
            found = sums.total(losses_of(model), pieces, 1.0, list(model.parameters()))
            assert [one.shape for one in found] == [one.shape for one in model.parameters()]
            assert not any(bool(one.any()) for one in found)


class Doubled(nn.Module):
    """A layer that gets two rows for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = scale()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([rows, -rows])).unflatten(0, (2, -1)).sum(0)


@pytest.mark.parametrize("clipping", ["ghost", "stored"])
def test_two_rows_for_an_image_are_refused_with_the_cure(clipping):
    model = Doubled()
    with pytest.raises(WorkFailed, match=r"^a layer gets 8 rows for 4 images, .*choose a network whose layers get one"):
        total(ClippedSums(model, clipping), losses_of(model), [torch.ones(4, 2)])


def test_images_of_a_patient_are_added_up_before_they_are_clipped_in_pieces_or_not(monkeypatch):
    """Patient 0: (3, 0) + (0, 4) has length 5 and is clipped to (0.6, 0.8). Patient 7: (0.1, 0.2) stays as it is."""
    model = scale()
    losses = losses_of(model)
    batch = (torch.tensor([[3.0, 0.0], [0.1, 0.2], [0.0, 4.0]]), torch.tensor([0, 7, 0]))
    [total] = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(total, torch.tensor([[0.7, 1.0]]), atol=1e-5)
    model = scale()
    losses = losses_of(model)
    batch = (torch.tensor([[float("inf"), 0.0], [0.1, 0.2]]), torch.tensor([0, 1]))
    [total] = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(total, torch.tensor([[0.1, 0.2]]))
    model = scale()
    losses = losses_of(model)
    batch = (torch.randn(9, 2), torch.zeros(9, dtype=torch.int64))
    whole = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    monkeypatch.setattr(clipped_sums, "MOST_ROWS", 2)
    pieces = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(whole[0], pieces[0], atol=1e-6)
