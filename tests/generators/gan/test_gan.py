"""GANs: losses by hand, shapes, conditions, determinism, what learns from what, sending and loading."""

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from small_gans import CLASSES, TINY, make, rng, squares
from torch import nn

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.generators.base import FitOptions
from polyclinic.generators.gan.adversarial import confusion_loss, gan_loss, gradient_penalty, site_cross_entropy
from polyclinic.generators.gan.model import private_losses
from polyclinic.generators.gan.networks import Down, Spectral, update_spectral_norms
from polyclinic.generators.gan.trainer import DRAWS, GANNetworks, GANTrainer, augment, balanced_batches, endless_batches
from polyclinic.privacy import dp_sgd
from polyclinic.privacy.dp_sgd import obstacles
from polyclinic.tasks import Target


def test_log_hinge_and_linear_by_hand():
    scores = torch.tensor([0.3, -2.0])
    likely = scores.sigmoid()
    torch.testing.assert_close(gan_loss("log").real(scores), -likely.log())
    torch.testing.assert_close(gan_loss("log").fake(scores), -(1 - likely).log())
    torch.testing.assert_close(gan_loss("log").generator(scores), -likely.log())
    torch.testing.assert_close(gan_loss("log", saturating=True).generator(scores), (1 - likely).log())
    smooth = -(0.95 * likely.log() + 0.05 * (1 - likely).log())
    torch.testing.assert_close(gan_loss("log", smoothing=0.05).real(scores), smooth)
    scores = torch.tensor([0.5, -3.0, 2.0])
    torch.testing.assert_close(gan_loss("hinge").real(scores), torch.tensor([0.5, 4.0, 0.0]))
    torch.testing.assert_close(gan_loss("hinge").fake(scores), torch.tensor([1.5, 0.0, 3.0]))
    torch.testing.assert_close(gan_loss("linear").real(scores), -scores)
    torch.testing.assert_close(gan_loss("linear").fake(scores), scores)
    for loss in (gan_loss("hinge"), gan_loss("linear")):
        torch.testing.assert_close(loss.generator(scores), -scores)


def test_being_identified_and_the_gradient_penalty_by_hand():
    """phi of the probability of the own site; of two sites with equal logits it is a half."""
    logits, site = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 0])
    likely = torch.tensor([0.5, math.exp(2) / (math.exp(2) + 1)])
    torch.testing.assert_close(gan_loss("log").identification_loss(logits, site), likely.log())
    torch.testing.assert_close(gan_loss("linear").identification_loss(logits, site), likely)
    torch.testing.assert_close(gan_loss("hinge").identification_loss(logits, site), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(site_cross_entropy(logits, site), -likely.log())
    torch.testing.assert_close(confusion_loss(logits, 1 - site), -(1 - likely).log())
    # A critic of half the squares has the point itself as its gradient: between 1 and 2, a quarter of the way 1.25.
    real, fake = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 1.0)
    for mixing, point in ((0.0, 1.0), (0.25, 1.25), (1.0, 2.0)):
        found = gradient_penalty(lambda x: x.square().sum((1, 2, 3)) / 2, real, fake, torch.tensor([mixing]))
        torch.testing.assert_close(found, torch.tensor([(point - 1) ** 2]))


@pytest.mark.parametrize("condition", ["plane", "projection", "apart", "none"])
@pytest.mark.parametrize("name", ["gan", "dcgan"])
def test_labels_count_where_they_are_a_condition_and_nowhere_else(name, condition):
    model = make(name, condition=condition)
    noise, images = torch.randn(2, 4, generator=rng()), torch.randn(2, 1, 28, 28, generator=rng(1))
    nets = model.networks.eval()
    for network, given in ((nets["generator"], noise), (nets["discriminator"], images)):
        zero, one = (network(given, torch.full((2,), label)) for label in (0, 1))
        assert torch.equal(zero, one) == (condition == "none")


