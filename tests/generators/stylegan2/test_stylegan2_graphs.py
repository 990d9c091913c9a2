"""StyleGAN2's steps can be recorded, and a recorded step is the step."""

from __future__ import annotations

import collections

import pytest
import torch
from pretended_gpu import pretend_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from polyclinic.generators.stylegan2 import training
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.tasks import Target
from polyclinic.training.gpu.graphs import WARM_UP


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
    monkeypatch.setattr("polyclinic.generators.stylegan2.layers.uses_gpu_kernels", lambda x: True)
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


def test_steps_with_graphs_are_the_steps_to_the_last_bit(monkeypatch):
    """On a pretended GPU: the numbers drawn, the order of the steps, the regularisers between them."""
    plain, graphed = stepping(), stepping()
    pretend_gpu(monkeypatch)
    graphed._stream = torch.cuda.Stream()
    for name in ("_even_out", "_tell_apart", "_flatten"):
        setattr(graphed, name, graphed._graphed(getattr(graphed, name)))
    for _ in range(WARM_UP + 3):
        plain.step()
        graphed.step()
        assert torch.equal(graphed.loss, plain.loss)
    assert graphed._learners[None].graphs
    theirs = graphed.networks.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in plain.networks.state_dict().items())


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
