"""Gradients of a recorded batch are the gradients of the batch."""

import numpy as np
import pytest
import torch
from pretended_gpu import Nothing, Stream

from polyclinic.data.parts import Part, prepare
from polyclinic.models import build, initial_weights
from polyclinic.runner.assembly import Assembly
from polyclinic.tasks import TASKS, Target
from polyclinic.training import graphs as recorded_gradients
from polyclinic.training.graphs import RecordedGradients
from polyclinic.training.loop import Trainer
from polyclinic.training.optimizer import Optimizer


@pytest.fixture
def no_gpu(monkeypatch):
    """A stand-in for a GPU: what is recorded is a call, and a replay repeats it into the same tensors."""

    class Graph:
        def replay(self):
            recording = self.recording
            kept = recording.gradients
            recording.loss.copy_(recording.of.gradients(recording.images, recording.targets))
            for place, one in zip(kept, recording.parameters, strict=True):
                place.copy_(one.grad)

    made = recorded_gradients.Recording.__init__

    def noted(self, of, images, targets):
        made(self, of, images, targets)
        self.of, self.graph.recording = of, self

    for name, stand_in in (("CUDAGraph", Graph), ("graph", Nothing), ("stream", Nothing), ("Stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(recorded_gradients.Recording, "__init__", noted)


def test_gradients_are_those_of_the_batch_whatever_its_shape(no_gpu):
    model = torch.nn.Linear(3, 2)
    learn = RecordedGradients(model, lambda x, y: (model(x) - y).square().mean())
    rng = torch.Generator().manual_seed(0)
    for count in (4, 4, 4, 5, 4, 5, 5, 5, 4):  # some called aside, some recorded, some replayed
        x, y = torch.randn(count, 3, generator=rng), torch.randn(count, 2, generator=rng)
        model.zero_grad(set_to_none=True)  # as an optimiser does it
        loss = float(learn(x, y))
        found = model.weight.grad.clone()
        wanted = (model(x) - y).square().mean()
        assert loss == pytest.approx(float(wanted.detach()))
        assert torch.allclose(found, torch.autograd.grad(wanted, model.weight)[0])
        with torch.no_grad():
            model.weight -= 0.1 * found
    assert len(learn.recordings) == 2


def test_what_cannot_be_recorded_goes_on_kernel_by_kernel(no_gpu, monkeypatch):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded_gradients.Recording, "__init__", fails)
    model = torch.nn.Linear(3, 2)
    learn = RecordedGradients(model, lambda x, y: (model(x) - y).square().mean())
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    wanted = torch.autograd.grad((model(x) - y).square().mean(), model.weight)[0]
    for _ in range(recorded_gradients.WARM_UP):
        learn(x, y)
    with pytest.warns(UserWarning, match=r"^engine.graphs: a training step cannot be recorded \(operation not"):
        learn(x, y)
    assert torch.equal(model.weight.grad, wanted)
    learn(x, y)  # and says it once
    assert torch.equal(model.weight.grad, wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_study_says_whether_steps_are_recorded(tiny, graphs, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("polyclinic.runner.assembly.Trainer", lambda *_, **settings: asked.append(settings["graphs"]))
    study = tiny("fedavg", {"engine.graphs": graphs})
    Assembly(study, prepare(study.data, study.sites), tmp_path).trainer()
    assert asked == [graphs]


def test_a_cpu_records_nothing():
    task, target = TASKS["classification"](name="classification"), Target(("a", "b"))
    model = build("small-cnn", channels=1, outputs=task.outputs(target), size=28)
    assert Trainer(model, task, target, Optimizer(), graphs=True)._recorded is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_training_is_training():
    task, target = TASKS["classification"](name="classification"), Target(("a", "b"))
    part = Part(np.random.default_rng(0).integers(0, 256, (64, 1, 32, 32), dtype=np.uint8), np.arange(64) % 2)

    def builder():
        return build("resnet18", channels=1, outputs=task.outputs(target), size=32, norm="batch")

    losses = {}
    for recorded in (False, True):
        optimizer = Optimizer(name="adam", lr=1e-4, batch_size=16)
        trainer = Trainer(builder(), task, target, optimizer, device="cuda", graphs=recorded)
        model, rng = trainer.load(initial_weights(builder, 0)), torch.Generator().manual_seed(0)
        losses[recorded] = [
            trainer.train(trainer.batches(part, rng), 4, optimizer.make(model.parameters(), 1)) for _ in range(3)
        ]
    assert losses[True] == pytest.approx(losses[False], abs=1e-3)
