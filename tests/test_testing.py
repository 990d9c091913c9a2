"""The contracts of `polyclinic.testing`: the package holds them, strangers do, and each can be broken."""

from typing import Any, ClassVar, Literal

import numpy as np
import plugin_everything
import pytest
import torch
from processes import ForkedWorker
from quick_backbones import QUICK
from recorded_digests import VQVAE2

import polyclinic
from polyclinic import Dataset, FedAvg, Finding, Source, Verdict, testing
from polyclinic.audits import ATTACKS
from polyclinic.data.datasets import SOURCES
from polyclinic.generators import GENERATORS
from polyclinic.methods import METHODS
from polyclinic.models import BACKBONES
from polyclinic.runner.run import engines

GAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
FLOW = {"name": "flow", "steps": 8, "batch_size": 8, "width": 8, "levels": 2, "blocks": 1, "sample_steps": 2}
REPLAY = {"generator": VQVAE2, "replay": {"probe": False}}
FEDER = {"generator": GAN, "tuning": {"on": False}, "method": {"buffer": 8}}
#: what methods need besides a tiny study
TABLES: dict[str, dict[str, Any]] = {
    "cwt-replay": REPLAY,
    "fedavg-replay": REPLAY,
    "feder": FEDER,
    "feder-a": FEDER,
    "feder-b": FEDER,
    "felicia": {"generator": GAN, "method": {"steps": 2, "learner_steps": 3}},
    "fedbn": {"model": {"backbone": "small-cnn"}},
    "private-head": {"method": {"phantoms": 10, "numbers": 8}},
    "fedpft": {"method": {"components": 2, "iterations": 3, "passes": 2}},
    "analytic": {"method": {"numbers": 8}},
    "gaussian-heads": {"method": {"numbers": 8}},
    "fedsamples": {"generator": FLOW, "method": {"looks": 2}},
}
#: one of each way to keep something at a site; others share their code. All of them with `make check-all`
IN_WORKERS = ("splitnn",)


