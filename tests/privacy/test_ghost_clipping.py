"""Ghost clipping: sums of clipped gradients against a loop over images, also from stored ones; its pieces by hand."""

import copy

import pytest
import torch
from pretended_gpu import pretend_gpu
from quick_backbones import QUICK
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.models import BACKBONES, build
from polyclinic.privacy import clipped_sums, ghost_clipping
from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.training.gpu.graphs import WARM_UP, GraphedFunction


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def losses_of(model: nn.Module):
    def losses(images: Tensor, targets: Tensor) -> Tensor:
        output = model(images)
        if output.dim() == 4:
            return (output.mean((1, 2, 3)) - targets).square()
        return F.cross_entropy(output, targets, reduction="none")

    return losses


def batch(rows: int, channels: int = 1, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, channels, size, size), torch.randint(3, (rows,))


def by_loop(model: nn.Module, losses, rows: tuple[Tensor, ...], clip: float) -> list[Tensor]:
    """The definition: the gradient of one image after the other, clipped and summed."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    totals = [torch.zeros_like(one) for one in parameters]
    for place in range(len(rows[0])):
        loss = losses(*(one[place : place + 1].contiguous() for one in rows)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        length = torch.stack([one.norm() for one in found]).norm()
        for total, one in zip(totals, found, strict=True):
            total += one * (clip / (length + 1e-6)).clamp(max=1.0)
    return totals


def at_once(sums: ClippedSums, losses, rows: tuple[Tensor, ...], clip: float) -> list[Tensor]:
    parameters = [one for one in sums.module.parameters() if one.requires_grad]
    with sums.following():
        return sums.total(losses, [rows], clip, parameters)


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    a, b = (torch.cat([one.flatten() for one in some]) for some in (found, wanted))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [*QUICK, "efficientnet-lite0"])
def test_every_backbone_has_the_sums_of_a_loop_over_images(name):
    """Opacus gives wrong gradients for channels-last images (by a third for ResNet-18): a GPU's images are such.
    Convolutions of EfficientNet pad by themselves."""
    outputs, small = 1 if BACKBONES[name].dense else 3, {} if name in QUICK else {"input_size": 32}
    model = build(name, channels=3, outputs=outputs, size=32, norm="group", **small).double().train()
    model = model.to(memory_format=torch.channels_last)
    images, targets = batch(2, channels=3)
    rows = (images.double().contiguous(memory_format=torch.channels_last), targets)
    wanted = by_loop(model, losses_of(model), rows, 0.5)
    assert ghost_clipping.can_follow(model) == (name in QUICK)  # Opacus has a rule for those
    for clipping in ("ghost", "stored"):
        found = at_once(ClippedSums(model, clipping), losses_of(model), rows, 0.5)
        assert error(found, wanted) < 1e-8, clipping


class Layers(nn.Module):
    """Layers with every setting that changes where a kernel looks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
        self.grouped = nn.Conv2d(4, 6, 3, padding="same", groups=2)
        self.norm = nn.GroupNorm(3, 6)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.rows = nn.LayerNorm(5)
        self.places = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.tanh(self.norm(self.grouped(self.first(x)))))
        x = self.rows(self.places(x.flatten(2).mT))  # a linear layer at many places
        return self.frozen(self.last(x.square()).mean(1))


@pytest.mark.parametrize("clip", [0.1, 1e9])
def test_every_kind_of_layer_in_double_precision(clip):
    model = Layers().double()
    images, targets = batch(4, channels=2, size=9)
    rows = (images.double(), targets)
    sums = ClippedSums(model)
    found = at_once(sums, losses_of(model), rows, clip)
    assert error(found, by_loop(model, losses_of(model), rows, clip)) < 1e-12
    assert sums.ghost


def test_a_length_is_never_lost_to_rounding_nor_an_image_without_a_finite_gradient_counted():
    """Two places that cancel out but for the last digits: the length in float32 must not be shorter than it is."""
    left, right = torch.rand(8, 1, 1, 64), torch.rand(8, 1, 1, 64)
    left, right = torch.cat([left, -left * (1 + 1e-4)], 2) * 1e3, torch.cat([right, right], 2)
    exact = (left.double().mT @ right.double()).flatten(1).square().sum(1)
    assert (ghost_clipping.Products(left, right).squares() >= exact * (1 - 1e-5)).all()
    model = build("small-cnn", channels=1, outputs=3, size=32, norm="group")
    images, targets = batch(3)
    images[1, 0, 3, 3] = float("nan")
    kept = (images[[0, 2]], targets[[0, 2]])
    for clipping in ("ghost", "stored"):
        found = at_once(ClippedSums(model, clipping), losses_of(model), (images, targets), 0.5)
        assert error(found, by_loop(model, losses_of(model), kept, 0.5)) < 1e-5, clipping


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x.flatten(1)))))


