"""The networks go through Opacus: per-sample gradients are those of each image alone."""

import pytest
import torch

from polyclinic.generators.vqvae2.autoencoder import losses
from polyclinic.generators.vqvae2.model import VQVAE2, VQVAE2Model
from polyclinic.generators.vqvae2.prior import negative_log_likelihoods
from polyclinic.tasks import Target

opacus = pytest.importorskip("opacus")

AGES = Target(unit="months", label_range=(0.0, 240.0))
CLASSES = Target(classes=("a", "b"))


def make(target: Target) -> VQVAE2Model:
    settings = VQVAE2(
        codebook="gradient",
        width=8,
        blocks=2,
        code_width=4,
        top_codes=8,
        bottom_codes=16,
        prior_width=8,
        prior_layers=2,
        prior_dropout=0.0,  # the same network twice, image by image
    )
    # a seed with which no latent lies so evenly between two codes that rounding decides
    return settings.build(channels=1, size=30, target=target, seed=1)


def check(net: torch.nn.Module, loss_of, count: int) -> None:
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


def test_autoencoder_with_gradient_codebooks():
    images = torch.rand(3, 1, 30, 30, generator=torch.Generator().manual_seed(0))
    net = make(CLASSES).autoencoder.train()
    check(net, lambda model, which: losses(images[which], model(images[which]), 0.25).mean(), 3)


@pytest.mark.parametrize("target", [CLASSES, AGES])
def test_prior(target: Target):
    generator = torch.Generator().manual_seed(0)
    top, bottom = (torch.randint(8, (3, side, side), generator=generator) for side in (4, 8))
    labels = torch.tensor([0, 1, 1]) if target.classes else torch.tensor([10.0, 100.0, 200.0])

    def loss_of(model, which) -> torch.Tensor:
        logits = model(top[which], bottom[which], labels[which])
        return negative_log_likelihoods(top[which], bottom[which], logits).mean()

    check(make(target).prior.train(), loss_of, 3)
