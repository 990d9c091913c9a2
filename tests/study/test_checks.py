"""Checks of a study: what cannot be, and what a site's policy would refuse."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyclinic.data.parts import ImageSet, prepare
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefusedData
from polyclinic.federation.federation import Federation
from polyclinic.federation.layers.cohort import check_more_images_than
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import Site
from polyclinic.generators import GENERATORS
from polyclinic.methods import METHODS
from polyclinic.methods.shared.method import ReplayMethod
from polyclinic.models import BACKBONES, NORMS, find, norm_names
from polyclinic.models.encoders import ENCODERS
from polyclinic.privacy.dp_sgd import BATCH_NORM, obstacles
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study
from polyclinic.study.checks import gives_square_map, has_batch_norm, network_obstacle, shape_at
from polyclinic.study.policy_check import Counts, numbers_for, refused_by
from polyclinic.tasks import TASKS

SOURCES = {"classification": "fundus-phantom", "regression": "hand-phantom", "segmentation": "brain-phantom"}
VOLUMES = {
    "data": {"source": "brain-volumes", "samples": 8, "shape": [16, 16, 16], "size": [16, 16, 16]},
    "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [2, 4, 4]}},
}
SMALL: dict[str, dict[str, Any]] = {
    "vqvae2": {"width": 8, "blocks": 1, "prior_width": 8, "prior_layers": 1},
    "stylegan2": {"width": 2, "latent": 4},
}
OF_GAN = {"width": 2, "latent": 4}
#: further settings of methods and generators that ask for something that not every study has
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "centralized": [{}, {"images": "synthetic"}],
    "felicia": [{}, {"central": "per-class"}],
    "fedreplay": [{}, {"encoder_site": "nowhere"}],
    "feder": [{}, {"turn_takes": {"site-1": 2.0}}],
}
GENERATOR_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "vqvae2": [{}, {"prior_epochs": 0}],
    "dcgan": [{}, {"condition": "apart"}, {"condition": "none"}],
}


class Reached(Exception):  # noqa: N818
    """The run has begun to ask sites."""


def tables(method: dict[str, Any], generator: dict[str, Any], task: str, **more: Any) -> dict[str, Any]:
    return {
        "data": {"source": SOURCES.get(task), "samples": 24, "size": 28, "validation": 0.2, "test": 0.2},
        "sites": {"partition": "iid", "count": 2},
        "task": {"name": task},
        "model": {"backbone": "unet" if task == "segmentation" else "small-cnn"},
        "method": {"rounds": 1, **method},
        "generator": generator,
        "engine": {"workers": 1, "device": "cpu"},
        **(VOLUMES if task == "volume-segmentation" else {}),
        **more,
    }


def generators() -> list[dict[str, Any]]:
    return [
        {"name": name, **SMALL.get(name, OF_GAN), **variant}
        for name in GENERATORS.builtin
        for variant in GENERATOR_VARIANTS.get(name, [{}])
    ]


def studies(method: str, task: str) -> list[tuple[dict[str, Any], Study | BadInput]]:
    """All studies of a method and a task that differ in what they use; one that is refused, as its refusal."""
    replays = [{}, {"replay": {"codes": "prior"}}] if issubclass(METHODS[method], ReplayMethod) else [{}]
    found: list[tuple[dict[str, Any], Study | BadInput]] = []
    for variant, replay in itertools.product(VARIANTS.get(method, [{}]), replays):
        for generator in generators():
            given = tables({"name": method, **variant}, generator, task, **replay)
            try:
                found.append((given, study := parse_study(given)))
            except BadInput as refusal:
                found.append((given, refusal))
                continue
            if not uses_generator(study):  # another generator is the same study
                break
    return found


def uses_generator(study: Study) -> bool:
    return study.method.needs_generator() or study.replay is not None


@pytest.mark.parametrize("task", TASKS.builtin)
@pytest.mark.parametrize("method", METHODS.builtin)
def test_what_the_check_accepts_the_run_accepts(method, task, monkeypatch, tmp_path):
    """Every accepted study begins to ask its sites, and its generator can be built; what it does not use, once."""

    def stop(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(Federation, "_answers", stop)
    without = False
    for number, (_, study) in enumerate(studies(method, task)):
        if isinstance(study, BadInput) or (without and not uses_generator(study)):
            continue
        without = without or not uses_generator(study)
        with pytest.raises(Reached):
            run(study, tmp_path / str(number))
        if uses_generator(study):
            target = Assembly(study, prepare(study.data, study.sites), Path()).target
            model = study.generator.build(channels=3, size=28, target=target, seed=0)
            assert study.generator.sampling_obstacle() is None or not study.method.needs_generator()
            assert model.networks


TURNS = {"turn_takes": {"site-1": 2.0}}


@pytest.mark.parametrize(
    ("method", "generator", "more", "refusal"),
    [
        ({"name": "felicia"}, {"name": "vqvae2"}, {}, r"generator\.name: felicia trains GANs"),
        ({"name": "feder"}, {"name": "vqvae2", "prior_epochs": 0}, {}, r"generator\.prior_epochs"),
        (
            {"name": "cwt-replay"},
            {"name": "vqvae2", "prior_epochs": 0},
            {"replay": {"codes": "prior"}},
            r"generator\.prior_epochs",
        ),
        ({"name": "feder"}, {"name": "dcgan"}, {"sites": {"partition": "iid", "count": 1}}, "two sites or more"),
        (
            {"name": "feder", "mode": "asynchronous", "turn_takes": {"west": 2.0}},
            {"name": "dcgan"},
            {},
            r"method\.turn_takes: there is no site 'west'",
        ),
        ({"name": "feder", **TURNS}, {"name": "dcgan"}, {}, r"method\.mode = 'asynchronous'"),
        ({"name": "fedreplay", "encoder_site": "west"}, {"name": "vqvae2"}, {}, r"method\.encoder_site: .*'west'"),
        ({"name": "felicia"}, {"name": "dcgan"}, {"sites": {"partition": "clusters", "count": 1}}, "two sites"),
        (
            {"name": "standalone"},
            {"name": "vqvae2"},
            {"model": {"backbones": {"west": "lenet5"}}},
            r"backbones: .*'west'",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused_before(method, generator, more, refusal):
    with pytest.raises(BadInput, match=refusal):
        parse_study({**tables(method, generator, "classification"), **more})


def test_wrong_seeds_and_values_are_said_beside_the_rest():
    with pytest.raises(BadInput, match=r"generator\.condition: 'apart' needs classes"):
        parse_study(tables({"name": "feder"}, {"name": "dcgan", "condition": "apart"}, "regression"))
    wrong = {"seed": -1, "data": {"source": "fundus-phantom", "sizee": 3}, "sites": {"partition": "iid", "count": 3}}
    with pytest.raises(BadInput, match=r"(?s)^seed: must be .*\ndata\.sizee: no such.*\nmethod\.rounds: must be"):
        parse_study({**wrong, "method": {"name": "fedavg", "rounds": 1.5}})


@pytest.mark.parametrize("name", [[], {}, [[]], 3, None])
def test_a_method_whose_name_is_no_text_is_refused_in_a_sentence(name):
    with pytest.raises(BadInput, match="method"):
        parse_study({"method": {"name": name}})


OWN = [*(name for name, kind in BACKBONES.builtin.items() if not kind.volumes), next(iter(ENCODERS.builtin))]


@pytest.mark.parametrize("name", OWN)
def test_a_backbone_has_the_norm_layers_that_it_says(name):
    pytest.importorskip("monai")  # for `unet`
    kind = find(name, size=32)
    for norm in NORMS:
        network = kind.without_weights(32, norm)
        said = bool(kind.norm_layers) and norm == "batch"
        assert bool(norm_names(network)) == said, norm
        assert obstacles(network) == ([BATCH_NORM] if said else []), norm


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in ("resnet101", "resnet152") else ()) for one in OWN]
)
def test_a_cut_gives_a_square_map_where_the_package_says_so(name):
    pytest.importorskip("monai")
    model = SimpleNamespace(backbone=name, arguments={}, norm="batch", input_size=None)
    study = SimpleNamespace(data=SimpleNamespace(size=64), model=model)
    for cut in [*find(name, size=64).stages][:-1]:
        shape = shape_at(study, cut)
        assert gives_square_map(study, cut) == (len(shape) == 3 and shape[1] == shape[2]), (cut, shape)


def test_a_backbone_that_is_derived_from_ours_is_looked_at(tiny, monkeypatch):
    """Its class inherits what ours says, and its layers may be others."""
    from torch import nn

    class Mine(BACKBONES["small-cnn"]):  # type: ignore[misc]
        def __init__(self, *given):
            super().__init__(*given)
            self.norm1 = self.norm2 = self.norm3 = nn.Identity()

    study = tiny("fedavg", {"model.backbone": "small-cnn"})
    assert has_batch_norm(study)
    assert network_obstacle(study) == BATCH_NORM
    monkeypatch.setitem(BACKBONES.builtin, "small-cnn-mine", Mine)
    own = study.with_settings({"model.backbone": "small-cnn-mine"})
    assert not has_batch_norm(own)
    assert network_obstacle(own) is None


#: as in the kit of a hospital
KIT = {"min_cohort": 10, "max_scores": 1000, "deployed": True}
ENCODED = {"model": {"backbone": "efficientnet-lite0-1024"}, "evaluation": {"select": "last"}}
SITE = Counts(152, 152, {"healthy": 80, "diseased": 72})


def study(method, **tables):
    data = {"source": "at-sites", "classes": ["healthy", "diseased"]}
    return parse_study({"data": data, "sites": {"partition": "iid", "count": 3}, "method": method, **tables})


def refusals(method, own=SITE, policy=None, **tables):
    return refused_by(study(method, **tables), Policy(**{**KIT, **(policy or {})}), own)


ANALYTIC = {"name": "analytic"}
PRIVATE = {"privacy": {"on": ["classifier"], "target_epsilon": 8.0, "cover": "named"}, **ENCODED}
FEW = {"batch_size": 4}
SECURE = {"federation": {"sum": "secure"}}
CASES = [
    (ANALYTIC, ENCODED, {}, "152 training images, sends no sums of products of 1,024", {"method.numbers": 8}),
    (ANALYTIC, {**ENCODED, **SECURE}, {}, "a secure sum does not change that", {"method.numbers": 16}),
    ({"name": "fedavg", "local_steps": 1}, {"optimizer": FEW}, {}, "of 4 images", {"optimizer.batch_size": 16}),
    ({"name": "fedavg"}, {"optimizer": {"lr": 0.5}}, {}, "above the 0.1", {"optimizer.lr": 0.1}),
    ({"name": "fedavg"}, {}, {"kinds": ["metrics"]}, "'train' of 'fedavg' releases weights", None),
    ({"name": "fedavg"}, SECURE, {"kinds": ["metrics", "shares", "keys"]}, "releases masked", None),
    ({"name": "fedavg"}, SECURE, {"min_sites": 5}, "wants 5 or more", {"federation.sum": "float"}),
    ({"name": "fedavg"}, {}, {"samples": "hide"}, "hides how many images", {"method.weighting": "uniform"}),
    ({"name": "fedavg", "rounds": 20}, {}, {"max_scores": 6}, "would leave 21 times", {"evaluation.every": 5}),
    ({"name": "fedavg"}, {}, {"max_epsilon": 3}, "nothing in the study is private", None),
    ({"name": "private-head"}, PRIVATE, {"max_epsilon": 3}, "epsilon 8 is wanted", {"privacy.target_epsilon": 3}),
    ({"name": "centralized"}, {}, {}, "exists in simulation only", {"method.name": "fedavg"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "tables", "policy", "words", "cure"), CASES)
def test_a_refusal_is_foreseen_and_its_cure_works(method, tables, policy, words, cure):
    (found,) = refusals(method, policy=policy, **tables)
    assert words in str(found)
    if cure is None:
        return
    named = next(iter(cure)).partition(".")[0] if "method.name" in cure else next(iter(cure))
    assert named in found.cure
    cured = study(method, **tables).with_settings(cure)
    assert refused_by(cured, Policy(**{**KIT, **policy}), SITE) == []


def test_conditions_are_counted_for_coordinator_and_site():
    (few, rare) = refusals(ANALYTIC, own=None, **ENCODED)
    assert str(few).startswith("a site with 1,024 training images or fewer sends no sums")
    assert str(rare).startswith("a site with a class of fewer than 10 patients (min_cohort) sends nothing")
    assert not any(one.by_images for one in (few, rare))
    rare_class = Counts(3000, 2000, {"healthy": 2990, "diseased": 4})
    (found,) = refusals(ANALYTIC, own=rare_class, **ENCODED)
    assert (found.by_images, "class 'diseased'" in found.what, "data.merge" in found.cure) == (True, True, True)
    (found,) = refusals({"name": "fedavg"}, own=Counts(30, 6))
    assert found.by_images
    part = ImageSet(np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 0, 1, 0]), cases=np.array([5, 5, 5, 6]))
    assert Counts.of(part, ("a", "b")) == Counts(4, 2, {"a": 2, "b": 1})


@pytest.mark.parametrize("images", [9, 30, 152, 4000])
def test_the_site_itself_lets_sums_of_so_many_numbers_out(images):
    site = Site.__new__(Site)
    site.policy = Policy(**KIT)
    check_more_images_than(numbers_for(images), site, images)
    with pytest.raises(GateRefusedData, match="give the features of single images away"):
        check_more_images_than(images, site, images)