def test_networks_of_each_class_get_their_own_rows_and_no_others():
    nets = make("dcgan", condition="apart", norm="group", spread=False).networks.train()
    labels = torch.tensor([1, 0, 1, 1, 0])
    for network, given in ((nets["generator"], torch.randn(5, 4)), (nets["discriminator"], torch.randn(5, 1, 28, 28))):
        whole = network(given, labels)
        for label, own in enumerate(network.of_class):
            alone = own(given[labels == label], labels[labels == label])
            torch.testing.assert_close(whole[labels == label], alone, rtol=0, atol=0)
        network(given, torch.ones(5, dtype=torch.long)).sum().backward()
        assert all(weight.grad is None for weight in network.of_class[0].parameters())
        assert all(weight.grad is not None for weight in network.of_class[1].parameters())


@pytest.mark.parametrize("seed", range(3))
def test_apart_no_group_whose_spread_is_taken_holds_real_and_made_images(seed):
    """A class may have any number of images in a batch: scores in one pass must be those of two."""
    model = make("dcgan", condition="apart", spread=True, batch_size=8)
    trainer = GANTrainer(GANNetworks(model.networks), model.settings)
    images = torch.randn(8, 1, 28, 28, generator=rng(seed))
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    together = trainer.scores([images, -images], [labels, labels])
    torch.testing.assert_close(together[0], trainer.score(images, labels))
    torch.testing.assert_close(together[1], trainer.score(-images, labels))


def test_networks_of_each_class_need_classes_and_a_linear_measure_bounds():
    ages = Target(unit="months", label_range=(0.0, 200.0))
    with pytest.raises(BadInput, match=r"generator\.condition: 'apart' needs classes.*choose 'projection'"):
        make(target=ages, condition="apart")
    with pytest.raises(ValidationError, match="set penalty = 10"):
        GENERATORS["dcgan"](loss="linear", discriminator_norm="none")


def test_a_central_discriminator_is_the_same_network_but_for_its_outputs_and_labels():
    settings = GENERATORS["dcgan"](**TINY)
    shape = settings.shape(1, 28, CLASSES)
    own = settings.networks(shape)["discriminator"]
    central = settings.central_discriminator(channels=1, size=28, target=CLASSES, sites=3)
    sizes = [{n: tuple(t.shape) for n, t in net.state_dict().items()} for net in (own, central)]
    differ = {name for name in sizes[0] | sizes[1] if sizes[0].get(name) != sizes[1].get(name)}
    assert differ == {"head.layer.weight", "head.layer.bias", "head.left", "head.right", "label.embed.weight"}
    assert central(torch.zeros(2, 1, 28, 28), torch.zeros(2)).shape == (2, 3)


def test_privgans_networks_are_those_of_its_code_counted_by_hand():
    settings = GENERATORS["privgan"](condition="none")
    networks = settings.networks(settings.shape(3, 32, CLASSES))
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    up = 25 * 512 * 256 + 256 + 25 * 256 * 128 + 128 + 25 * 128 * 64 + 64 + 25 * 64 * 3 + 3
    assert counts["generator"] == (100 + 1) * 2 * 2 * 512 + up == 4_512_899
    down = (25 * 3 + 1) * 64 + (25 * 64 + 1) * 128 + (25 * 128 + 1) * 128 + (25 * 128 + 1) * 256
    assert counts["discriminator"] == down + 256 * 2 * 2 + 1 == 1_440_001
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) for layer in networks["generator"].modules())
    with pytest.raises(ValidationError, match="privgan has no norms"):
        GENERATORS["privgan"](discriminator_norm="spectral")


def test_spectral_norm_divides_by_the_largest_singular_value():
    torch.manual_seed(0)
    for layer, given in ((nn.Linear(6, 4, bias=False), torch.eye(6)), (Down(2, 3), torch.randn(1, 2, 8, 8))):
        spectral = Spectral(layer)
        for _ in range(20):
            update_spectral_norms(spectral)
        largest = torch.linalg.matrix_norm(layer.weight.flatten(1), 2)
        bias = 0 if layer.bias is None else layer.bias[:, None, None]
        torch.testing.assert_close(spectral(given), (layer(given) - bias) / largest + bias, rtol=1e-3, atol=1e-4)


