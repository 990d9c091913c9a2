"""Compiled passes (`engine.compiled`): they are the network's passes, and what was decided holds for a whole run.

Quick tests have torch trace the network, and run what it traced as it is; `slow` ones compile it.
"""

import copy
import functools
import json
import os
import subprocess
import warnings

import numpy as np
import pytest
import torch
from pretended_gpu import pretend_gpu
from torch import nn

from polyclinic import run
from polyclinic.data.parts import ImageSet, prepare
from polyclinic.errors import BadInput, Damaged, Notice
from polyclinic.models import BACKBONES, build, initial_weights
from polyclinic.randomness import torch_rng
from polyclinic.runner.assembly import Assembly, assemble_from
from polyclinic.runner.recorder import Display
from polyclinic.tasks import TASKS, Target
from polyclinic.training import inductor
from polyclinic.training.compiling import (
    FILE,
    Compilation,
    CompiledNetwork,
    any_compiled,
    compile_network,
    read_noted,
    refusals,
)
from polyclinic.training.graphs import WARM_UP, GraphedGradients
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

TASK, TARGET = TASKS["classification"](name="classification"), Target(("a", "b"))
PART = ImageSet(np.random.default_rng(0).integers(0, 256, (22, 1, 16, 16), dtype=np.uint8), np.arange(22) % 2)
STEPS = 5


class Counted:
    """A backend that runs what torch traced as it is, and counts."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def compute(*given):
            self.calls += 1
            return graph(*given)

        return compute


def refuse(graph, inputs):
    raise RuntimeError("\nno working compiler\nmore words")


def builder():
    return build("small-cnn", channels=1, outputs=TASK.outputs(TARGET), size=16, norm="batch")


def make_trainer(compilation=None, **settings) -> Trainer:
    spec = TrainerSpec(task=TASK, target=TARGET, optimizer=Optimizer(batch_size=4), compilation=compilation, **settings)
    return Trainer(builder(), spec)


def trained(trainer: Trainer, rounds: int = 2, **how):
    trainer.load(initial_weights(builder, 0))
    for number in range(rounds):
        made = trainer.optimizer.make(trainer.parameters(), 1, trainer.kept)
        trainer.train(trainer.batches(PART, torch_rng("compiled", number)), STEPS, made, **how)
    return trainer.weights()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def noise(rows: int, channels: int = 1, size: int = 16):
    return torch.rand(rows, channels, size, size, generator=torch_rng("noise", rows))


# --- which passes ------------------------------------------------------------------------------------------


def test_whole_batches_are_compiled_also_with_replayed_images():
    found = [images for images in range(200) if Compilation(32).includes(images)]
    assert found == [32, 48, 64, 80, 96, 112, 128]
    assert [images for images in range(20) if Compilation(5).includes(images)] == [5, 10, 15]


@pytest.mark.parametrize("weights", [None, torch.tensor([0.3, 1.7])])
def test_compiled_training_is_training(weights):
    backend = Counted()
    found = trained(make_trainer(Compilation(4, backend=backend)), class_weights=weights)
    assert_same(found, trained(make_trainer(), class_weights=weights))
    assert (backend.graphs, backend.calls) == (1, 2 * STEPS + 1)  # and one pass to try


def test_sites_share_what_was_compiled_and_small_sites_go_on_without():
    backend = Counted()
    trainer = make_trainer(Compilation(4, backend=backend))
    for site in ("a", "b"):
        trainer.load({name: one + 0.01 for name, one in initial_weights(builder, site == "a").items()})
        made = trainer.optimizer.make(trainer.parameters(), 1)
        trainer.train(trainer.batches(PART, torch_rng(site)), STEPS, made)
    assert (backend.graphs, backend.calls) == (1, 2 * STEPS + 1)
    small = trainer.with_optimizer(Optimizer(batch_size=3))
    small.train(small.batches(PART, torch_rng("small")), STEPS, made)
    assert (backend.graphs, backend.calls) == (1, 2 * STEPS + 1)


def test_batches_of_many_sizes_are_bounded_whatever_their_order():
    backend, network = Counted(), builder().train()
    compiled = CompiledNetwork(network, Compilation(4, backend=backend))
    for rows in (*range(2, 24), *range(23, 1, -1)):
        before = {name: one.clone() for name, one in network.state_dict().items()}
        found = compiled(noise(rows))
        network.load_state_dict(before)
        assert torch.equal(found, network(noise(rows)))
    assert backend.graphs == 7


def test_many_networks_of_a_process_do_not_share_torchs_limit():
    backend = Counted()
    for _ in range(torch._dynamo.config.recompile_limit + 3):
        CompiledNetwork(builder().train(), Compilation(4, backend=backend))(noise(4))
    assert backend.graphs == torch._dynamo.config.recompile_limit + 3


def test_a_part_that_is_cut_off_anew_is_compiled_once():
    backend, ends = Counted(), []
    for compilation in (None, Compilation(4, backend=backend)):
        trainer = make_trainer(compilation)
        for number in range(3):
            rest = trainer.split(trainer.load(initial_weights(builder, number)))[1]
            given = ((noise(4, 32, 8), torch.arange(4) % 2) for _ in range(STEPS))
            trainer.train(given, STEPS, torch.optim.SGD(rest.parameters(), 0.1), model=rest)
        ends.append(trainer.weights())
    assert_same(*ends)
    assert (backend.graphs, backend.calls) == (1, 3 * STEPS + 1)


def test_layers_that_no_longer_learn_are_another_network():
    backend = Counted()
    trainer = make_trainer(Compilation(4, backend=backend))
    trained(trainer, rounds=1)
    trainer.model.conv1.requires_grad_(False)
    before = trainer.load(initial_weights(builder, 0)).conv1.weight.clone()
    trained(trainer, rounds=1)
    assert backend.graphs == 2
    assert torch.equal(trainer.model.conv1.weight, before)


def test_passes_that_a_compiled_network_does_not_know_are_ordinary():
    """Random shares hook into layers, a method has a loss of its own, and a copy is not the trainer's network."""
    backend = Counted()
    trainer, plain = make_trainer(Compilation(4, backend=backend)), make_trainer()
    trained(trainer)
    known = backend.calls
    with trainer.random_shares(torch_rng("shares")):
        found = trained(trainer)
    with plain.random_shares(torch_rng("shares")):
        assert_same(found, trained(plain))
    trained(trainer, objective=lambda images, targets: trainer.loss(trainer.forward(images), targets))
    twin = copy.deepcopy(trainer.model)
    trainer.train(trainer.batches(PART, torch_rng("x")), 1, torch.optim.SGD(twin.parameters(), 0.1), model=twin)
    assert (backend.graphs, backend.calls) == (1, known)


