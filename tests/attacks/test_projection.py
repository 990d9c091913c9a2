"""Projection: a generator that learnt its images by heart is told by them; noise, labels and codes."""

import pytest
import torch
from torch import Tensor

from polyclinic.attacks.projection import Projection
from polyclinic.errors import BadInput
from polyclinic.generators.latent_space import CodeSpace, GaussianSpace
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.metrics.perceptual import Pixels, perceptual_distance
from polyclinic.randomness import torch_rng

SIZE = 16
FREE = Projection(conditional=False, iterations=150, starts=16)


def images(count: int, name: str, size: int = SIZE) -> Tensor:
    return noise_images(count, 1, size, torch_rng("projection", name))


def spanned(by: Tensor) -> GaussianSpace:
    """A linear generator whose images are the mean of some images plus any mix of what they differ by."""
    centre = by.mean(0)
    directions = (by - centre).flatten(1)

    def generate(z: Tensor, labels: Tensor | None) -> Tensor:
        return centre + (z @ directions / len(by) ** 0.5).reshape(-1, *centre.shape)

    return GaussianSpace(generate, len(by))


def test_members_come_back_and_held_out_images_do_not_nor_either_of_another_generator():
    members, held_out = images(20, "members"), images(20, "held out")
    space = spanned(members)
    found = Projection(conditional=False, iterations=300, starts=16).compare(space, members, held_out, Pixels())
    once = Projection(conditional=False, iterations=1, starts=16).run(space, members, Pixels())
    assert found.members.distances.max() < 0.5 * found.held_out.distances.min()
    assert (found.members.distances < once.distances).all()
    assert found.ks == 1
    assert found.p_members_closer < 1e-6
    assert found.separation.auc == 1
    assert found.verdict().leak
    assert found.verdict().evidence["features"] == "pixels"
    torch.testing.assert_close(found.members.images, members, atol=0.15, rtol=0)
    found = FREE.compare(spanned(images(20, "other")), images(25, "members"), images(25, "held out"), Pixels())
    assert not found.verdict().leak
    assert found.p_value > 0.01
    assert "no closer to members" in str(found.verdict())


def test_a_search_can_begin_where_another_one_began():
    """Two generators are compared from the same points: the closest one differs from generator to generator."""
    members = images(6, "members")
    first, second = spanned(members), spanned(images(6, "other"))
    attack = Projection(conditional=False, iterations=1, starts=16, lr=1e-9, at_once=4)
    plain = attack.run(first, members, Pixels())
    again = attack.run(second, members, Pixels(), start=plain.start)
    assert torch.equal(again.start, plain.start)
    assert plain.start.shape == (6, 6)
    expected = (second.images(plain.start, None) - members).square().flatten(1).mean(1)
    torch.testing.assert_close(again.distances, expected, rtol=1e-3, atol=1e-4)
    assert not torch.equal(attack.run(second, members, Pixels()).start, plain.start)


def test_distances_are_those_of_the_images_that_are_returned():
    distance = perceptual_distance()
    space = spanned(images(6, "a"))
    once, found = (
        Projection(conditional=False, iterations=n, starts=4).run(space, images(2, "b"), distance) for n in (1, 5)
    )
    with torch.no_grad():
        torch.testing.assert_close(found.distances, distance(found.images, images(2, "b")), rtol=0.05, atol=1e-4)
    assert found.features == "EffLite0"
    assert (found.distances <= once.distances + 1e-6).all()


def test_a_projection_is_the_same_in_any_company_and_whoever_is_a_member():
    space, targets = spanned(images(8, "a")), images(5, "b")
    together = FREE.run(space, targets, Pixels())
    one_by_one = Projection(conditional=False, iterations=150, starts=16, at_once=1).run(space, targets, Pixels())
    torch.testing.assert_close(together.distances, one_by_one.distances, rtol=1e-3, atol=1e-6)
    assert torch.equal(together.distances, FREE.run(space, targets, Pixels()).distances)
    space, members, others = spanned(images(8, "a")), images(6, "b"), images(6, "c")
    found, swapped = (FREE.compare(space, *sets, Pixels()) for sets in ((members, others), (others, members.flip(0))))
    torch.testing.assert_close(found.members.images, swapped.held_out.images.flip(0))
    torch.testing.assert_close(found.held_out.images, swapped.members.images)
    assert found.separation.auc == pytest.approx(1 - swapped.separation.auc)


def test_the_label_is_asked_for_and_noise_that_is_not_frozen_named():
    """The generator draws bright images for label 1 and dark ones for label 0, and cannot do otherwise."""

    def generate(z: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        spread = 0.1 * z.tanh()[:, :, None, None].expand(-1, 1, SIZE, SIZE)
        return spread + 0.2 + 0.6 * labels[:, None, None, None]

    space, bright = GaussianSpace(generate, 1), torch.full((2, 1, SIZE, SIZE), 0.85)
    once = Projection(iterations=1, starts=16)
    mixed = once.run(space, bright, Pixels(), labels=torch.tensor([0, 1]))
    alone = once.run(space, bright[1:], Pixels(), labels=torch.tensor([1]))
    # started from images of its own label, whoever stands before it
    assert mixed.distances[1] == pytest.approx(float(alone.distances[0]))
    attack = Projection(iterations=60, starts=4)
    found = attack.run(space, bright, Pixels(), labels=torch.tensor([1, 0]))
    assert found.distances[0] < 1e-4
    assert found.distances[1] > 0.2
    with pytest.raises(BadInput, match="conditional = false"):
        attack.run(space, bright, Pixels())
    guessing = attack.model_copy(update={"guessed": True})
    guessed = guessing.run(space, torch.cat([bright, 1 - bright]), Pixels(), choices=torch.tensor([0, 1]))
    assert guessed.distances.max() < 1e-4
    with pytest.raises(BadInput, match="labels to choose from"):
        guessing.run(space, bright, Pixels())
    rng = torch_rng("projection", "noise")

    def noisy(z: Tensor, labels: Tensor | None) -> Tensor:
        return torch.rand(len(z), 1, SIZE, SIZE, generator=rng)

    with pytest.raises(BadInput, match="freeze its noise"):
        FREE.run(GaussianSpace(noisy, 3), images(2, "a"), Pixels())


def blocks(vectors) -> Tensor:
    """A decoder that paints each place's vector (2 numbers) as two pixels below each other, twice as large."""
    (values,) = vectors
    return values.transpose(1, 2).flatten(1, 2)[:, None].repeat_interleave(2, 3)


def test_codes_are_found():
    codebook = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.9, 0.9]])
    space = CodeSpace(blocks, [codebook], [4])
    rng = torch_rng("projection", "codes")
    codes = torch.randint(4, (3, 4, 4), generator=rng)
    targets = blocks([codebook[codes].movedim(-1, 1)])
    point = space.draw(2, rng)
    assert space.images(point, None).shape == targets[:2].shape
    once, found = (
        Projection(conditional=False, iterations=n, starts=4, lr=0.1).run(space, targets, Pixels()) for n in (1, 200)
    )
    assert found.distances.max() < 0.05 * once.distances.min()
