"""FELICIA's steps across sites against the same steps written out in one place, weight for weight."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from felicia_studies import gan_of
from run_folders import lines_of
from torch import Tensor

from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import COORDINATOR
from polyclinic.generators.base import RandomSource
from polyclinic.generators.gan.trainer import GANNetworks, GANTrainer, RealBatches, centred
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared.central_discriminator import CentralDiscriminator
from polyclinic.methods.shared.gan_plans import SyntheticBatch
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.runner.run.result import Result
from polyclinic.study import Study
from polyclinic.tasks import Target

CPU = torch.device("cpu")
BATCH, STEPS, ROUNDS = 8, 3, 2
SETTINGS = {"steps": STEPS, "rounds": ROUNDS, "weight": 3.0}


class Plain:
    """A site: its GAN, and the draws of the round it is in."""

    def __init__(self, study: Study, name: str) -> None:
        parts = prepare(study.data, study.sites)
        self.part = open_site(parts.folder, name).train
        self.target = Target(classes=tuple(parts.info["classes"]))
        self.study, self.name = study, name
        alike = study.method.first_weights == "same"
        seed = study.seed if alike else seed_of(study.seed, name, "first weights")
        self.model = study.generator.build(channels=3, size=28, target=self.target, seed=seed)
        self.trainer = GANTrainer(GANNetworks(self.model.networks), self.model.settings)

    def begin(self, round: int, purpose: str = "gan") -> None:
        rng = torch_rng(self.study.seed, self.name, purpose, round)
        self.batches = RealBatches(self.model, np.asarray(self.part.images), np.asarray(self.part.labels), rng)
        self.random = self.noise = RandomSource(rng, CPU)
        if self.study.method.shared_noise:
            self.noise = RandomSource(torch_rng(self.study.seed, "noise", purpose, round), CPU)

    def discriminate_and_make(self) -> Tensor:
        real, self.labels = next(self.batches)
        draws = self.trainer.draw_for_discriminator(self.random, len(real), len(real))
        self.trainer.discriminator_step(real, self.labels, self.labels, draws)
        self.fake = self.trainer.make_images(self.labels, self.noise)
        return self.fake.detach()

    def generate(self, gradient: Tensor | None) -> None:
        draws = self.trainer.draw_for_generator(self.random, len(self.labels))
        self.trainer.generator_step(self.fake, self.labels, draws, gradient)


class Both:
    """Two sites and their central discriminator, which lasts from the first step to the last."""

    def __init__(self, study: Study) -> None:
        self.method = study.method
        assert isinstance(self.method, Felicia)
        self.sites = [Plain(study, name) for name in ("site-1", "site-2")]
        trainer: Any = SimpleNamespace(target=self.sites[0].target, device=CPU, precision="fp32", graphs=False)
        at: Any = SimpleNamespace(generator=study.generator, trainer=trainer, seed=study.seed)
        self.central = CentralDiscriminator(self.method, at, (1, 3, 28, 28), 2)
        self.seed = study.seed

    def gradient(self, images: Tensor, site: int, rng: torch.Generator) -> Tensor:
        """lambda times the gradient of the mean over a site's images."""
        number = torch.full((len(images),), site)
        other = self.central.other_sites(number, rng)
        return 3.0 * self.central.image_gradient(images, number, other, self.sites[site].labels) / len(images)

    def synchronously(self) -> None:
        for round in range(1, ROUNDS + 1):
            for one in self.sites:
                one.begin(round)
            for step in range((round - 1) * STEPS, round * STEPS):
                self.step(step, torch_rng(self.seed, COORDINATOR, f"other owner {step}", round))

    def step(self, step: int, rng: torch.Generator) -> None:
        """Every D_i, then D_p on all synthetic images, then every G_i."""
        fakes = [one.discriminate_and_make() for one in self.sites]
        if step >= self.method.frozen:
            labels = torch.cat([one.labels for one in self.sites])
            self.central.step(torch.cat(fakes), torch.tensor([0] * BATCH + [1] * BATCH), labels)
        gradients = [self.gradient(fake, k, rng) for k, fake in enumerate(fakes)]
        for one, gradient in zip(self.sites, gradients, strict=True):
            one.generate(gradient if step >= self.method.warm_up else None)

    def locally(self) -> None:
        """Sites train with the central discriminator as it last came down; then it learns from what they send."""
        for round, begin, steps in exchanges(self.method.exchange_every):
            sent = [self.alone(k, round, begin, steps) for k in range(2)]
            for place in range(steps):
                shares = [images[place::steps] for images, _ in sent]
                labels = torch.cat([labels[place::steps] for _, labels in sent])
                site = torch.cat([torch.full((len(share),), k) for k, share in enumerate(shares)])
                if begin + place >= self.method.frozen:
                    self.central.step(torch.cat(shares), site, labels)

    def alone(self, k: int, round: int, begin: int, steps: int) -> SyntheticBatch:
        one = self.sites[k]
        one.begin(round, f"gan from {begin}")
        for step in range(begin, begin + steps):
            fake = one.discriminate_and_make()
            rng = torch_rng(self.seed, one.name, f"other owner {step}", round)
            one.generate(self.gradient(fake, k, rng) if step >= self.method.warm_up else None)
        count = self.method.sent or steps * BATCH
        labels = [next(one.batches)[1] for _ in range(-(-count // BATCH))]
        with torch.no_grad():
            made = [one.trainer.make_images(some, one.noise) for some in labels]
        return SyntheticBatch(torch.cat(made)[:count], torch.cat(labels)[:count])


def exchanges(every: int) -> Iterator[tuple[int, int, int]]:
    """Round, first step and number of steps of each exchange."""
    for round in range(1, ROUNDS + 1):
        for begin in range((round - 1) * STEPS, round * STEPS, every):
            yield round, begin, min(every, round * STEPS - begin)


def check(result: Result, both: Both) -> None:
    for one in both.sites:
        found, wanted = gan_of(result, one.name), one.model.state()
        assert found.keys() == wanted.keys()
        for part, tensor in wanted.items():
            torch.testing.assert_close(found[part], tensor, rtol=1e-4, atol=1e-6, msg=f"{one.name} {part}")


OPTIONS: list[dict[str, Any]] = [
    *({}, {"towards": "other"}, {"shared_noise": True}, {"first_weights": "same"}, {"central": "per-class"}),
    {"central_lr": 0.01, "warm_up": 2, "frozen": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_synchronous_steps_are_those_written_out(felicia, undisturbed, options):
    study = felicia(**options)
    both = Both(study)
    both.synchronously()
    check(undisturbed(study), both)


@pytest.mark.parametrize("options", [*OPTIONS, {"sent": 5}], ids=str)
def test_local_steps_are_those_written_out(felicia, undisturbed, options):
    study = felicia(schedule="local", exchange_every=2, **options)
    both = Both(study)
    both.locally()
    result = undisturbed(study)
    check(result, both)
    sent = [line for line in lines_of(result, "site-1") if line["kind"] == "synthetic-images"]
    assert len(sent) == 4  # two exchanges in a round: after two steps, and after the third
    pixels = sum(options.get("sent") or steps * BATCH for _, _, steps in exchanges(2)) * 3 * 28 * 28
    assert sum(line["bytes"] for line in sent) == pytest.approx(pixels * 4, rel=0.02)


def test_the_small_wire_tells_the_central_discriminator_nearly_the_same(felicia):
    """What arrives is what was made, but for the steps of a byte; and gradients but for bfloat16."""
    method = felicia(wire="small").method
    made = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    unprotected = SimpleNamespace(trainer=SimpleNamespace(privacy=None), generator=felicia().generator)
    parcel = method.parcel_of(unprotected, SyntheticBatch(made, torch.zeros(4)))
    arrived = centred(parcel.tensors["images"])
    assert parcel.tensors["images"].dtype == torch.uint8
    torch.testing.assert_close(arrived, made, rtol=0, atol=1 / 127)
    torch.testing.assert_close(method.pack_gradient(made).float(), made, rtol=2**-8, atol=0)
