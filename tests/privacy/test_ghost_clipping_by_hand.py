"""Ghost clipping in small pieces, by hand: inner products, their rounding, what is chosen and what is not followed."""

import pytest
import torch
from torch import nn

from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.privacy.ghost_clipping import (
    GhostClipping,
    NotFollowedError,
    Products,
    Stored,
    _as_followed,
    _exact,
    as_weight,
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


@pytest.mark.parametrize(
    ("places", "rows", "columns", "kind"),
    [
        (3, 2, 9, Products),  # twice 3 x 3 inner products, and 2 x 9 numbers of a weight
        (3, 9, 2, Products),
        (3, 1, 17, Stored),
        (4, 2, 9, Stored),
        (1, 1, 2, Products),
        (1, 1, 1, Stored),
        (9, 12, 14, Products),
        (9, 7, 23, Stored),
    ],
)
def test_gradients_are_stored_where_that_takes_fewer_numbers(places, rows, columns, kind):
    some = Products(torch.rand(1, 1, places, rows), torch.rand(1, 1, places, columns))
    assert type(some.cheaper()) is kind


def test_products_of_short_numbers_are_exact():
    """1 + 2^-7 has no square in bfloat16, and has one in float32."""
    one = torch.full((1, 1, 1, 1), 1 + 2**-7).bfloat16()
    found = product(one, one)
    assert found.dtype == torch.float32
    assert found.item() == (1 + 2**-7) ** 2


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
    ],
)
def test_lengths_are_computed_in_float32_at_least(given, computed):
    assert _exact(torch.ones(2).to(given)).dtype == computed


def test_a_processor_multiplies_numbers_of_any_precision_in_float32():
    layer, image = nn.Conv2d(8, 8, 1), torch.ones(1, 8, 2, 2)
    came, back = _as_followed(layer, image, image.bfloat16())
    assert (came.dtype, back.dtype) == (torch.float32, torch.float32)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("layer", "short"),
    [
        (nn.Conv2d(8, 8, 1), True),
        (nn.Conv2d(8, 16, 3), True),
        (nn.Conv2d(4, 8, (1, 2)), True),  # four channels of two pixels are eight numbers
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(8, 12, 1), False),
        (nn.Conv2d(16, 16, 1, groups=2), True),
        (nn.Conv2d(8, 16, 1, groups=2), False),
        (nn.Conv2d(16, 8, 1, groups=2), False),
        (nn.ConvTranspose2d(8, 8, 1), False),
        (nn.Linear(8, 8), False),
    ],
)
def test_a_gpu_multiplies_short_numbers_whose_rows_begin_at_sixteen_bytes(monkeypatch, layer, short):
    """Eight numbers of two bytes: what a kernel sees of a group, and the filters of a group."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    came, back = _as_followed(layer, torch.ones(2), torch.ones(2).bfloat16().as_subclass(OnGpu))
    assert {came.dtype, back.dtype} == {torch.bfloat16 if short else torch.float32}
    _, back = _as_followed(layer, torch.ones(2), torch.ones(2).as_subclass(OnGpu))
    assert back.dtype == torch.float32


def test_short_numbers_are_not_for_runs_that_must_repeat_themselves(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    came, back = _as_followed(nn.Conv2d(8, 8, 1), torch.ones(2), torch.ones(2).bfloat16().as_subclass(OnGpu))
    assert (came.dtype, back.dtype) == (torch.float32, torch.float32)


def test_numbers_by_pixel_become_a_weight_by_channel():
    """Two filters of a kernel of 1 x 2 pixels over three channels."""
    numbers = torch.arange(12)
    weight = as_weight(numbers, (2, 3, 1, 2), (1, 2))
    assert weight[0].tolist() == [[[0, 3]], [[1, 4]], [[2, 5]]]
    assert weight[1].tolist() == [[[6, 9]], [[7, 10]], [[8, 11]]]
    assert as_weight(numbers, (4, 3), ()).tolist() == numbers.reshape(4, 3).tolist()
    assert as_weight(numbers, (12,), ()).tolist() == numbers.tolist()


def test_a_left_out_image_adds_nothing_even_where_it_is_not_finite():
    left, right = torch.tensor([[1.0], [torch.inf]]), torch.tensor([[2.0], [torch.nan]])
    some = Products(left.reshape(2, 1, 1, 1), right.reshape(2, 1, 1, 1))
    found = some.total(torch.tensor([0.5, 0.0]), torch.tensor([False, True]), torch.Size((1, 1)))
    assert found.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("layer", "shape", "numbers"),
    [
        (nn.Linear(5, 2), (1, 5), 3 * 2 + 5),
        (nn.Conv2d(1, 2, 3, padding=1), (1, 1, 4, 4), 3 * 2 * 16 + 16 * 9),
        (nn.Conv2d(2, 3, 2, stride=2), (1, 2, 4, 4), 3 * 3 * 4 + 32 * 4 // 4),
        (nn.Conv2d(1, 1, (1, 3), stride=(2, 1)), (1, 1, 4, 4), 3 * 2 * 2 + 16 * 3 // 2),
        (nn.ConvTranspose2d(1, 2, 2, stride=2), (1, 1, 2, 2), 3 * 2 * 16 + 32 * 4 // 4),
    ],
)
def test_the_memory_of_a_layer_is_its_outputs_three_times_and_what_kernels_see(layer, shape, numbers):
    ghost = GhostClipping(layer)
    with ghost.following():
        assert ghost.bytes_of(lambda: layer(torch.ones(shape)).flatten(1).sum(1)) == 4 * numbers


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