def halve(layer, inputs, output):
    return output / 2


def test_a_hook_that_somebody_adds_later_is_not_left_out():
    """Torch looks for hooks once: a plug-in's protection would be gone without a word."""
    backend = Counted()
    trainer, plain = make_trainer(Compilation(4, backend=backend)), make_trainer()
    ordinary = trained(trainer)
    known, ends = backend.calls, []
    for one in (trainer, plain):
        hook = one.model.conv1.register_forward_hook(halve)
        ends.append(trained(one))
        hook.remove()
    assert_same(*ends)
    assert backend.calls == known
    assert_same(trained(trainer), ordinary)
    assert backend.calls > known


def test_hooks_of_the_network_itself_are_compiled(monkeypatch):
    def hooked():
        network = build("small-cnn", channels=1, outputs=TASK.outputs(TARGET), size=16, norm="batch")
        network.conv1.register_forward_hook(halve)
        return network

    monkeypatch.setitem(globals(), "builder", hooked)
    backend = Counted()
    assert_same(trained(make_trainer(Compilation(4, backend=backend))), trained(make_trainer()))
    assert backend.calls == 2 * STEPS + 1


class Scaled(nn.Module):
    """Another network with the same weights."""

    def __init__(self, network, factor):
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, images):
        return self.network(images) * self.factor


def test_networks_that_share_weights_are_not_taken_for_each_other():
    ends, backend = [], Counted()
    for compilation in (None, Compilation(4, backend=backend)):
        trainer = make_trainer(compilation)
        trainer.load(initial_weights(builder, 0))
        for factor in (0.5, -2.0):
            made = torch.optim.SGD(trainer.parameters(), 0.1)
            model = Scaled(trainer.model, factor)
            trainer.train(trainer.batches(PART, torch_rng(f"{factor}")), STEPS, made, model=model)
        ends.append(trainer.weights())
    assert_same(*ends)
    assert backend.calls == 0


# --- what cannot be compiled -------------------------------------------------------------------------------


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x):
        x = self.drop(self.norm(x))
        torch._dynamo.graph_break()
        return self.last(x)


def backward_fails():
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=refuse)


