"""FedER's buffers and its ensemble: what is in them, when a kept generator is another one, and how they are scored."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from feder_studies import SITES, TABLES, runner, study_of

from polyclinic.data.parts import open_site, prepare
from polyclinic.engines.in_process import InProcess
from polyclinic.errors import BadInput
from polyclinic.generators import private_tuning, replay_stream
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.methods import feder
from polyclinic.methods.shared import pooling, site_generator
from polyclinic.metrics.distribution import Extractor
from polyclinic.metrics.perceptual import Pixels
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.tasks import Target
from polyclinic.training.loop import Trainer


@pytest.fixture
def go(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(site_generator, "contact_sheet", lambda *_: None)
    return runner(tmp_path, cache)


def site_with(**changes):
    """As much of a site as generators need."""
    given = {
        "images": torch.arange(40 * 784).remainder(251).byte().reshape(40, 1, 28, 28),
        "labels": torch.arange(40) % 2,
    }
    given |= {name: changes.pop(name) for name in (*given, "masks") if name in changes}
    train = SimpleNamespace(**{name: tensor.numpy() for name, tensor in given.items()})
    task = SimpleNamespace(dense="masks" in given)
    trainer = SimpleNamespace(
        target=Target(("a", "b")), device=torch.device("cpu"), precision="fp32", task=task, privacy=None
    )
    settings = {"generator": DCGAN(), "tuning": None, "seed": 0, "name": "west", "round": 0, **changes}
    rng = lambda purpose: torch.Generator().manual_seed(len(purpose))  # noqa: E731
    return SimpleNamespace(data=SimpleNamespace(train=train), trainer=trainer, rng=rng, own_draws=False, **settings)


def test_images_of_a_buffer_have_the_labels_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(site_generator, "_draw_sheet", lambda *_: None)
    model = SimpleNamespace(sample=lambda labels, rng: labels.byte()[:, None, None, None].expand(-1, 1, 4, 4))
    buffer = site_generator.draw_buffer(site_with(), model, 50)
    assert torch.equal(buffer["images"][:, 0, 0, 0].long(), buffer["labels"])
    assert set(buffer["labels"].tolist()) == {0, 1}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"name": "east"},
        {"generator": DCGAN(steps=7)},
        {"tuning": PrivateTuning()},
        {"labels": torch.zeros(40, dtype=torch.long)},
        {"images": torch.zeros(40, 1, 28, 28, dtype=torch.uint8)},
    ],
)
def test_another_study_has_another_generator(change):
    assert site_generator.fingerprint(site_with()) == site_generator.fingerprint(site_with())
    assert site_generator.fingerprint(site_with(**change)) != site_generator.fingerprint(site_with())


# --- segmentation: pairs of image and mask ----------------------------------------------------------------


MASKS = torch.arange(40)[:, None, None].expand(40, 28, 28) % 3 == 0


def test_a_generator_for_segmentation_learns_images_with_their_masks_behind(monkeypatch):
    monkeypatch.setattr(site_generator, "_draw_sheet", lambda *_: None)
    site = site_with(masks=MASKS.byte())
    learned = site_generator.training_images(site)
    assert learned.shape == (40, 2, 28, 28)
    assert (learned[:, 0] == site.data.train.images[:, 0]).all()
    assert (learned[:, 1] == 255 * site.data.train.masks).all()
    assert site_generator.new_generator(site).channels == 2
    assert site_generator.fingerprint(site) != site_generator.fingerprint(site_with(masks=(~MASKS).byte()))
    pair = torch.stack([torch.full((4, 4), 3), torch.tensor([0, 127, 128, 255]).expand(4, 4)]).byte()
    model = SimpleNamespace(sample=lambda labels, rng: pair.expand(len(labels), 2, 4, 4))
    buffer = site_generator.draw_buffer(site, model, 5)
    assert (buffer["images"].shape, buffer["masks"].shape) == ((5, 1, 4, 4), (5, 4, 4))
    assert set(buffer["images"].unique().tolist()) == {3}
    assert torch.equal(buffer["masks"], torch.tensor([0, 0, 1, 1]).byte().expand(5, 4, 4))
    assert (pooling.pooled_images(buffer).masks == buffer["masks"].numpy()).all()


@pytest.mark.parametrize("name", ["feder", "feder-b", "centralized"])
def test_buffers_carry_masks_that_models_learn_from(tmp_path, cache, monkeypatch, name):
    monkeypatch.setattr(site_generator, "contact_sheet", lambda *_: None)
    drawn, targets, learn = [], [], Trainer.loss

    def draw(site, model, count, draw_buffer=site_generator.draw_buffer):
        drawn.append(draw_buffer(site, model, count))
        return drawn[-1]

    def loss(self, output, given, *more):
        targets.append(given)
        return learn(self, output, given, *more)

    monkeypatch.setattr(site_generator, "draw_buffer", draw)
    monkeypatch.setattr(Trainer, "loss", loss)
    method = {"images": "synthetic"} if name == "centralized" else {"buffer": 8}
    tables = {**TABLES, "method": {"name": name, "rounds": 1, **method}, "task": {"name": "segmentation"}}
    tables["data"] = {"source": "brain-phantom", "size": 28, "samples": 48, "validation": 0.2, "test": 0.2}
    tables |= {"sites": {"partition": "iid", "count": 2}, "model": {"backbone": "unet"}}
    tables["optimizer"] = {"lr": 0.05, "batch_size": 8}
    found = run(parse_study(tables), tmp_path / "run", cache=cache)
    assert 0 <= found.metrics["test"]["dice"] <= 1
    masks = torch.cat([buffer["masks"] for buffer in drawn])
    known = {mask.numpy().tobytes() for mask in masks if mask.any()}  # an empty one says nothing
    seen = {target[0].byte().numpy().tobytes() for batch in targets for target in batch}
    assert 0 < masks.float().mean() < 1
    assert known & seen


def test_perceptual_distances_do_not_see_masks():
    settings, pictures = PrivateTuning(distance="pixels"), torch.rand(4, 3, 8, 8)
    loss = private_tuning.privacy_loss(settings, Pixels())
    pairs = [torch.cat([pictures, torch.rand(4, 1, 8, 8)], 1) for _ in range(2)]
    assert torch.equal(loss(*pairs), loss(pictures, pictures))


def test_felicia_says_who_can_segment():
    tables = {**TABLES, "method": {"name": "felicia"}, "task": {"name": "segmentation"}, "model": {"backbone": "unet"}}
    del tables["tuning"]
    tables["data"] = {"source": "brain-phantom", "size": 28, "samples": 48}
    with pytest.raises(BadInput, match="'felicia' is for classification, regression, not segmentation; choose one"):
        parse_study(tables)


class Warned(Display):
    def __init__(self):
        self.sentences = []

    def warned(self, sentence):
        self.sentences.append(sentence)


@pytest.mark.parametrize("name", ["feder", "centralized"])
def test_a_run_warns_where_tuning_gained_nothing(tmp_path, cache, monkeypatch, name):
    """Every step of phase 2 is beyond the limit, so that phase 1's generator is kept."""
    coarse = Extractor(lambda images: images.mean((2, 3)), "coarse")
    monkeypatch.setattr(private_tuning, "efficientnet_features", lambda **_: coarse)
    monkeypatch.setattr(private_tuning.Meter, "__call__", lambda *_: float("inf"))
    phases = {"on": True, "most_steps": 1, "most_tuning_steps": 3, "measured": 20, "patience": 1, "check_every": 1}
    tuning = {**phases, "distance": "pixels"}
    method = {"buffer": 4} if name == "feder" else {"images": "synthetic"}
    tables = {**TABLES, "method": {"name": name, "rounds": 1, **method}, "tuning": tuning}
    tables["sites"] = {"partition": "iid", "count": 2}
    display = Warned()
    found = run(parse_study(tables), tmp_path / "run", cache=cache, display=display)
    for figures in found["generators"].values():
        assert (figures["kept_step"], figures["phase2_steps"]) == (0, 1)
        assert figures["phase2_fd"] == figures["phase1_fd"]
    assert found["warnings"] == display.sentences
    about_tuning = [sentence for sentence in found["warnings"] if "private tuning" in sentence]
    for site, sentence in zip(("site-1", "site-2"), about_tuning, strict=True):
        assert sentence.startswith(f"site '{site}': private tuning kept the generator of phase 1")