def test_augmentation_is_by_each_images_own_draws_and_in_the_middle_only_blanks():
    images = torch.rand(2, 3, 32, 32, generator=rng()) * 2 - 1
    changed = augment(images, torch.full((2, DRAWS), 0.5))
    outside = torch.ones(32, 32, dtype=torch.bool)
    outside[9:24, 9:24] = False
    torch.testing.assert_close(changed[..., outside], images[..., outside])
    assert (changed[..., 9:24, 9:24] == 0).all()
    images = (torch.rand(3, 1, 28, 28, generator=rng()) * 2 - 1).requires_grad_()
    draws = torch.rand(3, DRAWS, generator=rng(1))
    together = augment(images, draws)
    alone = torch.cat([augment(images[i : i + 1], draws[i : i + 1]) for i in range(3)])
    assert torch.equal(together, alone)
    stacked = augment(images.reshape(3, 1, 1, 28, 28), draws.reshape(3, 1, DRAWS))
    assert torch.equal(stacked.reshape(together.shape), together)
    (slope,) = torch.autograd.grad(together.square().sum(), images, create_graph=True)
    assert torch.autograd.grad(slope.square().sum(), images)[0].abs().sum() > 0


@pytest.mark.parametrize(("name", "steps"), [("dcgan", 60), ("gan", 250)])
def test_it_learns_which_class_is_bright(name, steps):
    images, labels = squares(64)
    model = make(name, steps=steps, width=8, batch_size=16, lr=2e-3, average=0.9)
    model.fit(images, labels, rng())
    made = model.sample(torch.tensor([0] * 16 + [1] * 16), rng(1)).float().mean((1, 2, 3))
    assert made[16:].mean() > made[:16].mean() + 25


def test_the_noise_counts_after_training_too():
    """A label's vector that is long, or a bias, lets a generator move all its images as one and forget the noise."""
    noise = torch.rand(64, 1, 4, 4, generator=rng(2))
    images = (nn.functional.interpolate(noise, 28, mode="bilinear") * 255).to(torch.uint8)
    model = make("dcgan", steps=80, width=8, batch_size=16, lr=1e-3, average=0.9, augment=False)
    model.fit(images, torch.arange(64) % 2, rng())
    made = model.sample(torch.zeros(64, dtype=torch.long), rng(1)).float()
    assert made.std(0).mean() > 0.4 * images.float().std(0).mean()


def test_batches_are_balanced_have_the_size_and_each_image_once_a_pass():
    labels = torch.tensor([0] * 50 + [1] * 3)
    index = next(balanced_batches(labels, 8, rng()))
    assert labels[index].tolist() == [0, 1] * 4
    index = torch.cat([next(batches) for batches in [balanced_batches(labels, 8, rng(1))] for _ in range(50)])
    assert set(index[labels[index] == 1].tolist()) == {50, 51, 52}
    found = [batch for batch, _ in zip(endless_batches(10, 4, rng()), range(4), strict=False)]
    assert [len(batch) for batch in found] == [4, 4, 4, 4]
    assert len(set(torch.cat(found[:2]).tolist())) == 8
    assert len(next(endless_batches(3, 8, rng()))) == 3


def test_replayed_images_join_as_real_ones_and_a_state_can_be_sent():
    images, labels = squares(8)
    taken = []

    def stream():
        while True:
            taken.append(1)
            yield torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long)

    alone, joined = make(), make()
    alone.fit(images, labels, rng())
    joined.fit(images, labels, rng(), FitOptions(stream()))
    assert len(taken) == 2
    assert any(not torch.equal(t, joined.state()[n]) for n, t in alone.state().items())
    model, other = make(), GENERATORS["dcgan"](**TINY).build(channels=1, size=28, target=CLASSES, seed=7)
    model.fit(*squares(8), rng())
    sent = load(save({name: tensor for name, tensor in model.state().items() if name.startswith("average.")}))
    other.load(sent, partial=True)
    labels = torch.tensor([0, 1])
    assert torch.equal(model.sample(labels, rng()), other.sample(labels, rng()))
    with pytest.raises(BadInput, match="load a state made with the same"):
        make(width=3).load(sent, partial=True)


