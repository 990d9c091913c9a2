"""Ghost clipping in small pieces, by hand: inner products, their rounding, what is chosen and what is not followed."""

import pytest
import torch
from torch import nn

from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.privacy.ghost_clipping import (
    GhostClipping,
    NotFollowedError,
    Products,
    _as_followed,
    can_follow,
    laid_out_as,
    product,
)


def column(*places: float) -> torch.Tensor:
    """One image and one group, with a number at each place: [1, 1, T, 1]."""
    return torch.tensor(places, dtype=torch.float64).reshape(1, 1, -1, 1)


@pytest.mark.parametrize(
    ("left", "right", "square", "sizes"),
    [
        ((1.0,), (1.0,), 1.0, 1.0),
        ((1.0, 1.0), (1.0, 1.0), 4.0, 4.0),
        ((1.0, -1.0), (1.0, 1.0), 0.0, 4.0),  # two places that cancel out: rounding could hide a length
        ((0.0,), (5.0,), 0.0, 0.0),
    ],
)
def test_a_length_is_enlarged_by_sixteen_units_in_the_last_place_of_all_that_was_added(left, right, square, sizes):
    [found] = Products(column(*left), column(*right)).squares().tolist()
    assert found == square + sizes * 16 * torch.finfo(torch.float64).eps


def test_products_of_short_numbers_are_exact():
    """1 + 2^-7 has no square in bfloat16, and has one in float32."""
    one = torch.full((1, 1, 1, 1), 1 + 2**-7).bfloat16()
    found = product(one, one)
    assert found.dtype == torch.float32
    assert found.item() == (1 + 2**-7) ** 2


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("layer", "repeats", "on", "computed"),
    [
        (nn.Conv2d(8, 8, 1), False, OnGpu, torch.bfloat16),  # rows begin at sixteen bytes: eight numbers of two
        (nn.Conv2d(4, 8, 1), False, OnGpu, torch.float32),
        (nn.Linear(8, 8), False, OnGpu, torch.float32),
        (nn.Conv2d(8, 8, 1), True, OnGpu, torch.float32),  # a run that must repeat itself
        (nn.Conv2d(8, 8, 1), False, torch.Tensor, torch.float32),  # a processor
    ],
)
def test_short_numbers_are_multiplied_where_a_gpu_is_fast_and_nowhere_else(monkeypatch, layer, repeats, on, computed):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeats)
    came, back = _as_followed(layer, torch.ones(2), torch.ones(2).bfloat16().as_subclass(on))
    assert {came.dtype, back.dtype} == {computed}


def tied() -> nn.Module:
    """Two layers that share a weight: the gradients of one layer are not those of the weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "followed"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True),
        (nn.Sequential(nn.Linear(2, 2), nn.PReLU()), False),
        (nn.Sequential(nn.Linear(2, 2), nn.PReLU().requires_grad_(False)), True),
        (tied(), False),
        (nn.Conv1d(1, 1, 1), False),
    ],
)
def test_layers_with_a_rule_whose_weights_are_their_own_are_followed(model, followed):
    assert can_follow(model) is followed
    assert ClippedSums(model).ghost is followed
    assert not ClippedSums(model, "stored").ghost


class Repeated(nn.Module):
    """Its layer runs once with a gradient, and before that without one."""

    def __init__(self, before) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(2, 1, bias=False), before

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with self.before():
            self.layer(rows)
        return self.layer(rows)[:, 0]


def clipped(model: nn.Module, losses) -> list[torch.Tensor]:
    ghost = GhostClipping(model)
    with ghost.following():
        return ghost.clipped_sums(losses, 10.0, list(model.parameters()))


def test_a_pass_without_gradients_does_not_count_as_one():
    rows = torch.tensor([[3.0, 4.0]])
    model = Repeated(torch.no_grad)
    [found] = clipped(model, lambda: model(rows))
    assert found.tolist() == [pytest.approx([3.0, 4.0], rel=1e-5)]
    model = Repeated(torch.enable_grad)
    with pytest.raises(NotFollowedError, match="Linear runs twice in a pass"):
        clipped(model, lambda: model(rows))


@pytest.mark.parametrize(("channels", "filters"), [(1, 2), (2, 1), (2, 2)])
def test_a_layer_that_gets_or_gives_other_rows_than_images_is_not_followed(channels, filters):
    """An image without its batch: its first axis has as many rows as channels, or filters."""
    model = nn.Conv2d(channels, filters, 1)
    with pytest.raises(NotFollowedError, match="Conv2d does not get a row for each image"):
        clipped(model, lambda: model(torch.ones(channels, 2, 2)).sum().reshape(1))


def test_an_output_that_is_changed_in_place_is_not_followed():
    model = nn.Linear(2, 1)
    with pytest.raises(NotFollowedError, match="the output of Linear is changed in place"):
        clipped(model, lambda: model(torch.ones(1, 2)).mul_(2)[:, 0])


def test_only_counted_rows_take_part():
    model, rows = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.5, 0.25]])
    ghost = GhostClipping(model)
    with ghost.following():
        given = (lambda: model(rows)[:, 0], 10.0, list(model.parameters()), torch.tensor([True, False, True]))
        [found] = ghost.clipped_sums(*given)
    assert found.tolist() == [pytest.approx([3.5, 4.25], rel=1e-5)]


@pytest.mark.parametrize(
    ("settings", "followed"), [({}, True), ({"padding_idx": 0}, False), ({"max_norm": 1.0}, False)]
)
def test_a_table_that_changes_its_rows_by_itself_is_not_followed(settings, followed):
    assert can_follow(nn.Embedding(5, 4, **settings)) is followed


def test_a_gradient_lies_in_memory_as_its_parameter():
    parameter, gradient = torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    assert laid_out_as(parameter, gradient) is gradient
    other = gradient.contiguous(memory_format=torch.channels_last)
    found = laid_out_as(parameter, other)
    assert found.stride() == parameter.stride() != other.stride()
    assert torch.equal(found, gradient)
