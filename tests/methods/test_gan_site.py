"""How the GANs of sites are set up for a round: alone or as a stack, with or without a CUDA graph."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.methods.shared import gan_site
from polyclinic.methods.shared.training_gans import DISCRIMINATOR_ADAM, GENERATOR_ADAM


class State(dict):
    def group(self, name):
        return self[name]


@pytest.fixture
def made(monkeypatch):
    """Makes the GANs of some sites; networks say of whom they are."""
    restored = []
    monkeypatch.setattr(
        gan_site, "SiteGAN", lambda site, model, *given: SimpleNamespace(site=site, model=model, given=given)
    )
    monkeypatch.setattr(gan_site, "SingleGAN", lambda own: SimpleNamespace(of=own, generator_buffers=[]))
    monkeypatch.setattr(
        gan_site,
        "StackedGAN",
        lambda own, as_products: SimpleNamespace(of=own, as_products=as_products, generator_buffers=[]),
    )
    monkeypatch.setattr(
        gan_site,
        "GANTrainer",
        lambda networks, spec, **given: SimpleNamespace(
            steps=0, generator_optimizer="generator", discriminator_optimizer="discriminator", given=given
        ),
    )
    monkeypatch.setattr(gan_site, "restore_optimizer", lambda optimizer, found: restored.append((optimizer, found)))
    monkeypatch.setattr(gan_site, "steps_taken", lambda site: 30)
    monkeypatch.setattr(gan_site.private, "is_private", lambda site, part: site.private)

    def make(names, *, steps=100, graphs=True, private=False, device="cpu"):
        sites = [SimpleNamespace(name=name, trainer=SimpleNamespace(graphs=graphs), private=private) for name in names]
        for number, site in enumerate(sites):
            adam = {"0/step": torch.tensor(4.0), "0/exp_avg": torch.tensor([float(number)])}
            site.state = State({GENERATOR_ADAM: adam, DISCRIMINATOR_ADAM: adam})
        model = {"settings": SimpleNamespace(spec=None), "device": torch.device(device), "precision": None}
        models = [SimpleNamespace(networks=f"of {name}", **model) for name in names]
        return gan_site.SiteGANs(sites, models, steps=steps), restored

    return make


@pytest.mark.parametrize(
    ("changes", "graphed"),
    [
        ({"steps": 100}, True),
        ({"steps": 99}, False),
        ({"graphs": False}, False),
        ({"private": True}, False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_is_recorded_where_a_round_has_a_hundred(made, changes, graphed, device):
    found, _ = made(["a"], device=device, **changes)
    assert found.graphed is graphed
    assert found.trainer.given["capturable"] is (graphed and device == "cuda")


def test_one_site_is_alone_and_two_are_a_stack(made):
    alone, restored = made(["a"])
    assert (alone.networks.of, alone.names, alone.trainer.steps) == ("of a", ["a"], 30)
    assert [name for name, _ in restored] == ["generator", "discriminator"]
    assert {name: value.tolist() for name, value in restored[0][1].items()} == {"0/step": 4, "0/exp_avg": [0]}
    restored.clear()
    stacked, _ = made(["a", "b"])
    assert (stacked.networks.of, stacked.networks.as_products) == (["of a", "of b"], False)
    assert {name: value.tolist() for name, value in restored[1][1].items()} == {"0/step": 4, "0/exp_avg": [[0], [1]]}
    assert made(["a", "b"], device="cuda")[0].networks.as_products


def test_tensors_of_a_stack_have_a_place_for_each_site(made):
    batches, labels = torch.arange(4.0).reshape(2, 2), torch.tensor([[0, 1], [1, 0]])
    alone, stacked = made(["a"])[0], made(["a", "b"])[0]
    assert alone._stack([batches]) is batches
    assert stacked._stack(list(batches)).tolist() == batches.tolist()
    assert [one.labels.tolist() for one in alone._each(batches, labels)] == [labels.tolist()]
    assert [one.labels.tolist() for one in stacked._each(batches, labels)] == labels.tolist()


def test_a_site_that_dropped_out_goes_on_without_a_further_loss(made):
    stacked, _ = made(["a", "b", "c"])
    assert stacked._gradient({}) is None
    found = stacked._gradient({"c": torch.tensor([3.0]), "a": torch.tensor([1.0])})
    assert found.tolist() == [[1], [0], [3]]
