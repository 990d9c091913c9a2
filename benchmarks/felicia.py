"""FELICIA: how fast stacked owners train against one by one, and the paper's three experiments.

    python benchmarks/felicia.py --quick                      # one seed, minutes on a CPU
    python benchmarks/felicia.py --device cuda --only skin    # three seeds, as docs/felicia.md reports them

Real images come from the folder that POLYCLINIC_DATA or --data names (mnist.npz, cifar10_subset_jpeg.npz,
fed_isic5_64_jpeg.npz); without it only the speed is measured, on noise. Figures and rows go to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from felicia_common import Scale, wait
from felicia_experiments import EXPERIMENTS

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import initial_networks
from polyclinic.generators.gan.central import Central, CentralTerm
from polyclinic.generators.gan.dcgan import DCGAN
from polyclinic.generators.gan.model import GAN, GANModel, RealBatches
from polyclinic.generators.gan.owners import Federated, Images, Owners
from polyclinic.generators.gan.trainer import Dice
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

#: in a hurry, on a CPU: one seed, small networks, small images; the rows in docs/felicia.md name what they changed
QUICK = {
    "digits": Scale(1000, 1200, 2, 1, (0.0, 3.0), (0, 10, 25, 50), small={"width": 8}),
    "bias": Scale(3000, 900, 1, 1, (0.0, 3.0), (0.02,), 80, small={"width": 8, "batch_size": 32}),
    "digit-bias": Scale(3000, 900, 3, 1, (0.0, 3.0), (0.02,), 300, real_repeats=6, size=16, small={"width": 12}),
    "skin": Scale(3000, 900, 1, 1, (0.0, 3.0), (), 80, size=32, small={"width": 8, "batch_size": 16}),
}
FULL = {
    "digits": Scale(6000, 1200, 6, 3, (0.0, 1.0, 3.0), (0, 5, 10, 20, 35, 50)),
    "bias": Scale(10000, 1200, 4, 3, (0.0, 1.0, 3.0, 10.0), (0.02, 0.1, 0.5, 0.98), 600, repeats=2, real_repeats=8),
    "digit-bias": Scale(
        12000, 1200, 6, 3, (0.0, 1.0, 3.0, 10.0), (0.02, 0.1, 0.5, 0.98), 300, repeats=2, real_repeats=8
    ),
    "skin": Scale(10000, 1200, 8, 3, (0.0, 1.0, 3.0, 5.0, 7.0, 10.0), (), 150, repeats=2, real_repeats=8),
}
#: a conditional DCGAN as the paper has it: cross-entropy, the label as one more channel, nothing that helps with few
#: images; learning rate and smoothed labels are those of PrivGAN's code
PLAIN = {
    **{"loss": "log", "smoothing": 0.05, "lr": 2e-4, "condition": "plane"},
    **{"discriminator_norm": "none", "augment": False, "spread": False},
}
#: and with what `dcgan` has by itself for few images
FEW = {name: DCGAN.model_fields[name].default for name in PLAIN}


# --- speed --------------------------------------------------------------------------------------------


def speed(device: str, quick: bool) -> list[dict[str, Any]]:
    """Seconds of a step of K owners and a central discriminator: stacked, on a GPU also as one CUDA graph, and one by
    one; 32 px DCGANs, batch 32."""
    settings = GENERATORS["dcgan"](width=4 if quick else 16)
    assert isinstance(settings, GAN)
    rows = []
    for count in (2, 4) if quick else (2, 4, 16, 64):
        held = {f"owner-{k}": _noise(k) for k in range(count)}
        row: dict[str, Any] = {"owners": count}
        for name, step in _ways(settings, held, device):
            row[name] = _time(step, device, 0.3 if quick else 0.5)
        for name in [name for name in row if name.startswith("stacked")]:
            row[name.replace("stacked", "ratio")] = round(row["one_by_one"] / row[name], 2)
        rows.append(row)
        print(row, flush=True)
    return rows


def _ways(settings: GAN, held: dict[str, Images], device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    fast = device.startswith("cuda")
    for recorded in (False, True) if fast else (False,):
        how = {"as_products": fast, "recorded": recorded}
        owners = Owners(settings, CentralTerm(), [Federated(0, 1.0, held)], TWO, device=device, **how)
        yield "stacked_recorded" if recorded else "stacked", owners.step
    yield "one_by_one", OneByOne(settings, CentralTerm(), held, device).step


TWO = Target(classes=("a", "b"))


def _noise(k: int) -> Images:
    pixels = torch.randint(0, 256, (128, 3, 32, 32), generator=torch_rng("speed", k), dtype=torch.uint8)
    return Images(pixels, torch.arange(128) % 2)


def _time(step: Callable[[], Any], device: str, seconds: float) -> float:
    """Seconds per step, over about so many seconds, after a few steps that do not count."""
    for _ in range(5):
        step()
    wait(device)
    started, taken = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or taken < 2:
        step()
        wait(device)
        taken += 1
    return round((time.perf_counter() - started) / taken, 5)


class OneByOne:
    """The same steps with a pair of networks for each owner, one after the other, as sites of a federation do them."""

    def __init__(self, settings: GAN, term: CentralTerm, held: dict[str, Images], device: str) -> None:
        first = next(iter(held.values())).images
        channels, size = first.shape[1:3]
        build = {"channels": channels, "size": size, "target": TWO, "seed": 0, "device": device, "precision": "fp32"}
        self.models = [GANModel(settings, **build) for _ in held]  # type: ignore[arg-type]
        self.duels = [model.duel() for model in self.models]
        self.dice = [Dice(torch_rng("dice", k), torch.device(device)) for k in range(len(held))]
        self.batches = [
            RealBatches(model, one.images, one.labels, torch_rng("batches", k))
            for k, (model, one) in enumerate(zip(self.models, held.values(), strict=True))
        ]
        shape = settings.shape(channels, size, TWO)
        network = initial_networks(lambda: {"central": settings.central(shape, len(held))}, 0)["central"].to(device)
        self.central = Central.of(network, settings.phi, term, owners=len(held), lr=settings.lr, device=device)
        self.owner = torch.arange(len(held), device=device).repeat_interleave(settings.batch_size)

    def step(self) -> None:
        wanted, fakes = [], []
        for duel, dice, batches in zip(self.duels, self.dice, self.batches, strict=True):
            real, labels = batches.next()
            duel.judge(real, labels, labels, dice)
            wanted.append(labels)
            fakes.append(duel.make(labels, dice))
        together = torch.cat([fake.detach() for fake in fakes])
        self.central.judge(together, self.owner)
        slopes = self.central.slope(together, self.owner).div(len(fakes[0])).split(len(fakes[0]))
        for duel, dice, fake, labels, slope in zip(self.duels, self.dice, fakes, wanted, slopes, strict=True):
            duel.learn(fake, labels, dice, slope)


# --- all of it ----------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    if options.device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    figures: dict[str, Any] = {"benchmark": "felicia", "quick": options.quick, "device": options.device}
    if "speed" in options.only:
        figures["speed"] = speed(options.device, options.quick)
    for name in (name for name in EXPERIMENTS if name in options.only):
        if options.data is None:
            print(f"{name}: needs real images; set POLYCLINIC_DATA", flush=True)
            continue
        say, save = functools.partial(_say, name), functools.partial(_written, name, out=options.out)
        figures[name] = save(EXPERIMENTS[name](options.data, _scale(name, options), say, save))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, small networks, minutes on a CPU")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="+", default=["speed", *EXPERIMENTS], choices=["speed", *EXPERIMENTS])
    parser.add_argument("--data", type=Path, default=_folder(), help="folder with the real images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, help="an experiment stops after so many")
    parser.add_argument("--steps", type=int, help="steps of every generator")
    parser.add_argument("--looks", type=int, help="moments at which what the generators make is judged")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first-seed", type=int, help="of them: other seeds judge what some have chosen")
    parser.add_argument("--lambdas", type=float, nargs="+")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of the GANs; fp32 is TF32 on a GPU")
    parser.add_argument("--width", type=int, help="of the GANs, if not the study's")
    parser.add_argument("--size", type=int, help="side of the images of the second and third experiment, if not theirs")
    parser.add_argument("--plain", action="store_true", help="the base GAN as the paper has it")
    parser.add_argument("--few", action="store_true", help="the base GAN with what is to help it with few images")
    parser.add_argument(
        "--gan", type=_setting, nargs="+", default=[], metavar="NAME=VALUE", help="other settings of the base GAN"
    )
    parser.add_argument("--towards", choices=["away", "other"], help="what generators pay, if not as the study says")
    parser.add_argument("--repeats", type=int, help="classifiers of each diet at each look")
    parser.add_argument("--learner-steps", type=int, help="of each classifier")
    parser.add_argument("--eager", action="store_true", help="on a GPU: no CUDA graphs")
    parser.add_argument("--points", type=float, nargs="+", help="alphas of digits, or shares of horses or nines")
    parser.add_argument("--out", type=Path, help="folder for rows and arrays, which felicia_figures.py draws")
    return parser.parse_args()


def _folder() -> Path | None:
    return Path(os.environ["POLYCLINIC_DATA"]) if os.environ.get("POLYCLINIC_DATA") else None


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a study's file would have it; what is no TOML is a word."""
    name, _, value = text.partition("=")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _scale(name: str, options: argparse.Namespace) -> Scale:
    wanted = {
        "steps": options.steps,
        "seconds": options.seconds,
        "looks": options.looks,
        "seeds": options.seeds,
        "first_seed": options.first_seed,
        "weights": options.lambdas and tuple(options.lambdas),
        "points": options.points and tuple(options.points),
        "device": options.device,
        "precision": options.precision,
        "repeats": options.repeats,
        "learner_steps": options.learner_steps,
        "size": options.size,
        "towards": options.towards,
        "recorded": False if options.eager else None,
    }
    base = (QUICK if options.quick else FULL)[name]
    other = PLAIN if options.plain else FEW if options.few else {}
    width = {"width": options.width} if options.width else {}
    wanted["small"] = base.small | other | width | dict(options.gan)
    return dataclasses.replace(base, **{key: value for key, value in wanted.items() if value is not None})


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def _written(name: str, found: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The plain part of what an experiment found; arrays go to a file beside it."""
    arrays = {**found.get("clouds", {}), **found.get("pictures", {})}
    plain = {key: value for key, value in found.items() if key not in ("clouds", "pictures")}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        np.savez_compressed(out / f"{name}.npz", **{key.replace("/", "|"): value for key, value in arrays.items()})
    return plain


if __name__ == "__main__":
    main()
