"""Stacked networks against the same networks one by one, in double precision; plans and corrections by hand."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from pretended_gpu import pretend_gpu
from safetensors.torch import load_file
from torch.func import vmap
from torch.nn import functional as F

import polyclinic
from polyclinic.federation.host import SiteHost
from polyclinic.federation.operation import carry_out
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.models import build
from polyclinic.training import plans
from polyclinic.training.batches import ReplayedBatches
from polyclinic.training.gpu import stacking
from polyclinic.training.gpu.graphs import WARM_UP
from polyclinic.training.gpu.stacked_layers import convolve_stacked
from polyclinic.training.loop import Trainer
from polyclinic.training.plans import Correction


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


SHAPES = [(3, 1, 1, 6), (5, 2, 2, 9), (1, 2, 0, 7), (3, 3, 0, 8)]


@pytest.mark.parametrize(("kernel", "stride", "padding", "side"), SHAPES)
def test_products_are_the_convolutions_of_each_network_and_their_gradients(kernel, stride, padding, side):
    images = torch.rand(3, 2, 4, side, side, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, 5, 4, kernel, kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([F.conv2d(*one, stride, padding) for one in zip(images, weight, bias, strict=True)])
    found = convolve_stacked(images, weight, bias, (stride, stride), (padding, padding))
    assert torch.allclose(found, wanted)
    back = torch.rand_like(wanted)
    for a, b in zip(*(torch.autograd.grad(one, (images, weight, bias), back) for one in (found, wanted)), strict=True):
        assert torch.allclose(a, b)


def loss(output, targets):
    return F.cross_entropy(output, targets)


@pytest.mark.parametrize(("name", "graphs"), [("small-cnn", False), ("small-cnn", True), ("lenet5", False)])
def test_stacked_networks_learn_what_they_learn_one_by_one(name, graphs, monkeypatch):
    """Networks with weights of their own and batch norm take some steps of SGD with momentum."""
    if graphs:
        pretend_gpu(monkeypatch)
    members, size = 3, 32
    alone = [build(name, channels=1, outputs=3, size=size).double().train() for _ in range(members)]
    stacked = stacking.StackedModel(alone[0], members)
    stacked.load([network.state_dict() for network in alone])
    learn = stacking.StackedGradients(
        stacked, lambda images, targets: vmap(loss)(stacked(images), targets), graphs=graphs
    )
    together = torch.optim.SGD(stacked.parameters.values(), 0.01, 0.9)
    each = [torch.optim.SGD(network.parameters(), 0.01, 0.9) for network in alone]
    for _ in range(WARM_UP + 2 if graphs else 2):
        images, targets = torch.rand(members, 4, 1, size, size).double(), torch.randint(3, (members, 4))
        losses = learn(images, targets)
        together.step()
        for place, (network, optimizer) in enumerate(zip(alone, each, strict=True)):
            optimizer.zero_grad()
            own = loss(network(images[place]), targets[place])
            own.backward()
            optimizer.step()
            assert float(losses[place]) == pytest.approx(own.item(), rel=1e-8)
    for place, network in enumerate(alone):
        for key, value in stacked.states()[place].items():
            assert torch.allclose(value, network.state_dict()[key], atol=1e-7), (place, key)


def run(tiny, tmp_path, method, stacked, **overrides):
    settings = {"sites.partition": "dirichlet", "sites.min_size": 4, "engine.stacked": stacked, "method.rounds": 2}
    return polyclinic.run(tiny(method, {**settings, **overrides}), tmp_path / f"{method} {stacked}")


def weights_of(folder):
    manifest = json.loads((folder / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    states = [read_state(folder, site, SitePosition(*at)) for site, at in manifest["sites"].items()]
    found = {f"{place}/{n}": t for place, one in enumerate(states) for n, t in one.group("local").items()}
    return {**found, **load_file(folder / "model.safetensors")}


REPLAYING = {"replay.probe": False, "replay.codes": "prior", "replay.samples": 8, "generator.name": "dcgan"}
REPLAYING |= {"generator.steps": 1, "generator.width": 2, "generator.latent": 4}


@pytest.mark.parametrize("method", [
    *("fedavg", "fedbn", "moon", "scaffold"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedprox", "feddyn", "standalone", "fedavg-replay")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ditto", "fedrep", "finetune")),
])  # fmt: skip
def test_sites_that_train_as_a_stack_end_where_they_end_one_by_one(method, tiny, tmp_path, monkeypatch):
    """Sites of different sizes: they take different numbers of steps, and the smallest has smaller batches. A stack
    that fails is done one by one, and would end there too."""
    used, answers, handle = [], [], SiteHost.handle_group
    monkeypatch.setattr(SiteHost, "handle_group", lambda *asked: answers.extend(made := handle(*asked)) or made)
    monkeypatch.setattr(stacking.StackedTrainer, "train", noting(stacking.StackedTrainer.train, used))
    options = {
        "fedavg": {"optimizer.augment": ["flip"]}, "fedbn": {"model.backbone": "small-cnn"},
        "standalone": {"method.local_steps": 2}, "fedavg-replay": REPLAYING, "fedrep": {"method.head_epochs": 1},
        "finetune": {"method.tuning_steps": 2},
    }.get(method, {})  # fmt: skip
    alone, stacked = (run(tiny, tmp_path, method, choice, **options) for choice in ("never", "always"))
    assert used
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    together = ["train"] if method in ("fedbn", "standalone", "ditto", "fedrep") else ["evaluate", "train"]
    together = ["train", "tune"] if method == "finetune" else together
    assert (alone["environment"]["stacked"], stacked["environment"]["stacked"]) == ([], together)
    a, b = weights_of(alone.folder), weights_of(stacked.folder)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].double(), b[name].double(), atol=2e-5), name


def noting(function, calls):
    def noted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return noted


def test_sites_that_score_one_model_do_so_in_one_pass(tiny, tmp_path, monkeypatch):
    """The weights are loaded once, and every site releases the scores that it releases alone."""
    passes, loads = [], []
    options = {"method.local_steps": 1, "evaluation.every": 1, "data.validation": 0.3, "optimizer.keep_state": True}
    alone = run(tiny, tmp_path, "fedavg", "never", **options)
    monkeypatch.setattr(Trainer, "evaluate_parts", noting(Trainer.evaluate_parts, passes))
    monkeypatch.setattr(Trainer, "load", noting(Trainer.load, loads))
    together = run(tiny, tmp_path, "fedavg", "always", **options)
    assert together["environment"]["stacked"] == ["evaluate"]  # training keeps optimisers, so it is done one by one
    assert {len(parts) for _, parts in passes} == {3}
    assert len(loads) < 3 * 2 + 3 * len(passes)  # for training in two rounds, and not once for each site in a pass
    wanted, found = (one["metrics"]["test"] for one in (alone, together))
    assert all(found[name] == pytest.approx(wanted[name], abs=1e-5) for name in ("accuracy", "loss"))
    ledgers = [sorted((one.folder / "ledger").iterdir()) for one in (alone, together)]
    first, second = ([len(path.read_text().splitlines()) for path in of_run] for of_run in ledgers)
    assert first == second


def test_more_sites_than_are_open_at_once_work_in_groups(tiny, tmp_path, monkeypatch):
    groups = []
    monkeypatch.setattr(SiteHost, "GROUPED", 2)
    monkeypatch.setattr(SiteHost, "handle_group", noting(SiteHost.handle_group, groups))
    run(tiny, tmp_path, "fedavg", "always", **{"method.rounds": 1})
    assert {len(calls) for _, calls in groups} == {2, 1}


ALONE = [
    *({"optimizer.keep_state": True}, {"audit.keep_parcels": 1}, {"optimizer.augment": ["mixup"]}),
    {"data.grades": 5, "federation.label_sets": {"site-1": ["grade-0", "grade-1"]}},  # a loss of its own
]


@pytest.mark.parametrize("overrides", ALONE)
def test_what_a_stack_cannot_do_is_done_one_by_one(overrides, tiny, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(stacking.StackedTrainer, "train", noting(stacking.StackedTrainer.train, calls))
    run(tiny, tmp_path, "fedavg", "always", **overrides)
    assert not calls


def test_sites_train_one_by_one_where_a_stack_fails(tiny, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel for this")

    alone = run(tiny, tmp_path, "fedavg", "never")
    monkeypatch.setattr(stacking.StackedTrainer, "train", fail)
    with pytest.warns(UserWarning, match="engine.stacked: sites train one after the other, more slowly: no kernel"):
        failed = run(tiny, tmp_path, "fedavg", "always")
    a, b = weights_of(failed.folder), weights_of(alone.folder)
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize(("sites", "stacked"), [(16, True), (3, False)])
def test_auto_counts_the_sites(sites, stacked, tiny, tmp_path, monkeypatch):
    """On a GPU; here the engine is told that it is one."""
    used = []
    monkeypatch.setattr(stacking.StackedTrainer, "train", noting(stacking.StackedTrainer.train, used))
    monkeypatch.setattr("polyclinic.runner.run.engines.device_of", lambda name: "cuda")
    options = {"sites.count": sites, "sites.partition": "iid", "data.samples": 16 * 12}
    study = tiny("fedavg", {**options, "engine.workers": 1, "optimizer.batch_size": 4, "method.rounds": 1})
    polyclinic.run(study, tmp_path / "run")
    assert bool(used) == stacked


def test_when_one_pass_over_all_sites_fails_each_site_is_scored_alone(tiny, tmp_path, monkeypatch):
    study = tiny("fedavg", {"engine.stacked": "always"})
    expected = polyclinic.run(study, tmp_path / "expected")

    def fail(self, parts):
        if len(parts) > 1:
            raise RuntimeError("an image cannot be read")
        return evaluate_parts(self, parts)

    evaluate_parts = Trainer.evaluate_parts
    monkeypatch.setattr(Trainer, "evaluate_parts", fail)
    found = polyclinic.run(study, tmp_path / "found")
    assert found["failures"] == []
    assert found.metrics["per_site"].keys() == expected.metrics["per_site"].keys()


class Counting:
    """A trainer's way to batches: images that tell which site and which place they are of."""

    def __init__(self, site: int) -> None:
        self.site, self.optimizer = site, SimpleNamespace(batch_size=3, augment=())

    def batch(self, part, index, rng):
        return (100.0 * self.site + index)[:, None], index


