"""FedER's sites worked at together: generators, first models and turns as stacks, against one site after the other."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from polyclinic.federation.site import SitePosition, read_state
from polyclinic.generators.gan import model
from polyclinic.methods.feder import FedER
from polyclinic.methods.shared import site_generator
from polyclinic.methods.shared.site_generator import FitGenerator
from polyclinic.randomness import seeded
from polyclinic.training.gpu import stacking

pytestmark = pytest.mark.usefixtures("no_contact_sheets")


def states_of(folder):
    """Every site's own model and its generator."""
    manifest = json.loads((folder / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    found = {}
    for site, at in manifest["sites"].items():
        state = read_state(folder, site, SitePosition(*at))
        found |= {f"{site}/{name}": value for name, value in state.group("local").items()}
        [file] = folder.rglob(f"{site}/generator.safetensors")
        found |= {f"{site}/generator/{name}": value for name, value in load_file(file).items()}
    return found


def noting(function, calls):
    def noted(first, *args, **kwargs):
        calls.append(len(first) if isinstance(first, list) else first.model.members)
        return function(first, *args, **kwargs)

    return noted


@pytest.mark.parametrize(
    ("name", "mode"), [("feder", "synchronous"), pytest.param("feder-b", "asynchronous", marks=pytest.mark.slow)]
)
def test_sites_worked_at_together_end_where_they_end_one_by_one(name, mode, go, monkeypatch):
    gans, classifiers = [], []
    monkeypatch.setattr(site_generator, "fit_together", noting(model.fit_together, gans))
    monkeypatch.setattr(stacking.StackedTrainer, "train", noting(stacking.StackedTrainer.train, classifiers))
    engine = {"checkpoint_every": 1}
    alone = go(name, {"mode": mode}, engine={**engine, "stacked": "never"})
    together = go(name, {"mode": mode}, engine={**engine, "stacked": "always"})
    assert gans == [3]
    assert 3 in classifiers
    assert together["environment"]["stacked"] == ["adapt", "prepare"]
    a, b = states_of(alone.folder), states_of(together.folder)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=1e-2, atol=1e-3, msg=key)
    for key in ("real_images", "synthetic_images"):
        assert alone["rounds"] == together["rounds"], key


@pytest.mark.slow
def test_generators_that_cannot_be_stacked_are_trained_one_by_one(go, monkeypatch):
    def fail(learners):
        raise RuntimeError("no memory")

    monkeypatch.setattr(site_generator, "fit_together", fail)
    with pytest.warns(UserWarning, match="generators are trained one after the other"):
        failed = go(method={"rounds": 1}, engine={"stacked": "always", "checkpoint_every": 1})
    alone = go(method={"rounds": 1}, engine={"stacked": "never", "checkpoint_every": 1})
    a, b = states_of(alone.folder), states_of(failed.folder)
    assert all(torch.equal(a[key], b[key]) for key in a if "/generator/" in key)


@pytest.mark.parametrize(("layer", "together"), [(nn.Dropout(0.5), False), (nn.Dropout(0.0), True)])
def test_sites_whose_network_has_dropout_prepare_alone(layer, together):
    """They would draw from one stream."""
    trainer = SimpleNamespace(stacked="always", model=nn.Sequential(layer))
    assert FitGenerator.may_group(FedER(reuse_generators=False), trainer, 3, noted=False) is together


def test_a_generator_that_draws_from_global_state_draws_as_if_its_site_were_alone(monkeypatch):
    """A plug-in's may."""
    for name in ("generator_settings", "tuning_settings"):
        monkeypatch.setattr(site_generator, name, lambda site: None)
    monkeypatch.setattr(site_generator, "train_generator", lambda site, reuse: (torch.rand(2), {}))

    def site(name):
        return SimpleNamespace(name=name, round=0, address=lambda *purpose: (7, name, *purpose))

    def drawn(*names):
        kept = {}
        FitGenerator.carry_out(
            [
                FitGenerator(site(name), lambda model, name=name: kept.update({name: (model, torch.rand(2))}), False)
                for name in names
            ]
        )
        return kept

    together = drawn("a", "b")
    with seeded(7, "b", "prepare", 0):  # as a host does around the work of one site
        alone, after = drawn("b"), torch.rand(2)
    assert all(torch.equal(x, y) for x, y in zip(together["b"], alone["b"], strict=True))
    assert not torch.equal(together["a"][0], together["b"][0])
    with seeded(7, "a", "prepare", 0):
        assert torch.equal(torch.rand(2), together["a"][0])
    with seeded(7, "b", "prepare", 0):  # what comes after it, such as dropout, draws other numbers than it did
        assert torch.equal([torch.rand(2) for _ in range(3)][2], after)
