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


@pytest.mark.parametrize(("private", "rows"), [(True, 16), (False, 5)])
def test_a_private_batch_is_as_large_as_the_study_says(made, monkeypatch, private, rows):
    monkeypatch.setattr(gan_site, "batch_rows", lambda site: 5)
    found, _ = made(["a"], private=private)
    found.settings.batch_size = 16
    assert found.rows == rows


@pytest.mark.parametrize(("names", "private"), [("a", False), ("a", True), ("ab", False)])
@pytest.mark.parametrize(("count", "batches"), [(3, 1), (4, 2), (7, 3)])
def test_samples_are_made_in_batches_until_there_are_enough(made, names, private, count, batches):
    """Batches of three; labels say of which batch an image is."""
    found, _ = made(list(names), private=private)
    for member in found.members:
        labels = iter([torch.full((3,), number) for number in range(9)])
        member.draw_noise = lambda: torch.zeros(3, 2)
        member.batches = SimpleNamespace(next=lambda labels=labels: (None, next(labels)))
        member.labels_to_make = lambda labels: labels
        member.drawn_labels = lambda labels=labels: next(labels) + 100
    made_for = []
    found.trainer.generate = lambda noise, wanted: made_for.append(1) or wanted[..., None, None, None].float()
    sampled = found.sample(count)
    wanted = [number // 3 + 100 * private for number in range(count)]
    assert [one.labels.tolist() for one in sampled] == [wanted] * len(names)
    assert [one.images.flatten().tolist() for one in sampled] == [wanted] * len(names)
    assert len(made_for) == batches


def test_images_that_are_made_twice_count_once_in_batch_norm(made):
    found, _ = made(["a"])
    buffer = torch.tensor([1.0])
    found.networks.generator_buffers, found.statistics = [buffer], [torch.zeros(1)]
    found.trainer.generate = lambda noise, wanted: buffer.add_(noise).clone()
    assert found._make_once(torch.tensor([2.0]), None).tolist() == [3]
    assert found._make_again(torch.tensor([2.0]), None).tolist() == [3]
    assert buffer.tolist() == [3]
    assert found._make_once(torch.tensor([4.0]), None).tolist() == [7]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("further", [True, False])
def test_a_step_is_one_function_where_it_is_recorded_and_has_a_further_loss(made, graphs, further):
    found, _ = made(["a"], graphs=graphs)
    done = []
    found.settings.critic_steps = 2
    found._gradient = lambda gradients: "gradient" if further else None
    found._generator_step = lambda gradient: done.append(("generator", gradient))
    found.start = lambda: "started"
    found._wanted, found._generator_draws = (lambda: "labels"), (lambda: "draws")
    found._discriminator_inputs = lambda: ["input"]
    found.noise, found.members[0].draw_noise = "noise", lambda: "next noise"
    found._step = lambda name, function: lambda *given: done.append((name, *given)) or "images"
    found._each = lambda images, labels: (images, labels)
    answer = found.advance({})
    if graphs and further:
        given = ("gradient", "noise", "labels", "draws", "next noise", "labels", "input", "input")
        assert (answer, done) == (("images", "labels"), [("advance", *given)])
    else:
        assert (answer, done) == ("started", [("generator", "gradient" if further else None)])


@pytest.mark.parametrize("names", ["a", "ab"])
def test_draws_that_a_gan_does_not_need_are_left_out(made, names):
    found, _ = made(list(names))
    for member in found.members:
        member.wanted, member.random = [0, 1, 2], None
        member.discriminator_inputs = lambda trainer: [torch.ones(1), None]
    found.trainer.draw_for_generator = lambda rng, count: None
    assert found._generator_draws() is None
    first, second = found._discriminator_inputs()
    assert (first.tolist(), second) == ([1] if names == "a" else [[1], [1]], None)
    found.trainer.draw_for_generator = lambda rng, count: torch.tensor([count])
    assert found._generator_draws().flatten().tolist() == [3] * len(names)
