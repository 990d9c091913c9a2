"""How fast generators train: images a second of StyleGAN2 and VQ-VAE-2, and steps of several sites' small GANs.

    python lab/benchmarks/generator_steps.py [--quick] [--only stylegan2 vqvae2 gan stacks] [--json FILE]

In the precision that studies have on the device: bf16 on a GPU, where steps are recorded as CUDA graphs, and fp32 on a
CPU. Images are noise: their content does not change the work.

- `stylegan2`: all regularisers and augmentation included; medians of turns of whole cycles of the regularisers.
- `vqvae2`: whole epochs, moving averages of the codebooks included; the first two warm up.
- `gan`: steps a second of a small GAN, as FedER's sites train them before the first round.
- `stacks`: the GANs of nine sites take a step each, one after the other and as one stack, in turns.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import GPU, WARM_UP, finish, flags, keep, machine, now, seconds_of

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import FitOptions
from polyclinic.generators.gan.model import GANSteps, Learner
from polyclinic.generators.stylegan2.training import R1_EVERY
from polyclinic.tasks import Target

#: channels of VQ-VAE-2's autoencoder, numbers in a code's vector: the default, and those of the examples
WIDTHS = ((64, 16), (128, 64))
SITES = 9  #: whose GANs are stacked


def built(name: str, size: int, **settings: Any) -> Any:
    where = {"device": "cuda" if GPU else "cpu", "precision": "bf16" if GPU else "fp32"}
    return GENERATORS[name](**settings).build(channels=3, size=size, target=Target(("a", "b")), seed=0, **where)


def noise(count: int, size: int) -> tuple[torch.Tensor, torch.Generator]:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=rng), rng


def rates(ways: dict[str, Callable[[], Any]], steps: int, turns: int, warm_up: int = WARM_UP) -> dict[str, float]:
    """Steps a second by way, in turns; each way is warmed up first."""
    for step in ways.values():
        seconds_of(step, warm_up)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, step in ways.items():
            found[way].append(steps / seconds_of(step, steps))
    return {way: round(statistics.median(rate), 2) for way, rate in found.items()}


def stylegan2(options: argparse.Namespace) -> list[dict[str, Any]]:
    sizes, batch = ([32], 4) if options.quick else (options.sizes, 32)
    small = {"width": 4, "latent": 8} if options.quick else {"width": 64, "latent": 512}  # the paper's at 256 px
    rows = []
    for size in sizes:
        images, rng = noise(4 * batch, size)
        settings = {**small, "batch_size": batch, **json.loads(options.set)}
        steps = built("stylegan2", size, **settings).begin(images, torch.arange(len(images)) % 2, rng)
        steps.p.fill_(0.3)  # of augmentation, as in the middle of a training
        warm_up = WARM_UP * R1_EVERY + 1 if GPU else 1  # R1, the rarest, must have been recorded
        rate = rates({"all": steps.step}, R1_EVERY * (1 if options.quick else 8), 1 if options.quick else 3, warm_up)
        rows.append({"generator": f"StyleGAN2, {size} px", "images a second": round(rate["all"] * batch, 1)})
    return rows


def vqvae2(options: argparse.Namespace) -> list[dict[str, Any]]:
    size, count, epochs = (32, 64, 4) if options.quick else (256, 512, 12)
    rows = []
    for width, code_width in WIDTHS[:1] if options.quick else WIDTHS:
        shape = {"width": width, "code_width": code_width}
        model = built("vqvae2", size, epochs=epochs, batch_size=32, prior_epochs=0, **shape)
        ends: list[float] = []
        images, rng = noise(count, size)
        model.fit(
            images,
            torch.zeros(count, dtype=torch.long),
            rng,
            FitOptions(report=lambda *_, ends=ends: ends.append(now())),
        )
        taken = [end - start for start, end in itertools.pairwise(ends[1:])]
        rate = round(count / statistics.median(taken), 1)
        rows.append({"generator": f"VQ-VAE-2, {size} px, width {width}", "images a second": rate})
    return rows


def learner(name: str, size: int) -> Learner:
    images, rng = noise(256, size)
    return Learner(built(name, size), images.numpy(), np.arange(256) % 2, rng)


def gan(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = (("dcgan", 32),) if options.quick else (("dcgan", 32), ("dcgan", 64), ("gan", 64))
    rows = []
    for name, size in cases:
        rate = rates({"all": GANSteps([learner(name, size)]).step}, *((1, 1) if options.quick else (50, 3)))
        rows.append({"generator": f"{name}, {size} px", "steps a second": rate["all"]})
    return rows


def stacks(options: argparse.Namespace) -> list[dict[str, Any]]:
    members = 2 if options.quick else SITES
    alone = [GANSteps([learner("dcgan", 32)]) for _ in range(members)]

    def one_after_the_other() -> None:
        for one in alone:
            one.step()

    stacked = GANSteps([learner("dcgan", 32) for _ in range(members)])
    ways = {"one after the other": one_after_the_other, "stacked": stacked.step}
    found = rates(ways, *((1, 1) if options.quick else (50, 3)))
    row = {"generator": "dcgan, 32 px", "members": members, "steps a second": found}
    return [row | {"times as fast": round(found["stacked"] / found["one after the other"], 2)}]


PARTS = {"stylegan2": stylegan2, "vqvae2": vqvae2, "gan": gan, "stacks": stacks}


def main() -> None:
    parser = flags(__doc__, "tiny networks, few steps: does it run?")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[256], help="sides of StyleGAN2's images")
    parser.add_argument("--set", default="{}", help="other settings of StyleGAN2, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {"benchmark": "generator_steps", **machine(), "quick": options.quick}
    for name in options.only:
        figures[name] = PARTS[name](options)
        keep(figures, options)
        print(name, figures[name], flush=True)
    finish(figures, options)


if __name__ == "__main__":
    main()