@pytest.mark.parametrize(("share", "size"), [(0.5, 16), (0.25, 32), (1.0, 8)])
def test_batches_hold_both_halves_of_eq_5(go, monkeypatch, share, size):
    """Eight images of the site's own at home; what was received besides, in the share that lambda leaves it."""
    sizes = []
    train = Trainer.train

    def noted(self, batches, steps, optimizer, **more):
        def watched():
            for images, labels in batches:
                sizes.append((len(images), len(labels)))
                yield images, labels

        return train(self, watched(), steps, optimizer, **more)

    monkeypatch.setattr(Trainer, "train", noted)
    go(method={"real_share": share, "rounds": 1, "local_steps": 3})
    assert sizes == [(8, 8)] * 9 + [(size, size)] * 9  # three sites, three steps each


def test_images_of_a_buffer_are_augmented_as_real_ones_are(go, monkeypatch):
    given = []
    stream = replay_stream.stream
    monkeypatch.setattr(replay_stream, "stream", lambda *a, **k: given.append(k["augmentation"]) or stream(*a, **k))
    go(method={"rounds": 1, "local_steps": 1})
    assert given == [study_of().optimizer.augment] * 3


def test_a_large_buffer_brings_no_more_steps(go, monkeypatch):
    """Also where the buffer is all that a site trains on: a pass is as long as one over its real images."""
    steps = []
    train = Trainer.train
    monkeypatch.setattr(
        Trainer, "train", lambda self, b, count, o, **more: steps.append(count) or train(self, b, count, o, **more)
    )
    for buffer in (8, 64):
        go("feder-b", method={"buffer": buffer, "rounds": 1})
    assert steps[:6] == steps[6:]


