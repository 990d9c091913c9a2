"""Local epochs from a table of batches: what is launched at once is what an ordinary loop does, bit for bit.

Without a GPU a pretended one records (`pretended_gpu`), and fused optimisers run on the CPU.
"""

import itertools
import warnings

import numpy as np
import pytest
import torch
from pretended_gpu import BrokenGraph, pretend_gpu

from polyclinic.data.parts import ImageSet
from polyclinic.models import build, initial_weights
from polyclinic.randomness import torch_rng
from polyclinic.tasks import TASKS, Target
from polyclinic.training import optimizer
from polyclinic.training.augmentation import AUGMENTATIONS
from polyclinic.training.batches import take_batches
from polyclinic.training.gpu import graphs
from polyclinic.training.gpu.graphs import WARM_UP, BatchTable
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import KEPT, MOST_KEPT, Optimizer

TASK, TARGET = TASKS["classification"](name="classification"), Target(("a", "b"))
PART = ImageSet(np.random.default_rng(0).integers(0, 256, (22, 1, 16, 16), dtype=np.uint8), np.arange(22) % 2)
STEPS = 5  # of one pass, with batches of four; two images are left over


@pytest.fixture
def gpu(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(optimizer, "on_gpu", lambda parameters: True)


def builder():
    return build("small-cnn", channels=1, outputs=TASK.outputs(TARGET), size=16, norm="batch")


def make_trainer(*, recorded: bool, **settings) -> Trainer:
    spec = TrainerSpec(task=TASK, target=TARGET, optimizer=Optimizer(batch_size=4, **settings))
    trainer = Trainer(builder(), spec)
    trainer.graphs = trainer.records_steps = recorded
    return trainer


def trained(trainer: Trainer, rounds: int = 6, steps: int = STEPS, **how):
    """Losses and weights after rounds of a site's training, each with a fresh optimiser."""
    trainer.load(initial_weights(builder, 0))
    losses = []
    for number in range(1, rounds + 1):
        batches = trainer.batches(PART, torch_rng("epochs", number))
        made = trainer.optimizer.make(trainer.model.parameters(), number, trainer.kept)
        losses.append(trainer.train(trainer.mixed(batches, torch_rng("mixup", number)), steps, made, **how))
    return losses, trainer.weights()


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def recorded_of(trainer: Trainer):
    """The recorded steps of a trainer with one optimiser."""
    [kept] = trainer.kept[KEPT].values()
    return kept.recorded


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.0, "weight_decay": 0.1},
        {"name": "adam", "lr": 1e-3},
        {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        {"name": "sgd", "decay_every": 2},
        {"name": "adam", "schedule": "cosine", "warmup": 2},
        {"balanced_batches": True},
        {"augment": AUGMENTATIONS},
    ],
    ids=str,
)
def test_epochs_of_recorded_steps_are_the_epochs(gpu, settings):
    plain, recorded = (make_trainer(recorded=way, **settings) for way in (False, True))
    assert_same(trained(recorded), trained(plain))
    [steps] = recorded_of(recorded)[False].tables.values()
    assert len(steps.step.graphs) == 1


@pytest.mark.parametrize("most", [1, 2, 3, 32])
def test_an_epoch_longer_than_the_table_is_launched_in_parts(gpu, monkeypatch, most):
    monkeypatch.setattr(graphs, "MOST_STEPS", most)
    plain, recorded = (make_trainer(recorded=way) for way in (False, True))
    assert_same(trained(recorded, steps=8), trained(plain, steps=8))  # a pass has five batches: two permutations
    [steps] = recorded_of(recorded)[False].tables.values()
    assert steps.table.steps == most


def test_bytes_of_images_bound_the_table():
    one = 4 * 32 * 3 * 224 * 224
    assert graphs.steps_in_table(one) == graphs.TABLE_BYTES // one < graphs.MOST_STEPS
    assert graphs.steps_in_table(100) == graphs.MOST_STEPS
    assert graphs.steps_in_table(2**40) == 1