class InPlace(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.flatten(1)).mul_(2))


class Own(Twice):
    """A parameter that belongs to no layer with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.flatten(1)) * self.scale)


@pytest.mark.parametrize("clipping", ["ghost", "stored"])
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_images_may_be_padded_with_themselves(mode, clipping):
    """Opacus pads with zeros, whatever the layer does."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, padding_mode=mode), nn.Flatten(), nn.Tanh())
    rows = batch(4, size=5)
    found = at_once(ClippedSums(model, clipping), losses_of(model), rows, 0.5)
    assert error(found, by_loop(model, losses_of(model), rows, 0.5)) < 1e-5


@pytest.mark.parametrize("kind", [InPlace, Own])
def test_what_cannot_be_followed_is_never_a_wrong_sum(kind):
    model, rows = kind(), batch(4, size=3)
    sums = ClippedSums(model)
    try:
        found = at_once(sums, losses_of(model), rows, 0.5)
    except (RuntimeError, NotImplementedError):
        return  # Opacus refuses
    finally:
        assert not sums.ghost
    assert error(found, by_loop(model, losses_of(model), rows, 0.5)) < 1e-5


def test_recorded_pieces_are_filled_up_and_the_filling_takes_no_part(monkeypatch):
    """Batches of 3 to 20 images go through two graphs, of 16 and 32 rows, and keep their sums."""
    pretend_gpu(monkeypatch)
    model = build("small-cnn", channels=1, outputs=3, size=16, norm="group")
    recorded: list[GraphedFunction] = []

    def record(function):
        recorded.append(GraphedFunction(function, "private steps"))
        return recorded[-1]

    sums = ClippedSums(model, record=record)
    for rows in (3, 17, 16, 20, 5, 18, 4, 19, 16):
        given = batch(rows, size=16)
        plain = ClippedSums(copy.deepcopy(model))
        wanted = at_once(plain, losses_of(plain.module), given, 0.5)
        assert error(at_once(sums, losses_of(model), given, 0.5), wanted) < 1e-5
    [one] = recorded
    assert sorted(shapes[0][0][0] for shapes in one.calls) == [16, 32]
    assert min(one.calls.values()) > WARM_UP


