"""Tables I to IV and Figs. 1 to 7 of "Analysing the Influence of Attack Configurations ..." (Dahlgaard et al. 2022).

100 images, one behind each gradient, LeNet-5 with weights from U(-0.5, 0.5), labels searched for together with the
images, L-BFGS with 100 steps: mean squared error and SSIM of the images that converged, and how many did not (the error
is not below the start's, or is 2 or more). {TG, Unif} x {Euclidean, adaptive Gaussian, fixed lambda²} x lr {0.1, 1};
all with one kind of distance are attacked in one batch (or a few: --at-once).

Where the paper's text and its authors' code differ, both are there (--distances):

  AG      adaptive Gaussian, lambda² = n Var as the text says     AG2    2 n Var, as in one version of the code
  plain   fixed lambda², a kernel for each layer i, weight 1/i    whole  one kernel over all layers, as in the code
  scaled  plain times lambda², which does not stop at L-BFGS' tolerances     Var  lambda² = Var (SAPAG)

From the authors' code come: a new network for each image (--networks one: the same for all), three channels for the
chest X-rays (--chest-channels 1: grey), ResNet-18 with weights from U(-0.5, 0.5), batch norm's too (--resnet-weights
torch: PyTorch's), starts that are scaled by channel (--scaling channel; the text says image, which is our default). Its
scores are given as well, under `their_scoring`: an image failed if its error after the last step is not below that
after the first one, and SSIM has a data range of 2.

Images come from the folder that POLYCLINIC_DATA names (see attack_tables_images.py): chest (a TB collection) and nih
(the paper's own source, from a COVID collection), cifar (CIFAR-10; the paper has CIFAR-100), mnist, omniglot, and svhn
if you put an svhn.npz there (images [N, 32, 32, 3] uint8, labels [N]). The network has 100 outputs on all of them,
which is what makes the paper's 85,000 parameters. --resnet attacks 20 images with ResNet-18 and AdamW as well (a GPU is
advised; products of its matrices are in TF32 there). --figures FOLDER draws images through the steps and curves.

Needs torch and NumPy, Pillow for CIFAR, and matplotlib for figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attack_tables_images import FILES, data_file, load_images
from attack_tables_paper import PAPER_BASELINE, WIDTHS, paper_row
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks import scoring
from polyclinic.attacks.gradient_inversion import networks
from polyclinic.attacks.gradient_inversion.distances import DistanceFrom, euclidean, gaussian
from polyclinic.attacks.gradient_inversion.initialisation import draw
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective
from polyclinic.attacks.gradient_inversion.simulation import Simulation, StackedSimulation
from polyclinic.attacks.solvers.adam import Adam
from polyclinic.attacks.solvers.lbfgs import LBFGS
from polyclinic.attacks.solvers.search import search
from polyclinic.metrics.images import ssim
from polyclinic.randomness import torch_rng

CLASSES = 100
STARTS = {"TG": "transformed-gaussian", "Unif": "uniform"}
NAMED: dict[str, DistanceFrom] = {
    "Eucl": euclidean,
    "AG": partial(gaussian, variance="n-var"),
    "AG2": partial(gaussian, variance="n-var", factor=2.0),
    "Var": partial(gaussian, variance="var"),
}
#: kinds of distance with a fixed lambda²
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"kernel": "per-layer", "scaled": False},
    "scaled": {"kernel": "per-layer", "scaled": True},
    "whole": {"kernel": "whole-gradient", "scaled": False},
}
RESNET_IMAGES = 20


# --- one configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    start: str
    distance: str  #: a name, or a fixed lambda²
    lr: float
    network: str = "LeNet-5"
    form: str = ""  #: of a fixed lambda²


@dataclass(frozen=True)
class Kept:
    """Images [G * N, K, C, H, W] of a group of G configurations at K steps, of which the first is the start."""

    steps: tuple[int, ...]
    images: Tensor
    seconds: float


class Attacked(Objective):
    """What is minimised for a group of configurations that differ in start, learning rate and lambda² only."""

    def __init__(self, *given: Any, widths: Tensor, what: Configuration, **named: Any) -> None:
        """`widths` [N]: each target's lambda², where it is fixed."""
        self.widths, self.what = widths, what
        fixed = partial(gaussian, variance=widths, **FORMS[what.form]) if what.form else None
        super().__init__(*given, distance=fixed or NAMED[what.distance], **named)

    def select_rows(self, rows: Tensor) -> Attacked:
        observed = {name: tensor[rows] for name, tensor in self.observed.items()}
        named = {"image_shape": self.image_shape, "widths": self.widths[rows], "what": self.what}
        return Attacked(self.simulation.select_rows(rows), observed, self.labels, **named)


