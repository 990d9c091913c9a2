"""Tables I to IV of "Analysing the Influence of Attack Configurations ..." (Dahlgaard et al. 2022), ours beside theirs.

100 images, one behind each gradient, LeNet-5 with weights from U(-0.5, 0.5), labels searched for together with the
images, L-BFGS with 100 steps: mean squared error and SSIM of the images that converged, and how many did not (the error
is not below the start's, or is 2 or more). {TG, Unif} x {Euclidean, adaptive Gaussian, fixed lambda²} x lr {0.1, 1};
all with one kind of distance are attacked in one batch (or a few: --at-once).

Images come from the folder that POLYCLINIC_DATA names: mnist.npz (28 px), cifar10_subset_jpeg.npz (32 px; the
paper has CIFAR-100), tb_cxr_64.npz and covid_cxr_64.npz (chest X-rays, halved to 32 px; the paper has NIH's). The
network has 100 outputs on all of them, which is what makes the paper's 85,000 parameters. A fixed lambda² comes in two
forms: the paper's, 1 - exp(-D / lambda²), and the same times lambda², which has the same minimum and does not stop at
L-BFGS' tolerances. --resnet attacks 20 images with ResNet-18 and AdamW as well (a GPU is advised; products of its
matrices are in TF32 there).

Needs torch and NumPy, and Pillow for CIFAR.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from polyclinic.attacks import scoring
from polyclinic.attacks.gradient_inversion import networks
from polyclinic.attacks.gradient_inversion.distances import DISTANCES, gaussian
from polyclinic.attacks.gradient_inversion.initialisation import draw
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective
from polyclinic.attacks.gradient_inversion.simulation import Simulation
from polyclinic.attacks.solvers.adam import Adam
from polyclinic.attacks.solvers.lbfgs import LBFGS
from polyclinic.attacks.solvers.search import Optimizer, search
from polyclinic.randomness import numpy_rng, torch_rng

CLASSES = 100
STARTS = {"TG": "transformed-gaussian", "Unif": "uniform"}
FORMS = ("plain", "scaled")
WIDTHS = (50, 100, 150, 200, 500, 800, 1000, 1500)  # the columns of Table I
#: the paper's figures by data, lr, distance and start: (MSE, SSIM, non-converging); None where it has none
PAPER: dict[tuple[str, float, str, str], tuple[float | None, float | None, int]] = {}


def _paper(data: str, lr: float, names: tuple[Any, ...], start: str, mse: Any, ssim: Any, failed: Any) -> None:
    for i, name in enumerate(names):
        PAPER[data, lr, str(name), start] = (mse[i] if mse else None, ssim[i] if ssim else None, failed[i])


# Table I, and its lambda² of "AG"; Table II; Table III; Table IV
_CHEST = (*WIDTHS, "AG")
_paper(
    "chest",
    0.1,
    _CHEST,
    "TG",
    (8.6e-2, 3.8e-2, 5.1e-3, 4.7e-3, 6.1e-3, 8.6e-3, 7.2e-3, 1.1e-2, 9.6e-3),
    (0.11, 0.67, 0.87, 0.88, 0.85, 0.83, 0.83, 0.81, 0.85),
    (36, 30, 26, 19, 7, 6, 4, 6, 10),
)
_paper(
    "chest",
    0.1,
    _CHEST,
    "Unif",
    (1.4e-1, 5.9e-2, 1.8e-2, 1.4e-2, 8.3e-3, 9.3e-3, 1.7e-2, 1.1e-2, 2.1e-2),
    (0.07, 0.54, 0.78, 0.83, 0.81, 0.79, 0.77, 0.76, 0.81),
    (34, 19, 26, 24, 10, 3, 8, 3, 8),
)
_paper("chest", 1.0, ("Eucl", "AG"), "TG", None, None, (21, 13))
_paper("chest", 1.0, ("Eucl", "AG"), "Unif", None, None, (27, 10))
_paper("chest", 0.1, ("Eucl",), "TG", None, None, (5,))
_paper("chest", 0.1, ("Eucl",), "Unif", None, None, (8,))
_CIFAR = (*WIDTHS, 2000, "AG")
_paper(
    "cifar",
    0.1,
    _CIFAR,
    "TG",
    (3.24e-1, 1.37e-1, 4.47e-2, 1.37e-2, 1.99e-2, 6.44e-3, 1.52e-2, 7.60e-3, 8.05e-3, 5.71e-3),
    (0.012, 0.483, 0.726, 0.783, 0.846, 0.833, 0.707, 0.814, 0.802, 0.850),
    (35, 15, 18, 14, 12, 6, 3, 3, 5, 6),
)
_paper(
    "cifar",
    0.1,
    _CIFAR,
    "Unif",
    (1.54e-1, 7.36e-2, 1.28e-2, 6.48e-3, 7.80e-3, 1.35e-2, 1.05e-2, 1.20e-2, 1.29e-2, 9.96e-3),
    (0.054, 0.553, 0.831, 0.851, 0.809, 0.776, 0.778, 0.750, 0.734, 0.783),
    (24, 16, 27, 14, 7, 5, 8, 3, 10, 7),
)
_paper("cifar", 0.1, ("Eucl",), "TG", None, None, (4,))
_paper("cifar", 0.1, ("Eucl",), "Unif", None, None, (5,))
_paper("mnist", 0.1, ("Eucl", "AG"), "TG", None, None, (4, 8))
_paper("mnist", 0.1, ("Eucl", "AG"), "Unif", None, None, (4, 8))
# Table IV counts 2 (TG) and 13 (Unif) failures of AG on CIFAR where Table III has 6 and 7: both are the paper's
PAPER_TWICE = {("cifar", 0.1, "AG", "TG"): 2, ("cifar", 0.1, "AG", "Unif"): 13}
PAPER_BASELINE = {"chest": {"mse": 0.050, "ssim": 0.526}}


# --- images -------------------------------------------------------------------------------------------


def load_images(data: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`count` images [N, C, H, W] in [0, 1], drawn at random, and their labels [N]."""
    folder = Path(os.environ.get("POLYCLINIC_DATA", ""))
    files = {
        "mnist": ("mnist.npz",),
        "cifar": ("cifar10_subset_jpeg.npz",),
        "chest": ("tb_cxr_64.npz", "covid_cxr_64.npz"),
    }
    found = [folder / name for name in files[data] if (folder / name).is_file()]
    if not os.environ.get("POLYCLINIC_DATA") or not found:
        wanted = " or ".join(files[data])
        raise SystemExit(f"POLYCLINIC_DATA: no {wanted} in '{folder}'; set it to the folder with the images")
    with np.load(found[0], allow_pickle=False) as archive:
        labels = archive["test_labels" if data == "mnist" else "labels"].reshape(-1)
        rows = np.sort(numpy_rng(seed, "targets", data).choice(len(labels), count, replace=False))
        pixels = (
            packed(archive, rows) if data == "cifar" else archive["test_images" if data == "mnist" else "images"][rows]
        )
    images = torch.from_numpy(pixels).float() / 255
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    if data == "chest":
        images = F.avg_pool2d(images, images.shape[-1] // 32)
    return images.contiguous(), torch.from_numpy(labels[rows].astype(np.int64))


def packed(archive: Any, rows: np.ndarray) -> np.ndarray:
    """Some images of an archive of JPEGs, [N, 32, 32, 3] uint8."""
    from PIL import Image

    data, offsets = archive["jpeg"], archive["jpeg_off"]
    pictures = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in rows]
    return np.stack([np.asarray(picture) for picture in pictures])