@pytest.mark.parametrize("name", METHODS.builtin)
def test_every_method_holds_the_contract(name, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)  # that of a stranger's method below is a real one
    result = testing.check_method(METHODS[name], tmp_path, workers=name in IN_WORKERS, **TABLES.get(name, {}))
    assert METHODS[name].summary
    assert set(result.metrics["per_site"]) == {"site-1", "site-2", "site-3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS.builtin if name not in IN_WORKERS])
def test_every_method_holds_the_contract_in_worker_processes(name, tmp_path):
    testing.check_method(METHODS[name], tmp_path, **TABLES.get(name, {}))


@pytest.mark.parametrize("name", [name for name in SOURCES.builtin if name.endswith("-phantom")])
def test_every_phantom_holds_the_contract(name):
    testing.check_source(SOURCES[name](source=name, samples=10, size=28))


@pytest.mark.parametrize("name", QUICK)
def test_every_backbone_holds_the_contract(name):
    testing.check_backbone(BACKBONES[name])


@pytest.mark.parametrize(
    "table",
    [VQVAE2, GAN, {**GAN, "name": "gan"}, {**GAN, "name": "wgan-gp"}, {**GAN, "name": "stylegan2", "width": 2}],
    ids=lambda table: table["name"],
)
def test_every_generator_holds_the_contract(table):
    testing.check_generator(GENERATORS[table["name"]](**table))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run whose parcels were kept."""
    folder = tmp_path_factory.mktemp("kept")
    study = testing.study_for(METHODS["fedavg"], audit={"keep_parcels": 0})
    polyclinic.run(study, folder / "run", cache=folder / "cache")
    return folder / "run", folder / "cache"


#: an attack for volumes has its own test, on a study of volumes
IMAGES_ON_WEIGHTS = [name for name, one in ATTACKS.builtin.items() if "weights" in one.kinds and not one.volumes]


@pytest.mark.parametrize("name", IMAGES_ON_WEIGHTS)
def test_every_attack_on_weights_holds_the_contract(name, kept):
    run, cache = kept
    testing.check_attack(ATTACKS[name], run, cache=cache)


def test_a_strangers_classes_hold_the_contracts(tmp_path, kept):
    kinds = ["weights", "metrics", "prototypes", "keys", "masked", "shares"]
    tables = {"plugins": [plugin_everything.__file__], "policy": {"kinds": kinds}}
    testing.check_method(plugin_everything.FedPrototypes, tmp_path, **tables)
    testing.check_source(plugin_everything.Squares(size=16, samples=10))
    testing.check_backbone(plugin_everything.OneLayer)
    testing.check_generator(plugin_everything.SmallGAN(steps=2))
    testing.check_attack(plugin_everything.LooksAtPrototypes, kept[0], cache=kept[1])


class Unseeded(FedAvg):
    """Draws from a generator without an address."""

    name: Literal["unseeded"] = "unseeded"  # type: ignore[assignment]

    def combine(self, federation, state, replies):
        noise = float(np.random.default_rng().normal())
        return {
            name: t + noise if t.is_floating_point() else t
            for name, t in super().combine(federation, state, replies).items()
        }


class Forgetful(FedAvg):
    """Keeps in the object what a resumed run needs."""

    name: Literal["forgetful"] = "forgetful"  # type: ignore[assignment]

    def run(self, federation):
        seen = []
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            seen.append(federation.ask_all("train", weights=state.weights))
            state.weights = self.combine(federation, state, seen[0])
            federation.evaluate(state.weights)
        return state.weights


@pytest.mark.parametrize(("method", "word"), [(Unseeded, "same study"), (Forgetful, "resumed run")])
def test_a_method_that_breaks_the_contract_is_told_how(method, word, tmp_path):
    with pytest.raises(AssertionError, match=f"{method.model_fields['name'].default}: .*{word}"):
        testing.check_method(method, tmp_path, workers=False)
    assert method.model_fields["name"].default not in METHODS


def test_a_sum_that_is_refused_for_another_reason_than_the_methods_own_is_told(tmp_path):
    with pytest.raises(AssertionError, match=r"fedavg: .* and not by its sum_obstacle\(\): engine\.wire"):
        testing.check_method(FedAvg, tmp_path, workers=False, engine={"wire": "fp16"})


class Restless(Source):
    """Other images each time."""

    source: Literal["restless"] = "restless"

    def load(self) -> Dataset:
        images = np.random.default_rng().integers(0, 255, (4, 1, self.size, self.size), np.uint8)
        return Dataset(images=images, labels=np.arange(4) % 2, classes=("a", "b"))


class Wide(Source):
    """Images of another size than asked for."""

    source: Literal["wide"] = "wide"

    def load(self) -> Dataset:
        return Dataset(images=np.zeros((4, 1, 8, 8), np.uint8), labels=np.arange(4), classes=("a", "b"))


@pytest.mark.parametrize(("source", "word"), [(Restless, "images differ"), (Wide, r"data\.size")])
def test_a_source_that_breaks_the_contract_is_told_how(source, word):
    with pytest.raises(AssertionError, match=word):
        testing.check_source(source(size=16))


class Forgotten(plugin_everything.OneLayer):
    """Has a layer that no stage names."""

    name: ClassVar[str] = "forgotten"

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.beside = torch.nn.Linear(1, 1)


def test_what_breaks_a_contract_is_told_how():
    with pytest.raises(AssertionError, match="must be in a stage"):
        testing.check_backbone(Forgotten)
    with pytest.raises(AssertionError, match="loaded from its state"):
        testing.check_generator(Restart(steps=2))


class Restart(plugin_everything.SmallGAN):
    """Its models keep nothing of a state that they are sent."""

    name: Literal["restart"] = "restart"  # type: ignore[assignment]

    def build(self, **given):
        model = super().build(**given)
        model.load = lambda state: None
        return model


class Tensors(plugin_everything.LooksAtPrototypes):
    """Has evidence that no file can hold."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)

    def attack(self, seen, truth):
        return [Finding("tensor", "nothing", Verdict(True, "a tensor", {"found": torch.ones(1)}))]


class Guesses(plugin_everything.LooksAtPrototypes):
    """Says something else each time."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)

    def attack(self, seen, truth):
        return [
            Finding("guess", "nothing", Verdict(True, "a guess", {"guess": float(np.random.default_rng().normal())}))
        ]


@pytest.mark.parametrize(("attack", "word"), [(Guesses, "something else"), (Tensors, "evidence")])
def test_an_attack_that_breaks_the_contract_is_told_how(kept, attack, word):
    with pytest.raises(AssertionError, match=word):
        testing.check_attack(attack, kept[0], cache=kept[1])
