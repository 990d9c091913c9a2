"""DP-SGD: against plain SGD, arithmetic by hand, and the statistics that its guarantee rests on."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from private_runs import Scale
from quick_backbones import QUICK
from torch import nn
from torch.nn import functional as F

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.models import BACKBONES, build
from polyclinic.privacy import dp_sgd
from polyclinic.randomness import numpy_rng, seed_of, torch_rng

CPU = torch.device("cpu")
BATCH = 6
SMALL = ("small-cnn", "lenet5", "cnn-32-64-128", "cnn-64-128-64-32")  # quick enough for several batches


def noise(*address: str | int) -> dp_sgd.Noise:
    return dp_sgd.noise_from(CPU, 0, *address)


def silent(like: torch.Tensor) -> torch.Tensor:
    raise AssertionError("no noise was wanted")


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def network(name: str) -> nn.Module:
    outputs = 1 if BACKBONES[name].dense else 3
    return build(name, channels=1, outputs=outputs, size=32, norm="group")


def losses_of(model: nn.Module):
    def losses(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = model(images)
        if output.dim() == 4:
            return (output.mean((1, 2, 3)) - targets).square()
        return F.cross_entropy(output, targets.long(), reduction="none")

    return losses


def batches(*sizes: int) -> list[dp_sgd.Batch]:
    rng = torch_rng("batches")
    return [
        (torch.rand(size, 1, 32, 32, generator=rng), torch.randint(3, (size,), generator=rng).float()) for size in sizes
    ]


def plain_steps(model: nn.Module, given: list[dp_sgd.Batch], optimizer: torch.optim.Optimizer, expected: int) -> None:
    for batch in given:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if len(batch[0]):
            (losses_of(model)(*batch).sum() / expected).backward()
        optimizer.step()


def descend(model, losses, batches, steps, optimizer, *, correct=None, **mean) -> None:
    some = itertools.islice(batches, steps)
    dp_sgd.take_noisy_steps(model, optimizer, losses, some, dp_sgd.NoisyMean(**mean), correct)


def furthest(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_without_noise_and_clipping_it_is_plain_sgd(name, kind):
    """On the same batches, one of them empty, every backbone ends in the same weights."""
    model = network(name)
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    given = batches(BATCH, 2, 0, BATCH + 1) if name in SMALL else batches(3, 0)

    def make(one: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(one.parameters(), 0.01, 0.9)
        # a large eps: Adam's first steps know little but signs, and would blow rounding up
        return torch.optim.Adam(one.parameters(), 0.01, eps=0.1)

    settings = {"noise": 0.0, "clip": math.inf, "expected": BATCH, "draw": silent}
    descend(model, losses_of(model), iter(given), len(given), make(model), **settings)
    plain_steps(other, given, make(other), BATCH)
    assert furthest(model, other) <= 1e-6
    assert furthest(model, start) > 1e-3


def gradient(rows: list[list[float]], *, clip: float, expected: float, noise: float = 0.0, draw=silent) -> torch.Tensor:
    model = Scale()
    batch = (torch.tensor(rows).reshape(-1, 2),)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    settings = {"noise": noise, "clip": clip, "expected": expected, "draw": draw}
    descend(model, model, iter([batch]), 1, optimizer, **settings)
    return -model.layer.weight.detach()[0]


def test_clipped_sums_and_noise_over_the_expected_number_by_hand():
    """(3, 4) of length 5 becomes (0.6, 0.8); the others are short enough; the sum of three rows is halved."""
    found = gradient([[3.0, 4.0], [0.3, 0.0], [0.0, 0.5]], clip=1.0, expected=2)
    assert found.tolist() == pytest.approx([(0.6 + 0.3) / 2, (0.8 + 0.5) / 2], abs=1e-6)
    ones = gradient([[3.0, 4.0]], clip=2.0, expected=4, noise=0.5, draw=torch.ones_like)
    assert ones.tolist() == pytest.approx([(1.2 + 1.0) / 4, (1.6 + 1.0) / 4], abs=1e-6)
    assert gradient([], clip=1.0, expected=2).tolist() == [0.0, 0.0]
    drawn = gradient([], clip=2.0, expected=4, noise=0.5, draw=torch.ones_like)
    assert drawn.tolist() == pytest.approx([0.25, 0.25])


def test_what_corrects_the_gradient_comes_after_the_noise():
    seen = []

    def correct(model: nn.Module) -> None:
        [weight] = model.parameters()
        seen.append(weight.grad.clone())
        weight.grad.zero_()

    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    batch = (torch.tensor([[0.0, 0.5]]),)
    settings = {"noise": 1.0, "clip": 1.0, "expected": 1, "draw": torch.ones_like, "correct": correct}
    descend(model, model, iter([batch]), 1, optimizer, **settings)
    assert seen[0].tolist() == [pytest.approx([1.0, 1.5])]
    assert model.layer.weight.tolist() == [[0.0, 0.0]]


def test_the_noise_has_the_standard_deviation_it_is_said_to_have():
    """100,000 weights, zero gradient: what moves them is the noise, of deviation noise * clip / expected."""
    model = nn.Linear(1000, 100, bias=False)
    start = model.weight.detach().clone()
    settings = {"noise": 1.3, "clip": 0.6, "expected": 8, "draw": noise()}
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    descend(model, lambda x: 0 * model(x).sum(1), iter([(torch.ones(2, 1000),)]), 1, optimizer, **settings)
    moved = (model.weight.detach() - start).flatten().double().numpy()
    wanted = 1.3 * 0.6 / 8
    assert moved.std() == pytest.approx(wanted, rel=0.01)
    assert abs(moved.mean()) < 4 * wanted / math.sqrt(len(moved))
    assert np.mean(np.abs(moved) < wanted) == pytest.approx(0.6827, abs=0.006)
    assert np.mean(np.abs(moved) < 3 * wanted) == pytest.approx(0.9973, abs=0.001)


def test_noise_is_numpys_at_the_whole_address_and_new_at_every_draw():
    like = torch.zeros(50)
    first, second = noise("a"), noise("a")
    one = first(like)
    assert torch.equal(one, second(like))
    assert not torch.equal(one, first(like))
    assert not torch.equal(one, noise("b")(like))
    assert noise("a")(like.double()).dtype == torch.float64
    # torch's generator is linear: whoever knows some of its numbers can work out the others.
    rng = numpy_rng(0, "a")
    drawn = noise("a")
    for shape in ((3, 2), (5,)):
        wanted = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        assert torch.equal(drawn(torch.zeros(shape)), wanted)
    # A generator that takes 32 bits of a seed would give the same noise at both of these.
    one, other = (0, "site-1", "batches", 47390), (0, "site-1", "batches", 113486)
    assert seed_of(*one) % 2**32 == seed_of(*other) % 2**32
    assert not torch.equal(dp_sgd.noise_from(CPU, *one)(torch.zeros(9)), dp_sgd.noise_from(CPU, *other)(torch.zeros(9)))


def test_poisson_batches_have_the_sizes_and_chances_they_should():
    """Size: mean nq, variance nq(1 - q). Every image and every pair of images: chance q and q squared."""
    count, rate, draws = 40, 0.1, 20000
    chosen = np.zeros((draws, count), dtype=bool)
    for row, index in zip(chosen, dp_sgd.poisson(count, rate, numpy_rng("poisson")), strict=False):
        row[index.numpy()] = True
    sizes = chosen.sum(1)
    assert sizes.mean() == pytest.approx(count * rate, rel=0.02)
    assert sizes.var() == pytest.approx(count * rate * (1 - rate), rel=0.05)
    assert np.mean(sizes == 0) == pytest.approx((1 - rate) ** count, abs=0.003)
    assert np.abs(chosen.mean(0) - rate).max() < 5 * math.sqrt(rate * (1 - rate) / draws)
    pairs = (chosen.T.astype(float) @ chosen / draws)[~np.eye(count, dtype=bool)]
    assert pairs.mean() == pytest.approx(rate**2, rel=0.02)
    assert np.abs(pairs - rate**2).max() < 6 * math.sqrt(rate**2 / draws)
    first = next(dp_sgd.poisson(7, 1.0, numpy_rng("all")))
    assert first.tolist() == list(range(7))
    assert first.dtype == torch.int64


def test_the_module_is_as_it_was_but_for_its_weights():
    model = network("small-cnn")
    names, hooks = list(model.state_dict()), [len(m._forward_hooks) for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"noise": 1.0, "clip": 1.0, "expected": 2, "draw": noise()}
    for _ in range(2):  # and so it can be trained again
        descend(model, losses_of(model), iter(batches(2)), 1, optimizer, **settings)
    assert list(model.state_dict()) == names
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None and not vars(p) for p in model.parameters())


NOISY = {"noise": 1.0, "clip": 1.0, "expected": 2, "draw": torch.zeros_like}


class Sly(nn.Module):
    """Writes down what it sees, in a buffer of a layer that has no weights, which Opacus lets pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.memory = nn.Module()
        self.memory.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.seen.copy_(x[0])
        return self.layer(x)[:, 0]