def test_the_ensemble_is_the_majority_of_its_models_where_they_are_as_sure(go, monkeypatch, cache):
    """Three models of which two call everything by the second class."""
    logits = itertools.cycle([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([0.0, 2.0])])
    monkeypatch.setattr(feder, "_outputs", lambda site, part, weights: next(logits).expand(len(part), -1))
    found = go("feder-a", method={"rounds": 1})
    study = study_of("feder-a")
    folder = prepare(study.data, study.sites, cache=cache).folder
    for site in SITES:
        share = float((open_site(folder, site).test.labels == 1).mean())
        assert found.metrics["ensemble"]["per_site"][site]["accuracy"] == pytest.approx(share)


def test_the_ensemble_is_scored_as_it_predicts(go, cache):
    found = go("feder-a")
    ensemble = load_predictor(found.folder, ensemble=True)
    study = study_of("feder-a")
    folder = prepare(study.data, study.sites, cache=cache).folder
    for site in SITES:
        part = open_site(folder, site).test
        right = ensemble.outputs(part.images.copy()).argmax(1) == torch.from_numpy(part.labels.copy())
        assert found.metrics["ensemble"]["per_site"][site]["accuracy"] == pytest.approx(float(right.double().mean()))


def test_real_institutions_score_no_ensemble(go, monkeypatch):
    """Nobody there has all models; figures of something else must not take its name."""
    monkeypatch.setattr(InProcess, "simulation", False)
    assert set(go("feder-a").metrics) == {"test", "mean", "per_site"}
