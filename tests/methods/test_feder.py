"""FedER: what its paper says, and its stacks."""

import json
from types import SimpleNamespace

import pytest
import torch
from feder_studies import SITES, TABLES, study_of
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import history, lines_of, result
from safetensors.torch import load_file
from stand_ins import rebuild
from torch import nn

from polyclinic.data import parts
from polyclinic.engines.in_process import InProcess
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.host import OpenSites
from polyclinic.federation.ledger.parcel import SEALED
from polyclinic.federation.ledger.wire import pack_images
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.generators.gan import model
from polyclinic.methods.feder import FedER, random_ring
from polyclinic.methods.shared import site_generator
from polyclinic.methods.shared.site_generator import FitGenerator
from polyclinic.randomness import seeded, torch_rng
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.training.gpu import stacking
from polyclinic.training.loop import Trainer


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_the_ring_is_one_cycle_through_all_sites(count, seed):
    sites = tuple(f"n{k}" for k in range(count))
    successor = dict(random_ring(sites, torch.Generator().manual_seed(seed)))
    assert sorted(successor) == sorted(successor.values()) == sorted(sites)
    assert all(site != other for site, other in successor.items())
    site, seen = sites[0], []
    for _ in sites:
        site = successor[site]
        seen.append(site)
    assert sorted(seen) == sorted(sites)


def test_the_ring_is_another_one_in_another_round():
    rings = {tuple(sorted(random_ring(tuple("abcde"), torch.Generator().manual_seed(k)))) for k in range(20)}
    assert len(rings) > 5


def test_nothing_but_sealed_parcels_and_figures_passes_the_coordinator(go, monkeypatch):
    seen = []
    call = InProcess.call

    def watched(self, calls):
        for one, answer in zip(calls, call(self, calls), strict=True):
            seen.extend((one, parcel) for parcel in one.parcels.values())
            seen.extend((one, parcel) for parcel in getattr(answer, "parcels", ()))
            yield answer

    monkeypatch.setattr(InProcess, "call", watched)
    monkeypatch.setattr(FedER, "more_metrics", lambda *_: {})
    go(method={"rounds": 1})
    before_the_end = [(one, parcel) for one, parcel in seen if one.arguments.get("split") != "test"]
    assert {parcel.kind for _, parcel in before_the_end} == {SEALED, "keys", "metrics", "statistics"}
    sealed = [parcel for _, parcel in before_the_end if parcel.kind == SEALED]
    assert {parcel.content for parcel in sealed} == {"weights", "synthetic-images"}
    assert len(sealed) == 2 * 2 * len(SITES)  # each once out of a site and once into another
    assert all(set(parcel.tensors) == {"box"} for parcel in sealed)


def test_a_buffer_is_drawn_once_handed_over_and_never_relayed(go):
    for name, kinds in (
        ("feder", {"weights", "synthetic-images"}),
        ("feder-a", {"synthetic-images"}),
        ("feder-b", {"synthetic-images"}),
    ):
        found = go(name)
        left = [line for site in SITES for line in lines_of(found, site)]
        assert {line["kind"] for line in left if line["to"] != "coordinator"} == kinds
        assert ("weights" in found["communication"]["by_kind"]) is any(line["kind"] == "weights" for line in left)
        assert ("weights" in found["communication"]["by_kind"]) is (name == "feder")
    found = go(method={"rounds": 3})
    digests = {
        site: {line["digest"] for line in lines_of(found, site) if line["kind"] == "synthetic-images"} for site in SITES
    }
    assert all(len(of_site) == 1 for of_site in digests.values())
    assert len(set.union(*digests.values())) == 3


def test_a_buffer_is_compressed_once_even_where_sites_are_sent_to_disk(go, monkeypatch):
    packed = []
    monkeypatch.setattr(
        "polyclinic.federation.ledger.wire.pack_images",
        lambda images: packed.append(len(images)) or pack_images(images),
    )
    undisturbed = go(method={"rounds": 3})
    assert packed == [16, 16, 16]
    monkeypatch.setattr(OpenSites, "RESIDENT_BYTES", 1)
    assert go(method={"rounds": 3})["weights_sha256"] == undisturbed["weights_sha256"]
    assert len(packed) == 6


