"""CUDA graphs: a replayed call does what the function does, and one policy holds for all users.

Without a GPU a pretended one records (`pretended_gpu`).
"""

import warnings

import numpy as np
import pytest
import torch
from pretended_gpu import BrokenGraph, pretend_gpu

from polyclinic.data.parts import ImageSet, prepare
from polyclinic.errors import BadInput
from polyclinic.models import build, initial_weights
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.machine import record_steps
from polyclinic.study.tables import EngineSettings
from polyclinic.tasks import TASKS, Target
from polyclinic.training.augmentation import AUGMENTATIONS
from polyclinic.training.gpu import graphs
from polyclinic.training.gpu.graphs import WARM_UP, GraphedFunction, GraphedGradients
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer


@pytest.fixture
def gpu(monkeypatch):
    pretend_gpu(monkeypatch)


def test_every_call_does_the_work_once(gpu):
    seen = []

    def double(x):
        seen.append(x.tolist())
        return 2 * x

    graphed = GraphedFunction(double, "doubling")
    outputs = [graphed(torch.full((2,), value)).tolist() for value in range(WARM_UP + 3)]
    assert seen == [[value] * 2 for value in range(WARM_UP + 3)]
    assert outputs == [[2 * value] * 2 for value in range(WARM_UP + 3)]
    assert len(graphed.graphs) == 1


def test_gradients_are_those_of_the_batch_whatever_its_shape(gpu):
    model = torch.nn.Linear(3, 2)
    learn = GraphedGradients(model, lambda x, y: (model(x) - y).square().mean())
    rng = torch.Generator().manual_seed(0)
    for count in (4, 4, 4, 5, 4, 5, 5, 5, 4, 5):  # some ordinary calls, some recorded, some replayed
        x, y = torch.randn(count, 3, generator=rng), torch.randn(count, 2, generator=rng)
        model.zero_grad(set_to_none=True)  # as an optimiser does it
        loss = float(learn(x, y))
        found = model.weight.grad.clone()
        wanted = (model(x) - y).square().mean()
        assert loss == pytest.approx(float(wanted.detach()))
        assert torch.allclose(found, torch.autograd.grad(wanted, model.weight)[0])
        with torch.no_grad():
            model.weight -= 0.1 * found
    assert len(learn.passes.graphs) == 2


@pytest.mark.parametrize(
    ("engine", "recorded"),
    [({}, True), ({"graphs": True}, True), ({"graphs": False}, False), ({"reproducible": True}, False)],
)
def test_the_study_says_whether_steps_are_graphs(engine, recorded):
    settings = EngineSettings(**engine)
    assert record_steps(settings, "cuda") is recorded
    assert record_steps(settings, "cpu") is False


@pytest.mark.parametrize("table", [{"graphs": True}, {"stacked": "always"}])
def test_a_reproducible_run_refuses_what_rounds_differently(tiny, table):
    with pytest.raises(BadInput, match="reproducible forbids graphs = true and stacked = 'always'"):
        tiny("fedavg", {"engine.reproducible": True, **{f"engine.{name}": value for name, value in table.items()}})


def test_a_reproducible_run_takes_no_way_that_rounds_differently(tiny, monkeypatch, tmp_path):
    asked, fixed = [], []
    monkeypatch.setattr("polyclinic.runner.run.assembly.Trainer", lambda _, spec: asked.append(spec))
    monkeypatch.setattr("polyclinic.runner.run.assembly.device_of", lambda name: "cuda")
    monkeypatch.setattr("polyclinic.runner.run.assembly.fix_order_of_sums", lambda: fixed.append(True))
    for reproducible in (False, True):
        study = tiny("fedavg", {"engine.reproducible": reproducible})
        Assembly(study, prepare(study.data, study.sites), tmp_path).trainer()
    plain, exact = asked
    assert (plain.graphs, plain.stacked, plain.optimizer._fused) == (True, "auto", True)
    assert (exact.graphs, exact.stacked, exact.optimizer._fused) == (False, "never", False)
    assert fixed == [True]


def test_inputs_of_many_shapes_are_not_all_recorded(gpu):
    """A graph keeps the memory of its pass."""
    graphed = GraphedFunction(lambda x: x + 1, "a step")
    for rows in range(1, graphs.MOST_GRAPHS + 4):
        for _ in range(WARM_UP + 2):
            assert torch.equal(graphed(torch.ones(rows)), torch.full((rows,), 2.0))
    assert len(graphed.graphs) == graphs.MOST_GRAPHS


TARGET = Target(("a", "b"))


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


def test_a_cpu_records_nothing():
    spec = TrainerSpec(task=TASKS["classification"](), target=TARGET, optimizer=Optimizer(), graphs=True)
    assert not Trainer(make_trainer("classification").model, spec).graphs


def noise_batches(channels: int = 1, size: int = 16):
    rng = torch_rng("graphs")
    while True:
        yield torch.rand(4, channels, size, size, generator=rng), torch.randint(2, (4,), generator=rng)


