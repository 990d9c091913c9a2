"""Generators: one file a generator, with its networks and losses beside it, and the line that makes it known.

They know torch, tasks and training, and nothing of methods or sites.
"""

from polyclinic.generators.base import CodedModel, Codes, Generator, GeneratorModel, Progress, RandomSource
from polyclinic.generators.flow.model import Flow
from polyclinic.generators.gan.adversarial import AdversarialGenerator, AdversarialModel, AdversarialSteps, gan_loss
from polyclinic.generators.gan.settings import DCGAN, PrivGAN, VanillaGAN, WassersteinGAN
from polyclinic.generators.latent_space import CodeSpace, GaussianSpace
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.registry import Registry

GENERATORS: Registry[type[Generator]] = Registry(
    "polyclinic.generators",
    {
        "vqvae2": VQVAE2, "gan": VanillaGAN, "dcgan": DCGAN, "wgan-gp": WassersteinGAN, "privgan": PrivGAN,
        "stylegan2": StyleGAN2, "flow": Flow,
    },
    base=Generator,
)  # fmt: skip

__all__ = [
    "DCGAN", "GENERATORS", "VQVAE2", "AdversarialGenerator", "AdversarialModel", "AdversarialSteps", "CodeSpace",
    "CodedModel", "Codes", "Flow", "GaussianSpace", "Generator", "GeneratorModel", "PrivGAN", "Progress",
    "RandomSource", "StyleGAN2", "VanillaGAN", "WassersteinGAN", "gan_loss",
]  # fmt: skip