@pytest.mark.parametrize("case", ["unsupported", "no compiler", "second pass"])
def test_what_torch_cannot_compile_goes_on_with_ordinary_passes_and_one_warning(case):
    """As if nothing had been tried: statistics of batch norm and draws of dropout are the same."""
    backend = {"unsupported": "eager", "no compiler": refuse, "second pass": backward_fails()}[case]
    network = Unsupported().train() if case == "unsupported" else nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    plain, images = copy.deepcopy(network), torch.rand(4, 3, generator=torch_rng("rows"))
    compiled = CompiledNetwork(network, Compilation(4, backend=backend))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wanted = [plain(images) for _ in range(3)]
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match=r"^engine.compiled: \w+, 4 x 3 runs without torch.compile, more") as told:
            found = [compiled(images) for _ in range(3)]
    assert len(told) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert_same(network.state_dict(), plain.state_dict())


def test_a_network_that_changes_at_every_step_goes_on_with_ordinary_passes(tmp_path):
    network, backend = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).train(), Counted()
    images = torch.rand(4, 3, generator=torch_rng("rows"))
    compiled = CompiledNetwork(network, Compilation(4, tmp_path, backend))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(torch._dynamo.config.recompile_limit + 3):
            network[0].eps = 0.1 + number
            plain = copy.deepcopy(network)
            assert torch.equal(compiled(images), plain(images))
            assert_same(network.state_dict(), plain.state_dict())
    assert [one.category for one in told] == [Notice]
    [said] = refusals(tmp_path)
    assert "from here on" in said
    assert "something in it changes between steps" in said


def test_errors_of_the_network_itself_are_its_own():
    compiled = CompiledNetwork(nn.Linear(3, 2).train(), Compilation(4, backend=Counted()))
    compiled(torch.rand(4, 3))
    compiled._compiled[torch.Size([4, 3])] = lambda images: 1 / 0
    with pytest.raises(ZeroDivisionError):
        compiled(torch.rand(4, 3))


def test_a_missing_compiler_is_said_with_the_cure():
    def fail(graph, inputs):
        raise type("InvalidCxxCompiler", (RuntimeError,), {})("in words of torch")

    with pytest.warns(Notice, match="no working C\\+\\+ compiler was found; install g\\+\\+, or name another one"):
        CompiledNetwork(builder().train(), Compilation(4, backend=fail))(noise(4))


def test_a_try_leaves_nothing_behind():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    plain, images = copy.deepcopy(network), torch.rand(4, 3, generator=torch_rng("rows"))
    backend = Counted()
    compiled = CompiledNetwork(network, Compilation(4, backend=backend))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wanted = plain(images)
        torch.manual_seed(1)
        assert torch.equal(compiled(images), wanted)
    assert_same(network.state_dict(), plain.state_dict())
    assert all(one.grad is None for one in network.parameters())
    assert backend.calls == 2


# --- what a run folder knows -------------------------------------------------------------------------------


def test_a_run_begun_with_compiled_steps_says_so_where_it_loses_them(tmp_path):
    name, network = "small-cnn, 4 x 1 x 16 x 16", builder().train()
    CompiledNetwork(network, Compilation(4, tmp_path, Counted()))(noise(4))
    assert json.loads((tmp_path / FILE).read_text()) == {name: {"compiled": True, "reason": None}}
    assert (any_compiled(tmp_path), refusals(tmp_path)) == (True, [])
    with pytest.warns(UserWarning, match="though the run was begun with it.*: no working compiler$"):
        CompiledNetwork(network, Compilation(4, tmp_path, refuse))(noise(4))
    assert any_compiled(tmp_path)
    [told] = refusals(tmp_path)
    assert told.startswith(f"engine.compiled: {name} runs without torch.compile from here on")


def test_a_run_begun_without_compiled_steps_stays_without(tmp_path):
    network, backend = builder().train(), Counted()
    with pytest.warns(UserWarning, match="more slowly: no working compiler$"):
        CompiledNetwork(network, Compilation(4, tmp_path, refuse))(noise(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CompiledNetwork(network, Compilation(4, tmp_path, backend))(noise(4))  # another process, or a resumed run
        CompiledNetwork(network, Compilation(4, tmp_path, backend))(noise(8))
    assert backend.graphs == 1  # the other size, of which nothing was known
    assert json.loads((tmp_path / FILE).read_text()).keys() == {f"small-cnn, {n} x 1 x 16 x 16" for n in (4, 8)}


def test_a_reason_of_another_process_stays(tmp_path):
    name, network = "small-cnn, 4 x 1 x 16 x 16", builder().train()

    def compile_while_another_fails(graph, inputs):
        Compilation(4, tmp_path).note(name, "no compiler there")
        Compilation(4, tmp_path).note("another network", None)
        return graph

    CompiledNetwork(network, Compilation(4, tmp_path, compile_while_another_fails))(noise(4))
    assert read_noted(tmp_path) == {
        name: {"compiled": True, "reason": "no compiler there"},
        "another network": {"compiled": True, "reason": None},
    }


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        '{"a": 1}',
        '{"a": {"compiled": true}}',
        '{"a": {"compiled": 1, "reason": null}}',
        '{"a": {"compiled": true, "reason": 5}}',
        json.dumps({"a": {"compiled": False, "reason": "\x1b[2J"}}),
        json.dumps({"a": {"compiled": False, "reason": "x" * 10_000}}),
        json.dumps({"a\n": {"compiled": False, "reason": None}}),
    ],
)
def test_a_damaged_note_is_said_before_work(tiny, tmp_path, content):
    with pytest.raises(StoppedError):
        run(tiny("fedavg"), tmp_path / "run", display=StopAfterOne())
    (tmp_path / "run" / FILE).write_text(content)
    with pytest.raises(Damaged, match=r"compiled\.json: is damaged .*; bring it back from a copy$"):
        run(tiny("fedavg"), tmp_path / "run", resume=True, display=StopAfterOne())


