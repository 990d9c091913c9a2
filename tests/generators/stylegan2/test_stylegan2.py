"""StyleGAN2: images, labels, augmentation; a GPU descends as a CPU does; parts of losses weigh what they should."""

import collections
import math

import pytest
import torch
from pretended_gpu import pretend_gpu
from small_stylegan2 import TINY, TWO, build, rng
from torch.utils._python_dispatch import TorchDispatchMode

from polyclinic.errors import BadInput
from polyclinic.generators.base import FitOptions, RandomSource
from polyclinic.generators.stylegan2 import training
from polyclinic.generators.stylegan2.layers import Conv, StyledConv
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.privacy.dp_sgd import mixes_samples, obstacles
from polyclinic.tasks import Target
from polyclinic.training.gpu.graphs import WARM_UP

LABELS = torch.arange(8) % 2


def stepping(channels=1, device="cpu", precision="fp32", **settings):
    images = torch.randint(0, 256, (16, channels, 32, 32), dtype=torch.uint8, generator=rng())
    chosen = StyleGAN2(**{**TINY, **settings})
    model = chosen.build(channels=channels, size=32, target=TWO, seed=0, device=device, precision=precision)
    return model.begin(images, torch.arange(16) % 2, rng())


def augmenting(device="cpu", **settings):
    steps = stepping(3, device, **settings)
    steps.p.fill_(0.3)
    return steps


@pytest.fixture
def descents(monkeypatch):
    """What each optimiser was asked to descend: the loss, and its gradients in one row. Nothing is moved."""
    found = []

    def noted(optimizer, loss):
        weights = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        row = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
        found.append((float(loss.detach()), torch.cat([one.flatten() for one in row])))

    monkeypatch.setattr(training, "_descend", noted)
    return found


# a CPU's bf16 is 0.02 to 0.08 away from its fp32 here
@pytest.mark.parametrize(("precision", "apart"), [("fp32", 1e-5), ("bf16", 0.2)])
@pytest.mark.parametrize("step", ["_learn", "_tell_apart", "_flatten", "_even_out"])
def test_a_gpu_descends_as_a_cpu_does(step, precision, apart, descents, monkeypatch):
    """Whole steps, second derivatives of R1 and path length included; in bf16 up to its rounding."""
    for gpu, of in ((False, "fp32"), (True, precision)):
        monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x, gpu=gpu: gpu)
        steps = stepping(channels=3, precision=of)
        steps.p.fill_(0.3)
        real, labels = next(steps.batches)
        getattr(steps, step)(*((labels,) if step == "_even_out" else (real, labels)))
    (loss, expected), (found_loss, found) = descents
    assert found_loss == pytest.approx(loss, rel=apart)
    assert float(expected.norm()) > 0
    assert float((found - expected).norm() / expected.norm()) < apart


@pytest.mark.parametrize("gpu", [False, True])
def test_autocast_reaches_all_convolutions(gpu, monkeypatch):
    """PyTorch's know of it; ours are told."""
    monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x: gpu)
    x, w = torch.randn(2, 8, 8, 8), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = [Conv(8, 8, kernel, down=down)(x) for kernel in (1, 3) for down in (False, True)]
        made += [StyledConv(8, 8, 3, 4, up=up)(x, w)[0] for up in (False, True)]
    assert {one.dtype for one in made} == {torch.bfloat16}


def test_r1_is_half_of_gamma_for_each_of_the_steps_that_it_stands_for(descents):
    steps = stepping(gamma=3.0)
    real, labels = next(steps.batches)
    steps._flatten(real, labels)
    seen = real.clone().requires_grad_()
    (slope,) = torch.autograd.grad(steps.discriminator(seen, labels).sum(), seen)
    assert descents[0][0] == pytest.approx(3.0 / 2 * 16 * float(slope.square().sum() / len(real)), rel=1e-4)