def network(name: str, images: Tensor, options: argparse.Namespace, row: int) -> nn.Module:
    """The network of an image; with --networks one, row 0 is that of all."""
    channels, size = images.shape[1], images.shape[-1]
    address = ("weights",) if options.networks == "one" else ("weights", row)
    if name == "LeNet-5":
        made: nn.Module = networks.LeNet(channels, CLASSES, size)
        return networks.with_random_weights(made, torch_rng(options.seed, *address))
    widths = tuple(options.resnet_widths)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed + row)
        made = networks.UnstridedResNet18(channels, CLASSES, size, widths)
    if options.resnet_weights == "torch":
        return made
    return networks.with_random_weights(made, torch_rng(options.seed, *address), batch_norm=True)


def simulation_of(name: str, images: Tensor, options: argparse.Namespace) -> Simulation:
    dtype = torch.float64 if options.double else torch.float32
    own = options.networks == "new"
    models = [
        networks.prepare_for_attack(
            network(name, images, options, row).to(options.device, dtype), device=options.device, own_weights=own
        )
        for row in range(len(images) if own else 1)
    ]
    return StackedSimulation(models) if own else Simulation(models[0])


def objective_of(
    group: list[Configuration], images: Tensor, labels: Tensor, options: argparse.Namespace
) -> tuple[Attacked, Tensor]:
    """Every image in every configuration of a group, each as a target of its own, and where they start [G * N, D]."""
    dtype = torch.float64 if options.double else torch.float32
    simulation = simulation_of(group[0].network, images, options)
    hot = F.one_hot(labels, CLASSES)[:, None].to(options.device, dtype)
    with torch.no_grad():
        sent = simulation.of_targets(images[:, None].to(options.device, dtype), hot)
    observed = {name: tensor.repeat(len(group), *(1,) * (tensor.dim() - 1)) for name, tensor in sent.items()}
    repeated = torch.arange(len(images), device=options.device).repeat(len(group))
    starts = [start_of(what.start, images[i].shape, i, options) for what in group for i in range(len(images))]
    widths = torch.tensor([float(what.distance) if what.form else 1.0 for what in group], dtype=dtype)
    widths = widths.repeat_interleave(len(images)).to(options.device)
    objective = Attacked(
        simulation.select_rows(repeated),
        observed,
        FreeLabels((CLASSES,)),
        image_shape=(1, *images.shape[1:]),
        widths=widths,
        what=group[0],
    )
    return objective, torch.stack(starts).to(options.device, dtype)


def start_of(scheme: str, shape: torch.Size, row: int, options: argparse.Namespace) -> Tensor:
    """[D]: image, then label; the same for every distance and learning rate."""
    rng = torch_rng(options.seed, "start", scheme, row)
    sizes = (tuple(shape), (CLASSES,))
    return torch.cat([draw(STARTS[scheme], 1, size, rng, options.scaling).flatten() for size in sizes])


def attack(group: list[Configuration], images: Tensor, labels: Tensor, options: argparse.Namespace) -> Iterator[Kept]:
    """Attack every image in every configuration of a group; with AdamW, what there is after each number of steps."""
    begin = time.perf_counter()
    objective, start = objective_of(group, images, labels, options)
    shape, size = images.shape[1:], images[0].numel()
    if group[0].network == "LeNet-5":
        rates = torch.tensor([what.lr for what in group]).repeat_interleave(len(images))
        optimizer = LBFGS(start, lr=rates, steps=options.steps)
        steps = tuple(sorted({0, 1, *range(0, options.steps, options.every), options.steps}))
        found = search(objective, optimizer, returns="last", trajectory=steps).trajectory
        yield Kept(steps, found.points[..., :size].unflatten(2, shape), time.perf_counter() - begin)
        return
    adam = Adam(start, lr=group[0].lr, steps=options.resnet_steps[0], weight_decay=options.weight_decay)
    kept, taken = [start], [0]
    for steps_in_all in sorted({1, *options.resnet_steps}):  # goes on from where it stood; the authors score step 1
        adam.limit, adam.steps = steps_in_all - int(adam.step_count), steps_in_all
        adam.active = ~(adam.diverged | adam.converged)
        kept.append(search(objective, adam, returns="last").point)
        taken.append(steps_in_all)
        points = torch.stack(kept, 1)[..., :size].unflatten(2, shape)
        if steps_in_all in options.resnet_steps:
            yield Kept(tuple(taken), points, time.perf_counter() - begin)


# --- scores -------------------------------------------------------------------------------------------


