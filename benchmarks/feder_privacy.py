"""Fig. 3 of FedER: how near a generator comes to its training images, with and without the privacy loss.

A GAN is trained in two phases on the images of one source. After each, training images and held-out ones are projected
into its latent space, a classifier is trained on its images alone, and fidelity is measured. "Farther" is decided by a
Kolmogorov-Smirnov test between the distances of training images after phase 1 and after phase 2.

POLYCLINIC_DATA (or --data) names the folder of real images; without it, chest phantoms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feder_data import CLASSES, MAKERS
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from polyclinic.attacks.projection import Projected, Projection
from polyclinic.data.contact_sheet import contact_sheet
from polyclinic.data.datasets import SOURCES
from polyclinic.data.parts import ImageSet
from polyclinic.data.pixels import to_uint8
from polyclinic.generators import GENERATORS, private_tuning
from polyclinic.generators.base import GeneratorModel
from polyclinic.generators.private_tuning import Meter, PrivateTuning, fit
from polyclinic.generators.stylegan2.model import StyleGAN2Model
from polyclinic.metrics.perceptual import perceptual_distance
from polyclinic.models import build, initial_weights
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.tasks import TASKS, Target
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

SHOWN = 10
CLASSIFIER_STEPS = 600


def main() -> None:
    options = _options()
    started = time.monotonic()
    images, labels, classes = read(options)
    order = torch.randperm(len(images), generator=torch_rng(options.seed, "fig3", "order"))
    count = min(options.train, len(images) // 2)
    member, held = order[:count], order[count:]
    target = Target(classes)
    settings = GENERATORS[options.generator].model_validate({"name": options.generator, **json.loads(options.set)})
    model = settings.build(
        channels=images.shape[1],
        size=images.shape[-1],
        target=target,
        seed=options.seed,
        device=options.device,
        precision=options.precision,
    )
    tuning = PrivateTuning.model_validate(
        {
            "alpha": options.alpha,
            "most_steps": options.steps,
            "most_tuning_steps": options.tuning_steps,
            "patience": options.patience,
            "check_every": options.check_every,
            "measured": options.measured,
            **json.loads(options.tuning),
        }
    )
    phases = train(model, images[member], labels[member], tuning, options)
    found: dict[str, Any] = {
        "benchmark": "feder_privacy",
        "quick": options.quick,
        "data": f"{options.task} {options.source}" if options.data else "chest phantoms",
        "generator": options.generator,
        "training images": count,
        "alpha": options.alpha,
        "seed": options.seed,
        "tuning": tuning.model_dump(mode="json"),
        "start": options.start,
        "phases": {},
    }
    projected: dict[str, Projected] = {}
    starts: dict[str, Tensor | None] = {"training": None, "held-out": None}
    for name, (state, figures) in phases.items():
        model.load(state)
        some = slice(options.projected)
        near = project(model, images[member][some], labels[member][some], starts["training"], options)
        far = project(model, images[held][some], labels[held][some], starts["held-out"], options)
        if options.start == "same-w":  # the second generator begins where the first one did
            starts = {"training": near.start, "held-out": far.start}
        projected[name] = near
        auc = trained_on_samples(model, labels[member], (images[held], labels[held]), target, options)
        found["phases"][name] = figures | {
            "distance of training images": quartiles(near.distances),
            "distance of held-out images": quartiles(far.distances),
            "p, training images nearer than held-out": _nearer(near.distances, far.distances),
            "AUC of a classifier trained on samples": auc,
        }
        print(f"{time.monotonic() - started:5.0f} s: {name}: {json.dumps(found['phases'][name])}", flush=True)
    found["AUC of a classifier trained on real images"] = scored(
        images[member], labels[member], (images[held], labels[held]), target, options
    )
    if len(projected) == 2:
        found |= compared(projected, found["phases"])
    if options.histogram and len(projected) == 2:
        draw_histogram(projected, Path(options.histogram))
    if options.sheet:
        rows = {"training": images[member][:SHOWN]}
        rows |= {f"nearest, {name[:7]}": to_uint8(one.images[:SHOWN]) for name, one in projected.items()}
        contact_sheet(rows, Path(options.sheet))
    found["seconds"] = round(time.monotonic() - started, 1)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


def train(
    model: GeneratorModel, images: Tensor, labels: Tensor, tuning: PrivateTuning, options: argparse.Namespace
) -> dict[str, tuple[dict[str, Tensor], dict[str, float]]]:
    """State and figures after each phase. Phase 1 is `fit` with alpha 0; phase 2 goes on from there."""
    rng, found = torch_rng(options.seed, "fig3", "fit"), {}

    def told(what: str, done: int, total: int, distance: float) -> None:
        print(f"{what}: {done} steps, FD {distance:.1f}", flush=True)

    first = fit(model, images, labels, rng, tuning.model_copy(update={"alpha": 0.0}), progress=told)
    found["plain"] = (model.state(), {name.removeprefix("phase1_"): value for name, value in first.items()})
    if options.alpha:
        meter = Meter(images, labels, tuning, torch_rng(options.seed, "fig3", "meter"), model.device)
        loss = private_tuning.privacy_loss(tuning, private_tuning.distance_named(tuning.distance, model.device))
        steps = private_tuning.steps_of(model, images, labels, rng)
        limit = tuning.growth * meter(model)
        taken = private_tuning.until_it_grows(model, steps, meter, tuning.lengths(), loss, limit, told)
        found["privacy loss"] = (model.state(), {**taken._asdict(), **meter.summary(model)})
    return found


# --- projection ---------------------------------------------------------------------------------------


def project(
    model: GeneratorModel, images: Tensor, labels: Tensor, start: Tensor | None, options: argparse.Namespace
) -> Projected:
    """As the attack does it. `start`: the styles w to begin with, as in the paper, not this generator's closest."""
    attack = Projection(iterations=options.iterations, conditional=not isinstance(model, StyleGAN2Model), at_once=100)
    distance = perceptual_distance(device=options.device)
    known = labels if attack.conditional else None
    return attack.run(
        model.latent_space(), images, distance, labels=known, start=start, seed=options.seed, device=options.device
    )