@pytest.mark.parametrize("name", ["feder", "feder-a", "feder-b"])
def test_what_each_variant_trains_on(go, monkeypatch, name):
    """FedER-B never touches a real image once its generator is trained: its statistics say so, and it is so."""
    monkeypatch.setattr(parts, "READ_AT_ONCE", 0)
    trained_on = []
    batches = Trainer.batches
    monkeypatch.setattr(
        Trainer,
        "batches",
        lambda self, part, rng: (trained_on.append(type(part.images).__name__), batches(self, part, rng))[1],
    )
    told = []
    train = FedER.train

    def noted(self, site, buffer):
        told.append((yield from train(self, site, buffer)))
        return told[-1]

    monkeypatch.setattr(FedER, "train", noted)
    go(name)
    real = "memmap"  # a site's own images are mapped from its part; a buffer is an array
    assert set(trained_on) == ({"ndarray"} if name == "feder-b" else {real})
    for one in told[3:]:
        assert one["real_images"] == (0 if name == "feder-b" else one["steps"] * 8)
        assert one["synthetic_images"] == one["steps"] * (16 if name == "feder-b" else 8)


def test_transfer_is_plain_at_lambda_one_and_asynchronous_turns_are_even(go):
    """Without a buffer in the loss FedER is the hand-written loop: train, pass along the ring, train what came."""
    found = go(method={"real_share": 1.0})
    assert found["weights_sha256"] == go(method={"buffer": 0})["weights_sha256"]
    assert found["weights_sha256"] != go()["weights_sha256"]
    by_hand = ring_by_hand(rebuild(found))
    assert by_hand.keys() == found.weights().keys()
    assert all(torch.equal(by_hand[name], tensor) for name, tensor in found.weights().items())
    method = {"mode": "asynchronous", "rounds": 4}
    even = go(method=method)
    assert even["asynchronous"]["turns"] == 4 * len(SITES)
    assert even["rounds"] == 4
    slow = go(method={**method, "turn_takes": {"site-1": 5.0}})
    assert slow["asynchronous"]["turns"] == 4 * len(SITES)
    assert slow["asynchronous"]["time"] > even["asynchronous"]["time"]
    turns = [sum(line["operation"] == "adapt" for line in lines_of(slow, site)) for site in SITES]
    assert turns[0] < min(turns[1:])


def ring_by_hand(run):
    models, study = dict.fromkeys(run.sites, run.assembly.initial_weights()), run.study
    for number in range(study.method.rounds + 1):
        if number:
            ring = random_ring(tuple(run.sites), torch_rng(study.seed, "coordinator", "ring", number))
            models = {successor: models[site] for site, successor in ring}
        for site, data in run.sites.items():
            optimizer = study.optimizer.make(run.trainer.load(models[site]).parameters(), number)
            batches = run.trainer.batches(data.train, torch_rng(study.seed, site, "batches", number))
            run.trainer.train(batches, run.trainer.steps_in(data.train), optimizer)
            models[site] = run.trainer.weights()
    return {f"{site}/{name}": tensor for site, weights in models.items() for name, tensor in weights.items()}


class Stop(Display):
    def __init__(self, after):
        self.after = after

    def round_done(self, line, rounds):
        if line["round"] == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_asynchronous_run_ends_as_an_undisturbed_one(go, tmp_path, cache):
    """`check_method` does the same with sites in step."""
    study = study_of(method={"mode": "asynchronous", "rounds": 3})
    undisturbed = go(method={"mode": "asynchronous", "rounds": 3})
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(study, folder, display=Stop(2), cache=cache)
    resumed = run(study, folder, resume=True, cache=cache)
    assert resumed["weights_sha256"] == undisturbed["weights_sha256"]  # though the two have other keys
    assert history(folder) == history(undisturbed.folder)
    assert result(folder) == result(undisturbed.folder)
    for site in SITES:
        of_content = [
            [(line["operation"], line["digest"]) for line in lines_of(one, site) if line["kind"] != "keys"]
            for one in (resumed, undisturbed)
        ]
        assert of_content[0] == of_content[1]


