"""Private tuning: the paper's choices, and which generators can be tuned."""

from __future__ import annotations

import pytest
import torch
from small_tuning import COARSE, TUNING, TWO, build, data, rng

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS, private_tuning
from polyclinic.generators.base import Generator, GeneratorModel
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.generators.private_tuning import (
    PrivateTuning,
    distance_named,
    fit,
)
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.metrics.distribution import Extractor
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

# --- the paper's choices -----------------------------------------------------------------------------


def test_the_preset_has_the_papers_choices_and_what_is_written_down_stays():
    paper = PrivateTuning(preset="paper")
    chosen = {name: getattr(paper, name) for name in ("distance", "features", "scale", "alpha", "patience", "growth")}
    assert chosen == {
        "distance": "lpips-vgg",
        "features": "inception-fid",
        "scale": "sum",
        "alpha": 1.0,
        "patience": 10_000,
        "growth": 2.5,
    }
    quick = PrivateTuning(preset="paper", patience=5)
    assert (quick.patience, quick.scale) == (5, "sum")
    assert PrivateTuning.model_validate(quick.model_dump(mode="json")) == quick
    assert (PrivateTuning().distance, PrivateTuning().scale) == ("efficientnet-lite0", "mean")


def test_phases_are_as_long_as_the_generators_own_steps_unless_the_table_says_otherwise():
    assert PrivateTuning().for_steps(600).lengths() == (120, 600, 60, 120)
    assert PrivateTuning().for_steps(8).lengths() == (1, 8, 1, 1)
    assert PrivateTuning(most_steps=50_000).for_steps(600).lengths() == (10_000, 50_000, 5000, 500)
    assert PrivateTuning(preset="paper").for_steps(600).lengths() == (10_000, 100_000, 100_000, 500)


def test_weights_that_are_missing_are_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    PrivateTuning().check_weights()
    PrivateTuning(preset="paper", on=False).check_weights()
    with pytest.raises(BadInput, match=r"lpips-vgg is not here .*; run polyclinic weights get lpips-vgg"):
        PrivateTuning(preset="paper").check_weights()
    with pytest.raises(BadInput, match=r"inception-fid is not here .*; run polyclinic weights get inception-fid"):
        PrivateTuning(preset="paper", distance="pixels").check_weights()
    data = {"source": "fundus-phantom", "size": 28, "samples": 40}
    tables = {"data": data, "sites": {"partition": "iid", "count": 2}, "method": {"name": "feder"}}
    study = parse_study({**tables, "tuning": {"preset": "paper"}})
    with pytest.raises(BadInput, match="polyclinic weights get lpips-vgg"):
        run(study, tmp_path / "run", cache=tmp_path)
    assert not (tmp_path / "run").exists()


def test_with_fids_own_features_the_figure_is_called_fid(monkeypatch):
    monkeypatch.setattr(private_tuning, "inception_features", lambda **_: Extractor(COARSE.network, "Inception"))
    short = {"check_every": 1, "most_steps": 1, "most_tuning_steps": 1, "distance": "pixels"}
    settings = TUNING.model_copy(update={"features": "inception-fid", **short})
    found = fit(build(), *data(), rng(), settings)
    assert {"phase1_fid", "phase1_fid_half", "phase1_fid_floor", "phase2_fid"} <= set(found)
    assert not any("_fd" in name for name in found)


# --- who can -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("coarse_features")
def test_gans_can_and_others_say_so():
    assert DCGAN().tunable
    assert StyleGAN2().tunable
    assert not VQVAE2().tunable
    model = VQVAE2(width=8, blocks=1).build(channels=1, size=28, target=TWO, seed=0)
    with pytest.raises(BadInput, match="is not trained step by step; choose a GAN"):
        fit(model, *data(), rng(), TUNING)
    assert distance_named("pixels", torch.device("cpu")).name == "pixels"


class OneColour(Generator):
    """A generator of somebody else: one grey level, which learns the mean of the images."""

    name: str = "one-colour"
    tunable = True

    def build(self, *, channels, size, target, seed, device="cpu", precision="fp32"):
        networks = {"level": torch.nn.Linear(1, 1)}
        networks["level"].weight.data.fill_(0.1)
        networks["level"].bias.data.fill_(0.2)
        return OneColourModel(networks, channels=channels, size=size, target=target, device=device)

    def dp_obstacle(self):
        return "a test"


class OneColourModel(GeneratorModel):
    def fit(self, images, labels, rng, options=None):
        return {}

    def sample(self, labels, rng):
        made = self.made(len(labels)).clamp(0, 1) * 255
        return (made + torch.randn(made.shape, generator=rng)).clamp(0, 255).byte().detach()

    def made(self, count):
        level = self.networks["level"](torch.ones(1, 1))
        return level.reshape(1, 1, 1, 1).expand(count, self.channels, self.size, self.size)

    def begin(self, images, labels, rng):
        return OneColourSteps(self, images)


class OneColourSteps:
    def __init__(self, model, images):
        self.model, self.images, self.paid = model, images, []
        self.optimizer = torch.optim.SGD(model.networks.parameters(), lr=0.05)

    def step(self, extra=None):
        real = self.images.float() / 255
        loss = (self.model.made(len(real)) - real).square().mean()
        if extra is not None:
            loss = loss + extra(real, self.model.made(len(real)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.usefixtures("coarse_features")
def test_a_generator_of_somebody_else_takes_part_by_its_trait(tiny):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GENERATORS, "one-colour", OneColour)
        study = tiny("feder", {"generator": {"name": "one-colour"}})
        assert study.tuning is not None
        assert study.tuning.on
    model = build(OneColour())
    images = torch.full((24, 1, 28, 28), 128, dtype=torch.uint8)
    changes = {"check_every": 1, "most_steps": 2, "most_tuning_steps": 5, "distance": "pixels", "growth": 1e9}
    settings = TUNING.model_copy(update={**changes, "alpha": 4.0})
    assert fit(model, images, torch.arange(24) % 2, rng(), settings)["phase2_steps"] == 5
    # lr 0.05, two weights: the error 128/255 - 0.3 shrinks by 1 - 0.2 a step, then grows by 1 + 0.2 * 3
    error = (128 / 255 - 0.3) * 0.8**2 * 1.6**5
    level = model.networks["level"](torch.ones(1, 1)).item()
    assert level == pytest.approx(128 / 255 - error, abs=1e-3)
