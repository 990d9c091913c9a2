"""How long sites train in a round: steps, passes, and batch sizes of their own."""

import pytest
from test_equivalences import assert_not_same, assert_same

from polyclinic.errors import BadInput
from polyclinic.training.loop import Trainer

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


def test_a_private_site_accounts_for_its_own_batch_size(tiny_run):
    """32 images: batches of 8 are a sampling rate of 1/4, batches of 4 one of 1/8."""
    method, private = {"name": "fedavg", "rounds": 1, "local_steps": 2}, {"privacy": {"noise_multiplier": 1.0}}
    plain, found, small = (
        tiny_run(method, **EQUAL, **private, optimizer={"augment": [], **batches})["privacy"]
        for batches in ({}, {"batch_sizes": {"site-2": 4}}, {"batch_size": 4})
    )
    assert (found["site"], found["epsilon"]) == ("site-1", plain["epsilon"])
    assert small["epsilon"] < plain["epsilon"]


def test_batch_sizes_of_unknown_sites_are_refused(tiny_run):
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