def draw_histogram(projected: dict[str, Projected], file: Path) -> None:
    """Fig. 3: how far training images are from their projections, without the privacy loss and with it."""
    colours = {"plain": "tab:blue", "privacy loss": "tab:red"}
    values = {name: one.distances.numpy() for name, one in projected.items()}
    edges = np.linspace(0, max(float(some.max()) for some in values.values()), 31)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, distances in values.items():
        axes.hist(
            distances, edges, alpha=0.55, color=colours[name], label=f"{name} (median {np.median(distances):.2f})"
        )
    axes.set_xlabel(f"{projected['plain'].features} distance of a training image to its projection")
    axes.set_ylabel("training images")
    axes.legend()
    figure.savefig(file, dpi=150)


def compared(projected: dict[str, Projected], phases: dict[str, Any]) -> dict[str, Any]:
    """With the privacy loss against without it: are training images farther, and what did it cost?"""
    plain, private = projected["plain"].distances, projected["privacy loss"].distances
    both = stats.ks_2samp(plain, private)
    farther = stats.ks_2samp(plain, private, alternative="greater")
    aucs = [phases[name]["AUC of a classifier trained on samples"] for name in ("plain", "privacy loss")]
    return {
        "KS": float(both.statistic),
        "p that training images are farther by chance": float(farther.pvalue),
        "median ratio": float(private.median() / plain.median()),
        "AUC lost": aucs[0] - aucs[1],
        "holds": bool(farther.pvalue < 0.01 and aucs[0] - aucs[1] <= 0.02),
    }


def _nearer(near: Tensor, far: Tensor) -> float:
    return float(stats.ks_2samp(near, far, alternative="greater").pvalue)


def quartiles(values: Tensor) -> list[float]:
    return [round(float(v), 5) for v in np.quantile(values.numpy(), [0.25, 0.5, 0.75])]


# --- what a classifier learns from samples ------------------------------------------------------------