def replayed(site: int) -> ReplayedBatches:
    made = ((torch.full((2, 1), -100.0 * site - k), torch.tensor([k, k])) for k in itertools.count())
    return ReplayedBatches(made, 2)


def test_each_site_has_its_own_replayed_images_behind_its_own(monkeypatch):
    monkeypatch.setattr(stacking, "shuffled_indices", indices)
    part = Part(torch.zeros(9, 1).numpy())
    members = [stacking.Member(Counting(site), part, torch.Generator(), replayed(site)) for site in (1, 2)]
    assert {member.rows for member in members} == {(3, 2)}
    together = itertools.islice(stacking.stacked_batches(members), 3)
    alone = [replayed(site).join(batches_of(Counting(site))) for site in (1, 2)]
    for (images, targets), *each in zip(together, *alone, strict=False):
        assert torch.equal(images, torch.stack([own for own, _ in each]))
        assert torch.equal(targets, torch.stack([own for _, own in each]))


class Part:
    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)


def indices(*_):
    return (torch.tensor([step, step + 1, step + 2]) for step in itertools.count())


def batches_of(trainer: Counting):
    return (trainer.batch(None, index, None) for index in indices())


def test_the_stacks_that_were_used_last_are_kept(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(stacking, "StackedTrainer", lambda trainer, members, losses: made.append(members) or [members])
    trainer = SimpleNamespace(kept={})
    for members in (2, 3, 4, 5, 2, 6):
        assert stacking.stacked_trainer(trainer, members) == [members]
    assert made == [2, 3, 4, 5, 6]
    assert [members for members, _ in trainer.kept["stacks"]] == [4, 5, 2, 6]  # that of three was not used for longest
    stacking.stacked_trainer(trainer, 3)
    assert made[-1] == 3
    assert len(trainer.kept["stacks"]) == stacking.MOST_STACKS


class Asked:
    """A plan that notes with which others it was carried out."""

    groups: list = []  # noqa: RUF012

    def __init__(self, value):
        self.value = value

    @classmethod
    def carry_out(cls, plans):
        cls.groups.append([plan.value for plan in plans])
        return [10 * plan.value for plan in plans]


class Other(Asked):
    groups: list = []  # noqa: RUF012


def test_site_halves_wait_for_each_other_at_plans_of_one_kind():
    def half(values, kind=Asked):
        total = 0
        for value in values:
            total += yield kind(value)
        return total

    Asked.groups, Other.groups = [], []
    assert carry_out([half([1, 2]), half([]), half([3]), half([4], Other)]) == [30, 0, 30, 40]
    assert Asked.groups == [[1, 3], [2]]
    assert Other.groups == [[4]]


def add(gradients, weights, given, state):
    """Adds `given`; the state counts steps. The gradient of `left` is taken away."""
    changed = {name: one + given["more"][name] for name, one in gradients.items() if name != "left"}
    return changed, {"steps": state["steps"] + 1}


def correction(more):
    return Correction(add, {"more": {"w": more}}, {"steps": torch.zeros(())})


def test_a_correction_of_one_network_changes_its_gradients():
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in ("w", "left", "frozen")})
    model["w"].grad, model["left"].grad = torch.ones(2), torch.ones(2)
    correct = plans._Corrector(correction(torch.tensor([1.0, 2.0])), torch.device("cpu"))
    correct(model)
    assert model["w"].grad.tolist() == [2, 3]
    assert model["left"].grad is None
    assert model["frozen"].grad is None
    assert float(correct.state["steps"]) == 1


@pytest.mark.parametrize("same", [False, True])
def test_corrections_of_a_stack_are_those_of_each_network(same):
    """A network that is through no longer changes its state; tensors that all sites share are not copied."""
    shared = torch.tensor([1.0, 2.0])
    given = [shared, shared if same else torch.tensor([5.0, 6.0])]
    correct = stacking.StackedCorrector([correction(one) for one in given], [1, 3], torch.device("cpu"))
    for _ in range(3):
        parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in ("w", "left")}
        for one in parameters.values():
            one.grad = torch.ones(2, 2)
        correct(SimpleNamespace(parameters=parameters))
    assert parameters["w"].grad.tolist() == [[2, 3], [2, 3] if same else [6, 7]]
    assert parameters["left"].grad is None
    assert [float(correct.state_of(place)["steps"]) for place in range(2)] == [1, 3]
    assert correct.given["more"]["w"].dim() == (1 if same else 2)
