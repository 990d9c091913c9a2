"""The trainer against arithmetic done by hand: batches, augmentation, steps, evaluation, decay, kept optimisers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from polyclinic.data.parts import ImageSet
from polyclinic.federation.site import SiteState
from polyclinic.models import build, initial_weights
from polyclinic.randomness import torch_rng
from polyclinic.tasks import TASKS, Target
from polyclinic.training.augmentation import augment
from polyclinic.training.generator_loop import Objective, Schedule, descend
from polyclinic.training.loop import EVALUATION_BATCH, Trainer, TrainerSpec
from polyclinic.training.optimizer import (
    Optimizer,
    keep_optimizer,
    optimizer_tensors,
    restore_optimizer,
    start_optimizer,
)

SIZE = 16
TARGET = Target(("healthy", "ill"))


def numbered(count, seed=0):
    """`count` images, each of which can be told by its first pixel; labels 0 and 1 in turn."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 1, SIZE, SIZE), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(count)
    masks = (images[:, 0] > 128).astype(np.uint8)
    return ImageSet(images, np.arange(count, dtype=np.int64) % 2, masks)


def make_trainer(task="classification", backbone="small-cnn", **optimizer):
    optimizer = Optimizer(**{"batch_size": 4, "lr": 0.1, **optimizer})

    def make():
        return build(backbone, channels=1, outputs=1 if task == "segmentation" else 2, size=SIZE)

    made = Trainer(make(), TrainerSpec(task=TASKS[task](name=task), target=TARGET, optimizer=optimizer))
    made.load(initial_weights(make, 0))
    return made


def rng(number=0):
    return torch_rng("test", number)


def seen(batches, count):
    """The numbers of the images in the first `count` batches."""
    return [(images[:, 0, 0, 0] * 255).round().long().tolist() for images, _ in (next(batches) for _ in range(count))]


@given(count=st.integers(1, 30), size=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_pass_has_floor_of_n_over_b_whole_batches(count, size):
    trainer, part = make_trainer(batch_size=size), numbered(count)
    steps = trainer.steps_in(part)
    assert steps == max(1, count // size)
    batches = trainer.batches(part, rng())
    for _ in range(3):
        one_pass = seen(batches, steps)
        numbers = [n for batch in one_pass for n in batch]
        assert {len(batch) for batch in one_pass} == {min(size, count)}
        assert len(set(numbers)) == len(numbers)  # no image twice in a pass


def test_each_pass_is_a_new_permutation_and_noted_while_somebody_asks():
    batches = make_trainer(batch_size=10).batches(numbered(10), rng())
    first, second = seen(batches, 1)[0], seen(batches, 1)[0]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10))
    trainer, part = make_trainer(batch_size=2), numbered(6)
    batches = trainer.batches(part, rng())
    seen(batches, 1)
    with trainer.note_batches() as noted:
        during = seen(batches, 2)
    seen(batches, 1)
    assert [index.tolist() for index in noted] == during


def test_a_batch_holds_images_in_0_to_1_with_their_own_labels_and_masks():
    part = numbered(8)
    images, labels = next(make_trainer().batches(part, rng()))
    for image, label in zip(images, labels, strict=True):
        number = int((image[0, 0, 0] * 255).round())
        assert torch.equal(image, torch.from_numpy(part.images[number]).float() / 255)
        assert int(label) == number % 2
    part = numbered(12)
    trainer = make_trainer("segmentation", "unet", augment=("flip", "turn"), batch_size=6)
    for images, targets in (next(trainer.batches(part, rng(k))) for k in range(4)):
        assert torch.equal(targets.bool().reshape(6, SIZE, SIZE), (images[:, 0] * 255).round() > 128)


