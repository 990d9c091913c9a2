"""What must be equal, is: to the last bit where arithmetic allows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyclinic.data.parts import open_site, prepare
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.result import Result
from polyclinic.study import parse_study

ONE_SITE = {"sites": {"partition": "iid", "count": 1}}
MASKS = {
    "data": {"source": "brain-phantom", "size": 28, "samples": 60},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "segmentation"},
    "model": {"backbone": "unet"},
}
AGES = {
    "data": {"source": "hand-phantom", "size": 28, "samples": 60},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "regression"},
    "model": {"backbone": "lenet5"},
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


@pytest.mark.parametrize("cut", ["conv1", "conv2"])
def test_splitnn_equals_unsplit_training_on_the_same_batches(tiny_run, cut):
    split = tiny_run({"name": "splitnn"}, model={"cut": cut})
    assert_same(split, tiny_run({"name": "cwt"}))
    assert "activations" in split["communication"]["by_kind"]


def test_splitnn_equals_unsplit_training_with_the_cut_before_max_pooling(tiny_run):
    few = {"data": {"samples": 40}, "sites": {"partition": "iid", "count": 2}}
    split = tiny_run({"name": "splitnn", "rounds": 1}, model={"backbone": "resnet18", "cut": "relu"}, **few)
    assert_same(split, tiny_run({"name": "cwt", "rounds": 1}, model={"backbone": "resnet18"}, **few))


@pytest.mark.parametrize("tables", [AGES, MASKS], ids=["regression", "segmentation"])
def test_splitnn_equals_unsplit_training_for_every_task(tiny_run, tables):
    assert_same(tiny_run({"name": "splitnn"}, **tables), tiny_run({"name": "cwt"}, **tables))


def test_splitnn_equals_unsplit_training_with_adam_and_its_moments_kept_on_one_site(tiny_run):
    adam = {"optimizer": {"name": "adam", "lr": 0.001, "keep_state": True}}
    split = tiny_run({"name": "splitnn", "rounds": 3}, **ONE_SITE, **adam)
    assert_same(split, tiny_run({"name": "cwt", "rounds": 3}, **ONE_SITE, **adam))


def test_fedprox_without_penalty_is_fedavg(tiny_run):
    average = tiny_run({"name": "fedavg"})
    assert_same(tiny_run({"name": "fedprox", "mu": 0.0}), average)
    assert_not_same(tiny_run({"name": "fedprox", "mu": 1.0}), average)


def test_fedavgm_without_momentum_is_fedavg(tiny_run):
    average = tiny_run({"name": "fedavg"})
    assert_same(tiny_run({"name": "fedavgm", "beta": 0.0}), average)
    assert_not_same(tiny_run({"name": "fedavgm", "beta": 0.9}), average)


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


def test_fedbn_with_one_site_equals_fedavg(tiny_run):
    assert_same(tiny_run({"name": "fedbn"}, **ONE_SITE), tiny_run({"name": "fedavg"}, **ONE_SITE))


def test_local_batch_norm_statistics_with_one_site_equal_averaged_ones(tiny_run):
    local = tiny_run({"name": "cwt"}, **ONE_SITE, model={"batch_norm": "local"})
    assert_same(local, tiny_run({"name": "cwt"}, **ONE_SITE))


def test_a_model_without_batch_norm_does_not_care_where_its_statistics_live(tiny_run):
    group = {"model": {"norm": "group"}}
    everywhere = tiny_run({"name": "fedavg"}, **group)
    assert_same(tiny_run({"name": "fedavg"}, model={"norm": "group", "batch_norm": "local"}), everywhere)


def test_cwt_equals_training_on_the_sites_in_turn(tiny_run, tmp_path: Path, cache: Path):
    """The same by hand: one model, a fresh optimiser for each turn, the site's own order of batches."""
    result = tiny_run({"name": "cwt"})
    study = parse_study(_tables_of(result))
    assembly = Assembly(study, prepare(study.data, study.sites, cache=cache), tmp_path)
    trainer = assembly.trainer()
    model = trainer.load(assembly.initial_weights()).train()
    for number in (1, 2):
        for site in assembly.prepared.names:
            part = open_site(assembly.prepared.folder, site).train
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            batches = trainer.batches(part, torch_rng(study.seed, site, "batches", number))
            for _ in range(len(part) // 8):
                images, labels = next(batches)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
    by_hand = model.state_dict()
    assert all(torch.equal(by_hand[name], tensor) for name, tensor in weights(result).items())


def _tables_of(result: Result) -> dict:
    import tomllib

    return tomllib.loads((result.folder / "study.toml").read_text())
