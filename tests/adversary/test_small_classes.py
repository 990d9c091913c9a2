"""Attack: have sums, means or mixtures of a class of which the site has one training image, or a few."""

import pytest
import torch
from attacked_site import ask

from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import GateRefusedData
from polyclinic.federation.layers.suspension import Suspensions

ENCODER = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
OPERATIONS = [
    ({"name": "analytic"}, "give_sums"),
    ({"name": "gaussian-heads"}, "give_sums"),
    ({"name": "gaussian-heads", "rule": "naive-bayes"}, "give_class_sums"),
    ({"name": "fedpft"}, "give_mixtures"),
]


def keep_images(kit, ill):
    """So many images of class 'ill', none of them for validation."""
    for file in sorted((kit.folder.parent / "scans" / "ill").iterdir())[ill:]:
        file.unlink()
    table = '[datasets.scans]\nsource = "folder"\npath = "../../scans"\nvalidation = 0.0\ntest = 0.1\n'
    (kit.folder / "local" / "site.toml").write_text(table)


@pytest.mark.parametrize(("method", "operation"), OPERATIONS)
def test_nothing_leaves_of_a_class_of_few_patients(kit, method, operation):
    kit.policy(min_cohort=10, few_images="allow")
    keep_images(kit, ill=5)
    host = kit.host(model=ENCODER, method=method)
    with pytest.raises(GateRefusedData, match="fewer than min_cohort patients") as refusal:
        ask(host, operation)
    assert discreet(str(kit.folder))(refusal.value) == FAILED
    assert Suspensions(kit.folder).all()
    assert host.sites.ledgers["north"].position.lines == 0


@pytest.mark.parametrize(("method", "operation"), OPERATIONS)
def test_classes_of_enough_patients_leave(kit, method, operation):
    kit.policy(min_cohort=10, few_images="allow")
    assert ask(kit.host(model=ENCODER, method=method), operation).parcels


@pytest.mark.parametrize(("numbers", "leaves"), [(None, False), (39, False), (38, True)])
def test_sums_of_products_of_no_more_images_than_numbers_stay(kit, numbers, leaves):
    """The site has 39 training images."""
    host = kit.host(model=ENCODER, method={"name": "analytic", "numbers": numbers})
    if leaves:
        assert ask(host, "give_sums").parcels
        return
    with pytest.raises(GateRefusedData, match="give the features of single images away"):
        ask(host, "give_sums")


def test_products_of_each_class_count_by_class(kit):
    host = kit.host(model=ENCODER, method={"name": "gaussian-heads", "rule": "qda"})
    with pytest.raises(GateRefusedData, match="give the features of single images away"):
        ask(host, "give_class_sums")


def test_no_component_of_a_mixture_is_of_few_images(kit):
    """19 and 20 images of a class, and 5 as the smallest cohort."""
    kit.policy(min_cohort=5)
    sent = ask(kit.host(model=ENCODER, method={"name": "fedpft", "components": 2}), "give_mixtures").parcels[0]
    for label, count in enumerate(sent.metadata["counts"]):
        sizes = torch.as_tensor(sent.tensors[f"{label}/shares"]) * count
        assert (sizes > 5 - 1e-3).all()