def test_path_length_by_hand(descents):
    steps = stepping(path_weight=3.0)
    steps.random = RandomSource(rng(5), steps.device)
    steps._even_out(LABELS)
    random, generator = RandomSource(rng(5), steps.device), steps.generator
    styles = generator.repeated(generator.mapping(random.normal(4, 8), LABELS[:4]))
    images = generator.synthesis(styles, [random.normal(4, 1, side, side) for side in generator.synthesis.noise_sides])
    change = (images * random.normal(4, 1, 32, 32)).sum() / 32
    (slope,) = torch.autograd.grad(change, styles)
    lengths = [math.sqrt(sum(float(of_layer.square().sum()) for of_layer in one) / len(one)) for one in slope]
    usual = 0.01 * sum(lengths) / 4
    assert float(steps.controls.get_buffer("path_length")) == pytest.approx(usual, rel=1e-4)
    assert descents[0][0] == pytest.approx(3.0 * 4 * sum((one - usual) ** 2 for one in lengths) / 4, rel=1e-3)


@pytest.mark.parametrize(("taken", "half_life"), [(0, 0.4), (100, 40.0), (10**6, 1000.0)])
def test_the_average_follows_fast_at_first(taken, half_life):
    steps = stepping(average_images=1000)
    for average, weight in zip(steps.of_average, steps.to_follow, strict=True):
        average.zero_(), weight.data.fill_(1.0)
    steps.taken = taken
    steps._follow(8)
    assert all(float(one.mean()) == pytest.approx(1 - 0.5 ** (8 / half_life)) for one in steps.of_average)


def test_two_styles_in_the_share_of_steps_that_was_asked_for():
    steps = stepping()
    assert bool((steps.styles(LABELS) == steps.styles(LABELS, mixed=0.0)[:, :1]).all()) is False  # drawn anew
    mixed, places = 0, set()
    for _ in range(300):
        styles = steps.styles(LABELS, mixed=0.25)
        of_first = (styles == styles[:, :1]).all(2).all(0).tolist()
        mixed += not all(of_first)
        places.add(sum(of_first))
        assert of_first == sorted(of_first, reverse=True)
    assert 50 < mixed < 100
    assert places == set(range(1, steps.generator.synthesis.layers + 1))


def test_the_discriminator_learns_from_as_many_made_images_with_the_same_labels(monkeypatch):
    """All of one kind are black here, of the other white; it is sure of the real ones."""
    steps, asked, paid = stepping(), [], []
    monkeypatch.setattr(steps, "make", lambda labels, *_: asked.append(labels) or -torch.ones(len(labels), 1, 32, 32))
    monkeypatch.setattr(steps, "_scores", lambda images, labels: images.mean((1, 2, 3)))
    monkeypatch.setattr(training, "_descend", lambda optimizer, loss: paid.append(float(loss)))
    sure = steps._tell_apart(torch.ones(8, 1, 32, 32), LABELS)
    assert torch.equal(asked[0], LABELS)
    assert paid == [pytest.approx(2 * math.log1p(math.exp(-1)))]
    assert float(sure) == 1.0


def test_the_generators_half_adds_the_gradient_of_a_further_loss(monkeypatch):
    steps = stepping(path_weight=0.0, ada_target=0.0, style_mixing=0.0)
    labels = steps.discriminator_half()
    fake = steps.make(labels)
    further = torch.randn(fake.shape, generator=rng(3))
    weights = list(steps.generator.parameters())
    loss = torch.nn.functional.softplus(-steps.discriminator(fake, labels)).mean() + (fake * further).sum()
    wanted = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    monkeypatch.setattr(steps.of_generator, "step", lambda: None)  # gradients stay to be seen
    steps.generator_half(fake, labels, further)
    for weight, gradient in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-5)
    assert steps.taken == 1


def test_halves_have_their_regularisers_when_due(monkeypatch):
    steps, due = stepping(), []
    for name in ("_flatten", "_even_out", "_adapt"):
        monkeypatch.setattr(steps, name, lambda *_, name=name: due.append((steps.taken, name)))
    for _ in range(17):
        labels = steps.discriminator_half()
        steps.generator_half(steps.make(labels), labels)
    assert [at for at, name in due if name == "_flatten"] == [0, 16]
    assert [at for at, name in due if name == "_even_out"] == [0, 4, 8, 12, 16]
    assert [at for at, name in due if name == "_adapt"] == [4, 8, 12, 16]


