"""FedER's buffers, its ensemble and its results: what is in them, and when a kept generator is another one."""

from types import SimpleNamespace

import pytest
import torch
from feder_studies import SITES, TABLES, study_of
from run_folders import lines_of
from stand_ins import rebuild

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import private_tuning, replay_stream
from polyclinic.generators.gan.settings import DCGAN
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.methods.feder import FedER
from polyclinic.methods.shared import shared_images, site_generator
from polyclinic.methods.shared.site_generator import uniform_labels
from polyclinic.metrics.distribution import Extractor
from polyclinic.metrics.perceptual import Pixels
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.result import convergence
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.tasks import Target
from polyclinic.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("no_contact_sheets")


def site_with(**changes):
    """As much of a site as generators need."""
    images = torch.arange(40 * 784).remainder(251).byte().reshape(40, 1, 28, 28)
    given = {"images": images, "labels": torch.arange(40) % 2}
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


@pytest.mark.parametrize("change", [
    {"seed": 1},
    {"name": "east"},
    {"generator": DCGAN(steps=7)},
    {"tuning": PrivateTuning()},
    {"labels": torch.zeros(40, dtype=torch.long)},
    {"images": torch.zeros(40, 1, 28, 28, dtype=torch.uint8)},
])  # fmt: skip
def test_another_study_has_another_generator(change):
    assert site_generator.fingerprint(site_with()) == site_generator.fingerprint(site_with())
    assert site_generator.fingerprint(site_with(**change)) != site_generator.fingerprint(site_with())


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
    assert (shared_images.pooled_images(buffer).masks == buffer["masks"].numpy()).all()


@pytest.mark.parametrize("name", ["feder", "feder-b", "centralized"])
def test_buffers_carry_masks_that_models_learn_from(tmp_path, cache, monkeypatch, name):
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


def test_the_ensemble_is_scored_as_it_predicts(go):
    """It is the mean of the sites' models."""
    found = go("feder-a")
    ensemble, sites = load_predictor(found.folder, ensemble=True), [load_predictor(found.folder, site=s) for s in SITES]
    noise = torch.randint(0, 256, (4, sites[0].card.channels, 28, 28), dtype=torch.uint8).numpy()
    assert torch.allclose(ensemble.outputs(noise), torch.stack([site.outputs(noise) for site in sites]).mean(0))
    for name, data in rebuild(found).sites.items():
        part = data.test
        right = ensemble.outputs(part.images.copy()).argmax(1) == torch.from_numpy(part.labels.copy())
        assert found.metrics["ensemble"]["per_site"][name]["accuracy"] == pytest.approx(float(right.double().mean()))


def test_sites_may_have_networks_of_their_own(go):
    found = go(model={"backbone": "lenet5", "backbones": {"site-2": "small-cnn"}})
    handed = {(site, line["to"]) for site in SITES for line in lines_of(found, site) if line["kind"] == "weights"}
    assert handed <= {("site-1", "site-3"), ("site-3", "site-1")}  # models go where they fit, buffers everywhere
    assert all(any(line["kind"] == "synthetic-images" for line in lines_of(found, site)) for site in SITES)
    assert found.metrics["across_sites"]["site-2"].keys() == set(SITES)
    ensemble = load_predictor(found.folder, ensemble=True)
    assert [type(model).__name__ for model in ensemble.model.networks] == ["LeNet5", "SmallCNN", "LeNet5"]
    assert found.metrics["ensemble"]["test"]["accuracy"] > 0


def test_convergence_is_mean_and_deviation_over_the_models_by_hand():
    across = {
        "a": {"a": {"accuracy": 0.9}, "b": {"accuracy": 0.5}},
        "b": {"a": {"accuracy": 0.7}, "b": {"accuracy": 0.5}},
    }
    found = convergence(across)
    assert found["a"]["accuracy"]["mean"] == pytest.approx(0.8)
    assert found["a"]["accuracy"]["std"] == pytest.approx(0.02**0.5)  # (0.1² + 0.1²) / (2 - 1)
    assert found["b"]["accuracy"] == {"mean": 0.5, "std": 0.0}


