"""StyleGAN2's steps can be recorded, and a recorded step is the step."""

from __future__ import annotations

import collections

import pytest
import torch
from pretended_gpu import Nothing, Stream
from torch.utils._python_dispatch import TorchDispatchMode

from polyclinic.generators.stylegan2 import graphs as stylegan2_graphs
from polyclinic.generators.stylegan2 import training
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.tasks import Target


def stepping(device="cpu", **settings):
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=rng)
    model = StyleGAN2(width=2, latent=8, batch_size=8, **settings).build(
        channels=3, size=32, target=Target(("dark", "bright")), seed=0, device=device
    )
    steps = model.begin(images, torch.arange(16) % 2, rng)
    steps.p.fill_(0.3)
    return steps


class Counted(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", ["_learn", "_tell_apart", "_flatten", "_even_out"])
def test_a_step_fetches_no_number_from_the_cpu_and_asks_the_gpu_for_none(monkeypatch, step):
    """Either would end a recording. Optimisers are left out: on a GPU they are others."""
    monkeypatch.setattr("polyclinic.generators.stylegan2.layers.on_gpu", lambda x: True)
    monkeypatch.setattr(training, "_descend", lambda optimizer, loss: loss.backward())
    steps = stepping()
    steps.step()  # what is kept from the first time on
    real, labels = next(steps.batches)
    given = (labels,) if step == "_even_out" else (real, labels)
    with Counted() as counted:
        getattr(steps, step)(*given)
    assert counted.calls["convolution"] > 0
    assert not {"lift_fresh", "nonzero", "masked_select", "unique"} & set(counted.calls)
    asked = 0 if step == "_even_out" else 1  # for p, on a CPU only
    assert counted.calls["_local_scalar_dense"] == asked


def test_inputs_of_another_shape_are_worked_on_without_a_recording(monkeypatch):
    """A stand-in for a GPU: what is recorded is a call, and a replay repeats it."""
    recorded = []

    class Graph:
        def register_generator_state(self, rng): ...

        def replay(self):
            recorded.append(work.function(*work.inputs))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Nothing)
    monkeypatch.setattr(torch.cuda, "stream", Nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    seen = []
    work = stylegan2_graphs.Recorded(lambda x: seen.append(x.tolist()), torch.Generator(), Stream())
    for value in range(stylegan2_graphs.WARM_UP):
        work(torch.full((2,), value))
    assert (seen, recorded) == ([[0, 0], [1, 1]], [])
    work(torch.tensor([5, 6]))  # recorded, and replayed with what was given
    assert seen[2:] == [[5, 6], [5, 6]]
    work(torch.tensor([7, 8]))
    work(torch.tensor([9]))
    assert seen[4:] == [[7, 8], [9]]
    assert len(recorded) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_are_the_steps():
    losses = {}
    for graphs in (False, True):
        steps = stepping("cuda", graphs=graphs)
        losses[graphs] = []
        for _ in range(6):
            steps.step()
            losses[graphs].append(float(steps.loss))
    assert losses[True] == pytest.approx(losses[False], abs=1e-3)
