"""FedER: networks of their own, the ensemble, buffers, baselines, generators that are kept."""

from __future__ import annotations

import pytest
import torch
from feder_studies import SITES, TABLES, lines_of
from safetensors.torch import load_file

from polyclinic.methods.feder import FedER, mean_prediction
from polyclinic.methods.shared import site_generator
from polyclinic.methods.shared.site_generator import uniform_labels
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.runner.run.release import convergence
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.tasks import Target

pytestmark = pytest.mark.usefixtures("no_contact_sheets")


# --- networks of their own, the ensemble, the result -------------------------------------------------


def test_sites_may_have_networks_of_their_own(go):
    found = go(model={"backbone": "lenet5", "backbones": {"site-2": "small-cnn"}})
    handed = {(site, line["to"]) for site in SITES for line in lines_of(found, site) if line["kind"] == "weights"}
    assert handed <= {("site-1", "site-3"), ("site-3", "site-1")}  # models go where they fit, buffers everywhere
    assert all(any(line["kind"] == "synthetic-images" for line in lines_of(found, site)) for site in SITES)
    assert found.metrics["across_sites"]["site-2"].keys() == set(SITES)
    ensemble = load_predictor(found.folder, ensemble=True)
    assert [type(model).__name__ for model in ensemble.model.networks] == ["LeNet5", "SmallCNN", "LeNet5"]
    assert found.metrics["ensemble"]["test"]["accuracy"] > 0


def test_one_site_or_the_ensemble_predicts(go):
    found = go("feder-a")
    images = load_predictor(found.folder, ensemble=True)
    sites = [load_predictor(found.folder, site=site) for site in SITES]
    noise = torch.randint(0, 256, (4, sites[0].card.channels, 28, 28), dtype=torch.uint8).numpy()
    together = torch.stack([site.outputs(noise) for site in sites]).mean(0)
    assert torch.allclose(images.outputs(noise), together)


def test_the_ensemble_is_the_mean_of_probabilities_or_of_values():
    logits = torch.randn(3, 5, 4)
    assert torch.allclose(mean_prediction(logits, values=False).softmax(1), logits.softmax(2).mean(0), atol=1e-6)
    assert torch.allclose(mean_prediction(logits, values=True), logits.mean(0))


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


def test_each_site_draws_a_sheet_of_real_and_synthetic_images(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from polyclinic.data.plots import contact_sheet

    monkeypatch.setattr(site_generator, "contact_sheet", contact_sheet)
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8)
    part = SimpleNamespace(images=images.numpy(), labels=torch.tensor([0, 1, 0, 1, 1]).numpy())
    trainer = SimpleNamespace(target=Target(("clear", "ill")))
    site = SimpleNamespace(data=SimpleNamespace(train=part), folder=tmp_path, name="site-1", trainer=trainer)
    site_generator._draw_sheet(site, {"images": images.repeat(4, 1, 1, 1), "labels": torch.arange(20) % 2})
    assert (tmp_path / "synthetic.png").stat().st_size > 1000


def test_generators_of_sites_start_alike_and_learn_their_own_images(go):
    found = go()
    states = [load_file(found.folder / "sites" / site / "generator.safetensors") for site in SITES]
    name = next(n for n in states[0] if "discriminator" in n and "weight" in n)
    assert not torch.equal(states[0][name], states[1][name])


# --- buffers -----------------------------------------------------------------------------------------


def test_labels_of_a_buffer_are_drawn_alike_from_the_classes_of_the_site():
    target = Target(("a", "b", "c"))
    drawn = uniform_labels(3000, torch.tensor([0] * 99 + [2]).numpy(), target, torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=3).tolist()
    assert counts[1] == 0
    assert abs(counts[0] - 1500) < 150
    values = uniform_labels(3000, torch.rand(5).numpy(), Target((), "years", (20.0, 80.0)), torch.Generator())
    assert 20 <= values.min() < 25 < 75 < values.max() <= 80


def test_eq_5_by_hand(go):
    """lambda E[own] + (1 - lambda) E[buffer] is the mean over a batch with that share of each."""
    method = FedER(real_share=0.25)
    assert (
        method.synthetic_images(8),
        FedER(real_share=0.5).synthetic_images(8),
        FedER(real_share=1.0).synthetic_images(8),
    ) == (24, 8, 0)
    own, made = torch.rand(8), torch.rand(24)
    assert torch.cat([own, made]).mean() == pytest.approx(float(0.25 * own.mean() + 0.75 * made.mean()))


# --- the baselines of Table 2 ------------------------------------------------------------------------


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


# --- generators that are kept ------------------------------------------------------------------------


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