class Codes(nn.Module):
    """Each image becomes rows of a table, chosen by its brightness at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.whole, self.last = nn.Embedding(5, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole((x.mean((1, 2, 3)) * 5).long())  # one vector for an image, as for a label
        return self.last(torch.tanh(self.table((x[:, 0] * 5).long())).mean((1, 2)) + whole)


def test_a_table_of_vectors_is_followed_and_a_layer_that_runs_twice_stored():
    model, rows = Codes(), batch(4, size=6)
    sums = ClippedSums(model)
    found = at_once(sums, losses_of(model), rows, 0.3)
    assert sums.ghost
    assert error(found, by_loop(model, losses_of(model), rows, 0.3)) < 1e-5
    model, rows = Twice(), batch(4, size=3)
    sums = ClippedSums(model)
    found = at_once(sums, losses_of(model), rows, 0.5)
    assert not sums.ghost
    assert error(found, by_loop(model, losses_of(model), rows, 0.5)) < 1e-5


def test_a_batch_goes_through_in_pieces_that_fit_the_memory(monkeypatch):
    model = build("small-cnn", channels=1, outputs=3, size=16, norm="group")
    given, seen = batch(10, size=16), []
    sums = ClippedSums(model)
    wanted = at_once(sums, losses_of(model), given, 0.5)

    def losses(images: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(images))
        return losses_of(model)(images, targets)

    ghost = ghost_clipping.GhostClipping(model)
    with ghost.following():
        one_row = ghost.bytes_of(lambda: losses_of(model)(*(one[:1] for one in given)))
    monkeypatch.setattr(clipped_sums, "ROOM", {"cpu": 4 * one_row + 3})
    assert error(at_once(ClippedSums(model), losses, given, 0.5), wanted) < 1e-5
    assert seen == [1, 4, 4, 2]  # one row to know what it takes


def column(*places: float) -> torch.Tensor:
    """One image and one group, with a number at each place: [1, 1, T, 1]."""
    return torch.tensor(places, dtype=torch.float64).reshape(1, 1, -1, 1)


@pytest.mark.parametrize(("left", "right", "square", "sizes"), [
    ((1.0,), (1.0,), 1.0, 1.0),
    ((1.0, 1.0), (1.0, 1.0), 4.0, 4.0),
    ((1.0, -1.0), (1.0, 1.0), 0.0, 4.0),  # two places that cancel out: rounding could hide a length
    ((0.0,), (5.0,), 0.0, 0.0),
])  # fmt: skip
def test_a_length_is_enlarged_by_sixteen_units_in_the_last_place_of_all_that_was_added(left, right, square, sizes):
    [found] = ghost_clipping.Products(column(*left), column(*right)).squares().tolist()
    assert found == square + sizes * 16 * torch.finfo(torch.float64).eps


def test_products_of_short_numbers_are_exact_and_gradients_lie_as_their_parameters():
    """1 + 2^-7 has no square in bfloat16, and has one in float32."""
    one = torch.full((1, 1, 1, 1), 1 + 2**-7).bfloat16()
    found = ghost_clipping.product(one, one)
    assert found.dtype == torch.float32
    assert found.item() == (1 + 2**-7) ** 2
    parameter, gradient = torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    assert ghost_clipping.laid_out_as(parameter, gradient) is gradient
    other = gradient.contiguous(memory_format=torch.channels_last)
    found = ghost_clipping.laid_out_as(parameter, other)
    assert found.stride() == parameter.stride() != other.stride()
    assert torch.equal(found, gradient)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("layer", "repeats", "on", "computed"), [
    (nn.Conv2d(8, 8, 1), False, OnGpu, torch.bfloat16),  # rows begin at sixteen bytes: eight numbers of two
    (nn.Conv2d(4, 8, 1), False, OnGpu, torch.float32),
    (nn.Linear(8, 8), False, OnGpu, torch.float32),
    (nn.Conv2d(8, 8, 1), True, OnGpu, torch.float32),  # a run that must repeat itself
    (nn.Conv2d(8, 8, 1), False, torch.Tensor, torch.float32),  # a processor
])  # fmt: skip
def test_short_numbers_are_multiplied_where_a_gpu_is_fast_and_nowhere_else(monkeypatch, layer, repeats, on, computed):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeats)
    came, back = ghost_clipping._as_followed(layer, torch.ones(2), torch.ones(2).bfloat16().as_subclass(on))
    assert {came.dtype, back.dtype} == {computed}


def tied() -> nn.Module:
    """Two layers that share a weight: the gradients of one layer are not those of the weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(("model", "followed"), [
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True), (nn.Sequential(nn.Linear(2, 2), nn.PReLU()), False),
    (nn.Sequential(nn.Linear(2, 2), nn.PReLU().requires_grad_(False)), True), (tied(), False),
    (nn.Conv1d(1, 1, 1), False),
])  # fmt: skip
def test_layers_with_a_rule_whose_weights_are_their_own_are_followed(model, followed):
    assert ghost_clipping.can_follow(model) is followed
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
    ghost = ghost_clipping.GhostClipping(model)
    with ghost.following():
        return ghost.clipped_sums(losses, 10.0, list(model.parameters()))


def test_a_pass_without_gradients_does_not_count_and_an_output_changed_in_place_is_not_followed():
    rows = torch.tensor([[3.0, 4.0]])
    model = Repeated(torch.no_grad)
    [found] = clipped(model, lambda: model(rows))
    assert found.tolist() == [pytest.approx([3.0, 4.0], rel=1e-5)]
    model = Repeated(torch.enable_grad)
    with pytest.raises(ghost_clipping.NotFollowedError, match="Linear runs twice in a pass"):
        clipped(model, lambda: model(rows))
    model = nn.Linear(2, 1)
    with pytest.raises(ghost_clipping.NotFollowedError, match="the output of Linear is changed in place"):
        clipped(model, lambda: model(torch.ones(1, 2)).mul_(2)[:, 0])


@pytest.mark.parametrize(("channels", "filters"), [(1, 2), (2, 1), (2, 2)])
def test_a_layer_that_gets_or_gives_other_rows_than_images_is_not_followed(channels, filters):
    """An image without its batch: its first axis has as many rows as channels, or filters."""
    model = nn.Conv2d(channels, filters, 1)
    with pytest.raises(ghost_clipping.NotFollowedError, match="Conv2d does not get a row for each image"):
        clipped(model, lambda: model(torch.ones(channels, 2, 2)).sum().reshape(1))


def test_only_counted_rows_take_part():
    model, rows = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.5, 0.25]])
    ghost = ghost_clipping.GhostClipping(model)
    with ghost.following():
        given = (lambda: model(rows)[:, 0], 10.0, list(model.parameters()), torch.tensor([True, False, True]))
        [found] = ghost.clipped_sums(*given)
    assert found.tolist() == [pytest.approx([3.5, 4.25], rel=1e-5)]


@pytest.mark.parametrize(
    ("settings", "followed"), [({}, True), ({"padding_idx": 0}, False), ({"max_norm": 1.0}, False)]
)
def test_a_table_that_changes_its_rows_by_itself_is_not_followed(settings, followed):
    assert ghost_clipping.can_follow(nn.Embedding(5, 4, **settings)) is followed
