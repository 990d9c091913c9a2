"""Recorded evaluation: the sums of the ordinary way, whatever the sizes of batches and parts."""

import warnings

import numpy as np
import pytest
import torch
from pretended_gpu import BrokenGraph, pretend_gpu

from polyclinic.data.parts import ImageSet
from polyclinic.models import build, initial_weights
from polyclinic.tasks import TASKS, Target
from polyclinic.training import loop
from polyclinic.training.gpu.graphs import WARM_UP, GraphedFunction
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

TARGET = Target(("a", "b"))
KEY = "evaluation: None"


def make_trainer(task: str, device: str = "cpu", *, graphs: bool = False) -> Trainer:
    known = TASKS[task](name=task)

    def builder():
        backbone = "unet" if known.dense else "small-cnn"
        return build(backbone, channels=1, outputs=known.outputs(TARGET), size=16, norm="batch")

    spec = TrainerSpec(task=known, target=TARGET, optimizer=Optimizer(), device=device, graphs=graphs)
    trainer = Trainer(builder(), spec)
    trainer.load(initial_weights(builder, 0))
    trainer.graphs = graphs
    return trainer


def parts_of(*counts: int) -> list[ImageSet]:
    rng = np.random.default_rng(0)
    return [
        ImageSet(
            rng.integers(0, 256, (count, 1, 16, 16), dtype=np.uint8),
            np.arange(count) % 2,
            masks=rng.integers(0, 2, (count, 16, 16), dtype=np.uint8),
        )
        for count in counts
    ]


def sums(trainer: Trainer, parts: list[ImageSet], rounds: int):
    return [trainer.evaluate_parts(parts) for _ in range(rounds)][-1]


def assert_same(one, other):
    for found, wanted in zip(one, other, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(loop, "EVALUATION_BATCH", 8)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_recorded_evaluation_gives_the_sums(task, monkeypatch, small_batches):
    """Full batches, a ragged one at the end, and small parts that are joined."""
    pretend_gpu(monkeypatch)
    parts = parts_of(19, 3, 4)
    plain, recorded = (make_trainer(task, graphs=graphs) for graphs in (False, True))
    assert_same(sums(recorded, parts, WARM_UP + 2), sums(plain, parts, 1))
    graphs = recorded.kept[KEY].graphs
    assert sorted(shapes[0][0][0] for shapes in graphs) == [4, 6, 8]  # 8, 8, 3 + 3, 4


def test_other_weights_give_other_sums(monkeypatch, small_batches):
    pretend_gpu(monkeypatch)
    trainer, parts = make_trainer("classification", graphs=True), parts_of(16)
    before = sums(trainer, parts, WARM_UP + 1)
    changed = {name: value * 1.5 for name, value in trainer.weights().items() if value.is_floating_point()}
    trainer.load(changed)
    after = sums(trainer, parts, 1)
    plain = make_trainer("classification")
    plain.load(changed)
    assert_same(after, sums(plain, parts, 1))
    assert not torch.equal(after[0]["loss"], before[0]["loss"])


def test_answers_outlive_the_next_pass(monkeypatch, small_batches):
    pretend_gpu(monkeypatch)
    trainer, parts = make_trainer("classification", graphs=True), parts_of(40)
    sums(trainer, parts, 1)
    outputs = [output for output, _ in trainer.outputs(parts[0])]
    wanted = [output for output, _ in make_trainer("classification").outputs(parts[0])]
    assert torch.equal(torch.cat(outputs), torch.cat(wanted))


def test_large_images_are_not_recorded(monkeypatch, small_batches):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(loop, "MOST_RECORDED_BYTES", 8 * 16 * 16 * 4 - 1)
    trainer, parts = make_trainer("classification", graphs=True), parts_of(15)
    assert_same(sums(trainer, parts, WARM_UP + 2), sums(make_trainer("classification"), parts, 1))
    assert [shapes[0][0][0] for shapes in trainer.kept[KEY].graphs] == [7]


def test_what_cuda_cannot_record_is_evaluated_all_the_same(monkeypatch, small_batches):
    pretend_gpu(monkeypatch, BrokenGraph)
    trainer, parts = make_trainer("classification", graphs=True), parts_of(8)
    with pytest.warns(UserWarning, match=r"^engine.graphs: evaluation runs without a CUDA graph"):
        found = sums(trainer, parts, WARM_UP + 2)
    assert_same(found, sums(make_trainer("classification"), parts, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_recorded_evaluation_on_a_gpu(task):
    """Between rounds of training, as a run does it: graphs of both modes use the same weights."""
    parts = parts_of(600, 30)
    plain, recorded = (make_trainer(task, "cuda", graphs=graphs) for graphs in (False, True))
    for _ in range(WARM_UP + 2):
        changed = {name: value * 1.1 for name, value in plain.weights().items() if value.is_floating_point()}
        found = []
        for trainer in (plain, recorded):
            trainer.load(changed)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*without a CUDA graph.*")
                found.append(trainer.evaluate_parts(parts))
        for one, other in zip(*found, strict=True):
            assert all(torch.allclose(one[name].double(), other[name].double(), rtol=1e-4) for name in one)
    assert isinstance(recorded.kept[KEY], GraphedFunction)
    assert len(recorded.kept[KEY].graphs) >= 1
