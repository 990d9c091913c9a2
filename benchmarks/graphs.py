"""CUDA graphs on a real GPU: the four users give the same numbers with graphs as without, and how much faster they are.

The users: a site's training steps, GANs stacked on one GPU, StyleGAN2's steps, the iterations of a gradient inversion.
The fifth row checks the way back: a function that CUDA cannot record goes on with ordinary calls, its random numbers
included. Exit 1 where numbers differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import polyclinic
from polyclinic.attacks.gradient_inversion.networks import LeNet, prepare_for_attack, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective
from polyclinic.attacks.gradient_inversion.simulation import Simulation, cross_entropy
from polyclinic.attacks.solvers.lbfgs import LBFGS
from polyclinic.attacks.solvers.search import search
from polyclinic.data.parts import ImageSet
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.generators.stylegan2.model import StyleGAN2
from polyclinic.methods.shared import gan_site
from polyclinic.methods.shared.training_gans import NETWORKS
from polyclinic.models import build, initial_weights
from polyclinic.randomness import device_rng, torch_rng
from polyclinic.study.tables import parse_study
from polyclinic.tasks import TASKS, Target
from polyclinic.training.graphs import WARM_UP, GraphedFunction
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

TWO = Target(("dark", "bright"))
#: a user's work: with graphs or without, for so many steps; the numbers it ends with
Work = Callable[[bool, int], Tensor]


def training(graphs: bool, steps: int) -> Tensor:
    """Weights of a ResNet-18 after some steps of Adam, on batches of two sizes."""
    task = TASKS["classification"](name="classification")

    def builder() -> Any:
        return build("resnet18", channels=1, outputs=task.outputs(TWO), size=32, norm="batch")

    images = np.random.default_rng(0).integers(0, 256, (64, 1, 32, 32), dtype=np.uint8)
    part, rng = ImageSet(images, np.arange(64) % 2), torch_rng("graphs", "batches")
    optimizer = Optimizer(name="adam", lr=1e-4, batch_size=16)
    trainer = Trainer(builder(), TrainerSpec(task=task, target=TWO, optimizer=optimizer, device="cuda", graphs=graphs))
    model = trainer.load(initial_weights(builder, 0))
    for size in (16, 12):
        trainer.optimizer = optimizer.model_copy(update={"batch_size": size})
        trainer.train(trainer.batches(part, rng), steps // 2, optimizer.make(model.parameters(), 1))
    return flat(trainer.weights())


def stacked_gans(graphs: bool, steps: int) -> Tensor:
    """Weights of three sites' GANs, which train as one stack, after some steps of FELICIA."""
    tables: dict[str, Any] = {
        "data": {"source": "skin-phantom", "size": 28, "samples": 90},
        "sites": {"partition": "iid", "count": 3},
        "model": {"backbone": "lenet5"},
        "method": {"name": "felicia", "rounds": 1, "steps": steps, "learner_steps": 1, "images": 8},
        "generator": {"name": "dcgan", "width": 8, "latent": 16, "batch_size": 8},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"device": "cuda", "precision": "fp32", "graphs": graphs},
    }
    gan_site.GRAPH_PAYS = 1  # record however short the round is
    with tempfile.TemporaryDirectory() as folder:
        result = polyclinic.run(parse_study(tables), Path(folder) / "run")
        manifest = json.loads((result.folder / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
        states = [read_state(result.folder, s, SitePosition(*at)) for s, at in manifest["sites"].items()]
        return torch.cat([flat(state.group(NETWORKS)) for state in states])


def stylegan2(graphs: bool, steps: int) -> Tensor:
    """Weights of the generator after some steps, all regularisers and augmentation included."""
    settings = StyleGAN2(width=4, latent=16, batch_size=8, graphs=graphs)
    model = settings.build(channels=3, size=32, target=TWO, seed=0, device="cuda")
    training = model.begin(noise(32, 3, 32, "stylegan2"), torch.arange(32) % 2, torch_rng("graphs", "stylegan2"))
    training.p.fill_(0.3)
    for _ in range(steps):
        training.step()
    return flat(training.generator.state_dict())


def inversion(graphs: bool, steps: int) -> Tensor:
    """Where L-BFGS gets from four gradients of a LeNet, in float64."""
    model = with_random_weights(LeNet(channels=1, classes=5, size=16), torch_rng("graphs", "weights")).double()
    truth = torch.rand(4, 1, 1, 16, 16, generator=torch_rng("graphs", "images"), dtype=torch.float64)
    sent = [gradients(model, images, torch.eye(5)[[row]].double()) for row, images in enumerate(truth)]
    simulation = Simulation(prepare_for_attack(model, device="cuda"))
    observed = {name: torch.stack([one[name] for one in sent]).cuda() for name in simulation.names}
    objective = Objective(simulation, observed, FreeLabels((5,)), image_shape=(1, 1, 16, 16))
    start = torch.rand(4, 256 + 5, generator=torch_rng("graphs", "start"), dtype=torch.float64).cuda()
    return search(objective, LBFGS(start, lr=1.0, steps=max(1, steps // 20)), returns="last", graphs=graphs).point.cpu()


def gradients(model: torch.nn.Module, images: Tensor, label: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(cross_entropy(model(images), label), parameters)
    return dict(zip(names, found, strict=True))


def fallback(graphs: bool, steps: int) -> Tensor:
    """Random numbers of a function that reads a number from the GPU: no recording, and the same numbers."""
    rng = device_rng(torch.device("cuda"), "graphs", "fallback")

    def draw(x: Tensor) -> Tensor:
        numbers = torch.rand(3, generator=rng, device="cuda") + torch.nn.functional.dropout(x)
        return numbers * float(x.sum())

    torch.manual_seed(0)
    call = GraphedFunction(draw, "a function that reads a number", rngs=[rng]) if graphs else draw
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.stack([call(torch.full((3,), float(n), device="cuda")) for n in range(WARM_UP + 4)])
    if graphs and len(said) != 1:
        raise SystemExit(f"graphs: one warning was due, and there were {[str(one.message) for one in said]}")
    return found.cpu()


#: each user's work, and the fewest steps by which it can be longer
CASES: dict[str, tuple[Work, int]] = {
    "training": (training, 2),
    "stacked GANs": (stacked_gans, 1),
    "StyleGAN2": (stylegan2, 1),
    "gradient inversion": (inversion, 20),
    "fallback": (fallback, 1),
}
#: steps after which numbers are compared: rounding, which differs, grows with every step of a training
COMPARED = 20


def measure(name: str, steps: int) -> dict[str, Any]:
    """Numbers agree if they differ by no more than a tenth of what one step more would change, or than three times what
    two runs without graphs differ by: sums on a GPU have no fixed order."""
    work, least = CASES[name]
    plain, graphed = work(False, COMPARED), work(True, COMPARED)
    difference, rounding = distance(graphed, plain), distance(work(False, COMPARED), plain)
    one_step = distance(work(False, COMPARED + least), plain)
    return {
        "case": name,
        "difference": difference,
        "difference of two runs without graphs": rounding,
        "what one step more changes": one_step,
        "agrees": difference <= max(0.1 * one_step, 3 * rounding),
        "seconds without graphs": timed(work, False, steps),
        "seconds with graphs": timed(work, True, steps),
    }


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def timed(work: Work, graphs: bool, steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work(graphs, steps)
    torch.cuda.synchronize()
    return round(time.perf_counter() - started, 3)


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([one.detach().cpu().double().flatten() for one in state.values()])


def noise(count: int, channels: int, size: int, name: str) -> Tensor:
    return torch.randint(256, (count, channels, size, size), dtype=torch.uint8, generator=torch_rng("graphs", name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="time 60 steps of each user instead of 400")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("graphs: there is no CUDA device here; run it on a machine with a GPU", file=sys.stderr)
        raise SystemExit(2)
    rows = []
    for name in CASES:
        rows.append(measure(name, 60 if options.quick else 400))
        print(rows[-1], flush=True)
    figures = {"benchmark": "graphs", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    raise SystemExit(0 if all(row["agrees"] for row in rows) else 1)


if __name__ == "__main__":
    main()
