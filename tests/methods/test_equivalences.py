"""What must be equal, is: to the last bit where arithmetic allows."""

import pytest
import torch
from stand_ins import rebuild
from torch import Tensor

from polyclinic.randomness import torch_rng
from polyclinic.runner.run.result import Result

ONE_SITE = {"sites": {"partition": "iid", "count": 1}}
TWO = {"sites": {"partition": "iid", "count": 2}}
MASKS = {"source": "brain-phantom", "size": 28, "samples": 60}
#: SplitNN with these settings, and CWT with the same but for the cut
SPLIT = {
    "conv1": ({}, {"model": {"cut": "conv1"}}),
    "conv2": ({}, {"model": {"cut": "conv2"}}),
    "before max pooling": (
        {"rounds": 1},
        {**TWO, "data": {"samples": 40}, "model": {"backbone": "resnet18", "cut": "relu"}},
    ),
    "regression": (
        {},
        {
            **TWO,
            "data": {**MASKS, "source": "hand-phantom"},
            "task": {"name": "regression"},
            "model": {"backbone": "lenet5"},
        },
    ),
    "segmentation": ({}, {**TWO, "data": MASKS, "task": {"name": "segmentation"}, "model": {"backbone": "unet"}}),
    "adam keeps its moments": (
        {"rounds": 3},
        {**ONE_SITE, "optimizer": {"name": "adam", "lr": 0.001, "keep_state": True}},
    ),
}


def weights(result: Result) -> dict[str, Tensor]:
    """The released weights; of the only site where each site has its own."""
    return {name.removeprefix("site-1/"): tensor for name, tensor in result.weights().items()}


def assert_same(a: Result, b: Result) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def assert_not_same(a: Result, b: Result) -> None:
    first, second = weights(a), weights(b)
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("how", SPLIT)
def test_splitnn_equals_unsplit_training_on_the_same_batches(tiny_run, how):
    method, tables = SPLIT[how]
    split = tiny_run({"name": "splitnn", **method}, **tables)
    whole = {name: {key: value for key, value in table.items() if key != "cut"} for name, table in tables.items()}
    assert_same(split, tiny_run({"name": "cwt", **method}, **whole))
    assert "activations" in split["communication"]["by_kind"]


@pytest.mark.parametrize(
    ("method", "plain", "term"),
    [
        ({"name": "fedprox", "mu": 0.0}, {}, {"mu": 1.0}),
        ({"name": "fedavgm", "beta": 0.0}, {}, {"beta": 0.9}),
        ({"name": "moon", "mu": 0.0}, {}, {"mu": 5.0}),
        ({"name": "fedopt", "server_optimizer": "sgd", "server_lr": 1.0, "beta1": 0.0}, {}, {"beta1": 0.5}),
        ({"name": "feddyn", "alpha": 0.0}, {"weighting": "uniform"}, {"alpha": 0.1}),
    ],
    ids=lambda one: one.get("name", ""),
)
def test_a_method_without_its_own_term_is_fedavg(tiny_run, method, plain, term):
    average = tiny_run({"name": "fedavg", **plain})
    assert_same(tiny_run(method), average)
    assert_not_same(tiny_run({**method, **term}), average)


@pytest.mark.parametrize(
    ("method", "other", "model"),
    [("fedbn", "fedavg", {}), ("fedper", "fedavg", {}), ("cwt", "cwt", {"batch_norm": "local"})],
)
def test_what_stays_at_the_only_site_is_what_would_be_averaged(tiny_run, method, other, model):
    assert_same(tiny_run({"name": method}, **ONE_SITE, model=model), tiny_run({"name": other}, **ONE_SITE))


@pytest.mark.parametrize("backbone", ["lenet5", "small-cnn"])
def test_fedavg_of_one_full_batch_step_is_fedsgd(tiny_run, backbone):
    """The mean of w - lr g_k and w - lr times the mean of g_k round differently; in all else they are equal."""
    plain = {"optimizer": {"batch_size": 1000, "momentum": 0.0, "augment": []}, "model": {"backbone": backbone}}
    average = weights(tiny_run({"name": "fedavg", "rounds": 3, "local_steps": 1}, **plain))
    gradient = weights(tiny_run({"name": "fedsgd", "rounds": 3}, **plain))
    for name in average:
        torch.testing.assert_close(average[name], gradient[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "cwt", "splitnn"])
@pytest.mark.parametrize("keep_state", [False, True])
def test_one_site_equals_standalone(tiny_run, method, keep_state):
    kept = {"optimizer": {"keep_state": keep_state}}
    assert_same(tiny_run({"name": method}, **ONE_SITE, **kept), tiny_run({"name": "standalone"}, **ONE_SITE, **kept))


def test_a_model_without_batch_norm_does_not_care_where_its_statistics_live(tiny_run):
    group = {"model": {"norm": "group"}}
    everywhere = tiny_run({"name": "fedavg"}, **group)
    assert_same(tiny_run({"name": "fedavg"}, model={"norm": "group", "batch_norm": "local"}), everywhere)


def test_cwt_equals_training_on_the_sites_in_turn(tiny_run):
    """The same by hand: one model, a fresh optimiser for each turn, the site's own order of batches."""
    result = tiny_run({"name": "cwt"})
    run = rebuild(result)
    model = run.trainer.load(run.assembly.initial_weights()).train()
    for number in (1, 2):
        for site, data in run.sites.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            batches = run.trainer.batches(data.train, torch_rng(run.study.seed, site, "batches", number))
            for _ in range(len(data.train) // 8):
                images, labels = next(batches)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
    by_hand = model.state_dict()
    assert all(torch.equal(by_hand[name], tensor) for name, tensor in weights(result).items())