PRIVATE = {"discriminator_norm": "group", "labels": "even", "spread": False, "width": 4}


def test_what_stands_against_privacy_is_said_with_the_cure():
    reasons = {"discriminator_norm": GENERATORS["dcgan"](), "condition": GENERATORS["gan"](condition="apart")}
    reasons |= {"penalty": GENERATORS["wgan-gp"](), "labels": GENERATORS["gan"]()}
    reasons |= {"spread": GENERATORS["dcgan"](discriminator_norm="group")}
    for reason, settings in reasons.items():
        assert settings.dp_obstacle().startswith(f"generator.{reason}:")
    for name in ("gan", "dcgan"):
        settings = GENERATORS[name](**{**TINY, **PRIVATE})
        assert settings.dp_obstacle() is None
        assert not obstacles(settings.networks(settings.shape(1, 28, CLASSES))["discriminator"])


def test_private_gradients_of_a_discriminator_are_those_of_each_image():
    """Opacus through the convolutional discriminator, against one backward pass per image."""
    torch.manual_seed(0)
    net = make("dcgan", **PRIVATE).networks["discriminator"]
    rows, labels = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 0, 1])
    real = torch.tensor([True, True, False, False])
    losses = private_losses(net, gan_loss("hinge"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    expected = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    for i in range(4):
        net.zero_grad()
        losses(rows[i : i + 1], labels[i : i + 1], real[i : i + 1]).sum().backward()
        norm = torch.sqrt(sum(w.grad.square().sum() for w in net.parameters() if w.grad is not None))
        for name, weight in net.named_parameters():
            expected[name] += 0 if weight.grad is None else weight.grad * min(1, 0.5 / norm) / 4
    mean = dp_sgd.NoisyMean(noise=0.0, clip=0.5, expected=4, draw=dp_sgd.noise_from(torch.device("cpu"), "n"))
    with dp_sgd.private_gradients(net, optimizer, mean) as put:
        put(losses, [(rows, labels, real)])
        for name, weight in net.named_parameters():
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gan", "dcgan"])
def test_with_privacy_only_the_learner_moves_the_discriminator(name):
    """The generator learns through a copy; real images reach nothing but the learner's losses."""
    images, labels = squares(8)
    model = make(name, **PRIVATE)
    before = model.state()
    seen = []

    def learn(module, losses, batch_of, schedule, joined):
        assert module is model.networks["discriminator"]
        assert joined == 4
        for _ in range(2):
            rows, known, is_real = batch_of(torch.tensor([0, 3]), torch.tensor([5, 6]))
            seen.append(int(is_real.sum()))
            assert losses(rows, known, is_real).shape == (6,)
        nobody = torch.tensor([], dtype=torch.long)
        assert batch_of(nobody, nobody)[0].shape[0] == 4

    found = model.fit(images, labels, rng(), FitOptions(private={"generator": learn}))
    assert seen == [2, 2]
    assert math.isnan(found["generator"])
    for part, tensor in model.state().items():
        if part.startswith("discriminator."):
            assert torch.equal(tensor, before[part])
    moved = [(t - before[n]).abs().max() for n, t in model.state().items() if n.startswith("generator.")]
    assert max(moved) > 1e-4  # about as far as two steps of Adam with its learning rate of 2e-4


@pytest.mark.parametrize("width", [1, 2])
def test_groups_of_one_feature_are_refused(width):
    """Their norm is 0 for every image: the generator would learn from rounding errors, or not at all."""
    with pytest.raises(ValidationError, match=rf"width {width} makes groups of one feature.* set width = 3 or more"):
        make("gan", width=width, discriminator_norm="group")
    make("dcgan", width=width, discriminator_norm="group")