def test_a_discriminator_of_sites_is_the_same_network_but_for_outputs_labels_and_spread():
    settings = StyleGAN2(width=2, latent=8)
    own = settings.build(channels=3, size=28, target=TWO, seed=0).networks["discriminator"]
    central = settings.central_discriminator(channels=3, size=28, target=TWO, sites=3)
    sizes = [{name: tuple(t.shape) for name, t in network.state_dict().items()} for network in (own, central)]
    differ = {name for name in sizes[0] | sizes[1] if sizes[0].get(name) != sizes[1].get(name)}
    assert differ == {"last.weight", "score.weight", "score.bias", "label.embed.weight"}
    assert sizes[0]["last.weight"][1] == sizes[1]["last.weight"][1] + 1
    images = torch.randn(5, 3, 28, 28, generator=rng())
    found = central(images, torch.zeros(5))
    assert found.shape == (5, 3)
    torch.testing.assert_close(found[:1], central(images[:1], torch.zeros(1)))  # no image depends on the others
    per_class = settings.central_discriminator(channels=3, size=28, target=TWO, sites=3, per_class=True)
    assert per_class(images, torch.tensor([0, 1, 1, 0, 1])).shape == (5, 3)


class Counted(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", ["_learn", "_tell_apart", "_flatten", "_even_out"])
def test_a_step_fetches_no_number_from_the_cpu_and_asks_the_gpu_for_none(monkeypatch, step):
    """Either would end a recording. Optimisers are left out: on a GPU they are others."""
    monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x: True)
    monkeypatch.setattr(training, "_descend", lambda optimizer, loss: loss.backward())
    steps = augmenting()
    steps.step()  # what is kept from the first time on
    real, labels = next(steps.batches)
    given = (labels,) if step == "_even_out" else (real, labels)
    with Counted() as counted:
        getattr(steps, step)(*given)
    assert counted.calls["convolution"] > 0
    assert not {"lift_fresh", "nonzero", "masked_select", "unique"} & set(counted.calls)
    asked = 0 if step == "_even_out" else 1  # for p, on a CPU only
    assert counted.calls["_local_scalar_dense"] == asked


def test_steps_with_graphs_are_the_steps_to_the_last_bit(monkeypatch):
    """On a pretended GPU: the numbers drawn, the order of the steps, the regularisers between them."""
    plain, graphed = augmenting(), augmenting()
    pretend_gpu(monkeypatch)
    graphed._stream = torch.cuda.Stream()
    for name in ("_even_out", "_tell_apart", "_flatten"):
        setattr(graphed, name, graphed._graphed(getattr(graphed, name)))
    for _ in range(WARM_UP + 3):
        plain.step()
        graphed.step()
        assert torch.equal(graphed.loss, plain.loss)
    assert graphed._learners[None].graphs
    theirs = graphed.networks.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in plain.networks.state_dict().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_are_the_steps():
    losses = {}
    for graphs in (False, True):
        steps = augmenting("cuda", graphs=graphs)
        losses[graphs] = []
        for _ in range(6):
            steps.step()
            losses[graphs].append(float(steps.loss))
    assert losses[True] == pytest.approx(losses[False], abs=1e-3)


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1), (100, 1)])
def test_images_have_the_size_that_was_asked_for(size, channels):
    model = build(size, channels)
    made = model.sample(torch.tensor([0, 1, 1]), rng())
    assert (made.shape, made.dtype) == ((3, channels, size, size), torch.uint8)
    assert model.sample(torch.zeros(0, dtype=torch.long), rng()).shape == (0, channels, size, size)


@pytest.mark.parametrize(("size", "inner"), [(28, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 256)])
def test_inside_a_side_is_a_power_of_two(size, inner):
    assert StyleGAN2().shape(1, size, Target()).size == inner


