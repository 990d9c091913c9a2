"""A small StyleGAN2."""

import torch

from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.tasks import Target

TWO = Target(("dark", "bright"))


TINY = {"width": 2, "latent": 8, "batch_size": 8}


def build(size=28, channels=1, target=TWO, **settings):
    return StyleGAN2(**{**TINY, **settings}).build(channels=channels, size=size, target=target, seed=0)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)
