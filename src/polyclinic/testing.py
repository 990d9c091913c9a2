"""Contracts for plug-ins: what every method, source, backbone, generator and attack holds to. Call them in your tests.

    from polyclinic import testing

    def test_my_method(tmp_path):
        testing.check_method(MyMethod, tmp_path)

A contract that is broken raises an AssertionError, whose sentence says what a user would meet.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic import models
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted
from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.data.dataset import Dataset
from polyclinic.data.source import Source
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import verify
from polyclinic.generators.base import FitOptions, Generator
from polyclinic.methods import METHODS, Method
from polyclinic.models import Backbone
from polyclinic.randomness import torch_rng
from polyclinic.registry import Registry
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.result import Result
from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target

#: a study that runs in a second: drawn images, three sites, two rounds
TABLES: dict[str, Any] = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 60, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "iid", "count": 3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"lr": 0.05, "batch_size": 4},
    "method": {"rounds": 2},
    "evaluation": {"every": 0, "select": "last"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},
}
ENCODER = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
#: kinds that every run releases: scores, and the keys of sealed parcels
ALWAYS = {"metrics", "keys"}


class _StopInSecond(Display):
    """Ends a run in its second round, as Ctrl-C does: when a site is asked, or at the end of a round that asks none. A
    run of one round ends when its last scores are asked for."""

    done = 0

    def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
        self.done += 1
        if self.done == 2:
            raise KeyboardInterrupt

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        if self.done == 1:
            raise KeyboardInterrupt


# --- methods ------------------------------------------------------------------------------------------


def check_method(method: type[Method], folder: Path, /, *, workers: bool = True, **tables: Any) -> Result:
    """Run a tiny study with a method in every way that must not change its result; the result.

    Same seed, same weights. A run that stops in its second round, if there is one, is resumed to the same weights and
    ledgers. Worker processes give the same (`workers`; the method must then be in a plug-in or a package). Ledgers
    hold, and have only kinds that operations declare; a site whose policy forbids one lets nothing of it out. A secure
    sum ends in the bits of an open one, or the method's `sum_obstacle` says why there is none. `tables` change the
    study: `method={"rounds": 1}`, `plugins=[...]`.
    """
    with nullcontext() if "plugins" in tables else _registered(METHODS, method.model_fields["name"].default, method):
        study = study_for(method, **tables)
        first = run(study, folder / "first", cache=folder / "cache")
        assert all(t.isfinite().all() for t in first.weights().values()), f"{study.method.name}: weights are not finite"
        _check_equalities(study, first, folder, workers)
        _check_gate(study, first, folder)
        _check_sums(study, folder)
    return first


def study_for(method: type[Method], /, **tables: Any) -> Study:
    """The tiny study of the contracts, with what a method needs (an encoder, privacy) and `tables`."""
    name = method.model_fields["name"].default
    wanted = {key: {**value, **tables.get(key, {})} for key, value in TABLES.items()}
    wanted |= {key: value for key, value in tables.items() if key not in TABLES or key == "sites"}
    if method.traits.needs_encoder and "backbone" not in tables.get("model", {}):
        wanted["model"] = {**ENCODER, **tables.get("model", {})}
    if method.traits.trains == "private head":
        wanted.setdefault("privacy", {"noise_multiplier": 1.0})
    wanted["method"] = {"name": name, **wanted["method"]}
    return Study(**wanted)


def _check_equalities(study: Study, first: Result, folder: Path, workers: bool) -> None:
    name = study.method.name
    again = run(study, folder / "again", cache=folder / "cache")
    _assert_same(
        first, again, f"{name}: the same study gave another result; draw from site.rng(...) and federation.rng(...)"
    )
    stopped = folder / "stopped"
    try:
        run(study, stopped, display=_StopInSecond(), cache=folder / "cache")
        raise AssertionError(
            f"{name}: no round ended, and so the run was not stopped in its second one; go through "
            "federation.rounds(...)"
        )
    except KeyboardInterrupt:
        assert not (stopped / "result.json").exists()
        resumed = run(study, stopped, resume=True, cache=folder / "cache")
        _assert_same(
            first, resumed, f"{name}: a resumed run ended elsewhere; keep what rounds need in federation.state"
        )
    if workers:
        apart = study.with_settings({"engine.workers": 2})
        _assert_same(
            first,
            run(apart, folder / "workers", cache=folder / "cache"),
            f"{name}: two worker processes gave another result; keep what a site needs in site.state",
        )


def _check_gate(study: Study, first: Result, folder: Path) -> None:
    name = study.method.name
    operations = [getattr(getattr(type(study.method), one, None), "operation", None) for one in dir(type(study.method))]
    declared = {kind for operation in operations if operation for kind in operation.releases}
    released = {line["kind"] for lines in _ledgers(first).values() for line in lines}
    assert released <= declared | ALWAYS, f"{name}: {sorted(released - declared - ALWAYS)} left, which nothing declares"
    for kind in sorted(released - ALWAYS)[:1]:
        place, allowed = folder / "strict", sorted((released | ALWAYS) - {kind})
        with suppress(WorkFailed, BadInput):
            run(study.with_settings({"policy.kinds": allowed}), place, cache=folder / "cache")
        for path in place.glob("ledger/*.jsonl"):
            kinds = {line["kind"] for line in verify(path)}
            assert kind not in kinds, f"{name}: {kind} left {path.stem}, whose policy forbids it"


def _check_sums(study: Study, folder: Path) -> None:
    found, name, obstacle, refusal = {}, study.method.name, study.method.sum_obstacle(), ""
    for way in ("integer", "secure"):
        try:
            summed = study.with_settings({"federation": {"sum": way}})
        except BadInput as error:
            refusal = str(error)
        if refusal:
            said = f"{name}: federation.sum = '{way}' is refused, and not by its sum_obstacle(): {refusal}"
            assert refusal == obstacle, said
            return
        found[way] = run(summed, folder / way, cache=folder / "cache")["weights_sha256"]
    assert found["integer"] == found["secure"], f"{name}: a secure sum is not the open one"


def _ledgers(result: Result) -> dict[str, list[dict[str, Any]]]:
    return {path.name: verify(path) for path in sorted((result.folder / "ledger").glob("*.jsonl"))}


def _assert_same(first: Result, second: Result, sentence: str) -> None:
    """Same weights, scores and ledgers."""
    for key in ("weights_sha256", "metrics", "ledgers", "communication"):
        assert first[key] == second[key], f"{sentence} ({key} differs)"
    ledgers = [[path.read_bytes() for path in sorted((r.folder / "ledger").iterdir())] for r in (first, second)]
    assert ledgers[0] == ledgers[1], f"{sentence} (ledgers differ)"
    lines = [
        [json.loads(text) for text in (r.folder / "history.jsonl").read_text().splitlines()] for r in (first, second)
    ]
    told = [[{k: v for k, v in line.items() if k != "seconds"} for line in of_run] for of_run in lines]
    assert told[0] == told[1], f"{sentence} (history.jsonl differs)"


@contextmanager
def _registered(registry: Registry, name: str, entry: type) -> Iterator[None]:
    """A class known by its name, also one that is in no plug-in."""
    new = name not in registry
    if new:
        registry[name] = entry
    try:
        yield
    finally:
        if new:
            del registry[name]


# --- sources, backbones, generators, attacks ----------------------------------------------------------


def check_source(source: Source) -> Dataset:
    """Load a source twice: the same images both times, of the size that was asked for, with labels that fit."""
    name = source.source
    dataset, again = source.load(), source.load()
    for field in fields(Dataset):
        one, other = getattr(dataset, field.name), getattr(again, field.name)
        same = (
            np.array_equal(one, other, equal_nan=field.name == "geometry")
            if field.name in Dataset.PER_IMAGE and one is not None
            else one == other
        )
        assert same, f"{name}: loaded twice, {field.name} differ; draw from numpy_rng(self.seed, ...)"
    assert dataset.images.shape[1] in (1, 3), f"{name}: images have {dataset.images.shape[1]} channels, not 1 or 3"
    assert dataset.images.shape[2:] == (source.size, source.size), f"{name}: images are not of data.size"
    if "classification" in source.tasks:
        assert dataset.labels.dtype == np.int64, f"{name}: class labels are {dataset.labels.dtype}, not int64"
        assert set(np.unique(dataset.labels)) <= set(range(len(dataset.classes))), f"{name}: a label has no class"
    if "segmentation" in source.tasks:
        masks = set() if dataset.masks is None else set(np.unique(dataset.masks))
        assert masks == {0, 1}, f"{name}: masks are not of 0 and 1"
    return dataset


def check_backbone(backbone: type[Backbone], *, channels: int = 1, size: int = 28) -> None:
    """Build a network: outputs of the promised shape, gradients everywhere, and the same outputs when it is cut."""
    for norm in ("batch", "group"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = backbone(channels, 2, size, norm)
        images = torch.rand(4, channels, size, size, generator=torch_rng("contract", backbone.name))
        outputs = model(images)
        wanted = (4, 2, size, size) if backbone.dense else (4, 2)
        assert tuple(outputs.shape) == wanted, f"{backbone.name}: outputs are {tuple(outputs.shape)}, not {wanted}"
        owned = {child for stage in backbone.stages.values() for child in stage}
        missing = {name for name, _ in model.named_children()} ^ owned
        assert not missing, f"{backbone.name}: {sorted(missing)} must be in a stage and be a layer"
        outputs.square().sum().backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert not unused, f"{backbone.name}: no gradient reaches {unused[:3]}"
        model.eval()
        for cut in model.cuts:
            front, rest = models.split(model, cut)
            assert torch.equal(rest(front(images)), model(images)), (
                f"{backbone.name}: cut at {cut}, it gives something else"
            )
    assert not models.norm_names(model), f"{backbone.name}: it has batch norm where norm is 'group'"
    alone = model(images[:1])
    assert torch.allclose(model(images)[:1], alone, atol=1e-5), f"{backbone.name}: norm 'group' mixes images"


def check_generator(generator: Generator, *, channels: int = 3, size: int = 28) -> None:
    """Fit and sample: images of the promised form, the same from the same seed, and from a state that was sent."""
    target = Target(classes=("no", "yes"))
    rng = torch_rng("contract", "images")
    images = torch.randint(256, (8, channels, size, size), dtype=torch.uint8, generator=rng)
    labels = torch.arange(8) % 2

    def fitted() -> Any:
        model = generator.build(channels=channels, size=size, target=target, seed=1)
        model.fit(images, labels, torch_rng("contract", "fit"), FitOptions())  # as methods call it
        return model

    model, again = fitted(), fitted()
    made = model.sample(labels, torch_rng("contract", "sample"))
    form = (made.dtype, tuple(made.shape))
    assert form == (torch.uint8, tuple(images.shape)), f"{generator.name}: samples are {form}"
    sent = generator.build(channels=channels, size=size, target=target, seed=2)
    sent.load(model.state())
    for other, how in ((again, "fitted again from the same seed"), (sent, "loaded from its state")):
        same = torch.equal(made, other.sample(labels, torch_rng("contract", "sample")))
        assert same, f"{generator.name}: {how}, it makes other images"
    assert "\n" not in (generator.dp_obstacle() or ""), f"{generator.name}: dp_obstacle is more than one sentence"


def check_attack(attack: type[Attack], folder: Path, *, cache: Path | None = None) -> list[Finding | NotTried]:
    """Attack the first fitting parcel that a run kept (`audit.keep_parcels`), twice, and what the attack plants in it.

    Its answers are findings or reasons, the same ones both times, with evidence that audit.json can hold.
    """
    name = attack.__name__
    unknown = [kind for kind in attack.kinds if kind not in KINDS]
    assert not unknown, f"{name}: there is no kind of parcel {unknown}"
    assembly, lines = open_run(folder, cache=cache)
    tools = build_tools(assembly, "quick", "pixels", "cpu")
    kept = parcels_to_audit(folder, assembly.study, lines, "quick", (), ())
    chosen = [one for one in kept if one.parcel.kind in attack.kinds]
    assert chosen, f"{name}: the run in {folder} kept no parcel of its kinds, {', '.join(attack.kinds)}"
    audited = chosen[0]
    answers, again = (attack().attack(audited.seen(tools), audited.truth(tools)) for _ in range(2))
    for one, other in zip(answers, again, strict=True):
        assert isinstance(one, Finding | NotTried), f"{name}: it answers {type(one).__name__}, not Finding or NotTried"
        told = [a.verdict if isinstance(a, Finding) else a for a in (one, other)]
        plain = not isinstance(one, Finding) or _is_plain(one.verdict.evidence)
        assert plain, f"{name}: its evidence is not of plain numbers, texts, lists and dicts, as audit.json is"
        assert told[0] == told[1], f"{name}: tried twice, it says something else; draw from torch_rng(seen.tools.seed)"
    for plant in attack().planted(audited.seen(tools), audited.truth(tools)):
        assert isinstance(plant, Planted), f"{name}: it plants {type(plant).__name__}, not Planted"
        attack().attack(plant.seen, plant.truth)
    return answers


def _is_plain(evidence: object) -> bool:
    try:
        json.dumps(evidence)
    except TypeError:
        return False
    return True
