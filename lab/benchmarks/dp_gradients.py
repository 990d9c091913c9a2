"""Private gradients on this machine's device: right for every backbone, and how long a private step takes.

For every backbone, and for VQ-VAE-2, the sum of clipped gradients of a batch, as private training computes it, is
compared with a loop over the images of the batch, one at a time, on the same device: ghost clipping, ghost clipping in
a CUDA graph (on a GPU) and stored gradients, in float32 and (on a GPU, not for stored gradients) bfloat16. Exit 1 where
a sum is wrong by more than rounding. The steps are timed beside the plain step of the same network: medians of
interleaved repeats.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from measuring import DEVICE, GPU, WARM_UP, finish, flags, machine, medians
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.vqvae2.autoencoder import losses
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.models import BACKBONES, build
from polyclinic.privacy.clipped_sums import ClippedSums, Clipping, Losses
from polyclinic.tasks import Target
from polyclinic.training.gpu.graphs import GraphedFunction, GraphedGradients

CLIP = 0.5
#: relative errors of a sum that rounding explains; wrong gradients (Opacus, channels-last) were off by .09 to .36
ALLOWED = {"fp32": 2e-3, "bf16": 6e-2}
#: (backbone, side, images in a batch) of the timed steps
TIMED = (("resnet18", 64, 32), ("resnet18", 224, 32), ("small-cnn", 32, 32), ("lenet5", 32, 32))
#: sums of clipped gradients of a batch
Sums = Callable[[Tensor, Tensor], list[Tensor]]


class Case:
    """A network with a batch of images, as a trainer lays them out, and its losses in one precision."""

    def __init__(self, name: str, size: int, rows: int, precision: str) -> None:
        torch.manual_seed(0)
        self.precision = precision
        outputs = 1 if BACKBONES[name].dense else 3
        self.model = build(name, channels=1, outputs=outputs, size=size, norm="group").to(DEVICE).train()
        self.images = torch.rand(rows, 1, size, size, device=DEVICE)
        self.targets = torch.arange(rows, device=DEVICE) % 3
        if GPU:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.parameters = list(self.model.parameters())

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        with self.passes():
            output = self.model(images).float()
        if output.dim() == 4:
            return (output.mean((1, 2, 3)) - targets).square()
        return F.cross_entropy(output, targets, reduction="none")

    def passes(self) -> contextlib.AbstractContextManager:
        return torch.autocast(DEVICE.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()

    def sums(self, clipping: Clipping, *, graphs: bool = False) -> Sums:
        record = (lambda function: GraphedFunction(function, "private steps")) if graphs else None
        clipped = ClippedSums(self.model, clipping, record)

        def work(images: Tensor, targets: Tensor) -> list[Tensor]:
            with clipped.following():
                return clipped.total(self.losses, [(images, targets)], CLIP, self.parameters)

        return work


def by_loop(losses: Losses, batch: tuple[Tensor, ...], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The definition: one image after the other, clipped, summed."""
    totals = [torch.zeros_like(one) for one in parameters]
    for place in range(len(batch[0])):
        loss = losses(*(one[place : place + 1] for one in batch)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        length = torch.stack([one.norm() for one in found]).norm()
        for total, one in zip(totals, found, strict=True):
            total += one * (CLIP / (length + 1e-6)).clamp(max=1.0)
    return totals


def check(name: str, precision: str, size: int) -> dict[str, Any]:
    """Relative errors of the sums, by way of computing them."""
    case = Case(name, size, 6, precision)
    wanted = by_loop(case.losses, (case.images, case.targets), case.parameters)
    ways = {"ghost": case.sums("ghost")}
    if precision == "fp32":
        ways["stored"] = case.sums("stored")
    if GPU:
        ways["ghost in a graph"] = repeated(case.sums("ghost", graphs=True), WARM_UP)
    errors = {way: relative_error(sums(case.images, case.targets), wanted) for way, sums in ways.items()}
    right = max(errors.values()) <= ALLOWED[precision]
    return {"backbone": name, "size": size, "precision": precision, "errors": errors, "right": right}


def check_generator(channels: int) -> dict[str, Any]:
    """The same for VQ-VAE-2. Images of one channel lie in memory as two layouts have it, and private learning must not
    take them for the one whose layers are computed without being called (on a GPU)."""
    settings = VQVAE2(width=16, code_width=8, codebook="gradient")
    made = settings.build(channels=channels, size=32, target=Target(("a", "b")), seed=0, device=str(DEVICE))
    net = made.autoencoder.train()
    images = torch.rand(6, channels, 32, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parameters = [one for one in net.parameters() if one.requires_grad]

    def losses_of(batch: Tensor) -> Tensor:
        return losses(batch, net(batch), settings.commitment)

    wanted = by_loop(losses_of, (images,), parameters)
    errors = {}
    for way in ("ghost", "stored"):
        clipped = ClippedSums(net, way)  # type: ignore[arg-type]
        with clipped.following():
            errors[way] = relative_error(clipped.total(losses_of, [(images,)], CLIP, parameters), wanted)
    right = max(errors.values()) <= ALLOWED["fp32"]
    name = f"VQ-VAE-2, {'grey' if channels == 1 else 'colour'}"
    return {"backbone": name, "size": 32, "precision": "fp32", "errors": errors, "right": right}


def repeated(sums: Sums, times: int) -> Sums:
    """The result of the last of several calls: of a replayed graph, where the first ones are ordinary."""

    def work(images: Tensor, targets: Tensor) -> list[Tensor]:
        for _ in range(times - 1):
            sums(images, targets)
        return [one.clone() for one in sums(images, targets)]

    return work


def relative_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    a, b = (torch.cat([one.flatten() for one in some]) for some in (found, wanted))
    return float(f"{float((a - b).norm() / b.norm()):.2g}")


def time_steps(name: str, size: int, rows: int, precision: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step's passes: plain, and with sums of clipped gradients; eager, and in a graph on a GPU."""
    case = Case(name, size, rows, precision)
    ghost, stored = case.sums("ghost"), case.sums("stored")
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: _plain(case),
        "ghost": lambda: ghost(case.images, case.targets),
        "stored": lambda: stored(case.images, case.targets),
    }
    if GPU:
        graphed = GraphedGradients(case.model, lambda x, y: case.losses(x, y).mean())
        recorded = case.sums("ghost", graphs=True)
        ways["plain in a graph"] = lambda: graphed(case.images, case.targets)
        ways["ghost in a graph"] = lambda: recorded(case.images, case.targets)
    figures = medians(ways, repeats)
    return {"backbone": name, "size": size, "batch": rows, "precision": precision, "milliseconds": figures}


def _plain(case: Case) -> None:
    for one in case.parameters:
        one.grad = None
    case.losses(case.images, case.targets).mean().backward()


def main() -> None:
    parser = flags(__doc__, "the small backbones only, and two repeats")
    parser.add_argument("--also", nargs="*", default=[], help="with --quick: further backbones")
    parser.add_argument("--steps-only", action="store_true", help="time steps, and check no gradients")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    precisions = ("fp32", "bf16") if GPU else ("fp32",)
    names: list[str] = ["small-cnn", "lenet5", *options.also] if options.quick else list(BACKBONES.builtin)
    checks = []
    for name in () if options.steps_only else names:
        for precision in precisions:
            checks.append(check(name, precision, 64))
            print(checks[-1], flush=True)
    for channels in () if options.steps_only else (1, 3):
        checks.append(check_generator(channels))
        print(checks[-1], flush=True)
    torch.backends.cudnn.allow_tf32 = True
    timed = []
    for name, size, rows in TIMED:
        if not options.quick or name in names:
            timed.append(time_steps(name, size, rows, precisions[-1], 2 if options.quick else 5))
            print(timed[-1], flush=True)
    finish({"benchmark": "dp_gradients", **machine(), "checks": checks, "steps": timed}, options)
    raise SystemExit(0 if all(row["right"] for row in checks) else 1)


if __name__ == "__main__":
    main()
