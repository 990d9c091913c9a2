"""What every method declares and does, and label sets."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import lines_of
from stand_ins import reply

from polyclinic.data.labels import unknown_classes
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods import METHODS
from polyclinic.methods.shared import aggregation
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.training import plans


@pytest.mark.parametrize("method", [
    pytest.param(name, marks=pytest.mark.slow if name in ("felicia", "feder", "feder-a", "feder-b") else ())
    for name in sorted(METHODS)
    if "regression" in METHODS[name].traits.tasks
])  # fmt: skip
def test_every_method_runs_every_task_it_is_for(tiny_run, method):
    ages = {
        "data": {"source": "hand-phantom", "samples": 60},
        "sites": {"partition": "iid", "count": 3},
        "task": {"name": "regression"},
        "model": {"backbone": "small-cnn"},
    }
    quick = {"felicia": {"learner_steps": 3}, "private-head": {"phantoms": 10}}.get(method, {})
    result = tiny_run({"name": method, "rounds": 1, **quick}, **ages)
    assert 0 < result.metrics["test"]["mae"] < 228
    assert set(result.metrics["per_site"]) == {"site-1", "site-2", "site-3"}
    assert result["rounds"] == 1


def test_means_by_hand():
    replies = [reply("a", 1, w=[1.0, 2.0, 3.0], n=4), reply("b", 3, w=[5.0, 6.0, 7.0], n=9)]
    assert aggregation.average(replies)["w"].tolist() == [4.0, 5.0, 6.0]
    assert aggregation.average(replies, "uniform")["w"].tolist() == [3.0, 4.0, 5.0]
    assert aggregation.average(replies)["n"].item() == 8  # 7.75, a whole number again
    assert aggregation.average(replies)["w"].dtype == torch.float32
    alone = reply("a", 7, w=torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist())
    assert torch.equal(aggregation.average([alone])["w"], alone.weights["w"]), "to the last bit"
    with pytest.raises(WorkFailed, match=r"the sites sent different tensors: \['n'\]"):
        aggregation.average([alone, replies[0]])
    from polyclinic.federation.federation import State

    network = torch.nn.BatchNorm1d(1)
    coordinator = SimpleNamespace(trainer=SimpleNamespace(model=network, state=network.state_dict))
    method = METHODS["fedavgm"](beta=0.5)
    state = State(weights={"weight": torch.tensor([1.0]), "running_var": torch.tensor([1.0])})
    sent = [reply("a", 1, weight=[0.0], running_var=[0.25])]
    state.weights = method.combine(coordinator, state, sent)
    assert state.weights["weight"].item() == 0.0  # v = 1, w = 1 - 1
    state.weights = method.combine(coordinator, state, sent)
    assert state.weights["weight"].item() == -0.5  # v = 0.5 * 1 + 0, w = 0 - 0.5
    assert state.weights["running_var"].item() == 0.25  # statistics have no momentum


def test_fedbn_keeps_every_batch_norm_layer_at_home(tiny_run):
    result = tiny_run({"name": "fedbn"})
    models = result.weights()
    norms = [name for name in METHODS["fedbn"]().local_names(small_cnn(), "average") if "running_mean" in name]
    assert norms
    for name in norms:
        assert not torch.equal(models[f"site-1/{name}"], models[f"site-3/{name}"])
    shared = next(
        name for name in small_cnn().state_dict() if name not in METHODS["fedbn"]().local_names(small_cnn(), "average")
    )
    assert torch.equal(models[f"site-1/{shared}"], models[f"site-3/{shared}"])
    assert result["batch_norm"] == "local"


def small_cnn():
    from polyclinic.models import build

    return build("small-cnn", channels=3, outputs=2, size=28)


def test_shared_images_are_five_percent_and_go_to_the_others_where_policies_let_them(tiny_run):
    result = tiny_run({"name": "fedavg-share", "share": 0.1})
    counts = result["data"]["counts"]
    shared = [line for line in lines_of(result, "site-1") if line["kind"] == "real-images"]
    assert len(shared) == 1
    assert shared[0]["round"] == 0
    pixels = 3 * 28 * 28
    assert shared[0]["bytes"] // pixels == round(0.1 * counts["site-1"]["train"])
    with pytest.raises(WorkFailed, match="kept back real-images of 'give_share'"):
        tiny_run({"name": "fedavg-share"}, policy={"kinds": ["weights", "metrics", "labels"]})


def test_weighted_loss_needs_unbalanced_classes(tiny_run):
    tables = {
        "data": {"source": "hand-phantom"},
        "sites": {"partition": "iid", "count": 2},
        "task": {"name": "regression"},
        "method": {"name": "cwt", "weighted_loss": True},
    }
    with pytest.raises(BadInput, match=r"method\.weighted_loss"):
        parse_study(tables)
    plain, weighted = tiny_run({"name": "cwt"}), tiny_run({"name": "cwt", "weighted_loss": True})
    assert plain["weights_sha256"] != weighted["weights_sha256"]


@pytest.mark.parametrize("method", ["standalone", "fedbn"])
def test_selection_works_where_each_site_has_its_own_model(tiny_run, method):
    result = tiny_run({"name": method, "rounds": 3}, evaluation={"every": 1, "select": "best"})
    assert 1 <= result["selected"]["round"] <= 3
    assert result["model"] == "one of each site"
    across = result.metrics["across_sites"]
    assert set(across) == set(across["site-1"]) == {"site-1", "site-2", "site-3"}


MONTHS = {
    "standalone": 28.73,
    "centralized": 23.26,
    "fedsgd": 30.31,
    "fedavg": 23.77,
    "fedprox": 23.30,
    "fedavgm": 33.70,
    "fedbn": 55.11,
    "scaffold": 22.52,
    "fedopt": 23.72,
    "moon": 27.16,
    "feddyn": 24.57,
    "ditto": 25.30,
    "fedrep": 26.36,
    "fedper": 24.71,
    "finetune": 24.61,
    "fedavg-share": 21.53,
    "cwt": 25.29,
    "splitnn": 25.29,
    "cwt-replay": 31.05,
    "fedavg-replay": 29.69,
    "fedreplay": 23.18,
    "feder": 32.26,
    "feder-a": 35.78,
    "feder-b": 34.07,
    "felicia": 26.62,
    "analytic": 19.35,
    "private-head": 24.29,
    "fedsamples": 33.66,
}
STUDY = {
    "data": {"source": "hand-phantom", "samples": 200},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "optimizer": {"name": "adam", "lr": 0.002, "augment": []},
}
#: what takes too long here by default
SETTINGS = {
    "fedrep": {"head_epochs": 1},
    "felicia": {"learner_steps": 100},
    "private-head": {"phantoms": 10},
    "fedsamples": {"looks": 1},
}
#: the papers' methods and one plain one; of all others no bit changes unnoticed (`test_recorded_digests.py`)
QUICK = {"analytic", "cwt-replay", "fedavg", "feder", "fedreplay", "felicia"}
REGRESSION = sorted(name for name in METHODS if "regression" in METHODS[name].traits.tasks)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in REGRESSION]
)
@pytest.mark.slow
def test_a_method_learns_what_it_learned(tiny_run, method):
    backbone = "small-cnn" if method == "fedbn" else "lenet5"
    result = tiny_run({"name": method, "rounds": 15, **SETTINGS.get(method, {})}, **STUDY, model={"backbone": backbone})
    assert result.metrics["test"]["mae"] == pytest.approx(MONTHS[method], abs=1.5)


SETS = {"site-1": ("healthy", "diseased")}


@pytest.fixture
def site_of(study_of, cache, tmp_path):
    def make(**changes):
        study = study_of({"name": "fedavg", "rounds": 1}, **changes)
        assembly = Assembly(study, prepare(study.data, study.sites, cache=cache), tmp_path)
        return assembly, assembly.host().sites.get("site-1")

    return make


def test_images_of_unknown_classes_are_left_out_and_their_outputs_stay(site_of, monkeypatch):
    """A third class that one site does not know: its row of the last layer gets no gradient there."""
    assembly, site = site_of()
    site.trainer.target = site.trainer.target.__class__(("a", "b"))
    site.unknown_classes = (1,)
    labels = torch.zeros(4, dtype=torch.long)
    images = torch.rand(4, 3, 28, 28)
    loss = plans.restricted_loss(site)(images, labels)
    loss.backward()
    last = [p for n, p in site.trainer.model.named_parameters() if n.endswith("weight") and p.shape[0] == 2][-1]
    assert torch.count_nonzero(last.grad[1]) == 0
    assert loss.item() == pytest.approx(0.0, abs=1e-6)  # with one class that can be, nothing is to be learned
    start = site.trainer.weights()
    known = plans.FitSpec(1, site.data.train.take(site.data.train.labels == 0))
    end = plans.Fit(site, start, known).alone().weights
    assert [torch.equal(end[n], one) for n, one in start.items() if n.endswith("weight") and one.shape[0] == 2] == [
        True
    ]
    assert assembly.unknown_classes == {}


def test_a_site_opens_only_images_that_it_can_label():
    from polyclinic.data.labels import without_classes
    from polyclinic.data.parts import ImageSet, SiteData

    part = ImageSet(np.zeros((6, 1, 2, 2), np.uint8), np.array([0, 1, 2, 0, 1, 2]), cases=np.arange(6))
    found = without_classes(SiteData("north", part, part, part), (1,))
    assert found.train.labels.tolist() == [0, 2, 0, 2]
    assert found.test.cases.tolist() == [0, 2, 3, 5]
    assert unknown_classes({"east": ["c", "a"]}, ("east", "west"), ("a", "b", "c")) == {"east": (1,)}


@pytest.mark.parametrize(("sets", "sentence"), [
    ({"north": ["a", "b"]}, "there is no site 'north'"),
    ({"east": ["a", "bb"]}, "there is no class 'bb'"),
    ({"east": ["a"]}, "must know two classes or more"),
    ({"east": ["a", "b"], "west": ["a", "b"]}, "no site knows 'c'"),
])  # fmt: skip
def test_label_sets_that_cannot_be_are_refused(sets, sentence):
    with pytest.raises(BadInput, match=sentence):
        unknown_classes(sets, ("east", "west"), ("a", "b", "c"))


@pytest.mark.parametrize("name", ["cwt", "fedsgd", "moon", "fedpft", "standalone", "scaffold"])
def test_methods_that_would_unlearn_classes_refuse_with_the_cure(study_of, name):
    assert not METHODS[name].traits.label_sets
    with pytest.raises(BadInput, match="choose fedavg, fedprox, gaussian-heads or analytic"):
        study_of({"name": name}, federation={"label_sets": SETS})


def test_sites_that_know_different_grades_train_together(tiny_run):
    sets = {"site-1": ("grade-0", "grade-1"), "site-2": ("grade-2", "grade-3", "grade-4")}
    data = {"grades": 5, "samples": 80}
    method = {"name": "fedavg", "rounds": 1, "local_steps": 2}
    found = tiny_run(method, data=data, sites={"partition": "iid", "count": 3}, federation={"label_sets": sets})
    without = tiny_run(method, data=data, sites={"partition": "iid", "count": 3})
    assert found.values["weights_sha256"] != without.values["weights_sha256"]
    assert set(found.metrics["per_site"]) == {"site-1", "site-2", "site-3"}


@pytest.mark.parametrize("sets", [{"site-1": ["healthy"]}, {"site-9": ["healthy", "diseased"]}])
def test_a_run_with_label_sets_that_cannot_be_is_refused_before_anything_is_written(study_of, tmp_path, cache, sets):
    study = study_of({"name": "fedavg", "rounds": 1}, federation={"label_sets": sets})
    with pytest.raises(BadInput, match="label_sets"):
        run(study, tmp_path / "run", cache=cache)
    assert not (tmp_path / "run").exists()