def failing_once(monkeypatch):
    """Site 2 cannot adapt in round 1."""
    adapt = FedER.adapt

    def failing(self, site, only_newest=False):
        if site.name == "site-2" and site.round == 1:
            raise RuntimeError("the scanner is on fire")
        return adapt(self, site, only_newest)

    failing.operation = adapt.operation
    monkeypatch.setattr(FedER, "adapt", failing)


def test_a_site_that_fails_is_left_out_of_its_round(go, monkeypatch):
    failing_once(monkeypatch)
    found = go()
    assert [(f["round"], f["site"]) for f in found["failures"]] == [(1, "site-2")]
    with pytest.raises(WorkFailed):
        go(engine={"on_failure": "stop"})


def test_without_work_at_any_site_the_round_is_over(go, monkeypatch):
    """Of two sites one fails: the other has handed its model to nobody, and waits in vain."""
    failing_once(monkeypatch)
    found = go(method={"mode": "asynchronous"}, sites={"count": 2, "target_ks": 0.29})
    assert [(f["round"], f["site"]) for f in found["failures"]] == [(1, "site-2")]
    assert found["rounds"] == 2
    assert found["asynchronous"]["turns"] < 4


def test_a_site_that_could_not_prepare_says_why_it_hands_over_nothing(go, monkeypatch):
    fit = site_generator.fit

    def failing(site, model):
        if site.name == "site-2":
            raise RuntimeError("the scanner is on fire")
        return fit(site, model)

    monkeypatch.setattr(site_generator, "fit", failing)
    found = go()
    assert [(f["round"], f["operation"]) for f in found["failures"]] == [
        (0, "prepare"),
        (1, "hand_over"),
        (2, "hand_over"),
    ]
    assert found["failures"][1]["reason"] == (
        "site 'site-2' has no buffer to hand over: it could not prepare one in round 0"
    )


ASYNCHRONOUS = {"mode": "asynchronous"}
TAKES = r"method.turn_takes.site-1: must be (greater than 0|a finite number)"


@pytest.mark.parametrize(("name", "method", "changes", "message"), [
    ("feder", {"real_share": 0}, {}, "method.real_share"),
    ("feder-b", {"buffer": 0}, {}, "method.buffer"),
    ("feder", {}, {"sites": {"partition": "iid", "count": 1}}, "give it two sites or more"),
    ("feder", {}, {"model": {"backbones": {"site-1": "unet"}}}, "model.backbones: 'unet' of site 'site-1' cannot"),
    ("feder", {}, {"model": {"backbones": {"west": "lenet5"}}}, "model.backbones: there is no site 'west'"),
    ("feder", {}, {"generator": {"name": "gann"}}, "generator.name: no such choice"),
    ("feder", {}, {"privacy": {"on": ["classifier"]}}, "chooses when to stop training a generator by real images"),
    (
        "feder",
        {},
        {"generator": {"name": "vqvae2"}, "tuning": {"alpha": 1}},
        "'vqvae2' is not trained step by step",
    ),
    ("feder", {"turn_takes": {"west": 2.0}}, {}, "method.turn_takes: there is no site 'west'"),
    ("feder", {"turn_takes": {"site-1": 2.0}}, {}, r"method.turn_takes: sites in step wait .* set method.mode ="),
    # with a turn that is no number, or takes for ever, nobody would ever be next
    *(
        ("feder", {**ASYNCHRONOUS, "turn_takes": {"site-1": takes}}, {}, TAKES)
        for takes in (0.0, -3.0, float("nan"), float("inf"))
    ),
])  # fmt: skip
def test_what_cannot_work_is_said_before_anything_runs(name, method, changes, message, tmp_path, cache):
    tables = {**study_of().as_tables(), "method": {"name": name, "rounds": 2, **method}, **changes}
    with pytest.raises(BadInput, match=message):
        run(parse_study(tables), tmp_path, cache=cache)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": {"backbones": {"site-1": "lenet5"}}}, "model.backbones: 'fedavg' needs one network at all sites"),
    ({"tuning": {"alpha": 1}}, "tuning: 'fedavg' trains no generator"),
])  # fmt: skip
def test_what_is_feders_is_not_fedavgs(changes, message):
    tables = {name: table for name, table in TABLES.items() if name not in ("tuning", "generator")}
    with pytest.raises(BadInput, match=message):
        parse_study({**tables, "method": {"name": "fedavg"}, **changes})


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
