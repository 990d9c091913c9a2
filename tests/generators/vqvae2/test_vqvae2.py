"""The two-level autoencoder: shapes, the loss by hand, codebooks, sending and loading, gradients of each image."""

import pytest
import torch
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.generators.base import FitOptions
from polyclinic.generators.vqvae2.autoencoder import Autoencoder, Codebook, Moved, losses, noise_images
from polyclinic.generators.vqvae2.model import VQVAE2, VQVAE2Model
from polyclinic.generators.vqvae2.prior import negative_log_likelihoods
from polyclinic.tasks import Target
from polyclinic.training.generator_loop import Schedule

TINY = {"epochs": 2, "batch_size": 8, "width": 8, "blocks": 1, "code_width": 4, "top_codes": 8, "bottom_codes": 16}
PRIOR = {"prior_epochs": 1, "prior_width": 8, "prior_layers": 2, "prior_batch_size": 8}
CLASSES = Target(classes=("a", "b"))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int, size: int = 28, channels: int = 1, seed: int = 0) -> torch.Tensor:
    """Smooth images that differ from each other, uint8."""
    return noise_images(count, channels, size, rng(seed)).mul(255).to(torch.uint8)


def make(size: int = 28, channels: int = 1, target: Target = CLASSES, seed: int = 0, **settings: object) -> VQVAE2Model:
    return VQVAE2(**{**TINY, **PRIOR, **settings}).build(channels=channels, size=size, target=target, seed=seed)


def bare(learning: str = "gradient") -> Autoencoder:
    sizes = {"width": 8, "blocks": 1, "code_width": 4, "top_codes": 8, "bottom_codes": 16}
    return Autoencoder(VQVAE2(codebook=learning, **sizes), 1, 28)


