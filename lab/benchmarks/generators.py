"""How good a VQ-VAE-2 is on real images: what comes back, what its samples teach, and how long it takes.

For each seed it fits the autoencoder and the prior on the training images and then trains the same small network from
the same weights for the same number of steps on real images, on reconstructions, and on samples alone. As in a study,
the network released is the one that was best on real validation images; how the last one does on the (real) test
images is shown beside it. POLYCLINIC_DATA names the folder with pneumoniamnist.npz and boneage_rsna_male_64.npz.

On a machine without the package (PYTHONPATH=src) it needs, beside torch and NumPy, pydantic and monai with what they
depend on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import finish, flags, now
from torch import Tensor

from polyclinic.generators.base import FitOptions
from polyclinic.generators.probe import real_or_replayed
from polyclinic.generators.vqvae2.model import VQVAE2, VQVAE2Model
from polyclinic.metrics.images import pooled_psnr
from polyclinic.models import Backbone, build, initial_weights
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.tasks import Classification, Regression, Target, Task
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

SAMPLED = 1000  # images whose sampling is timed
CHECKS = 10  # how often a learner is scored on validation images
LEARNERS = 3  # networks trained on each kind of images, per seed: on 624 test images one alone says little


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [N, C, H, W] and labels [N] as a trainer takes them; the package's own ImageSet would have to bring
    all readers of medical files along."""

    images: np.ndarray
    labels: np.ndarray
    masks: None = None
    cases: None = None

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Case:
    """Images, what is learned from them, and the generator's settings, in full and in a hurry."""

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    target: Target
    task: Task
    metric: str
    full: VQVAE2
    quick: VQVAE2
    steps: int  #: optimiser steps of the network that learns the task
    quick_steps: int

    @property
    def size(self) -> int:
        return self.train.images.shape[-1]

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]


def pneumonia(folder: Path) -> Case:
    data = np.load(folder / "pneumoniamnist.npz", allow_pickle=False)
    full = VQVAE2(width=32, epochs=10, lr=1e-3, prior_width=48, prior_epochs=5)  # minutes on two cores
    return Case(
        "pneumonia",
        ImageSet(data["train_images"][:, None], data["train_labels"]),
        ImageSet(data["val_images"][:, None], data["val_labels"]),
        ImageSet(data["test_images"][:, None], data["test_labels"]),
        Target(classes=("normal", "pneumonia")),
        Classification(),
        "auc",
        full,
        full.model_copy(update={"epochs": 4, "prior_epochs": 2}),
        steps=1000,
        quick_steps=200,
    )


def bone_age(folder: Path) -> Case:
    data = np.load(folder / "boneage_rsna_male_64.npz", allow_pickle=False)
    images, months = data["images"][:, None], data["boneage_months"].astype(np.float32)
    order = torch.randperm(len(images), generator=torch_rng("bone age", "split")).numpy()
    test, validation, train = (np.sort(part) for part in np.split(order, [1000, 1500]))
    full = VQVAE2(width=64, epochs=30, prior_width=64, prior_epochs=20)
    return Case(
        "boneage",
        ImageSet(images[train], months[train]),
        ImageSet(images[validation], months[validation]),
        ImageSet(images[test], months[test]),
        Target(unit="months", label_range=(0.0, 240.0)),
        Regression(),
        "mae",
        full,
        full.model_copy(update={"width": 32, "epochs": 2, "lr": 1e-3, "prior_width": 32, "prior_epochs": 1}),
        steps=3000,
        quick_steps=300,
    )


CASES: dict[str, Callable[[Path], Case]] = {"pneumonia": pneumonia, "boneage": bone_age}