def test_batch_norm_is_refused_with_the_cure_and_whatever_changes_without_noise_is_found():
    normed, sly = build("small-cnn", channels=1, outputs=2, size=32, norm="batch"), Sly()
    with pytest.raises(BadInput, match=r"model\.norm = 'group'"):
        descend(normed, losses_of(normed), iter(batches(2)), 1, torch.optim.SGD(normed.parameters(), 0.1), **NOISY)
    with pytest.raises(WorkFailed, match=r"memory\.seen"):
        descend(sly, sly, itertools.repeat((torch.ones(2, 2),)), 1, torch.optim.SGD(sly.parameters(), 0.1), **NOISY)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_plain_sgd_too_and_noise_has_an_address():
    gpu = torch.device("cuda")
    model = network("resnet18").to(gpu).to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    given = [tuple(tensor.to(gpu) for tensor in batch) for batch in batches(BATCH, 0)]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    descend(model, losses_of(model), iter(given), 2, optimizer, noise=0.0, clip=math.inf, expected=BATCH, draw=silent)
    plain_steps(other, given, torch.optim.SGD(other.parameters(), 0.01), BATCH)
    assert furthest(model, other) < 1e-4
    like = torch.zeros(9, device=gpu)
    assert torch.equal(dp_sgd.noise_from(gpu, 5)(like), dp_sgd.noise_from(gpu, 5)(like))
    assert not torch.equal(dp_sgd.noise_from(gpu, 5)(like), dp_sgd.noise_from(gpu, 6)(like))


class UsedTwice(nn.Module):
    """A weight that a layer uses, and somebody else as well: gradients per image miss the second use."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(4, 3), share

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images) + self.share * F.linear(images, self.layer.weight)


def test_small_wrong_gradients_of_an_unknown_network_are_noticed():
    images = 0.1 * torch.rand(5, 4, generator=torch_rng("images"))
    assert dp_sgd.try_gradients(UsedTwice(0.0), images) is None
    assert "not the gradient of the sum" in (dp_sgd.try_gradients(UsedTwice(1.0), images) or "")
