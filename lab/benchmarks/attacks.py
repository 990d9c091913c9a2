"""Attacking many targets at once against attacking them one by one, both doing the same iterations, end to end.

One by one is what the papers' codes do, written here in plain PyTorch: the network as it is, autograd.grad with
create_graph, torch.optim.LBFGS or AdamW, a Python loop over targets. It is timed on a few targets spread evenly over
the same set, and its time *per target* is compared with ours per target. Both start from the same points, in the same
precision, in turns, and the median of each counts. On a CPU both are timed with one and with two threads, and the
faster counts for each (small products gain nothing from a second thread, and on a busy machine lose much). CPU seconds
with one thread are given as well: other work on the machine hardly changes their ratio.

With --device cuda, LeNet-5 runs in full float32; ResNet-18 lets both sides use TF32, which its size asks for.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from measuring import Clock, finish, flags, machine, tf32
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion import networks
from polyclinic.attacks.gradient_inversion.objective import FreeLabels, Objective, Simulation, cross_entropy
from polyclinic.attacks.gradient_inversion.solver import draw
from polyclinic.attacks.solvers.optimizers import LBFGS, Adam
from polyclinic.attacks.solvers.search import BatchedOptimizer, SearchResult, search
from polyclinic.randomness import torch_rng

CLASSES, SIZE = 100, 32
SHAPE = (3, SIZE, SIZE)


@dataclass(frozen=True)
class Case:
    """A network and an optimiser, how far to go, and what is to be reached."""

    name: str
    steps: int
    reference_targets: int
    goal: float
    network: Callable[[], nn.Module]
    ours: Callable[[Tensor, int], BatchedOptimizer]
    theirs: Callable[[list[Tensor]], torch.optim.Optimizer]


def lbfgs(points: Tensor, steps: int) -> BatchedOptimizer:
    return LBFGS(points, lr=0.1, steps=steps)


def adamw(points: Tensor, steps: int) -> BatchedOptimizer:
    return Adam(points, lr=1e-3, steps=steps)


def lenet() -> nn.Module:
    return networks.with_random_weights(networks.LeNet(classes=CLASSES, size=SIZE), torch_rng(0, "weights"))


def resnet() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return networks.UnstridedResNet18(classes=CLASSES, size=SIZE)


def cases(options: argparse.Namespace) -> list[Case]:
    gpu = options.device != "cpu"
    steps = options.steps or (100 if gpu and not options.quick else 10 if gpu else 3 if options.quick else 10)
    few = 3 if gpu else 6
    found = [
        Case(
            "LeNet-5 + L-BFGS",
            steps,
            few,
            100.0 if gpu else 4.0,
            lenet,
            lbfgs,
            lambda variables: torch.optim.LBFGS(variables, lr=0.1),
        )
    ]
    if gpu or options.resnet or options.only == "resnet":
        steps = options.resnet_steps or (10 if options.quick else 100)
        make = lambda variables: torch.optim.AdamW(variables, lr=1e-3, weight_decay=0.0)  # noqa: E731
        found.append(Case("ResNet-18 + AdamW", steps, 2, 40.0, resnet, adamw, make))
    return {"lenet": found[:1], "resnet": found[1:], None: found}[options.only]


def images_and_labels(count: int) -> tuple[Tensor, Tensor]:
    """Smooth random pictures [N, 1, 3, 32, 32] in [0, 1] and one-hot labels [N, 1, 100]."""
    rng = torch_rng(0, "pictures")
    coarse = torch.rand(count, 3, 6, 6, generator=rng)
    pictures = F.interpolate(coarse, SIZE, mode="bicubic", align_corners=False).clamp(0, 1)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    return pictures[:, None], F.one_hot(labels, CLASSES).float()[:, None]


def starts(count: int) -> Tensor:
    """[N, D]: the images, then the labels' logits."""
    rng = torch_rng(0, "starts")
    images = draw("transformed-gaussian", count, SHAPE, rng).flatten(1)
    return torch.cat((images, draw("transformed-gaussian", count, (CLASSES,), rng)), 1)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The update that a site sends for one batch."""
    return [g.detach() for g in torch.autograd.grad(cross_entropy(model(images), labels), list(model.parameters()))]


def at_once(
    case: Case, model: nn.Module, sent: list[list[Tensor]], points: Tensor, options: argparse.Namespace
) -> SearchResult:
    """Our attack on all targets, `chunk` of them in a batch; smaller batches if the device's memory asks for it."""
    try:
        groups = range(0, len(points), options.chunk)
        parts = [batch_at_once(case, model, sent, points, slice(i, i + options.chunk), options) for i in groups]
    except torch.OutOfMemoryError:
        if options.chunk == 1:
            raise
        options.chunk = -(-options.chunk // 2)
        print(f"out of memory: going on with {options.chunk} targets in a batch", flush=True)
        torch.cuda.empty_cache()
        return at_once(case, model, sent, points, options)
    names = ("point", "loss", "evaluations", "converged", "diverged")
    joined = [torch.cat([getattr(part, name) for part in parts]) for name in names]
    return SearchResult(*joined, trajectory=parts[0].trajectory)  # nothing was asked to be kept


def batch_at_once(
    case: Case, model: nn.Module, sent: list[list[Tensor]], points: Tensor, rows: slice, options: argparse.Namespace
) -> SearchResult:
    simulation = Simulation(networks.prepare_for_attack(model, device=options.device))
    layers = zip(simulation.names, *sent[rows], strict=True)
    observed = {name: torch.stack(tensors) for name, *tensors in layers}
    objective = Objective(simulation, observed, FreeLabels((CLASSES,)), image_shape=(1, *SHAPE))
    return search(objective, case.ours(points[rows], case.steps), returns="last", graphs=not options.no_graphs)


def one_by_one(case: Case, model: nn.Module, sent: list[list[Tensor]], points: Tensor) -> tuple[Tensor, int]:
    """The plain loop: what it ends with [R, D], and how many evaluations it made."""
    ends, evaluations = [], 0
    for target, point in zip(sent, points, strict=True):
        end, count = attack_one(case, model, target, point)
        ends.append(end)
        evaluations += count
    return torch.stack(ends), evaluations


def attack_one(case: Case, model: nn.Module, target: list[Tensor], point: Tensor) -> tuple[Tensor, int]:
    size = SIZE * SIZE * 3
    image = point[:size].reshape(1, *SHAPE).clone().requires_grad_()
    label = point[size:].reshape(1, CLASSES).clone().requires_grad_()
    optimizer = case.theirs([image, label])
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = cross_entropy(model(image), label.softmax(-1))
        simulated = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        distance = torch.zeros((), device=point.device)
        for s, t in zip(simulated, target, strict=True):
            distance = distance + ((s - t) ** 2).sum()
        distance.backward()
        return distance

    for _ in range(case.steps):
        optimizer.step(closure)
    return torch.cat((image.detach().flatten(), label.detach().flatten())), evaluations


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    count = options.targets
    images, labels = images_and_labels(count)
    model = case.network().to(options.device).train()
    pairs = zip(images.to(options.device), labels.to(options.device), strict=True)
    sent = [gradients(model, image, label) for image, label in pairs]
    points = starts(count).to(options.device)
    chosen = [round(i * (count - 1) / max(1, case.reference_targets - 1)) for i in range(case.reference_targets)]
    counts = sorted({1, options.threads}) if options.device == "cpu" else [options.threads]
    with tf32(case.name.startswith("ResNet")):
        warm_up(case, model, sent, points, options)
        few = [sent[i] for i in chosen]
        ours, theirs = [], []
        for threads in counts * options.repeats:  # in turns, so that other work on the machine meets both
            ours.append(timed(lambda: at_once(case, model, sent, points, options), threads))
            theirs.append(timed(lambda: one_by_one(case, model, few, points[chosen]), threads))
            print(
                f"{case.name}: {ours[-1].seconds:.2f} s at once, {theirs[-1].seconds:.2f} s for {len(few)}", flush=True
            )
    found, (ends, evaluations) = ours[0].result, theirs[0].result
    fast, slow = faster_median(ours), faster_median(theirs)
    share = count / len(chosen)
    return {
        "case": case.name,
        "device": machine(options.device)["device"],
        "targets": count,
        "steps": case.steps,
        "targets_in_a_batch": min(options.chunk, count),
        "reference_targets": len(chosen),
        "threads": [fast.threads, slow.threads],
        "seconds_at_once": round(fast.seconds, 3),
        "seconds_at_once_of_each_run": [round(run.seconds, 3) for run in ours],
        "seconds_one_by_one_measured": round(slow.seconds, 3),
        "seconds_one_by_one_of_each_run": [round(run.seconds, 3) for run in theirs],
        "seconds_one_by_one_scaled_to_all": round(slow.seconds * share, 1),
        "evaluations_per_target_at_once": round(float(found.evaluations.double().mean()), 1),
        "evaluations_per_target_one_by_one": round(evaluations / len(chosen), 1),
        "ratio": round(slow.seconds * share / fast.seconds, 2),
        "ratio_of_cpu_seconds_with_one_thread": round(theirs[0].cpu_seconds * share / ours[0].cpu_seconds, 2),
        "goal": case.goal,
        **agreement(found, ends, chosen, images),
    }


def agreement(found: SearchResult, ends: Tensor, chosen: list[int], images: Tensor) -> dict[str, Any]:
    """Mean squared errors of the same targets, ours and theirs: alike, if both did the same."""
    size = SIZE * SIZE * 3
    truth = images[chosen].flatten(1)
    errors = [(p[:, :size].cpu() - truth).square().mean(1) for p in (found.point[chosen], ends)]
    return {
        "mse_at_once": [float(f"{value:.3g}") for value in errors[0]],
        "mse_one_by_one": [float(f"{value:.3g}") for value in errors[1]],
        "diverged": int(found.diverged.sum()),
        "converged": int(found.converged.sum()),
        **({"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if ends.is_cuda else {}),
    }


def warm_up(
    case: Case, model: nn.Module, sent: list[list[Tensor]], points: Tensor, options: argparse.Namespace
) -> None:
    """Both sides once, briefly, so that neither pays for libraries being loaded."""
    short = replace(case, steps=1)
    few = min(len(points), options.chunk) if options.device != "cpu" else 2
    at_once(short, model, sent[:few], points[:few], options)
    one_by_one(short, model, sent[:1], points[:1])


@dataclass(frozen=True)
class Timing:
    result: Any
    seconds: float
    cpu_seconds: float
    threads: int


def faster_median(runs: list[Timing]) -> Timing:
    """The median run with each number of threads, and of these the fastest."""
    by_threads = [[run for run in runs if run.threads == threads] for threads in {run.threads for run in runs}]
    medians = [sorted(some, key=lambda run: run.seconds)[len(some) // 2] for some in by_threads]
    return min(medians, key=lambda run: run.seconds)


def timed(work: Callable[[], Any], threads: int) -> Timing:
    torch.set_num_threads(threads)
    clock = Clock()
    clock.start()
    result = work()
    clock.stop()
    return Timing(result, clock.wall, clock.cpu, threads)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    rows = []
    for case in cases(options):
        rows.append(measure(case, options))
        print({name: rows[-1][name] for name in ("case", "targets", "seconds_at_once", "ratio")}, flush=True)
    figures = {"benchmark": "attacks", "quick": options.quick, "torch": torch.__version__, "rows": rows}
    finish(figures, options)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "fewer steps")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--steps", type=int, help="steps of L-BFGS, each of up to 20 iterations")
    parser.add_argument("--resnet-steps", type=int, help="steps of AdamW on ResNet-18")
    parser.add_argument("--resnet", action="store_true", help="ResNet-18 on a CPU, too (slow, and nothing to gain)")
    parser.add_argument("--only", choices=["lenet", "resnet"], help="one of the two networks")
    parser.add_argument("--chunk", type=int, default=100, help="targets in one batch; fewer need less memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="of both sides in turns; the median of each counts")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