@given(count=st.integers(1, 30), size=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_one_pass_leaves_no_image_out(count, size):
    trainer = make_trainer(batch_size=size)
    batches = list(trainer.one_pass(numbered(count), rng()))
    numbers = [n for batch in seen(iter(batches), len(batches)) for n in batch]
    assert len(batches) == trainer.steps_in(numbered(count))
    assert sorted(numbers) == list(range(count))
    assert max(len(b[0]) for b in batches) - min(len(b[0]) for b in batches) <= 1


def orbit(image, kinds):
    """All pictures an image may become."""
    turned = [image.rot90(k, (-2, -1)) for k in range(4)] if "turn" in kinds else [image]
    return turned + [t.flip(-1) for t in turned] if "flip" in kinds else turned


@pytest.mark.parametrize("kinds", [("flip",), ("turn",), ("flip", "turn"), ()])
def test_masks_are_flipped_and_turned_with_their_images(kinds):
    images = torch.rand(200, 3, 6, 6, generator=rng())
    masks = (images[:, 0] > 0.5).to(torch.uint8)
    changed, changed_masks = augment(images, masks, kinds, rng())
    assert torch.equal(changed_masks, (changed[:, 0] > 0.5).to(torch.uint8))
    outcomes = set()
    for before, after in zip(images, changed, strict=True):
        found = [k for k, candidate in enumerate(orbit(before, kinds)) if torch.equal(candidate, after)]
        assert len(found) == 1
        outcomes.add(found[0])
    assert len(outcomes) == max(1, 2 * ("flip" in kinds)) * max(1, 4 * ("turn" in kinds))  # each possible one occurs


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [("sgd", SGD, {"momentum": 0.9}), ("adam", torch.optim.Adam, {}), ("adamw", torch.optim.AdamW, {})],
)
def test_training_is_the_bare_loop(name, kind, settings):
    part, trainer = numbered(14), make_trainer(name=name, weight_decay=0.01, **settings)
    model = build("small-cnn", channels=1, outputs=2, size=SIZE)
    model.load_state_dict(trainer.model.state_dict())
    optimizer = kind(model.parameters(), 0.1, weight_decay=0.01, **settings)
    model.train()
    losses = []
    batches = trainer.batches(part, rng(3))
    for _ in range(5):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    mean = trainer.train(trainer.batches(part, rng(3)), 5, trainer.optimizer.make(trainer.model.parameters(), 1))
    assert mean == pytest.approx(sum(losses) / 5, rel=1e-6)
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_class_weights_make_a_weighted_mean():
    trainer = make_trainer()
    output, labels = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, 0.5]]), torch.tensor([0, 1, 1])
    each = F.cross_entropy(output, labels, reduction="none")
    by_hand = (3 * each[0] + 0.5 * each[1] + 0.5 * each[2]) / 4
    assert torch.allclose(trainer.loss(output, labels, torch.tensor([3.0, 0.5])), by_hand)
    assert torch.allclose(trainer.loss(output, labels), each.mean())


def test_loading_a_part_leaves_the_rest_and_copies():
    trainer = make_trainer()
    before = trainer.weights()
    mine = {"fc.bias": torch.tensor([1.0, 2.0])}
    trainer.load(mine)
    mine["fc.bias"].zero_()
    after = trainer.weights()
    assert after["fc.bias"].tolist() == [1, 2]
    assert all(torch.equal(before[name], after[name]) for name in before if name != "fc.bias")
    after["fc.bias"].zero_()
    assert trainer.weights()["fc.bias"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("decay_every", "expected"),
    [(0, [1, 1, 1, 1, 1, 1, 1]), (1, [1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]), (2, [1, 1, 1, 0.5, 0.5, 0.25, 0.25])],
)
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_the_learning_rate_decays_by_round(decay_every, expected, name):
    table = Optimizer(name=name, lr=1.0, decay=0.5, decay_every=decay_every)
    parameter = torch.nn.Parameter(torch.zeros(1))
    rates = [table.make(iter([parameter]), round).param_groups[0]["lr"] for round in range(7)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_kept_optimiser_equals_one_that_was_never_put_away(name):
    """Three rounds of two steps with the state put away and taken out again, against six steps in one go."""
    part, trainer = numbered(40), make_trainer(name=name, keep_state=True, lr=0.01)
    site = SimpleNamespace(trainer=trainer, state=SiteState(), round=0, name="s")
    batches = trainer.batches(part, rng())
    for site.round in (1, 2, 3):
        optimizer = start_optimizer(site, trainer.model)
        trainer.train(batches, 2, optimizer)
        keep_optimizer(site, optimizer)

    straight = make_trainer(name=name, lr=0.01)
    straight.train(straight.batches(part, rng()), 6, straight.optimizer.make(straight.model.parameters(), 1))
    for key, tensor in straight.weights().items():
        assert torch.equal(tensor, trainer.weights()[key]), key


def test_a_kept_optimiser_takes_the_learning_rate_of_its_round():
    trainer = make_trainer(keep_state=True, lr=1.0, decay=0.1, decay_every=1)
    site = SimpleNamespace(trainer=trainer, state=SiteState(), round=1, name="s")
    first = start_optimizer(site, trainer.model)
    trainer.train(trainer.batches(numbered(8), rng()), 1, first)
    keep_optimizer(site, first)
    site.round = 2
    second = start_optimizer(site, trainer.model)
    assert second.param_groups[0]["lr"] == pytest.approx(0.1)
    buffers = [second.state[p]["momentum_buffer"] for p in second.param_groups[0]["params"]]
    kept = [first.state[p]["momentum_buffer"] for p in first.param_groups[0]["params"]]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(buffers, kept, strict=True))


