"""What must be equal, is: to the last bit where arithmetic allows. How long sites train: steps, passes, batch sizes."""

import pytest
import torch
from stand_ins import rebuild
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.result import Result
from polyclinic.training.loop import Trainer

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


@pytest.mark.parametrize(("method", "plain", "term"), [
    ({"name": "fedprox", "mu": 0.0}, {}, {"mu": 1.0}),
    ({"name": "fedavgm", "beta": 0.0}, {}, {"beta": 0.9}),
    ({"name": "moon", "mu": 0.0}, {}, {"mu": 5.0}),
    ({"name": "fedopt", "server_optimizer": "sgd", "server_lr": 1.0, "beta1": 0.0}, {}, {"beta1": 0.5}),
    ({"name": "feddyn", "alpha": 0.0}, {"weighting": "uniform"}, {"alpha": 0.1}),
], ids=lambda one: one.get("name", ""))  # fmt: skip
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


#: 64 training images at 2 sites: 32 each, four batches of 8 in a pass
EQUAL = {
    "data": {"samples": 80, "validation": 0.0, "test": 0.2},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "lenet5"},
}
LOCAL = ("standalone", "fedavg", "fedprox", "fedavgm", "cwt", "splitnn")
MADE = {"generator": {"name": "dcgan", "width": 2, "latent": 4, "steps": 1, "batch_size": 8}, "tuning": {"on": False}}
pytestmark = pytest.mark.usefixtures("no_contact_sheets")


def tables_of(method: str) -> dict:
    if method == "fedbn":
        return {**EQUAL, "model": {"backbone": "small-cnn"}}
    return {**EQUAL, **MADE} if method.startswith("feder") else EQUAL


@pytest.mark.parametrize("method", [*LOCAL, "fedbn", "feder"])
def test_passes_are_so_many_steps_bit_for_bit(tiny_run, method):
    tables, more = tables_of(method), {"buffer": 8} if method.startswith("feder") else {}
    settings = {"name": method, "rounds": 1, **more}
    twice = tiny_run({**settings, "local_epochs": 2}, **tables)
    assert twice["data"]["counts"]["site-1"]["train"] == 32
    assert_same(twice, tiny_run({**settings, "local_steps": 8}, **tables))
    once = tiny_run(settings, **tables)
    assert_not_same(twice, once)
    assert_same(once, tiny_run({**settings, "local_epochs": 1}, **tables))


def test_a_large_site_takes_more_steps_than_a_small_one(tiny_run, monkeypatch):
    taken, train = [], Trainer.train

    def noted(self, batches, steps, optimizer, **more):
        taken.append(steps)
        return train(self, batches, steps, optimizer, **more)

    monkeypatch.setattr(Trainer, "train", noted)
    uneven = {**EQUAL, "sites": {"partition": "quantity", "count": 2, "power": 1.5}}
    counts = tiny_run({"name": "fedavg", "rounds": 1, "local_epochs": 3}, **uneven)["data"]["counts"]
    assert taken == [3 * max(1, counts[site]["train"] // 8) for site in ("site-1", "site-2")]
    assert len(set(taken)) == 2


def test_steps_and_passes_together_are_refused(study_of):
    with pytest.raises(
        BadInput, match="method: local_steps and local_epochs both say how long a site trains; give one"
    ):
        study_of({"name": "fedavg", "local_steps": 2, "local_epochs": 2})


@pytest.mark.parametrize("method", ["fedavg", "cwt", "splitnn", "standalone", "fedsgd", "feder"])
def test_equal_batch_sizes_are_the_plain_setting(tiny_run, method):
    tables = tables_of(method)
    settings = {"name": method, "rounds": 1} | ({"buffer": 8} if method == "feder" else {})
    plain = tiny_run(settings, **tables, optimizer={"batch_size": 4})
    by_site = {"batch_size": 16, "batch_sizes": {"site-1": 4, "site-2": 4}}
    assert_same(plain, tiny_run(settings, **tables, optimizer=by_site))
    other = tiny_run(settings, **tables, optimizer={"batch_size": 4, "batch_sizes": {"site-2": 16}})
    if method != "fedsgd":  # a gradient over all images is the same in any batches, but for rounding
        assert_not_same(plain, other)


def test_batches_have_the_sites_own_size(tiny_run, monkeypatch):
    sizes, batch = [], Trainer.batch
    monkeypatch.setattr(
        Trainer, "batch", lambda self, part, index, rng: sizes.append(len(index)) or batch(self, part, index, rng)
    )
    tiny_run({"name": "cwt", "rounds": 1}, **EQUAL, optimizer={"batch_sizes": {"site-2": 16}})
    assert sizes == [8, 8, 8, 8, 16, 16]


def test_private_and_unknown_sites_have_their_own_batch_sizes(tiny_run):
    """32 images: batches of 8 are a sampling rate of 1/4, batches of 4 one of 1/8."""
    method, private = {"name": "fedavg", "rounds": 1, "local_steps": 2}, {"privacy": {"noise_multiplier": 1.0}}
    plain, found, small = (
        tiny_run(method, **EQUAL, **private, optimizer={"augment": [], **batches})["privacy"]
        for batches in ({}, {"batch_sizes": {"site-2": 4}}, {"batch_size": 4})
    )
    assert (found["site"], found["epsilon"]) == ("site-1", plain["epsilon"])
    assert small["epsilon"] < plain["epsilon"]
    with pytest.raises(
        BadInput, match=r"optimizer\.batch_sizes: there is no site 'north'; the sites are site-1, site-2"
    ):
        tiny_run({"name": "fedavg"}, **EQUAL, optimizer={"batch_sizes": {"north": 4}})
    with pytest.raises(BadInput, match=r"optimizer\.batch_sizes\.north: .*greater than or equal to 1"):
        tiny_run({"name": "fedavg"}, **EQUAL, optimizer={"batch_sizes": {"north": 0}})


@pytest.mark.parametrize(
    ("method", "steps"),
    # each of two sites gives 16 of its 32 images, and trains on 48; all 64 images in one place
    [({"name": "fedavg-share", "share": 0.5}, {"local_steps": 12}), ({"name": "centralized"}, {"steps": 16})],
)
def test_images_of_several_sites_are_passed_over_together(tiny_run, method, steps):
    twice = tiny_run({**method, "rounds": 1, "local_epochs": 2}, **EQUAL)
    assert_same(twice, tiny_run({**method, "rounds": 1, **steps}, **EQUAL))
