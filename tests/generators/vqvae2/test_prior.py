"""The prior over codes: what it may see, and that sampling with everything kept equals sampling the slow way."""

import pytest
import torch
from torch.nn import functional as F

from polyclinic.generators.base import LabelEmbedding
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.generators.vqvae2.prior import GatedLayer, PixelCNN, Prior, draw, negative_log_likelihoods
from polyclinic.tasks import Target

CLASSES = Target(classes=("a", "b", "c"))
AGES = Target(unit="months", label_range=(0.0, 240.0))


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def settings(**sizes: int) -> VQVAE2:
    return VQVAE2(prior_width=8, prior_dropout=0.0, **sizes)


def prior(target: Target = CLASSES, grid: int = 3) -> Prior:
    net = Prior(settings(top_codes=5, bottom_codes=7, code_width=3, prior_layers=3), target, grid)
    net.know(torch.randn(5, 3), torch.randn(7, 3))
    return net.double()


def pixel_cnn(size: int, grid: int, width: int = 8, layers: int = 3) -> PixelCNN:
    net = PixelCNN(size, 4, grid, width, layers)
    net.embed.know(torch.randn(size, 4))
    return net.double()


def sample_slowly(net: PixelCNN, condition: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The whole network again for every single position."""
    codes = torch.zeros(uniform.shape, dtype=torch.long)
    for y in range(net.grid):
        for x in range(net.grid):
            codes[:, y, x] = draw(net(codes, condition)[:, :, y, x], uniform[:, y, x])
    return codes


@pytest.mark.parametrize("grid", [1, 2, 5])
def test_sampling_with_everything_kept_equals_the_slow_way(grid: int):
    net = pixel_cnn(11, grid)
    condition = torch.randn(6, 8, grid, grid, dtype=torch.double)
    uniform = torch.rand(6, grid, grid)
    with torch.no_grad():
        assert torch.equal(net.sample(condition, uniform), sample_slowly(net, condition, uniform))


def test_both_levels_equal_the_slow_way():
    net, labels = prior(), torch.tensor([0, 1, 2, 2])
    with torch.no_grad():
        top, bottom = net.sample(labels, torch.Generator().manual_seed(3))
        uniform = torch.rand(4, 45, generator=torch.Generator().manual_seed(3))
        slow_top = sample_slowly(net.top, net.top_condition(labels), uniform[:, :9].unflatten(1, (3, 3)))
        below = net.bottom_condition(labels) + net.lift_top(net.embed_top(slow_top).movedim(-1, 1))
        slow_bottom = sample_slowly(net.bottom, below, uniform[:, 9:].unflatten(1, (6, 6)))
    assert torch.equal(top, slow_top)
    assert torch.equal(bottom, slow_bottom)


def test_a_position_sees_all_codes_before_it_and_none_after():
    grid = 4
    net = pixel_cnn(6, grid, 16, 5)
    condition = torch.zeros(1, 16, grid, grid, dtype=torch.double)
    codes = torch.randint(6, (1, grid, grid))
    before = net(codes, condition)
    for changed in range(grid * grid):
        other = codes.clone()
        other.view(-1)[changed] = (other.view(-1)[changed] + 1) % 6
        moved = (net(other, condition) - before).abs().amax(1).flatten() > 0
        # 5 layers of 3 columns: on a grid of 4 nothing that comes earlier is out of sight, and there is no blind spot
        assert moved.tolist() == [place > changed for place in range(grid * grid)]


def test_ages_are_embedded_smoothly_and_unknown_labels_alike():
    embed = LabelEmbedding(AGES, 8)
    near, far = embed(torch.tensor([100.0, 101.0])), embed(torch.tensor([100.0, 180.0]))
    assert 0 < (near[0] - near[1]).norm() < (far[0] - far[1]).norm()
    assert prior(AGES).sample(torch.tensor([12.0, 200.0]), torch.Generator())[1].shape == (2, 6, 6)
    embed = LabelEmbedding(Target(), 8)
    assert torch.equal(embed(torch.tensor([0.0])), embed(torch.tensor([7.0])))


def test_loss_and_logits_by_hand():
    net, labels = prior(), torch.tensor([0, 2])
    top, bottom = torch.randint(5, (2, 3, 3)), torch.randint(7, (2, 6, 6))
    logits = net(top, bottom, labels)
    found = negative_log_likelihoods(top, bottom, logits)
    for i in range(2):
        both = zip(logits, (top, bottom), strict=True)
        parts = [-one.log_softmax(1)[i].gather(0, codes[i][None]).mean() for one, codes in both]
        assert found[i].item() == pytest.approx(sum(parts).item(), rel=1e-5)
    net = pixel_cnn(5, 2)
    features = torch.randn(1, 8, 2, 2, dtype=torch.double)
    found = net.logits(features)
    hidden = net.body(features)
    trusted, guess = F.softplus(net.trust(hidden)), net.guess(hidden)
    for code, vector in enumerate(net.embed.vectors):
        # minus the squared distance, less what is the same for all codes
        nearness = guess.square().sum(1) - (guess - vector[:, None, None]).square().sum(1)
        torch.testing.assert_close(found[:, code], net.own(hidden)[:, code] + trusted[:, 0] * nearness)


def test_a_gated_layer_by_hand_and_draws_follow_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 3)
    drawn = draw(logits, torch.arange(1000) / 1000).bincount()
    assert drawn.tolist() == pytest.approx([500, 300, 200], abs=1)
    assert draw(logits[:1], torch.tensor([0.9999999])).item() == 2
    layer = GatedLayer(2, 0.0).double()
    above, left, condition = (torch.randn(3, 2, 4, 4, dtype=torch.double) for _ in range(3))
    found_above, found_left = layer(above, left, condition)

    def gated(inner):
        first, second = inner[:, :2], inner[:, 2:]
        return first.tanh() * second.sigmoid()

    told = layer.condition(condition)
    seen = F.conv2d(F.pad(above, (1, 1, 1, 0)), layer.vertical.weight, layer.vertical.bias)
    torch.testing.assert_close(found_above, above + gated(seen + told[:, :4]))
    beside = F.conv2d(F.pad(left, (1, 0)), layer.horizontal.weight, layer.horizontal.bias)
    inner = beside + layer.link(seen) + told[:, 4:]
    torch.testing.assert_close(found_left, left + layer.out(gated(inner)))
