"""Small GANs and images of squares."""

import torch

from polyclinic.generators import GENERATORS
from polyclinic.generators.gan.model import GANModel
from polyclinic.tasks import Target

TINY = {"steps": 2, "batch_size": 4, "width": 2, "latent": 4}


CLASSES = Target(classes=("dark", "bright"))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str = "dcgan", size: int = 28, channels: int = 1, target: Target = CLASSES, **settings) -> GANModel:
    return GENERATORS[name](**{**TINY, **settings}).build(channels=channels, size=size, target=target, seed=0)


def squares(count: int, size: int = 28) -> tuple[torch.Tensor, torch.Tensor]:
    """Dark and bright images, uint8, with their labels."""
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 40, (count, 1, size, size), generator=rng(5))
    return (noise + 180 * labels[:, None, None, None]).to(torch.uint8), labels