def measure(case: Case, settings: VQVAE2, steps: int, seed: int, device: str) -> dict[str, Any]:
    precision = "bf16" if device.startswith("cuda") else "fp32"
    model = settings.build(
        channels=case.channels, size=case.size, target=case.target, seed=seed, device=device, precision=precision
    )
    images, labels = torch.from_numpy(case.train.images), torch.from_numpy(case.train.labels)
    watch = Stopwatch()
    model.fit_codes(images, torch_rng(seed, "codes"), FitOptions(report=say))
    row: dict[str, Any] = {"seed": seed, "autoencoder_seconds": watch.lap()}
    codes = model.encode(images)
    row["encode_seconds"] = watch.lap()
    row["prior_loss"] = model.fit_prior(codes, labels, torch_rng(seed, "prior"), FitOptions(report=say))
    row["prior_seconds"] = watch.lap()
    model.sample(labels[:SAMPLED], torch_rng(seed, "speed"))
    row["seconds_for_1000_samples"] = watch.lap()
    sampled, back = model.sample(labels, torch_rng(seed, "samples")), model.decode(codes)
    row |= quality(model, case, images, back, codes)
    row |= taught(case, {"real": images, "reconstructed": back, "sampled": sampled}, steps, seed, device)
    row["probe_reconstructed_auc"] = real_or_replayed(
        images, back, torch_rng(seed, "probe"), paired=True, device=device
    )["auc"]
    row["probe_sampled_auc"] = real_or_replayed(images, sampled, torch_rng(seed, "probe"), device=device)["auc"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


class Stopwatch:
    """Seconds from lap to lap, waiting for a GPU to be done."""

    def __init__(self) -> None:
        self.last = now()

    def lap(self) -> float:
        before, self.last = self.last, now()
        return self.last - before


def quality(model: VQVAE2Model, case: Case, images: Tensor, back: Tensor, codes: dict[str, Tensor]) -> dict[str, float]:
    usage = model.usage(codes)
    return {
        "psnr_train": pooled_psnr(images, back, data_range=255),
        "psnr_test": model.quality(case.test.images)["psnr"],
        "usage_top": usage["top"],
        "usage_bottom": usage["bottom"],
    }


def taught(case: Case, kinds: dict[str, Tensor], steps: int, seed: int, device: str) -> dict[str, float]:
    """The test metric of networks trained on each kind of images with the same labels, mean over learners."""
    found: dict[str, float] = {}
    for kind, images in kinds.items():
        part = ImageSet(images.numpy(), case.train.labels)
        scores = [learn(case, part, steps, seed_of(seed, "learner", number), device) for number in range(LEARNERS)]
        best, last = (statistics.mean(values) for values in zip(*scores, strict=True))
        found |= {f"{case.metric}_{kind}": best, f"{case.metric}_{kind}_last": last}
        print(f"  {case.metric} trained on {kind}: {best:.4f}, after the last step {last:.4f}", flush=True)
    return found


def learn(case: Case, part: ImageSet, steps: int, seed: int, device: str) -> tuple[float, float]:
    """The test metric of a small network trained on a part: as it was best on validation images, and at the end."""

    def builder() -> Backbone:
        outputs = case.task.outputs(case.target)
        return build("small-cnn", channels=case.channels, outputs=outputs, size=case.size)

    optimizer = Optimizer(augment=("flip",))
    trainer = Trainer(builder(), TrainerSpec(task=case.task, target=case.target, optimizer=optimizer, device=device))
    trainer.load(initial_weights(builder, seed))
    batches = trainer.batches(part, torch_rng(seed, "batches"))
    optimizer = torch.optim.Adam(trainer.model.parameters(), 1e-3)
    sign = 1 if case.task.better == "higher" else -1
    best, kept = -float("inf"), trainer.weights()
    for number in range(CHECKS):
        optimizer.param_groups[0]["lr"] = 1e-3 if number < CHECKS // 2 else 1e-4
        trainer.train(batches, steps // CHECKS, optimizer)
        score = sign * score_on(trainer, case, case.validation)
        if score > best:
            best, kept = score, trainer.weights()
    last = score_on(trainer, case, case.test)
    trainer.load(kept)
    return score_on(trainer, case, case.test), last


def score_on(trainer: Trainer, case: Case, part: ImageSet) -> float:
    return case.task.finish(trainer.evaluate(part))[case.metric]


def say(stage: str, done: int, epochs: int, loss: float) -> None:
    print(f"  {stage} {done}/{epochs}: {loss:.4f}", file=sys.stderr, flush=True)


def summary(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds, and whether the targets are met."""
    means = {name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "seed"}
    spread = {name: statistics.stdev([row[name] for row in rows]) for name in means} if len(rows) > 1 else {}
    real, back, sampled = (means[f"{case.metric}_{kind}"] for kind in ("real", "reconstructed", "sampled"))
    kept = sampled / real if case.metric == "auc" else real / sampled
    loss = real - back if case.metric == "auc" else back - real
    found = {
        "mean": {name: round(value, 4) for name, value in means.items()},
        "std": {name: round(value, 4) for name, value in spread.items()},
        "lost_by_reconstruction": round(loss, 4),
        "kept_by_samples": round(kept, 4),
        "more_than_half_of_bottom_codes_used": means["usage_bottom"] > 0.5,
    }
    if case.metric == "auc":
        found |= {"reconstruction_within_0.01": loss <= 0.01, "samples_reach_0.95": kept >= 0.95}
    return found


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    case = CASES[options.data](real_data())
    settings, steps = (case.quick, case.quick_steps) if options.quick else (case.full, case.steps)
    settings = VQVAE2.model_validate({**settings.model_dump(), **json.loads(options.set)})
    rows = []
    for seed in range(options.seeds or (1 if options.quick else 3)):
        rows.append(measure(case, settings, options.steps or steps, seed, options.device))
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        "benchmark": "generators",
        "data": case.name,
        "quick": options.quick,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "generator": settings.model_dump(),
        "seeds": rows,
        **summary(case, rows),
    }
    finish(figures, options)


def real_data() -> Path:
    folder = os.environ.get("POLYCLINIC_DATA")
    if not folder:
        raise SystemExit("POLYCLINIC_DATA is not set: it names the folder with the real images")
    return Path(folder)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "one seed, and few epochs")
    parser.add_argument("--data", choices=sorted(CASES), default="pneumonia", help="which images")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=auto, help=f"where to compute (here: {auto})")
    parser.add_argument("--threads", type=int, help="threads to compute with")
    parser.add_argument("--seeds", type=int, help="how many seeds")
    parser.add_argument("--steps", type=int, help="optimiser steps of the networks that learn the task")
    parser.add_argument("--set", default="{}", help="other settings of the generator, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
