"""Spaces that an attacker searches in, by hand: Gaussian points, and codes of two levels."""

import torch

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import even_labels
from polyclinic.generators.latent_space import CodeSpace, GaussianSpace
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

TOP = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
BOTTOM = torch.tensor([[1.0], [3.0], [9.0]])


def space():
    return CodeSpace(lambda vectors: vectors, [TOP, BOTTOM], (1, 2))


def test_points_stand_for_the_nearest_codes():
    found = space()
    spreads = [float(TOP.std()), float(BOTTOM.std())]
    top = torch.tensor([[3.0, 3.5]]) / spreads[0]
    bottom = torch.tensor([[0.0, 2.9, 7.0, 1.9]]) / spreads[1]
    points = torch.cat([top, bottom], 1).requires_grad_()
    codes = found.codes(points)
    assert [level.tolist() for level in codes] == [[[[1]]], [[[0, 1], [2, 0]]]]
    high, low = found.images(points, None)
    assert high.shape == (1, 2, 1, 1)
    torch.testing.assert_close(high.flatten(), torch.tensor([4.0, 4.0]))
    torch.testing.assert_close(low[0, 0], torch.tensor([[1.0, 3.0], [9.0, 1.0]]))
    (high.sum() + 2 * low.sum()).backward()
    torch.testing.assert_close(points.grad[0], torch.tensor([spreads[0]] * 2 + [2 * spreads[1]] * 4))


def test_points_are_drawn_among_the_codes_or_pass_through_a_mapping():
    found = space()
    points = found.draw(50, torch_rng("codes"))
    assert points.shape == (50, 6)
    high, low = found.images(points, None)
    assert set(high.flatten().round(decimals=3).tolist()) == {0, 4}
    assert set(low.flatten().round(decimals=3).tolist()) == {1, 3, 9}
    assert CodeSpace(lambda vectors: vectors, [torch.ones(2, 1)], (1,)).spreads == [1.0]
    plain = GaussianSpace(lambda z, labels: z, 3)
    points = plain.draw(4, torch_rng("z"))
    assert torch.equal(points, torch.randn(4, 3, generator=torch_rng("z")))
    mapped = GaussianSpace(lambda z, labels: z, 3, lambda z: z + 10)
    assert torch.equal(mapped.draw(4, torch_rng("z")), points + 10)
    assert mapped.images(points, None) is points


def test_images_of_a_gans_latents_are_those_that_it_samples():
    labels = torch.tensor([0, 1, 1])
    for name in ("dcgan", "vqvae2"):
        settings = {"width": 4, "latent": 8} if name == "dcgan" else {"width": 4, "prior_width": 4, "blocks": 1}
        model = GENERATORS[name](name=name, **settings).build(channels=1, size=28, target=Target(("a", "b")), seed=0)
        searched = model.latent_space()
        points = searched.draw(3, torch_rng("same"))
        made = searched.images(points, labels)
        assert made.shape == (3, 1, 28, 28)
        if name == "dcgan":
            sampled = model.sample(labels, torch_rng("same")).float() / 255
            assert float((made.detach().clamp(0, 1) - sampled).abs().max()) < 0.003
        else:
            codes = dict(zip(("top", "bottom"), searched.codes(points), strict=True))
            assert float((made.clamp(0, 1) - model.decode(codes).float() / 255).abs().max()) < 0.003


def test_even_labels_run_over_the_classes_or_the_public_range():
    assert even_labels(5, Target(("a", "b"))).tolist() == [0, 1, 0, 1, 0]
    assert even_labels(3, Target(label_range=(10.0, 20.0))).tolist() == [10, 15, 20]
    assert even_labels(2, Target()).tolist() == [0, 0]