def test_weights_of_classes_have_graphs_and_further_shapes_ordinary_steps(gpu, monkeypatch):
    weights = torch.tensor([0.3, 1.7])
    plain, recorded = (make_trainer(recorded=way) for way in (False, True))
    assert_same(trained(recorded, class_weights=weights), trained(plain, class_weights=weights))
    assert trained(recorded)[0] == trained(plain)[0]  # the same trainer, without weights
    assert sorted(recorded_of(recorded)) == [False, True]
    monkeypatch.setattr(graphs, "MOST_TABLES", 0)
    plain, recorded = (make_trainer(recorded=way) for way in (False, True))
    assert_same(trained(recorded), trained(plain))
    assert recorded_of(recorded)[False].tables == {}


def test_what_cuda_cannot_record_trains_all_the_same_with_one_warning(monkeypatch):
    pretend_gpu(monkeypatch, BrokenGraph)
    monkeypatch.setattr(optimizer, "on_gpu", lambda parameters: True)
    plain, recorded = (make_trainer(recorded=way) for way in (False, True))
    with pytest.warns(UserWarning, match=r"^engine.graphs: a training step with its optimiser runs without") as seen:
        assert_same(trained(recorded), trained(plain))
    assert len(seen) == 1
    assert WARM_UP < STEPS


@pytest.mark.parametrize("how", ["correct", "objective", "shares", "kept state", "another optimiser"])
def test_what_cannot_be_recorded_goes_the_ordinary_way(gpu, how):
    trainer = make_trainer(recorded=True, keep_state=how == "kept state")
    changes = {}
    if how == "correct":
        changes = {"correct": lambda model: None}
    if how == "objective":
        changes = {"objective": lambda images, targets: trainer.loss(trainer.forward(images), targets)}
    if how == "another optimiser":
        made = torch.optim.SGD(trainer.model.parameters(), 0.1)
        trainer.train(trainer.batches(PART, torch_rng("other")), STEPS, made)
    elif how == "shares":
        with trainer.random_shares(torch_rng("shares")):
            trained(trainer, rounds=1)
    else:
        trained(trainer, rounds=1, **changes)
    assert all(kept.recorded == {} for kept in trainer.kept.get(KEPT, {}).values())


def test_batches_that_are_taken_together_are_noted_and_are_those_of_one_by_one():
    trainer = make_trainer(recorded=False, augment=[kind for kind in AUGMENTATIONS if kind != "mixup"])
    with trainer.note_batches() as together:
        some = take_batches(trainer.batches(PART, torch_rng("taken")), 7, lambda size: 32)
    with trainer.note_batches() as alone:
        wanted = list(itertools.islice(iter(trainer.batches(PART, torch_rng("taken"))), 7))
    assert [index.tolist() for index in together] == [index.tolist() for index in alone]
    for (images, targets), (own, labels) in zip(some, wanted, strict=True):
        assert torch.equal(images, own)
        assert torch.equal(targets, labels)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_table_keeps_the_order_of_images_in_memory(channels):
    images = torch.rand(4, channels, 5, 6).to(memory_format=torch.channels_last)
    labels = torch.arange(4)
    table = BatchTable((images, labels), 3)
    table.fill([(images + shift, labels + shift) for shift in range(3)])
    for shift in range(3):
        found, targets = table.take()
        assert torch.equal(found, images + shift)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert targets.tolist() == [shift, shift + 1, shift + 2, shift + 3]
    table.fill([(images, labels)])
    assert torch.equal(table.take()[0], images)  # it begins anew


def test_optimisers_of_several_choices_of_layers_are_kept(gpu):
    """A method that trains one part after the other does not record both anew in every round."""
    trainer = make_trainer(recorded=True)
    made = []
    for frozen in (False, True, False, True):
        trainer.model.conv1.requires_grad_(not frozen)
        one = trainer.optimizer.make(trainer.model.parameters(), 1, trainer.kept)
        trainer.train(trainer.batches(PART, torch_rng("parts")), STEPS, one)
        made.append(one)
    assert made[0] is made[2]
    assert made[1] is made[3]
    assert [len(kept.recorded) for kept in trainer.kept[KEPT].values()] == [1] * MOST_KEPT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("augment", [(), ("flip", "rotate", "noise")])
