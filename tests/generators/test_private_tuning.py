"""Privacy-preserving training of GANs: the loss against all pairs, when each phase ends and what it keeps, who can."""

import itertools

import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.generators import private_tuning
from polyclinic.generators.gan.model import GANSteps, Learner
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.metrics.distribution import Extractor, frechet_distance, kernel_distance
from polyclinic.metrics.perceptual import Pixels
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.tasks import Target

TWO = Target(("a", "b"))
TINY = DCGAN(width=2, latent=4, batch_size=8, steps=5)
#: cheap features: means over a grid of 4x4
COARSE = Extractor(lambda images: torch.nn.functional.adaptive_avg_pool2d(images[:, :1], 4).flatten(1), "coarse")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def data(count=24):
    images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=rng(9))
    return images, torch.arange(count) % 2


def build(settings=TINY):
    return settings.build(channels=1, size=28, target=TWO, seed=0)


TUNING = private_tuning.PrivateTuning(check_every=10, patience=30, most_steps=1000, most_tuning_steps=1000)


@pytest.fixture(autouse=True)
def coarse_features(monkeypatch):
    monkeypatch.setattr(private_tuning, "features_named", lambda name, device: COARSE)


def test_the_mean_over_all_pairs_from_means_alone():
    real, made = (torch.randn(n, 5, generator=rng(n), dtype=torch.float64) for n in (4, 6))
    every = [(a - b).square().sum() for a, b in itertools.product(real, made)]
    assert torch.allclose(private_tuning.mean_pairwise(real, made), torch.stack(every).mean())


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_eq_3_and_4_by_hand(scale):
    real, made = torch.rand(3, 1, 8, 8), torch.rand(3, 1, 8, 8)
    distance = Pixels()
    pairs = [float(distance(a[None], b[None])) for a, b in itertools.product(real, made)]
    loss = private_tuning.privacy_loss(private_tuning.PrivateTuning(alpha=2.0, scale=scale), distance)(real, made)
    expected = sum(pairs) / 9 if scale == "mean" else sum(pairs) / 3
    assert float(loss) == pytest.approx(-2 * expected, rel=1e-5)