def test_the_result_has_site_performance_convergence_and_figures_of_generators(go):
    found = go()
    assert found["model"] == "one of each site"
    assert set(found.metrics["convergence"]) == set(found.metrics["across_sites"]) == set(SITES)
    assert set(found["generators"]) == set(SITES)
    assert set(found.metrics["ensemble"]) == {"test", "per_site"}
    for kind in ("weights", "synthetic-images"):
        sent = [line["bytes"] for line in lines_of(found, "site-1") if line["kind"] == kind]
        assert found["handed_over_per_round"]["site-1"][kind] == sum(sent) / 2


def test_labels_of_a_buffer_are_drawn_alike_from_the_classes_of_the_site():
    target = Target(("a", "b", "c"))
    drawn = uniform_labels(3000, torch.tensor([0] * 99 + [2]).numpy(), target, torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=3).tolist()
    assert counts[1] == 0
    assert abs(counts[0] - 1500) < 150
    values = uniform_labels(3000, torch.rand(5).numpy(), Target((), "years", (20.0, 80.0)), torch.Generator())
    assert 20 <= values.min() < 25 < 75 < values.max() <= 80


def test_centralized_baselines_pool_what_they_say(tmp_path, cache):
    found = {}
    for images in ("real", "synthetic", "both"):
        tables = {**TABLES, "method": {"name": "centralized", "images": images, "rounds": 1}}
        if images == "real":
            tables = {name: table for name, table in tables.items() if name not in ("tuning", "generator")}
        found[images] = run(parse_study(tables), tmp_path / images, cache=cache)
    kinds = {name: {line["kind"] for line in lines_of(one, "site-1")} for name, one in found.items()}
    assert kinds["real"] == {"real-images", "labels", "metrics"}
    assert kinds["synthetic"] == {"synthetic-images", "metrics"}
    assert kinds["both"] == {"real-images", "labels", "synthetic-images", "metrics"}
    assert len({one["weights_sha256"] for one in found.values()}) == 3


def test_a_generator_is_trained_once_and_used_again(go, monkeypatch):
    fitted = []
    fit = site_generator.fit
    monkeypatch.setattr(site_generator, "fit", lambda site, model: fitted.append(site.name) or fit(site, model))
    plain = go()
    assert len(fitted) == 3
    first = go(method={"reuse_generators": True})
    again = go("feder-a", method={"reuse_generators": True})
    assert len(fitted) == 6
    assert first["weights_sha256"] == plain["weights_sha256"]
    assert again["generators"] == first["generators"]
    go(method={"reuse_generators": True}, generator={"steps": 3})
    assert len(fitted) == 9


def federation_with(sums, simulation=True):
    """Each site answers with these sums, or with nothing; what is asked is noted."""
    asked = []

    def ask_all(operation, *, counted, **parcels):
        asked.append((operation, counted, {name: parcel.tensors for name, parcel in parcels.items()}))
        metrics = {site: (Parcel("metrics", {"right": torch.tensor(n)}),) if n else () for site, n in sums.items()}
        return [Reply(site, parcels) for site, parcels in metrics.items()]

    task = SimpleNamespace(
        add=lambda a, b: {name: a[name] + b[name] for name in a},
        finish=lambda found: {name: float(value) for name, value in found.items()},
    )
    engine = SimpleNamespace(simulation=simulation)
    return SimpleNamespace(engine=engine, ask_all=ask_all, trainer=SimpleNamespace(task=task)), asked


def test_the_ensemble_is_scored_at_every_site_that_has_test_images_and_nowhere_else():
    federation, asked = federation_with({"a": 3.0, "b": 4.0, "c": 0.0})
    found = FedER().more_metrics(federation, {"a": {"w": torch.ones(1)}, "b": {"w": torch.zeros(1)}})
    assert found == {"ensemble": {"test": {"right": 7.0}, "per_site": {"a": {"right": 3.0}, "b": {"right": 4.0}}}}
    [(operation, counted, models)] = asked
    assert (operation, counted) == ("evaluate_together", False)
    assert {name: float(tensors["w"]) for name, tensors in models.items()} == {"model_0": 1.0, "model_1": 0.0}
    federation, asked = federation_with({"a": 0.0})
    assert FedER().more_metrics(federation, {}) == {}
    assert len(asked) == 1
    federation, asked = federation_with({"a": 3.0}, simulation=False)
    assert FedER().more_metrics(federation, {}) == {}
    assert asked == []