def test_what_a_compiler_says_can_be_read_again(tmp_path):
    def fail(graph, inputs):
        raise RuntimeError("\x1b[31merror\tat " + "x" * 1000)

    with pytest.warns(Notice, match="error at xxx"):
        CompiledNetwork(builder().train(), Compilation(4, tmp_path, fail))(noise(4))
    assert len(refusals(tmp_path)) == 1


@pytest.fixture
def compiling(monkeypatch):
    """Has runs compile with another backend."""

    def use(backend):
        monkeypatch.setattr("polyclinic.runner.assembly.Compilation", functools.partial(Compilation, backend=backend))

    return use


def test_a_result_says_that_steps_were_compiled(tiny, compiling, tmp_path):
    backend = Counted()
    compiling(backend)
    plain = run(tiny("fedavg"), tmp_path / "plain")
    compiled = run(tiny("fedavg", {"engine.compiled": True}), tmp_path / "compiled")
    assert plain["environment"]["compiled"] is False
    assert compiled["environment"]["compiled"] is True
    assert compiled["weights_sha256"] == plain["weights_sha256"]  # this backend rounds as ever
    assert backend.calls == 3 * 3 * 2 + 1  # rounds, sites, steps
    assert backend.graphs == 1


def test_a_result_says_that_steps_could_not_be_compiled(tiny, compiling, tmp_path):
    compiling(refuse)
    with pytest.warns(UserWarning, match="more slowly: no working compiler"):
        result = run(tiny("fedavg", {"engine.compiled": True}), tmp_path / "run")
    assert result["environment"]["compiled"] is False
    assert any(one.startswith("engine.compiled: lenet5") for one in result["warnings"])
    assert result["weights_sha256"] == run(tiny("fedavg"), tmp_path / "plain")["weights_sha256"]


def test_private_steps_are_not_compiled(tiny, compiling, tmp_path):
    backend = Counted()
    compiling(backend)
    private = {"privacy.on": ["classifier"], "privacy.noise": 1.0, "engine.compiled": True}
    result = run(tiny("fedavg", private), tmp_path / "run")
    assert (backend.graphs, result["environment"]["compiled"]) == (0, False)


class StoppedError(Exception):
    pass


class StopAfterOne(Display):
    def round_done(self, line, rounds):
        raise StoppedError


@pytest.mark.parametrize("still", [True, False])
def test_a_resumed_run_goes_on_with_compiled_steps_or_says_that_it_cannot(tiny, compiling, tmp_path, still):
    compiling(Counted())
    study = tiny("fedavg", {"engine.compiled": True})
    with pytest.raises(StoppedError):
        run(study, tmp_path / "run", display=StopAfterOne())
    if still:
        result = run(study, tmp_path / "run", resume=True)
    else:
        compiling(refuse)
        with pytest.warns(UserWarning, match="though the run was begun with it"):
            result = run(study, tmp_path / "run", resume=True)
    assert result["environment"]["compiled"] is True
    assert any("though the run was begun with it" in one for one in result["warnings"]) is not still


def test_a_resumed_run_keeps_the_setting(tiny, tmp_path):
    run(tiny("fedavg"), tmp_path / "run")
    with pytest.raises(BadInput, match=r"engine\.compiled: .* was begun with False; keep it"):
        run(tiny("fedavg", {"engine.compiled": True}), tmp_path / "run", resume=True)


def test_a_reproducible_run_refuses_compiled_steps(tiny):
    with pytest.raises(BadInput, match="reproducible forbids compiled = true, which rounds differently; set one of"):
        tiny("fedavg", {"engine.reproducible": True, "engine.compiled": True})