def scores_of(images: Tensor, steps: tuple[int, ...], truth: Tensor) -> tuple[dict[str, Any], scoring.TrajectoryScore]:
    """Of one configuration: images [N, K, C, H, W] against [N, C, H, W]."""
    ours = scoring.score_trajectory(images[:, :, None], steps, truth[:, None])
    last = scoring.score(images[:, -1:], truth[:, None], images[:, :1]).summary()
    first = ours.mse[:, steps.index(1)]
    failed = ~((ours.mse[:, -1] < first) & (ours.mse[:, -1] < scoring.FAILED))
    similar = ssim(images[:, -1], truth, data_range=2.0)[~failed]
    theirs = {
        "mse": float(ours.mse[~failed, -1].mean()),
        "ssim": float(similar.mean()),
        "non_converging": int(failed.sum()),
    }
    return {**last, "steps": steps[-1], "their_scoring": theirs}, ours


def row_of(data: str, what: Configuration, scores: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    setting = {"networks": options.networks, "scaling": options.scaling, "chest_channels": options.chest_channels}
    paper = paper_row(data, what.network, what.distance, what.start, what.lr)
    return {"data": data, **asdict(what), **setting, **scores, "paper": paper}


def show(row: dict[str, Any]) -> None:
    paper = row["paper"] or {}
    theirs = ", ".join(f"{name} {value}" for name, value in paper.items() if value is not None) or "no figure"
    print(
        f"{row['data']:<8} {row['network']:<9} {row['start']:<5} {row['distance']:>5} {row['form']:<6} "
        f"lr {row['lr']:<5} {row['steps']:>4} steps: MSE {row['mse']:.2e} SSIM {row['ssim']:.3f} "
        f"failed {row['non_converging']:>3} of {row['images']} ({row['seconds']:.0f} s) | paper: {theirs}",
        flush=True,
    )


# --- all configurations -------------------------------------------------------------------------------


def configurations(data: str, options: argparse.Namespace) -> Iterator[list[Configuration]]:
    """Groups that can be attacked in one batch."""
    choices = [(lr, start) for lr in options.lrs for start in options.starts]
    for distance in options.distances:
        if distance not in FORMS and (options.resnet or options.resnet_only):
            yield [Configuration(start, distance, 1e-3, "ResNet-18") for start in options.starts]
        if options.resnet_only:
            continue
        if distance in FORMS:
            slow = [(lr, start) for lr, start in choices if lr in options.lambda_lrs]
            pairs = [(f"{width:g}", *choice) for width in widths_of(data, options) for choice in slow]
            group = [Configuration(start, width, lr, form=distance) for width, lr, start in pairs]
        else:
            group = [Configuration(start, distance, lr) for lr, start in choices]
        size = max(1, options.at_once // options.images)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def widths_of(data: str, options: argparse.Namespace) -> tuple[float, ...]:
    if options.widths:
        return tuple(options.widths)
    return (200, 1000) if options.quick else (1, *WIDTHS, 2000) if data == "cifar" else WIDTHS


class Figures:
    """Figures like the paper's 1, 2 and 4 to 7 for the configurations with a named distance."""

    def __init__(self, folder: Path | None, image: int) -> None:
        self.folder, self.image = folder, image
        self.rows: dict[tuple[str, str, float], dict[str, Tensor]] = {}
        self.curves: dict[tuple[str, str, float], dict[str, scoring.TrajectoryScore]] = {}

    def add(self, data: str, what: Configuration, images: Tensor, score: scoring.TrajectoryScore) -> None:
        """`images` [N, K, C, H, W] at the steps of the score."""
        if self.folder is None or what.form:
            return
        place, name = (data, what.network, what.lr), f"{what.start} {what.distance}"
        self.rows.setdefault(place, {})[name] = images[min(self.image, len(images) - 1)].cpu()
        self.curves.setdefault(place, {})[name] = score

    def draw(self, truth: Tensor, baseline: dict[str, float], shown: int = 8) -> None:
        """`truth` [N, C, H, W]: the images that were attacked."""
        if self.folder is None:
            return
        from polyclinic.attacks.trajectory_plots import draw_curves, draw_images

        self.folder.mkdir(parents=True, exist_ok=True)
        for (data, name, lr), rows in self.rows.items():
            scores = self.curves[data, name, lr]
            steps = next(iter(scores.values())).steps
            some = sorted({round(k * (len(steps) - 1) / (shown - 1)) for k in range(shown)})
            file = f"{data}-{name}-lr{lr:g}.png"
            chosen = {name: images[some] for name, images in rows.items()}
            true = truth[min(self.image, len(truth) - 1)]
            draw_images(self.folder / f"images-{file}", chosen, [steps[k] for k in some], true)
            draw_curves(self.folder / f"curves-{file}", scores, baseline=baseline, title=f"{data}, {name}, lr {lr:g}")


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    baselines: dict[str, Any] = {}
    for data in options.data:
        figures = Figures(options.figures, options.figure_image)
        if data == "svhn" and not data_file(data).is_file():
            print("svhn: left out, as there is no svhn.npz in the folder that POLYCLINIC_DATA names")
            continue
        images, labels = load_images(data, options.images, options.seed, chest_channels=options.chest_channels)
        baselines[data] = {"ours": scoring.random_other_image(images), "paper": PAPER_BASELINE.get(data)}
        print(f"{data}: another image at random gives {baselines[data]['ours']}")
        for group in configurations(data, options):
            resnet = group[0].network == "ResNet-18"
            count = min(len(images), RESNET_IMAGES) if resnet else len(images)
            tf32 = resnet or options.tf32  # its size asks for it; L-BFGS would lose its way
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            truth = images[:count].to(options.device)
            for kept in attack(group, images[:count], labels[:count] % CLASSES, options):
                for what, found in zip(group, kept.images.chunk(len(group)), strict=True):
                    scores, on_the_way = scores_of(found, kept.steps, truth)
                    figures.add(data, what, found, on_the_way)
                    rows.append(row_of(data, what, {**scores, "seconds": round(kept.seconds / len(group), 1)}, options))
                    show(rows[-1])
                written = figures_of(rows, baselines, options)
                if options.json:  # as they come, so that an interrupted benchmark keeps what it has found
                    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
            figures.draw(images, baselines[data]["ours"])
    print(json.dumps(figures_of(rows, baselines, options)))


def figures_of(rows: list[dict[str, Any]], baselines: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    figures = {
        "benchmark": "attack_tables",
        "quick": options.quick,
        "precision": "fp64" if options.double else "tf32" if options.tf32 else "fp32",
        "baselines": baselines,
        "rows": rows,
    }
    return json.loads(json.dumps(figures), parse_constant=lambda name: None)  # no mean if nothing converged


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 images, 20 steps, two values of lambda²")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--data", nargs="+", choices=tuple(FILES), default=["chest"])
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--images", type=int, help="targets; 100 if not given (8 with --quick)")
    parser.add_argument("--steps", type=int, help="steps of L-BFGS, each of up to 20 iterations; 100 (20 with --quick)")
    parser.add_argument("--every", type=int, default=5, help="steps of L-BFGS between two points of a curve")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.1, 1.0], help="of L-BFGS")
    parser.add_argument("--lambda-lrs", type=float, nargs="+", default=[0.1], help="of those, for a fixed lambda²")
    parser.add_argument("--widths", type=float, nargs="+", help="values of a fixed lambda²; the paper's if not given")
    parser.add_argument("--networks", choices=("new", "one"), default="new", help="for each image, or one for all")
    parser.add_argument("--scaling", choices=("image", "channel"), default="image", help="what of a start fills [0, 1]")
    parser.add_argument("--chest-channels", type=int, choices=(1, 3), default=3, help="of chest X-rays")
    parser.add_argument("--resnet", action="store_true", help="ResNet-18 with AdamW on 20 images, too")
    parser.add_argument("--resnet-only", action="store_true", help="only that")
    parser.add_argument(
        "--resnet-weights", choices=("uniform", "torch"), default="uniform", help="U(-0.5, 0.5), or its own"
    )
    parser.add_argument("--resnet-widths", type=int, nargs=4, default=[64, 128, 256, 512], help="channels; for trials")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW; torch's default, as in the code")
    parser.add_argument(
        "--resnet-steps", type=int, nargs="+", default=[5000], help="of AdamW; scores after each of these numbers"
    )
    parser.add_argument(
        "--distances",
        nargs="+",
        choices=(*NAMED, *FORMS),
        default=["Eucl", "AG", "AG2", "plain", "whole"],
        help="Euclidean, adaptive Gaussian (n Var, 2 n Var), SAPAG, and all fixed lambda² in one of three forms",
    )
    parser.add_argument("--figures", type=Path, help="draw images through the steps, and curves, into this folder")
    parser.add_argument("--figure-image", type=int, default=0, help="which image is drawn")
    parser.add_argument("--at-once", type=int, help="targets in one batch; 3600 on a GPU, 400 on a CPU")
    parser.add_argument("--double", action="store_true", help="float64 instead of float32")
    parser.add_argument("--tf32", action="store_true", help="TF32 for LeNet-5, too, as torch 1.8 had it on new GPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.at_once = options.at_once or (400 if options.device == "cpu" else 3600)
    options.images = options.images or (8 if options.quick else 100)
    options.steps = options.steps or (20 if options.quick else 100)
    return options


if __name__ == "__main__":
    main()