def trained_on_samples(
    model: GeneratorModel,
    labels: Tensor,
    test: tuple[Tensor, Tensor],
    target: Target,
    options: argparse.Namespace,
) -> float:
    """AUC on real held-out images of a network that has seen made ones only; the mean of three networks."""
    wanted = torch.arange(max(options.samples, len(labels))) % len(target.classes)
    made = model.sample(wanted, torch_rng(options.seed, "fig3", "samples"))
    return scored(made, wanted, test, target, options)


def scored(
    images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor], target: Target, options: argparse.Namespace
) -> float:
    task = TASKS["classification"](name="classification")
    part, tested = ImageSet(images.numpy(), labels.numpy()), ImageSet(test[0].numpy(), test[1].numpy())
    aucs = []
    for number in range(3):

        def builder():
            return build(
                "small-cnn", channels=images.shape[1], outputs=task.outputs(target), size=images.shape[-1], norm="batch"
            )

        optimizer = Optimizer(name="adam", lr=1e-3, augment=("flip",))
        spec = TrainerSpec(task=task, target=target, optimizer=optimizer, device=options.device, graphs=True)
        trainer = Trainer(builder(), spec)
        model = trainer.load(initial_weights(builder, seed_of(options.seed, "fig3", number)))
        rng = torch_rng(options.seed, "fig3", "batches", number)
        trainer.train(trainer.batches(part, rng), options.classifier_steps, optimizer.make(model.parameters(), 1))
        aucs.append(task.finish(trainer.evaluate(tested))["auc"])
    return float(np.mean(aucs))


# --- images, options ----------------------------------------------------------------------------------


def read(options: argparse.Namespace) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images uint8 [N, C, H, W] of one source, labels, and the names of the classes."""
    if not options.data:
        source = SOURCES["chest-phantom"].model_validate(
            {"source": "chest-phantom", "size": options.size, "samples": 2 * options.train}
        )
        drawn = source.load()
        labels = torch.from_numpy(np.asarray(drawn.labels))
        return torch.from_numpy(np.asarray(drawn.images)), labels, tuple(drawn.classes)
    found = MAKERS[options.task](Path(options.data), options.size)
    here = found["site"] == options.source
    images = torch.from_numpy(found["images"][here])
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(found["labels"][here]), CLASSES[options.task]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps on phantoms: does it run?")
    parser.add_argument("--json", help="write the figures into this file")
    parser.add_argument("--sheet", help="draw training images and their projections into this file")
    parser.add_argument("--histogram", help="draw the distances of training images to their projections into this file")
    parser.add_argument(
        "--start",
        choices=("same-w", "own"),
        default="same-w",
        help="where the second generator's search begins: at the first one's points, as in the paper, or its own",
    )
    parser.add_argument("--tuning", default="{}", help='more settings of [tuning], as JSON: {"scale": "sum"}')
    parser.add_argument("--data", default=os.environ.get("POLYCLINIC_DATA"), help="folder of the real images")
    parser.add_argument("--task", choices=tuple(MAKERS), default="chest")
    parser.add_argument("--source", default="tuberculosis", help="whose images, as the task names its sites")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--train", type=int, default=600, help="training images; the others are held out")
    parser.add_argument("--generator", choices=tuple(GENERATORS), default="dcgan")
    parser.add_argument("--set", default="{}", help="settings of the generator, as JSON")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2000, help="at most, in the first phase")
    parser.add_argument("--tuning-steps", type=int, default=500, help="at most, in the second phase")
    parser.add_argument("--patience", type=int, default=1000)
    parser.add_argument("--check-every", type=int, default=200)
    parser.add_argument("--measured", type=int, default=500)
    parser.add_argument("--projected", type=int, default=200, help="images of each kind that are projected")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--classifier-steps", type=int, default=CLASSIFIER_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    if options.quick:
        options.data, options.train, options.steps, options.check_every, options.patience = None, 24, 4, 2, 2
        options.measured, options.projected, options.iterations, options.size = 20, 6, 4, 28
        options.samples, options.classifier_steps, options.tuning_steps = 32, 4, 4
    return options


if __name__ == "__main__":
    main()