def test_evaluation_equals_counting_by_hand_in_pieces_too():
    part, trainer = numbered(21), make_trainer()
    sums = trainer.evaluate(part)
    model = trainer.model.eval()
    with torch.no_grad():
        output = model(torch.from_numpy(part.images).float() / 255)
    labels = torch.from_numpy(part.labels)
    confusion = torch.zeros(2, 2, dtype=torch.int64)
    for label, guess in zip(labels, output.argmax(1), strict=True):
        confusion[label, guess] += 1
    assert torch.equal(sums["confusion"], confusion)
    assert int(sums["count"]) == 21
    assert float(sums["loss"]) == pytest.approx(float(F.cross_entropy(output, labels, reduction="sum")), rel=1e-5)
    metrics = trainer.task.finish(sums)
    assert metrics["accuracy"] == pytest.approx(float((output.argmax(1) == labels).float().mean()))
    count = EVALUATION_BATCH + 3
    images = np.random.default_rng(0).integers(0, 256, (count, 1, SIZE, SIZE), dtype=np.uint8)
    part = ImageSet(images, np.arange(count) % 2)
    trainer = make_trainer()
    sizes = [len(images) for images, _ in trainer.in_order(part)]
    assert sizes == [EVALUATION_BATCH, 3]
    whole = trainer.evaluate(part)
    pieces = [trainer.evaluate(ImageSet(part.images[s], part.labels[s])) for s in (slice(0, 100), slice(100, None))]
    together = trainer.task.add(*pieces)
    assert torch.equal(whole["confusion"], together["confusion"])
    assert torch.equal(whole["count"], together["count"])
    assert float(whole["loss"]) == pytest.approx(float(together["loss"]), rel=1e-6)


def test_what_was_made_for_a_layer_is_forgotten_with_it():
    trainer = make_trainer()
    other = trainer.with_optimizer(Optimizer(batch_size=2))
    trainer.kept["a graph"] = 1
    other.load(trainer.weights())
    assert trainer.kept
    trainer.model.fc = torch.nn.Linear(trainer.model.fc.in_features, 2)
    other.load({"fc.bias": torch.tensor([3.0, 4.0])})
    assert trainer.model.fc.bias.tolist() == [3, 4]
    assert trainer.kept == other.kept == {}
    trainer.kept["a graph"] = 1
    trainer.load({})
    assert trainer.kept


def test_what_a_loss_tells_is_seen_after_each_step_and_the_rate_follows_the_schedule() -> None:
    weight = nn.Parameter(torch.zeros(1))
    seen: list[float] = []

    def loss_of(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (weight - 1).square().sum() + 0 * rows.sum(), float(weight.detach())

    def look(before: float) -> None:
        seen.append(float(weight.detach()) - before)

    schedule = Schedule(epochs=3, batch_size=2, lr=0.1, decay=0.01, decay_every=1)
    objective = Objective([weight], lambda index: (torch.ones(len(index)),), loss_of, look)
    descend(objective, 4, schedule, torch.Generator().manual_seed(0))
    assert len(seen) == 6, "two batches in each of three epochs, and one look after each"
    assert all(moved > 0 for moved in seen), "a look comes after the step, which moves the weight"
    assert min(seen[:2]) > 20 * max(seen[2:4]) > 0, "a hundredth of the rate after an epoch"


def test_the_state_of_an_optimiser_comes_back_under_its_names():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    kept = optimizer_tensors(optimizer)
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"0/momentum_buffer": [1.0, -1.0]}
    other = SGD([weight], lr=0.5, momentum=0.9)
    restore_optimizer(other, {**kept, "0/an/other": torch.tensor([3.0, 4.0])})
    assert other.state[weight]["momentum_buffer"].tolist() == [1.0, -1.0]
    assert other.state[weight]["an/other"].tolist() == [3.0, 4.0]
    assert other.param_groups[0]["lr"] == 0.5
    restore_optimizer(other, {})
    assert other.state[weight]["momentum_buffer"].tolist() == [1.0, -1.0]