def test_samples_come_from_the_average_and_frozen_noise_makes_the_same_image():
    model = build(steps=20)
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8, generator=rng())
    model.fit(images, torch.arange(16) % 2, rng())
    state = model.state()
    moved = [name for name in state if name.startswith("generator.") and state[name].numel() > 1]
    assert any(not torch.equal(state[name], state["average." + name.removeprefix("generator.")]) for name in moved)
    w = torch.randn(4, 8, generator=rng())
    mean = model.average.mapping.get_buffer("mean")
    assert float(mean.abs().sum()) > 0
    assert torch.allclose(model.average.truncated(w, 0.0), mean.expand(4, -1))
    assert torch.equal(model.average.truncated(w, 1.0), w)
    model = build()
    w = torch.randn(2, 8, generator=rng()).requires_grad_()
    first, second = (model.images_of(w, model.fixed_noises()) for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert float(w.grad.abs().sum()) > 0


def test_replayed_images_join_every_batch_and_an_extra_loss_reaches_the_generator():
    images = torch.zeros(8, 1, 28, 28, dtype=torch.uint8)
    model = build()
    stream = iter([(torch.ones(4, 1, 28, 28), torch.ones(4, dtype=torch.long))])
    steps = model.begin(images, torch.zeros(8, dtype=torch.long), rng(), replayed=stream)
    real, labels = next(steps.batches)
    assert real.shape == (12, 1, 32, 32)
    assert labels.tolist() == [0] * 8 + [1] * 4
    assert (float(real[:8].max()), float(real[8:].min())) == (-1.0, 1.0)
    steps = stepping(path_weight=0)
    seen = []

    def extra(real, made):
        assert made.requires_grad
        seen.extend((real, made.detach()))
        return 1000 * made.mean()  # darker

    before = float(steps.make(torch.zeros(8, dtype=torch.long)).mean())
    for _ in range(10):
        steps.step(extra)
    assert float(steps.make(torch.zeros(8, dtype=torch.long)).mean()) < before - 0.1
    assert all(0 <= float(images.min()) <= float(images.max()) <= 1 for images in seen)


def test_gamma_follows_the_sizes_and_adam_is_slowed_for_its_regulariser():
    assert stepping().gamma(8) == pytest.approx(0.0002 * 32**2 / 8)
    assert stepping(gamma=3.0).gamma(8) == 3.0
    steps = stepping(lr=0.01)
    for optimizer, share in ((steps.of_generator, 4 / 5), (steps.of_discriminator, 16 / 17)):
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(0.01 * share)
        assert group["betas"] == pytest.approx((0.0, 0.99**share))
    assert stepping(lr=0.01, path_weight=0).of_generator.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(("sign", "start", "expected"), [(1.0, 0.0, 0.16), (-1.0, 0.2, 0.04), (-1.0, 0.0, 0.0)])
def test_ada_augments_more_where_the_discriminator_is_too_sure(sign, start, expected):
    steps = stepping(ada_images=200)
    steps.p.fill_(start)
    steps._sure.fill_(4 * sign)
    steps._adapt(8)
    assert float(steps.p) == pytest.approx(expected)  # 4 steps of 8 images are 16 % of 200
    assert float(steps.controls.get_buffer("p")) == pytest.approx(expected)
    assert float(steps.controls.get_buffer("sure")) == pytest.approx(sign)


def test_differential_privacy_and_bad_images_are_refused_with_the_reason():
    assert "compares the images of a batch" in StyleGAN2().dp_obstacle()
    model = build()
    assert any("Spread" in reason for reason in obstacles(model.networks["discriminator"]))
    assert mixes_samples(Judge(model.networks["discriminator"]), torch.randn(4, 1, 32, 32, generator=rng()))
    images, private = torch.zeros(8, 1, 28, 28, dtype=torch.uint8), FitOptions(private={"generator": None})
    with pytest.raises(BadInput, match="StyleGAN2's discriminator"):
        model.fit(images, torch.zeros(8), rng(), private)
    with pytest.raises(BadInput, match="up to 1024 px"):
        build(2000)
    with pytest.raises(BadInput, match="labels run from"):
        build(steps=1).fit(torch.zeros(8, 1, 28, 28, dtype=torch.uint8), torch.full((8,), 5), rng())


class Judge(torch.nn.Module):
    """A discriminator that knows the labels."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x, torch.zeros(len(x)))[:, None]