# --- one configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    start: str
    distance: str  #: Eucl, AG, or a fixed lambda²
    lr: float
    network: str = "LeNet-5"
    form: str = ""  #: of a fixed lambda²: plain or scaled


class Attacked(Objective):
    """What is minimised for a group of configurations that differ in start, learning rate and lambda² only."""

    def __init__(self, *given: Any, widths: Tensor, form: str, **named: Any) -> None:
        """`widths` [N]: each target's lambda², where `form` is plain or scaled."""
        self.widths, self.form = widths, form
        distance = partial(gaussian, variance=widths, scaled=form == "scaled") if form in FORMS else DISTANCES[form]
        super().__init__(*given, distance=distance, **named)

    def select_rows(self, rows: Tensor) -> Attacked:
        observed = {name: tensor[rows] for name, tensor in self.observed.items()}
        named = {"image_shape": self.image_shape, "widths": self.widths[rows], "form": self.form}
        return Attacked(self.simulation, observed, self.labels, **named)


def optimizer_of(group: list[Configuration], start: Tensor, options: argparse.Namespace) -> Optimizer:
    """`start` has as many rows for each configuration of the group."""
    if group[0].network == "ResNet-18":
        return Adam(start, lr=group[0].lr, steps=options.resnet_steps[0])
    rates = torch.tensor([what.lr for what in group]).repeat_interleave(len(start) // len(group))
    return LBFGS(start, lr=rates, steps=options.steps)


def network(name: str, images: Tensor, seed: int) -> nn.Module:
    channels, size = images.shape[1], images.shape[-1]
    if name == "LeNet-5":
        return networks.with_random_weights(networks.LeNet(channels, CLASSES, size), torch_rng(seed, "weights"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return networks.ResNet18(channels, CLASSES, size)


def attack(
    group: list[Configuration], images: Tensor, labels: Tensor, options: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """Attack every image in every configuration of a group, each as a target of its own, and score what comes back: at
    the end, or with AdamW after each number of steps that was asked for."""
    begin = time.perf_counter()
    dtype = torch.float64 if options.double else torch.float32
    model = network(group[0].network, images, options.seed).to(options.device, dtype)
    simulation = Simulation(networks.prepare_for_attack(model, device=options.device))
    hot = F.one_hot(labels, CLASSES)[:, None].to(options.device, dtype)
    with torch.no_grad():
        sent = vmap(simulation)(images[:, None].to(options.device, dtype), hot)
    observed = {name: tensor.repeat(len(group), *(1,) * (tensor.dim() - 1)) for name, tensor in sent.items()}
    starts = [start_of(what.start, images[i].shape, i, options.seed) for what in group for i in range(len(images))]
    start = torch.stack(starts).to(options.device, dtype)
    first, shape = group[0], (1, *images.shape[1:])
    form = first.form or {"Eucl": "euclidean", "AG": "adaptive-gaussian"}[first.distance]
    widths = torch.tensor([float(what.distance) if what.form else 1.0 for what in group], dtype=dtype)
    widths = widths.repeat_interleave(len(images)).to(options.device)
    objective = Attacked(simulation, observed, FreeLabels((CLASSES,)), image_shape=shape, widths=widths, form=form)
    optimizer = optimizer_of(group, start, options)
    for steps in options.resnet_steps if isinstance(optimizer, Adam) else [options.steps]:
        if isinstance(optimizer, Adam):  # goes on from where it stood
            optimizer.limit, optimizer.steps = steps - int(optimizer.step_count), steps
            optimizer.active = ~(optimizer.diverged | optimizer.converged)
        found = search(objective, optimizer, returns="last")
        ends, begins = (objective.unpack(point)[0].cpu().chunk(len(group)) for point in (found.point, start))
        told = {"steps": steps, "seconds": round((time.perf_counter() - begin) / len(group), 1)}
        yield [{**scoring.score(e, images[:, None], b).summary(), **told} for e, b in zip(ends, begins, strict=True)]


def start_of(scheme: str, shape: torch.Size, row: int, seed: int) -> Tensor:
    """[D]: image, then label; the same for every distance and learning rate."""
    rng = torch_rng(seed, "start", scheme, row)
    drawn = [draw(STARTS[scheme], 1, size, rng).flatten() for size in (tuple(shape), (CLASSES,))]
    return torch.cat(drawn)


# --- all configurations -------------------------------------------------------------------------------


def configurations(data: str, options: argparse.Namespace) -> Iterator[list[Configuration]]:
    """Groups that can be attacked in one batch."""
    starts, widths = options.starts, (200, 1000) if options.quick else (*WIDTHS, 2000) if data == "cifar" else WIDTHS
    choices = [(lr, start) for lr in (0.1, 1.0) for start in starts]
    for distance in options.distances:
        if distance not in FORMS and (options.resnet or options.resnet_only):
            yield [Configuration(start, distance, 1e-3, "ResNet-18") for start in starts]
        if options.resnet_only:
            continue
        if distance in FORMS:
            group = [Configuration(start, str(width), lr, form=distance) for width in widths for lr, start in choices]
        else:
            group = [Configuration(start, distance, lr) for lr, start in choices]
        size = max(1, options.at_once // options.images)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def row_of(data: str, what: Configuration, ours: dict[str, Any]) -> dict[str, Any]:
    key = (data, what.lr, what.distance, what.start)
    theirs = PAPER.get(key) if what.network == "LeNet-5" else (None, None, 0) if data == "chest" else None
    paper = None if theirs is None else dict(zip(("mse", "ssim", "non_converging"), theirs, strict=True))
    if paper is not None and key in PAPER_TWICE and what.network == "LeNet-5":
        paper["non_converging_in_table_iv"] = PAPER_TWICE[key]
    return {
        "data": data,
        "network": what.network,
        "start": what.start,
        "distance": what.distance,
        "form": what.form,
        "lr": what.lr,
        **ours,
        "paper": paper,
    }


def show(row: dict[str, Any]) -> None:
    paper = row["paper"] or {}
    theirs = ", ".join(f"{name} {value}" for name, value in paper.items() if value is not None) or "no figure"
    print(
        f"{row['data']:<6} {row['network']:<9} {row['start']:<5} {row['distance']:>5} {row['form']:<6} "
        f"lr {row['lr']:<5} {row['steps']:>4} steps: MSE {row['mse']:.2e} SSIM {row['ssim']:.3f} "
        f"failed {row['non_converging']:>3} of {row['images']} ({row['seconds']:.0f} s) | paper: {theirs}",
        flush=True,
    )


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    baselines: dict[str, Any] = {}
    for data in options.data:
        images, labels = load_images(data, options.images, options.seed)
        baselines[data] = {"ours": scoring.random_other_image(images), "paper": PAPER_BASELINE.get(data)}
        print(f"{data}: another image at random gives {baselines[data]['ours']}")
        for group in configurations(data, options):
            count = min(len(images), 20) if group[0].network == "ResNet-18" else len(images)
            tf32 = group[0].network == "ResNet-18"  # its size asks for it; L-BFGS would lose its way
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            for found in attack(group, images[:count], labels[:count] % CLASSES, options):
                for what, ours in zip(group, found, strict=True):
                    rows.append(row_of(data, what, ours))
                    show(rows[-1])
                figures = figures_of(rows, baselines, options)
                if options.json:  # as they come, so that an interrupted benchmark keeps what it has found
                    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def figures_of(rows: list[dict[str, Any]], baselines: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    figures = {
        "benchmark": "attack_tables",
        "quick": options.quick,
        "precision": "fp64" if options.double else "fp32",
        "baselines": baselines,
        "rows": rows,
    }
    return json.loads(json.dumps(figures), parse_constant=lambda name: None)  # no mean if nothing converged


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 images, 20 steps, two values of lambda²")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--data", nargs="+", choices=("chest", "cifar", "mnist"), default=["chest"])
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--images", type=int, help="targets; 100 if not given (8 with --quick)")
    parser.add_argument("--steps", type=int, help="steps of L-BFGS, each of up to 20 iterations; 100 (20 with --quick)")
    parser.add_argument("--resnet", action="store_true", help="ResNet-18 with AdamW on 20 images, too")
    parser.add_argument("--resnet-only", action="store_true", help="only that")
    parser.add_argument(
        "--resnet-steps", type=int, nargs="+", default=[5000], help="of AdamW; scores after each of these numbers"
    )
    parser.add_argument(
        "--distances",
        nargs="+",
        choices=("Eucl", "AG", *FORMS),
        default=["Eucl", "AG", *FORMS],
        help="Euclidean, adaptive Gaussian, and all fixed lambda² in the plain or the scaled form",
    )
    parser.add_argument("--at-once", type=int, help="targets in one batch; 3600 on a GPU, 400 on a CPU")
    parser.add_argument("--double", action="store_true", help="float64 instead of float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.at_once = options.at_once or (400 if options.device == "cpu" else 3600)
    options.images = options.images or (8 if options.quick else 100)
    options.steps = options.steps or (20 if options.quick else 100)
    return options


if __name__ == "__main__":
    main()
