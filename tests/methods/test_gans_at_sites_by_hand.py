"""GANs at sites, by hand: who can be stacked, rows of a batch, images that sites send."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import GENERATORS
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared import gan_plans
from polyclinic.methods.shared.central_discriminator import images_of_others, join_images
from polyclinic.methods.shared.gan_plans import STEPS


@pytest.fixture
def gans(monkeypatch):
    """Sites with settings of a GAN; private ones by name."""
    monkeypatch.setattr(gan_plans, "adversarial_settings", lambda at: at.generator)
    monkeypatch.setattr(gan_plans.private, "is_private", lambda site, part: site.name == "private")
    settings = {"stackable": True, "separates_classes": False, "balances_classes": False, "batch_size": 8}
    settings["takes_turns"] = True

    def make(name="a", images=20, size=28, channels=1, labels=(0, 1), classes=2, steps=None, **changes):
        part = ImageSet(np.zeros((images, channels, size, size), np.uint8), np.resize(labels, images))
        return SimpleNamespace(
            name=name,
            generator=SimpleNamespace(**{**settings, **changes}),
            data=SimpleNamespace(train=part),
            trainer=SimpleNamespace(target=SimpleNamespace(classes=("x",) * classes)),
            state={} if steps is None else {STEPS: torch.tensor(steps)},
        )

    return make


def test_rows_of_a_batch_are_those_of_a_small_site_unless_images_are_repeated(gans):
    assert gan_plans.batch_rows(gans()) == 8
    assert gan_plans.batch_rows(gans(images=5)) == 5
    assert gan_plans.batch_rows(gans(images=5, balances_classes=True)) == 8
    assert gan_plans.batch_rows(gans(images=5, balances_classes=True, classes=0)) == 5
    assert gan_plans.steps_taken(gans()) == 0
    assert gan_plans.steps_taken(gans(steps=7)) == 7


def test_sites_are_stacked_where_all_is_alike_and_classes_take_turns(gans):
    def groups(*sites):
        return [len(group) for group in gan_plans.stackable(list(sites))]

    assert groups(gans(), gans("b")) == [2]
    assert groups(gans()) == [1]
    assert groups(gans(), gans("b", size=32)) == [1, 1]
    assert groups(gans(), gans("b", channels=3)) == [1, 1]
    assert groups(gans(), gans("b", images=3)) == [1, 1]
    assert groups(gans(), gans("b", steps=1)) == [1, 1]
    assert groups(gans(), gans("private")) == [1, 1]
    assert groups(gans(stackable=False), gans("b")) == [1, 1]
    apart = {"separates_classes": True}
    assert groups(gans(**apart), gans("b", **apart)) == [2]
    assert groups(gans(**apart), gans("b", labels=(0,), **apart)) == [1, 1]
    turns = gan_plans.classes_take_turns
    assert turns([gans(), gans("b")])
    assert not turns([gans(takes_turns=False)])
    assert not turns([gans(classes=0)])
    assert not turns([gans(classes=3, labels=(0, 1, 2))]), "eight rows are not three times as many"
    assert not turns([gans(), gans("b", labels=(0,))])


def reply(site, images, labels=None):
    tensors = {"images": images, **({} if labels is None else {"labels": labels})}
    return Reply(site, (Parcel("synthetic-images", tensors),))


def coordinator(classes=2):
    trainer = SimpleNamespace(device="cpu", target=SimpleNamespace(classes=tuple(map(str, range(classes)))))
    return SimpleNamespace(trainer=trainer, sites=("a", "b", "c"))


def test_images_are_joined_with_the_number_of_their_site_and_given_to_all_others():
    black, white = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    found = join_images(coordinator(), [reply("c", black), reply("a", white)], per_class=False)
    assert found.site.tolist() == [2, 2, 0, 0]
    assert found.images.mean((1, 2, 3)).tolist() == pytest.approx([-1, -1, 1, 1])
    assert found.turns
    apart = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([1, 0]))]
    assert not join_images(coordinator(), apart, per_class=True).turns
    in_turns = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([0, 1]))]
    joined = join_images(coordinator(), in_turns, per_class=True)
    assert (joined.turns, joined.labels.tolist()) == (True, [0, 1, 0, 1])
    replies = [
        reply(name, torch.full((1, 1, 2, 2), n, dtype=torch.uint8), torch.tensor([n])) for n, name in enumerate("abc")
    ]
    given = images_of_others(replies)
    assert given["b"]["synthetic_images"].tensors["labels"].tolist() == [0, 2]
    assert given["b"]["synthetic_images"].tensors["images"].flatten().tolist() == [0] * 4 + [2] * 4
    assert images_of_others(replies[:1]) == {}


FLOATS, BYTES = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(("operation", "tensors", "words"), [
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0, 1])}, None),
    ("start_round", {"images": BYTES, "labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("generator_step", {"images": torch.zeros(2, 1, 2, 3), "labels": torch.tensor([0, 1])}, "none of the study's"),
    ("train_locally", {"images": FLOATS[:0], "labels": torch.zeros(0, dtype=torch.long)}, "none of the study's"),
    ("train_locally", {"labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("start_round", {"images": FLOATS}, "came without labels"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0.0, 1.0])}, "labels that are no classes"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0])}, "give one each"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0, 2])}, "labels run from 0 to 2"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([-1, 0])}, "labels run from -1 to 0"),
    ("give_images", {"images": BYTES, "labels": torch.tensor([0, 1])}, None),
    ("give_images", {"images": FLOATS, "labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("give_images", {"images": BYTES}, "came without labels"),
    ("evaluate", {}, None),
])  # fmt: skip
def test_images_that_a_site_sends_are_looked_at(operation, tensors, words):
    """For the central discriminators of two classes, or for other sites."""
    trainer = SimpleNamespace(target=SimpleNamespace(classes=("no", "yes")))
    federation = SimpleNamespace(generator=GENERATORS["dcgan"](), image_shape=(1, 2, 2), trainer=trainer)
    check, sent = Felicia(central="per-class").check_reply, Reply("a", (Parcel("synthetic-images", tensors),))
    with pytest.raises(ParcelRejected, match=words) if words else nullcontext():
        check(federation, Call("a", operation, 1), sent)
    check(federation, Call("a", "generator_step", 1, arguments={"last": True}), Reply("a", ()))
    with pytest.raises(ParcelRejected, match="no synthetic images came"):
        check(federation, Call("a", "generator_step", 1, arguments={"last": False}), Reply("a", ()))