@pytest.mark.parametrize("case", ["whole", "weighted", "a part", "some layers"])
def test_recorded_steps_are_the_steps(case, gpu):
    """The whole network, with weighted classes, the part behind a cut (FedReplay), with layers that do not learn."""
    trainer = make_trainer("classification", graphs=True)
    start = {name: one.clone() for name, one in trainer.weights().items()}
    weights = torch.tensor([0.3, 1.7]) if case == "weighted" else None
    channels, size = (32, 8) if case == "a part" else (1, 16)
    ends = []
    for recorded in (False, True):
        trainer.graphs = recorded
        for _ in range(2):  # a part is cut off anew in every round
            model = trainer.split(trainer.load(start))[1] if case == "a part" else trainer.load(start)
            if case == "some layers":
                model.conv1.requires_grad_(False)
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1, 0.9)
            given = noise_batches(channels, size)
            trainer.train(given, WARM_UP + 3, optimizer, class_weights=weights, model=model)
        ends.append(trainer.weights())
    assert len(trainer.kept) == 1
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start)
    assert not torch.equal(ends[0]["fc.weight"], start["fc.weight"])


def test_another_choice_of_layers_that_learn_is_another_graph(gpu):
    trainer = make_trainer("classification", graphs=True)
    for frozen in (False, True):
        trainer.model.conv1.requires_grad_(not frozen)
        before = trainer.model.conv1.weight.detach().clone()
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
        trainer.train(noise_batches(), WARM_UP + 3, optimizer)
        assert torch.equal(before, trainer.model.conv1.weight) == frozen
    assert len(trainer.kept) == 2


def trained(*, recorded: bool, device: str = "cpu", precision: str = "fp32", **settings):
    """Losses and weights after rounds of a site's training, each with a fresh optimiser."""
    task, [part] = TASKS["classification"](), parts_of(22)

    def builder():
        return build("small-cnn", channels=1, outputs=2, size=16, norm="batch")

    optimizer = Optimizer(**{"batch_size": 4, **settings}).over(6)
    spec = TrainerSpec(task=task, target=TARGET, optimizer=optimizer, device=device, precision=precision)
    trainer, losses = Trainer(builder(), spec), []
    trainer.graphs = recorded
    trainer.load(initial_weights(builder, 0))
    for number in range(1, 7):
        batches = trainer.mixed(trainer.batches(part, torch_rng("epochs", number)), torch_rng("mixup", number))
        losses.append(trainer.train(batches, 5, optimizer.make(trainer.model.parameters(), number)))
    assert not recorded or len(trainer.kept) == 1
    return losses, trainer.weights()


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "momentum": 0.0, "weight_decay": 0.1},
        {"name": "adam", "schedule": "cosine", "warmup": 2},
        {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "decay_every": 2},
        {"balanced_batches": True},
        {"augment": AUGMENTATIONS},
    ],
    ids=str,
)
def test_rounds_of_recorded_steps_are_the_rounds(gpu, settings):
    (losses, weights), (plain, wanted) = (trained(recorded=way, **settings) for way in (True, False))
    assert losses == plain
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_what_cuda_cannot_record_trains_all_the_same_with_one_warning(monkeypatch):
    pretend_gpu(monkeypatch, BrokenGraph)
    with pytest.warns(UserWarning, match=r"^engine.graphs: a training step runs without a CUDA graph") as seen:
        losses, _ = trained(recorded=True)
    assert losses == trained(recorded=False)[0]
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["objective", "hook"])
def test_what_cannot_be_recorded_goes_the_ordinary_way(gpu, how):
    trainer, objective = make_trainer("classification", graphs=True), None
    if how == "hook":
        trainer.model.fc.register_forward_hook(lambda *_: None)
    else:
        objective = lambda images, targets: trainer.loss(trainer.forward(images), targets)  # noqa: E731
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
    trainer.train(noise_batches(), WARM_UP + 3, optimizer, objective=objective)
    assert trainer.kept == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ordinary_and_recorded_steps_leave_the_same_bits_on_a_gpu(name, precision, monkeypatch):
    """What is recorded follows from counts, and a resumed run begins with ordinary steps: it must not end elsewhere."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    how = {"device": "cuda", "precision": precision, "name": name, "lr": 1e-3, "augment": ("flip", "crop", "noise")}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph.*")
        losses, weights = trained(recorded=True, **how)
    monkeypatch.setattr(graphs.GraphedFunction, "_record", lambda *_: False)
    plain, wanted = trained(recorded=True, **how)
    assert losses == plain
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def parts_of(*counts: int) -> list[ImageSet]:
    rng, parts = np.random.default_rng(0), []
    for count in counts:
        images = rng.integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
        parts.append(ImageSet(images, np.arange(count) % 2, masks=(images[:, 0] > 127).astype(np.uint8)))
    return parts
