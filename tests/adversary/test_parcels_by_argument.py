"""Attack: a parcel under another kind, or weights that leave names out. What is taken, an operation says."""

import pytest
import torch
from attacked_site import SITE, ask

from polyclinic import attacks
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel

PUBLIC = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(5))


def test_crafted_weights_under_another_kind_are_refused(kit):
    """As statistics they would pass neither the incoming check nor that of shapes."""
    kit.policy(incoming="on = true")
    host = kit.host(model={"backbone": "cnn-64-128-64-32"}, method={"name": "fedsgd", "rounds": 3})
    model = host.spec.trainer.model.cpu()
    model.load_state_dict(host.spec.first_weights(SITE))
    crafted = attacks.Imprint().craft(model, PUBLIC).state_dict()
    for kind in ("statistics", "gradients", "generator"):
        with pytest.raises(ParcelRejected, match=f"takes weights as 'weights', and {kind} came"):
            ask(host, "gradient", parcels={"weights": Parcel(kind, crafted)})
    assert Suspensions(kit.folder).all() == []


def test_gradients_under_another_kind_are_refused(kit):
    host = kit.host(method={"name": "scaffold", "rounds": 3})
    weights = host.spec.first_weights(SITE)
    with pytest.raises(ParcelRejected, match="takes gradients as 'gradients', and statistics came"):
        ask(host, "train", weights=weights, parcels={"gradients": Parcel("statistics", weights)})


def test_a_parcel_is_no_plain_argument(kit):
    host = kit.host()
    with pytest.raises(ParcelRejected, match="as 'own'"):
        ask(host, "evaluate", parcels={"own": Parcel("statistics", {})})


PERSONAL = ("ditto", "finetune")


@pytest.mark.parametrize("method", PERSONAL)
@pytest.mark.parametrize("names", [(), ("fc3.bias",)])
def test_weights_that_leave_names_out_do_not_release_the_sites_own_model(kit, method, names):
    """With steps of nearly no length, training would hand back what the network was left with: the site's own model."""
    optimizer = {"batch_size": 8, "lr": 0.05, "decay_every": 1, "decay": 1e-20}
    host = kit.host(method={"name": method, "rounds": 3, "local_steps": 3}, optimizer=optimizer)
    weights = host.spec.first_weights(SITE)
    [trained] = ask(host, "train", 1, weights=weights).parcels
    if method == "finetune":
        ask(host, "tune", 1, weights=trained.tensors)
    with pytest.raises(ParcelRejected, match=r"not those that the method shares; left out: conv1\.bias"):
        ask(host, "train", 2, weights={name: weights[name] for name in names})
    assert ask(host, "train", 2, weights=weights).parcels


def test_what_stays_at_a_site_may_be_left_out_and_nothing_else(kit):
    host = kit.host(method={"name": "fedper", "rounds": 3})
    weights, local = host.spec.first_weights(SITE), host.spec.trainer.local_names
    shared = {name: tensor for name, tensor in weights.items() if name not in local}
    assert 0 < len(shared) < len(weights)
    assert ask(host, "train", 1, weights=weights).parcels
    assert ask(host, "train", 2, weights=shared).parcels
    first = next(iter(shared))
    with pytest.raises(ParcelRejected, match="left out"):
        ask(host, "train", 3, weights={name: tensor for name, tensor in shared.items() if name != first})
    with pytest.raises(ParcelRejected, match="left out"):
        ask(host, "evaluate", 3, weights={first: shared[first]})


def test_the_front_of_a_network_is_enough_where_an_operation_says_so(kit):
    kit.policy(kinds=["weights", "activations", "labels", "statistics", "metrics"])
    host = kit.host(method={"name": "splitnn", "rounds": 3})
    trainer = host.spec.trainer
    front = trainer.weights(trainer.split(trainer.model)[0])
    with pytest.raises(ParcelRejected, match="left out"):
        ask(host, "begin", weights={name: front[name] for name in list(front)[:1]})
    assert ask(host, "begin", weights=front).parcels
    with pytest.raises(ParcelRejected, match="left out"):
        ask(host, "evaluate", weights=front)


def test_an_argument_with_a_name_of_its_own_has_the_kind_that_the_operation_declares(kit):
    generator = {"name": "dcgan", "width": 4, "latent": 8, "batch_size": 8}
    method = {"name": "felicia", "rounds": 2, "steps": 2, "schedule": "local", "exchange_every": 2}
    data = {"source": "at-sites", "dataset": "scans", "size": 32, "classes": ["clear", "ill"]}
    host = kit.host(data=data, method=method, generator=generator)
    turn = {"begin": 0, "steps": 2, "names": ["north", "south"]}
    with pytest.raises(ParcelRejected, match="takes generator as 'central', and statistics came"):
        ask(host, "train_locally", parcels={"central": Parcel("statistics", {})}, **turn)
    assert ask(host, "train_locally", parcels={"central": Parcel("generator", {})}, **turn).parcels