@pytest.mark.parametrize("compiled", [False, True])
def test_the_setting_travels_to_worker_processes(tiny, tmp_path, compiled):
    study = tiny("fedavg", {"engine.compiled": compiled})
    spec = Assembly(study, prepare(study.data, study.sites), tmp_path).worker_spec
    for trainer in (assemble_from(spec).trainer(), assemble_from(spec).host().spec.trainer):
        assert trainer.compilation == (Compilation(study.optimizer.batch_size, tmp_path) if compiled else None)


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_recorded_step_holds_the_compiled_network(monkeypatch, whole):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr("polyclinic.training.optimizer.on_gpu", lambda parameters: True)
    backend, ends = Counted(), []
    for compilation in (None, Compilation(4, backend=backend)):
        trainer = make_trainer(compilation)
        trainer.graphs, trainer.records_steps = True, whole
        ends.append(trained(trainer, rounds=3))
    assert_same(*ends)
    assert (backend.graphs, backend.calls) == (1, 3 * STEPS + 1)


def test_weights_that_were_rounded_all_at_once_are_those_of_the_compiled_network(monkeypatch):
    pretend_gpu(monkeypatch)
    network, backend = builder().train(), Counted()
    compiled = CompiledNetwork(network, Compilation(4, backend=backend))
    found = []
    for passes in (network, compiled):
        network.load_state_dict(initial_weights(builder, 0))

        def loss(images, passes=passes):
            with torch.autocast("cpu", torch.bfloat16):
                return passes(images).float().square().mean()

        learn = GraphedGradients(network, loss, half=True)
        for _ in range(WARM_UP + 2):
            learn(noise(4))
        found.append([one.grad.clone() for one in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert backend.graphs == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_and_recorded_training_is_training_on_a_gpu(precision, whole):
    """Passes alone, and whole steps recorded: nearly the weights of neither, and through both."""
    ends, losses = [], []
    for compilation in (None, Compilation(4)):
        table = Optimizer(batch_size=4, lr=1e-3)
        spec = TrainerSpec(
            task=TASK,
            target=TARGET,
            optimizer=table,
            device="cuda",
            precision=precision,
            graphs=compilation is not None,
            compilation=compilation,
        )
        trainer = Trainer(builder(), spec)
        trainer.records_steps &= whole
        trainer.load(initial_weights(builder, 0))
        made = table.make(trainer.parameters(), 1, trainer.kept)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without (a CUDA graph|torch.compile).*")
            losses.append(trainer.train(trainer.batches(PART, torch_rng("gpu")), 4 * STEPS, made))
        ends.append(trainer.weights())
    [compiled] = [one for one in trainer.kept.values() if isinstance(one, CompiledNetwork)]
    assert [one is not trainer.model for one in compiled._compiled.values()] == [True]
    [recorded] = [one for one in trainer.kept.values() if isinstance(one, GraphedGradients)]
    assert bool(recorded.passes.graphs) != whole  # whole steps are graphs of their own
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    for name, wanted in ends[0].items():
        assert torch.allclose(ends[1][name].float(), wanted.float(), atol=5e-3 if precision == "fp32" else 2e-2), name


# --- torch's compiler --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        one if one in ("small-cnn", "lenet5", "unet") else pytest.param(one, marks=pytest.mark.slow)
        for one in BACKBONES.builtin
    ],
)
def test_our_networks_can_be_compiled_as_a_whole(name):
    backend = Counted()
    network = build(name, channels=3, outputs=1, size=64, norm="batch").train()
    assert compile_network(network, backend)(noise(2, 3, 64)).shape[0] == 2
    assert backend.graphs == 1


@pytest.mark.slow
def test_compiled_training_on_a_cpu_is_training(monkeypatch, tmp_path):
    """With torch's own compiler: other last bits, no process left, and files in our folder alone."""
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(inductor.TORCH_CACHE, "")
    monkeypatch.delenv(inductor.TORCH_CACHE)
    wanted = trained(make_trainer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = trained(make_trainer(Compilation(4, tmp_path)))
    assert any_compiled(tmp_path)
    for name in wanted:
        assert torch.allclose(found[name].float(), wanted[name].float(), atol=1e-4), name
    assert any(not torch.equal(found[name], wanted[name]) for name in wanted)
    assert list((tmp_path / "cache" / "compiled").rglob("*.so"))
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True, text=True)
    assert children.stdout.split() == ["ps"]
    again = trained(make_trainer(Compilation(4, tmp_path)))
    assert_same(again, found)