class Counting:
    """A model whose state is how often it was trained, and whose distance is read from a list."""

    def __init__(self, distances):
        self.distances, self.at, self.losses = distances, 0, []

    def step(self, extra=None):
        self.at += 1
        self.losses.append(extra)

    def state(self):
        return {"at": self.at}

    def load(self, state):
        self.at = state["at"]

    def meter(self, _):
        return self.distances[max(0, self.at // 10 - 1)]


def test_phase_one_ends_when_nothing_gets_better_or_in_any_case_and_keeps_the_best():
    model = Counting([9, 5, 6, 4, 7, 8, 5, 1, 1])
    assert private_tuning.Phases(model, model, model.meter, TUNING.lengths()).until_it_stays() == 70
    assert model.at == 40  # the fourth measurement, 4, was the best; 30 steps without a better one
    assert set(model.losses) == {None}
    model = Counting([9 - k / 100 for k in range(200)])
    lengths = TUNING.lengths()._replace(most_steps=55)
    assert private_tuning.Phases(model, model, model.meter, lengths).until_it_stays() == 55


def test_phase_two_ends_beyond_the_limit_and_keeps_what_was_within():
    model, loss = Counting([4, 5, 9.9, 10.1, 3]), object()
    told = []
    phases = private_tuning.Phases(model, model, model.meter, TUNING.lengths(), lambda *said: told.append(said))
    assert (*phases.until_it_grows(loss, 10.0), model.at) == (40, 30, 30)
    assert set(model.losses) == {loss}
    assert [said[1] for said in told] == [1, 2, 5, 10, 20, 30, 40]
    assert [said[3] for said in told][3:] == [4, 5, 9.9, 10.1]


@pytest.mark.parametrize(("every", "most", "steps"), [
    (500, 1300, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1300]), (7, 14, [1, 2, 5, 7, 14]),
    (500, 30, [1, 2, 5, 10, 20, 30]), (1, 3, [1, 2, 3]), (2, 1, [1]),
])  # fmt: skip
def test_phase_two_is_measured_early(every, most, steps):
    assert list(private_tuning.measured_steps(every, most)) == steps


def test_a_loss_that_is_soon_too_strong_still_gains_something():
    """The first look was after `check_every` steps: a generator beyond the limit by then was never tuned."""

    class Growing(Counting):
        def meter(self, _):
            return 1.0 + self.at  # twice the first phase's after one step, beyond 10 after ten

    model = Growing([])
    phases = private_tuning.Phases(model, model, model.meter, private_tuning.PrivateTuning(preset="paper").lengths())
    assert (*phases.until_it_grows(object(), 10.0), model.at) == (10, 5, 5)


def test_a_tuning_that_gained_nothing_warns():
    figures = {"kept_step": 5, "phase1_distance": 0.5, "phase2_distance": 0.6}
    assert private_tuning.warning_about(figures) is None
    assert private_tuning.warning_about({}) is None  # phase 1 only, or no phases
    assert "kept the generator of phase 1" in private_tuning.warning_about(figures | {"kept_step": 0})
    assert "no farther from real ones" in private_tuning.warning_about(figures | {"phase2_distance": 0.5})


def test_a_meters_mean_distance_is_of_all_pairs_and_its_figures_of_the_sets_they_name():
    images, labels = data()
    meter = private_tuning.Meter(images, labels, private_tuning.PrivateTuning(measured=20), rng(), torch.device("cpu"))
    model, distance = build(), Pixels()
    real, made = (one.float() / 255 for one in (meter.images, meter.sample(model)))
    pairs = [float(distance(a[None], b[None])) for a, b in itertools.product(real, made)]
    assert meter.mean_distance(model, distance) == pytest.approx(sum(pairs) / 400, rel=1e-4)
    images, labels = data()
    meter = private_tuning.Meter(images, labels, private_tuning.PrivateTuning(measured=20), rng(), torch.device("cpu"))
    asked = []

    class Model:
        def sample(self, labels, rng):
            asked.append(labels)
            return images[: len(labels)].flip(2)

    found, made, real = meter.summary(Model()), COARSE(images[:20].flip(2)), meter.real
    assert torch.equal(asked[0], meter.labels)
    chosen = [int((COARSE(images) - one).abs().sum(1).argmin()) for one in real]
    assert torch.equal(labels[chosen], meter.labels)  # made images have the labels of the real ones
    assert found == {
        "fd": frechet_distance(real, made), "fd_half": frechet_distance(real[:10], made[10:]),
        "fd_floor": frechet_distance(real[:10], real[10:]), "kid": kernel_distance(real, made),
        "kid_floor": kernel_distance(real[:10], real[10:]),
    }  # fmt: skip


def test_both_phases_of_a_gan_and_a_second_whose_first_step_is_too_far():
    model, (images, labels) = build(), data()
    settings = TUNING.model_copy(
        update={"check_every": 2, "most_steps": 4, "most_tuning_steps": 4, "distance": "pixels", "growth": 1e6}
    )
    found = private_tuning.fit(model, images, labels, rng(), settings)
    names = ("steps", "fd", "fd_half", "fd_floor", "kid", "kid_floor")
    both = {f"phase{k}_{name}" for k in (1, 2) for name in (*names, "distance")}
    assert set(found) == both | {"kept_step"}
    assert (found["phase1_steps"], found["phase2_steps"], found["kept_step"]) == (4, 4, 4)
    assert found["phase1_fd"] > found["phase1_fd_floor"] > 0
    plain = private_tuning.fit(build(), images, labels, rng(), settings.model_copy(update={"alpha": 0.0}))
    assert plain == {name: found[name] for name in (f"phase1_{name}" for name in names)}
    model, (images, labels) = build(), data()
    tuning = {"check_every": 2, "most_steps": 2, "most_tuning_steps": 4, "distance": "pixels", "growth": 1.0}
    loud = TUNING.model_copy(update={**tuning, "alpha": 1e6})
    found = private_tuning.fit(model, images, labels, rng(), loud)
    assert (found["kept_step"], found["phase2_steps"]) == (0, 1)
    assert found["phase2_fd"] == found["phase1_fd"]
    assert private_tuning.warning_about(found)


def test_phase_two_may_go_to_growth_times_the_distance_of_phase_one(monkeypatch):
    limits = []

    monkeypatch.setattr(private_tuning.Phases, "until_it_grows", lambda self, _, limit: limits.append(limit) or (0, 0))
    settings = TUNING.model_copy(update={"most_steps": 2, "distance": "pixels", "growth": 3.0})
    found = private_tuning.fit(build(), *data(), rng(), settings)
    assert limits == [pytest.approx(3 * found["phase1_fd"])]


def test_an_extra_loss_of_a_gan_sees_images_between_0_and_1():
    images = torch.cat([torch.zeros(12, 1, 28, 28), torch.full((12, 1, 28, 28), 255)]).byte()
    steps, seen = GANSteps([Learner(build(), images, data()[1], rng())]), []
    steps.step(lambda real, made: seen.append((real, made.detach())) or made.sum())
    ((real, made),) = seen
    assert (float(real.min()), float(real.max())) == (0.0, 1.0)
    assert 0 <= float(made.min()) < 0.5 < float(made.max()) <= 1


def test_phases_are_as_long_as_the_generators_own_steps_unless_the_table_says_otherwise():
    assert private_tuning.PrivateTuning().for_steps(600).lengths() == (120, 600, 60, 120)
    assert private_tuning.PrivateTuning().for_steps(8).lengths() == (1, 8, 1, 1)
    assert private_tuning.PrivateTuning(most_steps=50_000).for_steps(600).lengths() == (10_000, 50_000, 5000, 500)
    assert private_tuning.PrivateTuning(preset="paper").for_steps(600).lengths() == (10_000, 100_000, 100_000, 500)


def test_weights_that_are_missing_are_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))
    private_tuning.PrivateTuning().check_weights()
    private_tuning.PrivateTuning(preset="paper", on=False).check_weights()
    with pytest.raises(BadInput, match=r"lpips-vgg is not here .*; run polyclinic weights get lpips-vgg"):
        private_tuning.PrivateTuning(preset="paper").check_weights()
    with pytest.raises(BadInput, match=r"inception-fid is not here .*; run polyclinic weights get inception-fid"):
        private_tuning.PrivateTuning(preset="paper", distance="pixels").check_weights()
    data = {"source": "fundus-phantom", "size": 28, "samples": 40}
    tables = {"data": data, "sites": {"partition": "iid", "count": 2}, "method": {"name": "feder"}}
    study = parse_study({**tables, "tuning": {"preset": "paper"}})
    with pytest.raises(BadInput, match="polyclinic weights get lpips-vgg"):
        run(study, tmp_path / "run", cache=tmp_path)
    assert not (tmp_path / "run").exists()


def test_with_fids_own_features_the_figure_is_called_fid(monkeypatch):
    monkeypatch.undo()  # the features of the settings
    monkeypatch.setattr(private_tuning, "inception_features", lambda **_: Extractor(COARSE.network, "Inception"))
    short = {"check_every": 1, "most_steps": 1, "most_tuning_steps": 1, "distance": "pixels"}
    settings = TUNING.model_copy(update={"features": "inception-fid", **short})
    found = private_tuning.fit(build(), *data(), rng(), settings)
    assert {"phase1_fid", "phase1_fid_half", "phase1_fid_floor", "phase2_fid"} <= set(found)
    assert not any("_fd" in name for name in found)


def test_gans_can_and_others_say_so():
    assert DCGAN().tunable
    assert StyleGAN2().tunable
    assert not VQVAE2().tunable
    model = VQVAE2(width=8, blocks=1).build(channels=1, size=28, target=TWO, seed=0)
    with pytest.raises(BadInput, match="is not trained step by step; choose a GAN"):
        private_tuning.fit(model, *data(), rng(), TUNING)