@pytest.mark.parametrize("size", [28, 31, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_codes_have_a_quarter_and_an_eighth_of_the_size_and_images_come_back_whole(size: int, channels: int):
    model = make(size, channels)
    images = blobs(5, size, channels)
    codes = model.encode(images)
    top = -(-size // 8)
    assert codes["top"].shape == (5, top, top)
    assert codes["bottom"].shape == (5, 2 * top, 2 * top)
    back = model.decode(codes)
    assert back.shape == images.shape
    assert back.dtype == torch.uint8


def test_a_reconstruction_is_the_decoding_of_the_codes():
    model = make()
    model.fit_codes(blobs(16), rng())
    images = blobs(4, seed=1)
    with torch.no_grad():
        passed = model.autoencoder(images.float() / 255).images.clamp(0, 1)
    assert (model.decode(model.encode(images)).float() / 255 - passed).abs().max() < 0.5 / 255 + 1e-5


def test_the_loss_and_the_nearest_code_by_hand():
    torch.manual_seed(0)
    net, images = bare(), torch.rand(3, 1, 28, 28)
    passed = net(images)
    top, bottom = (
        book.lookup(q.codes) for book, q in ((net.top_codebook, passed.top), (net.bottom_codebook, passed.bottom))
    )
    for i in range(3):
        pixels = F.mse_loss(passed.images[i] * 2 - 1, images[i] * 2 - 1)
        moved = F.mse_loss(top[i], passed.top.latents[i]) + F.mse_loss(bottom[i], passed.bottom.latents[i])
        assert losses(images, passed, 0.25)[i].item() == pytest.approx((pixels + 1.25 * moved).item(), rel=1e-5)
    torch.manual_seed(0)
    book, latents = Codebook(7, 3, "ema"), torch.randn(2, 3, 4, 4)
    away = torch.cdist(latents.movedim(1, -1).reshape(-1, 3), book.vectors.weight)
    assert torch.equal(book(latents).codes.flatten(), away.argmin(1))


def test_each_term_moves_what_it_should():
    """Codebook term: only the codes; commitment term: only the latents; straight through: latents get e's gradient."""
    torch.manual_seed(0)
    book, latents = Codebook(6, 4, "gradient"), torch.randn(2, 4, 3, 3, requires_grad=True)
    found = book(latents)
    rows, chosen = latents.detach().movedim(1, -1), book.vectors.weight.detach()[found.codes]
    (on_codes,) = torch.autograd.grad(found.codebook.sum(), book.vectors.weight, retain_graph=True)
    expected = torch.zeros(6, 4)
    expected.index_add_(0, found.codes.flatten(), (2 / 36 * (chosen - rows)).flatten(0, 2))
    torch.testing.assert_close(on_codes, expected)
    assert torch.autograd.grad(found.codebook.sum(), latents, retain_graph=True, allow_unused=True)[0] is None
    (on_latents,) = torch.autograd.grad(found.commitment.sum(), latents, retain_graph=True)
    torch.testing.assert_close(on_latents, (2 / 36 * (rows - chosen)).movedim(-1, 1))
    weight = torch.randn_like(found.vectors)
    (through,) = torch.autograd.grad((found.vectors * weight).sum(), latents)
    torch.testing.assert_close(through, weight)


def test_moving_averages_and_drawn_vectors_by_hand():
    book = Codebook(2, 1, "ema")
    book.vectors.weight.copy_(torch.tensor([[0.0], [10.0]]))
    book.counts.fill_(1)
    book.sums.copy_(torch.tensor([[0.0], [10.0]]))
    latents = torch.tensor([1.0, 2.0, 12.0]).reshape(1, 1, 1, 3)
    book.revive(book.move(book(latents)), rng())
    # counts: 0.99 + 0.01 * (2, 1); sums: 0.99 * (0, 10) + 0.01 * (3, 12)
    torch.testing.assert_close(book.counts, torch.tensor([1.01, 1.0]))
    torch.testing.assert_close(book.vectors.weight[:, 0], torch.tensor([0.03 / 1.01, 10.02]))
    latents = torch.arange(12.0).reshape(1, 1, 3, 4)
    for size in (12, 30):
        book = Codebook(size, 1, "ema")
        book.start(latents, rng())
        assert len(book.vectors.weight.unique()) == 12
    assert make().usage({"top": torch.tensor([0, 3, 3]), "bottom": torch.zeros(2)}) == {"top": 0.25, "bottom": 1 / 16}


def test_dead_codes_come_back_to_life_among_the_latents():
    book = Codebook(16, 2, "ema")
    book.start(torch.full((1, 2, 4, 4), 50.0), rng())  # all codes far away, on one spot
    latents = torch.randn(4, 2, 8, 8, generator=rng(1))
    for step in range(400):
        book.revive(book.move(book(latents)), rng(step))
    assert len(book(latents).codes.unique()) == 16


@pytest.mark.parametrize("learning", ["ema", "gradient"])
def test_learning_improves_what_comes_back(learning: str):
    images = blobs(32)
    model = make(codebook=learning, epochs=15, lr=2e-3, width=16)
    before = model.quality(images)["psnr"]
    model.fit_codes(images, rng())
    assert model.quality(images)["psnr"] > before + 3


def test_only_a_gradient_codebook_has_trainable_codes_and_goes_with_privacy():
    assert bare("gradient").top_codebook.vectors.weight.requires_grad
    assert not bare("ema").top_codebook.vectors.weight.requires_grad
    assert VQVAE2(codebook="gradient").dp_obstacle() is None
    assert "gradient" in (VQVAE2(codebook="ema").dp_obstacle() or "")


def test_a_loaded_codebook_does_not_start_anew():
    model, other = make(lr=1e-9), make(seed=1)
    model.fit_codes(blobs(16), rng())
    other.load(model.state())
    before = model.encode(blobs(16))["bottom"]
    other.settings = other.settings.model_copy(update={"lr": 1e-9, "epochs": 1})
    other.fit_codes(blobs(16), rng(5))
    same = (other.encode(blobs(16))["bottom"] == before).float().mean()
    assert same > 0.9


def test_replayed_images_join_every_batch():
    seen = []

    def replayed():
        while True:
            seen.append(8)
            yield torch.rand(8, 1, 28, 28), torch.zeros(8, dtype=torch.long)

    sizes = []
    model = make(epochs=1)
    model.autoencoder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    model.fit_codes(blobs(16), rng(), FitOptions(replayed()))
    assert sizes[-2:] == [16, 16]
    assert len(seen) == 2


def test_progress_is_told_after_every_epoch_and_a_priors_rate_falls_evenly_to_zero():
    told = []
    make().fit(
        blobs(10), torch.zeros(10, dtype=torch.long), rng(), FitOptions(report=lambda *args: told.append(args[:3]))
    )
    assert told == [("autoencoder", 1, 2), ("autoencoder", 2, 2), ("prior", 1, 1)]
    assert [Schedule(4, 8, 1.0, fade=True).lr_in(epoch) for epoch in range(4)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(("words", "work"), [
    ("28 px or more", lambda: make(size=27)), ("give uint8", lambda: make().encode(torch.zeros(2, 1, 28, 28))),
    ("give uint8", lambda: make().encode(blobs(2, size=32))),
    ("one each", lambda: make().fit_prior(make().encode(blobs(2)), torch.zeros(3), rng())),
    ("there are 2 classes", lambda: make().sample(torch.tensor([2]), rng())),
    ("prior_epochs", lambda: make(prior_epochs=0).sample(torch.tensor([1]), rng())),
    ("do not fit", lambda: make().decode(make(size=64).encode(blobs(1, 64)))),
    ("same \\[generator\\] table", lambda: make().load(make(width=16).state())),
    ("same \\[generator\\] table", lambda: make().load(make(prior_epochs=0).state())),
])  # fmt: skip
def test_faults_are_named(words: str, work):
    with pytest.raises(BadInput, match=words):
        work()


@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize("level", ["top", "bottom"])
def test_a_code_outside_the_codebook_is_refused_on_either_side(level: str, value: int):
    """The smallest and the largest code are each looked at: one code is wrong, all others are right."""
    model = make()
    codes = {name: torch.zeros_like(found).long() for name, found in model.encode(blobs(2)).items()}
    model.decode(codes)
    codes[level][0, 0, 0] = value
    with pytest.raises(BadInput, match=f"{level} codes of shape"):
        model.decode(codes)


@pytest.mark.parametrize("way", ["revive", "revive_unasked"])
def test_a_dead_code_moves_to_the_only_latent_that_no_code_is_near(way: str):
    """Of the two, a GPU takes the one that asks for no number."""
    book = Codebook(2, 1, "ema")
    book.counts.fill_(9.0)
    rows = torch.full((200, 1), -50.0)
    rows[17] = 50.0
    moved = Moved(rows, torch.zeros(200, dtype=torch.int64), torch.full((2, 1), -50.0), torch.tensor([False, True]))
    getattr(book, way)(moved, rng())
    assert book.vectors.weight[1].tolist() == pytest.approx([50.0])
    assert book.counts.tolist() == pytest.approx([9, 10])  # a tenth of an even spread of 200 rows over two codes


opacus = pytest.importorskip("opacus")

AGES = Target(unit="months", label_range=(0.0, 240.0))
CLASSES = Target(classes=("a", "b"))


def private(target: Target) -> VQVAE2Model:
    """A network with a seed with which no latent lies so evenly between two codes that rounding decides."""
    return make(30, target=target, seed=1, codebook="gradient", blocks=2, prior_dropout=0.0)


def check_each_image(net: torch.nn.Module, loss_of, count: int) -> None:
    """Gradients of all images at once, image by image, equal those of one image after the other."""
    assert not opacus.validators.ModuleValidator.validate(net, strict=False)
    wrapped = opacus.GradSampleModule(net, loss_reduction="mean")
    loss_of(wrapped, slice(None)).backward()
    at_once = {name: one.grad_sample.clone() for name, one in net.named_parameters()}
    wrapped.to_standard_module()
    for i in range(count):
        net.zero_grad()
        loss_of(net, slice(i, i + 1)).backward()
        for name, one in net.named_parameters():
            torch.testing.assert_close(at_once[name][i], one.grad, atol=1e-6, rtol=1e-4, msg=f"{name}, image {i}")


def test_gradients_of_the_autoencoder_are_those_of_each_image():
    images = torch.rand(3, 1, 30, 30, generator=torch.Generator().manual_seed(0))
    net = private(CLASSES).autoencoder.train()
    check_each_image(net, lambda model, which: losses(images[which], model(images[which]), 0.25).mean(), 3)


@pytest.mark.parametrize("target", [CLASSES, AGES])
def test_gradients_of_the_prior_are_those_of_each_image(target: Target):
    generator = torch.Generator().manual_seed(0)
    top, bottom = (torch.randint(8, (3, side, side), generator=generator) for side in (4, 8))
    labels = torch.tensor([0, 1, 1]) if target.classes else torch.tensor([10.0, 100.0, 200.0])

    def loss_of(model, which) -> torch.Tensor:
        logits = model(top[which], bottom[which], labels[which])
        return negative_log_likelihoods(top[which], bottom[which], logits).mean()

    check_each_image(private(target).prior.train(), loss_of, 3)