def test_recorded_steps_train_on_a_gpu(name, precision, augment):
    """Whole steps recorded, and passes alone: the same up to rounding."""
    table = Optimizer(name=name, lr=1e-3, batch_size=4, augment=augment, schedule="cosine").over(6)
    spec = TrainerSpec(task=TASK, target=TARGET, optimizer=table, device="cuda", precision=precision, graphs=True)
    found = []
    for whole in (False, True):
        trainer = Trainer(builder(), spec)
        assert trainer.records_steps
        trainer.records_steps = whole
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without a CUDA graph.*")
            found.append(trained(trainer))
    [steps] = recorded_of(trainer)[False].tables.values()
    assert len(steps.step.graphs) == 1
    passes, whole = found
    assert whole[0] == pytest.approx(passes[0], rel=2e-2)
    for value, wanted in zip(whole[1].values(), passes[1].values(), strict=True):
        assert torch.allclose(value.float(), wanted.float(), atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ordinary_and_recorded_steps_leave_the_same_bits_on_a_gpu(monkeypatch):
    """What is recorded follows from counts, and a resumed run begins with ordinary steps: it must not end elsewhere."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    table = Optimizer(name="adam", lr=1e-3, batch_size=4, augment=("flip", "crop"))
    spec = TrainerSpec(task=TASK, target=TARGET, optimizer=table, device="cuda", precision="bf16", graphs=True)
    recorded = trained(Trainer(builder(), spec))
    monkeypatch.setattr(graphs.GraphedFunction, "_record", lambda *_: False)
    assert_same(trained(Trainer(builder(), spec)), recorded)


def test_features_of_frozen_layers_that_are_larger_than_images_are_recorded(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path))

    def learn(*, recorded):
        model = builder()
        model.load_state_dict(initial_weights(builder, 0))
        model.freeze(model.cuts[0])
        spec = TrainerSpec(task=TASK, target=TARGET, optimizer=Optimizer(batch_size=4), frozen_features=True)
        trainer = Trainer(model, spec)
        trainer.graphs = trainer.records_steps = recorded
        batches = trainer.batches(PART, torch_rng("frozen"))
        assert trainer.fetcher.image_size(PART, augmented=False) > PART.images[0].size
        assert batches.image_bytes == next(trainer.batches(PART, torch_rng("other")))[0].nbytes
        made = trainer.optimizer.make(trainer.model.parameters(), 1, trainer.kept)
        return [trainer.train(batches, 10, made)], trainer.weights()

    monkeypatch.setattr(graphs, "TABLE_BYTES", 10 * 4 * 4 * PART.images[0].size)  # ten batches of images
    assert_same(learn(recorded=True), learn(recorded=False))


@pytest.mark.parametrize(("sizes", "steps"), [((2, 4, 4, 4, 4, 4), 6), ((4, 4), 3), ((), 2)])
def test_sources_with_batches_of_several_sizes_and_such_that_end(gpu, monkeypatch, sizes, steps):
    monkeypatch.setattr(graphs, "TABLE_BYTES", 3 * 4 * 4 * PART.images[0].size)  # three batches of four images
    drawn = torch_rng("sizes")
    given = [(torch.rand(size, 1, 16, 16, generator=drawn), torch.arange(size) % 2) for size in sizes]

    def learn(*, recorded):
        trainer = make_trainer(recorded=recorded)
        trainer.load(initial_weights(builder, 0))
        made = trainer.optimizer.make(trainer.model.parameters(), 1, trainer.kept)
        found = [trainer.train(iter(given), steps, made)], trainer.weights()
        assert not recorded or len(recorded_of(trainer)[False].tables) == len(set(sizes[:steps]))
        return found

    assert_same(learn(recorded=True), learn(recorded=False))
