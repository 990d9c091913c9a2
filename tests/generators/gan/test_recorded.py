"""Steps recorded as a CUDA graph: what can be checked without a GPU. A recording is played here step by step."""

from __future__ import annotations

import pytest
import torch
from pretended_gpu import BrokenGraph, PretendedGraph, pretend_gpu

from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.generators.gan.central import CentralTerm
from polyclinic.generators.gan.model import GAN
from polyclinic.generators.gan.owners import Federated, Images, Owners
from polyclinic.generators.gan.recorded import Recorded, Tape
from polyclinic.generators.gan.trainer import Dice, StackDice
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target
from polyclinic.training.graphs import WARM_UP

CPU = torch.device("cpu")
TWO = Target(classes=("dark", "bright"))


def dice(seed: int = 0) -> Dice:
    return Dice(torch.Generator().manual_seed(seed), CPU)


def draw_some(own: Dice, coin: Dice) -> dict[str, torch.Tensor]:
    noise = own.normal(3) + own.uniform(3)
    return {"sum": (noise * coin.below(5, 3)).clone()}


@pytest.mark.parametrize("graph", [PretendedGraph, BrokenGraph])
def test_a_recorded_step_draws_the_same_numbers_in_the_same_order(graph, monkeypatch, recwarn):
    pretend_gpu(monkeypatch, graph)
    recorded, plain = Recorded(draw_some, (dice(1), dice(2))), (dice(1), dice(2))
    for call in range(WARM_UP + 3):
        assert torch.equal(recorded()["sum"], draw_some(*plain)["sum"].clone()), call
    assert len(recwarn) == (graph is BrokenGraph)


def test_a_tape_gives_the_same_tensors_again():
    tape = Tape(dice())
    kept = [tape.normal(2), tape.uniform(2), tape.below(7, 2)]
    before = [one.clone() for one in kept]
    tape.renew()
    tape.rewind()
    again = [tape.normal(2), tape.uniform(2), tape.below(7, 2)]
    assert all(a is b for a, b in zip(kept, again, strict=True))
    assert not torch.equal(before[0], again[0])


def test_one_generator_may_serve_a_whole_stack():
    many = StackDice(torch.Generator().manual_seed(0), 3, CPU)
    assert many.normal(2, 4).shape == (3, 2, 4)
    assert many.uniform(5).shape == (3, 5)
    assert int(many.below(2, 50).max()) == 1


# --- owners -------------------------------------------------------------------------------------------


def pictures(count: int, seed: int) -> Images:
    made = torch.randint(0, 256, (count, 1, 28, 28), generator=torch_rng("pictures", seed), dtype=torch.uint8)
    return Images(made, torch.arange(count) % 2)


def owners(recordable: bool = False, **changes) -> Owners:
    chosen = GENERATORS["dcgan"](**{"width": 2, "latent": 4, "batch_size": 4})
    assert isinstance(chosen, GAN)
    held = {"a": pictures(10, 1), "b": pictures(7, 2), "c": pictures(8, 3)}
    term = CentralTerm(towards="other", **changes)
    federations = [Federated(0, 2.0, held), Federated(1, 0.0, held)]
    built = Owners(chosen, term, federations, TWO)
    if recordable:  # what `recorded=True` does, with a count on the device and a recording that a CPU can play
        built.duel.taken = torch.zeros(())
        built.recorded = Recorded(built._step, (built.dice, built.coin))
    return built


@pytest.mark.parametrize("changes", [{}, {"frozen": 2, "warm_up": 1}])
def test_recorded_owners_learn_the_same(changes, monkeypatch):
    pretend_gpu(monkeypatch)
    plain, recorded = owners(**changes), owners(recordable=True, **changes)
    for _ in range(WARM_UP + 4):
        plain.step()
        told = recorded.step()
    assert set(told) == {"discriminator", "generator", "recognised"}
    assert recorded.recorded is not None
    assert recorded.recorded.graphed.graphs
    for member in range(len(plain.names)):
        theirs = recorded.pairs.state(member)
        for name, tensor in plain.pairs.state(member).items():
            # the average moves by the same share, computed in another order
            assert torch.allclose(theirs[name], tensor, atol=1e-6 if name.startswith("average") else 0, rtol=0), name


def test_recording_waits_until_steps_are_alike(monkeypatch):
    pretend_gpu(monkeypatch)
    recorded = owners(recordable=True, frozen=2)
    for _ in range(2):
        recorded.step()
    assert recorded.recorded is not None
    assert recorded.recorded.graphed.calls.total() == 0
    recorded.step()
    assert recorded.recorded.graphed.calls.total() == 1


def test_only_a_gpu_records():
    chosen = GENERATORS["dcgan"]()
    assert isinstance(chosen, GAN)
    with pytest.raises(BadInput, match="recorded on a CUDA device, and not on 'cpu'"):
        Owners(chosen, CentralTerm(), [Federated(0, 1.0, {"a": pictures(4, 1)})], TWO, recorded=True)


def test_samples_of_all_owners_are_those_of_each():
    built = owners()
    for _ in range(3):
        built.step()
    labels = torch.arange(6) % 2
    every = built.samples(labels, "test")
    for place, (federation, name) in enumerate(built.names):
        rng = torch_rng(built.federations[federation].seed, name, "test")
        alone = built.model(federation, name).sample(labels, rng)
        assert (every[place].int() - alone.int()).abs().max() <= 1
