"""FELICIA's steps across sites against the same steps written out in one place, weight for weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import COORDINATOR
from polyclinic.federation.state import SitePosition, read_state
from polyclinic.generators.gan.central import Central
from polyclinic.generators.gan.model import RealBatches
from polyclinic.generators.gan.trainer import Dice
from polyclinic.methods.felicia import Felicia, _floats, central_network
from polyclinic.methods.shared.gan_site import NETWORKS
from polyclinic.randomness import torch_rng
from polyclinic.runner.result import Result
from polyclinic.study import Study
from polyclinic.tasks import Target

CPU = torch.device("cpu")
BATCH, STEPS, ROUNDS = 8, 3, 2
STUDY = {
    **{"data.source": "skin-phantom", "data.samples": 120, "sites.count": 2},
    **{"generator.name": "gan", "generator.width": 2, "generator.latent": 4, "generator.batch_size": BATCH},
}


@pytest.fixture
def felicia(tiny):
    def make(settings: dict[str, Any] | None = None, **method: Any) -> Study:
        quick = {"steps": STEPS, "rounds": ROUNDS, "learner_steps": 1, "images": 12, "weight": 3.0}
        return tiny("felicia", {**STUDY, **(settings or {})}, **{**quick, **method})

    return make


def gan_of(result: Result, site: str) -> dict[str, Tensor]:
    manifest = json.loads((Path(result.folder) / "checkpoint" / "manifest.json").read_text())
    return read_state(result.folder, site, SitePosition(*manifest["sites"][site])).group(NETWORKS)


class Plain:
    """An owner: its GAN, and the draws of the round it is in."""

    def __init__(self, study: Study, name: str) -> None:
        parts = prepare(study.data, study.sites)
        self.part = open_site(parts.folder, name).train
        self.target = Target(classes=tuple(parts.info["classes"]))
        self.study, self.name = study, name
        self.model = study.generator.build(channels=3, size=28, target=self.target, seed=study.seed)
        self.duel = self.model.duel()

    def begin(self, round: int, purpose: str = "gan") -> None:
        rng = torch_rng(self.study.seed, self.name, purpose, round)
        self.batches = RealBatches(self.model, np.asarray(self.part.images), np.asarray(self.part.labels), rng)
        self.dice = self.noise = Dice(rng, CPU)
        if self.study.method.shared_noise:
            self.noise = Dice(torch_rng(self.study.seed, "noise", purpose, round), CPU)

    def judge_and_make(self) -> Tensor:
        real, self.labels = self.batches.next()
        self.duel.judge(real, self.labels, self.labels, self.dice)
        self.fake = self.duel.make(self.labels, self.noise)
        return self.fake.detach()

    def learn(self, slope: Tensor | None) -> None:
        self.duel.learn(self.fake, self.labels, self.dice, slope)


class Both:
    """Two owners and their central discriminator, which lasts from the first step to the last."""

    def __init__(self, study: Study) -> None:
        self.term, settings = study.method, study.generator
        assert isinstance(self.term, Felicia)
        self.owners = [Plain(study, name) for name in ("site-1", "site-2")]
        self.network = central_network(settings, (1, 3, 28, 28), self.owners[0].target, 2, study.seed)
        self.central = Central.of(self.network, settings.phi, self.term, owners=2, lr=settings.lr)
        self.seed = study.seed

    def slope(self, central: Central, images: Tensor, owner: int, dice: Dice) -> Tensor:
        """lambda times the slope of the mean over an owner's images."""
        return 3.0 * central.slope(images, torch.full((len(images),), owner), dice) / len(images)

    def in_step(self) -> None:
        for round in range(1, ROUNDS + 1):
            for one in self.owners:
                one.begin(round)
            for step in range((round - 1) * STEPS, round * STEPS):
                self.step(step, Dice(torch_rng(self.seed, COORDINATOR, f"other owner {step}", round), CPU))

    def step(self, step: int, dice: Dice) -> None:
        """Every D_i, then D_p on all made images, then every G_i."""
        fakes = [one.judge_and_make() for one in self.owners]
        if step >= self.term.frozen:
            self.central.judge(torch.cat(fakes), torch.tensor([0] * BATCH + [1] * BATCH))
        slopes = [self.slope(self.central, fake, k, dice) for k, fake in enumerate(fakes)]
        for one, slope in zip(self.owners, slopes, strict=True):
            one.learn(slope if step >= self.term.warm_up else None)

    def apart(self) -> None:
        """Owners train with the central discriminator as it last came down; then it learns from what they send."""
        for round, begin, steps in exchanges(self.term.exchange_every):
            sent = [self.alone(k, round, begin, steps) for k in range(2)]
            for place in range(steps):
                shares = [images[place::steps] for images in sent]
                owner = torch.cat([torch.full((len(share),), k) for k, share in enumerate(shares)])
                if begin + place >= self.term.frozen:
                    self.central.judge(torch.cat(shares), owner)

    def alone(self, k: int, round: int, begin: int, steps: int) -> Tensor:
        one = self.owners[k]
        one.begin(round, f"gan from {begin}")
        for step in range(begin, begin + steps):
            fake = one.judge_and_make()
            dice = Dice(torch_rng(self.seed, one.name, f"other owner {step}", round), CPU)
            one.learn(self.slope(self.central, fake, k, dice) if step >= self.term.warm_up else None)
        count = self.term.sent or steps * BATCH
        with torch.no_grad():
            made = [one.duel.make(one.batches.next()[1], one.noise) for _ in range(-(-count // BATCH))]
        return torch.cat(made)[:count]


def exchanges(every: int) -> Iterator[tuple[int, int, int]]:
    """Round, first step and number of steps of each exchange."""
    for round in range(1, ROUNDS + 1):
        for begin in range((round - 1) * STEPS, round * STEPS, every):
            yield round, begin, min(every, round * STEPS - begin)


def check(result: Result, both: Both) -> None:
    for one in both.owners:
        found, wanted = gan_of(result, one.name), one.model.state()
        assert found.keys() == wanted.keys()
        for part, tensor in wanted.items():
            torch.testing.assert_close(found[part], tensor, rtol=1e-4, atol=1e-6, msg=f"{one.name} {part}")


OPTIONS: list[dict[str, Any]] = [
    *({}, {"towards": "other"}, {"shared_noise": True}),
    {"central_lr": 0.01, "warm_up": 2, "frozen": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_synchronous_steps_are_those_written_out(felicia, undisturbed, options):
    study = felicia(**options)
    both = Both(study)
    both.in_step()
    check(undisturbed(study), both)


@pytest.mark.parametrize("options", [*OPTIONS, {"sent": 5}], ids=str)
def test_local_steps_are_those_written_out(felicia, undisturbed, options):
    study = felicia(schedule="local", exchange_every=2, **options)
    both = Both(study)
    both.apart()
    result = undisturbed(study)
    check(result, both)
    lines = (result.folder / "ledger" / "site-1.jsonl").read_text().splitlines()
    sent = [line for line in map(json.loads, lines) if line["kind"] == "synthetic-images"]
    assert len(sent) == 4  # two exchanges in a round: after two steps, and after the third
    pixels = sum(options.get("sent") or steps * BATCH for _, _, steps in exchanges(2)) * 3 * 28 * 28
    assert sum(line["bytes"] for line in sent) == pytest.approx(pixels * 4, rel=0.02)


def test_the_small_wire_tells_the_central_discriminator_nearly_the_same(felicia):
    """What arrives is what was made, but for the steps of a byte; and slopes but for bfloat16."""
    method = felicia(wire="small").method
    made = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    unprotected = SimpleNamespace(trainer=SimpleNamespace(privacy=None))
    parcel = method.parcel_of(unprotected, made)
    arrived = _floats(parcel.tensors["images"])
    assert parcel.tensors["images"].dtype == torch.uint8
    torch.testing.assert_close(arrived, made, rtol=0, atol=1 / 127)
    torch.testing.assert_close(method.packed_slope(made).float(), made, rtol=2**-8, atol=0)
