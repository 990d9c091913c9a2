"""Images from gradients as Dahlgaard et al. take them: a new network for each image, 100 outputs whatever the data.

An arm's label says how: `TG, 50` is a transformed Gaussian start and a fixed lambda² of 50, `Unif, AG, lr 1` a uniform
start, the adaptive Gaussian and another learning rate than the paper's. All arms attack the same gradients, so values
are paired by image. As in the authors' code the last point counts, and an image failed if its error is 2 or more, or
not below that after the first step; MSE and SSIM are those of the others.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.networks import LeNet, UnstridedResNet18, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import cross_entropy
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.attacks.scoring import non_converging
from polyclinic.data.cache import code_digest
from polyclinic.data.datasets.npz import Npz
from polyclinic.data.pixels import Fit, fit_image
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import atomic_write, cache_folder, digest_of, make_folder, read_json
from polyclinic.metrics.images import mean_squared_error, ssim
from polyclinic.randomness import torch_rng

OUTPUTS, SIDE, CHANNELS = 100, 32, 3
#: images by network and scale; the paper has 100 and 20. Two cores would take days for ResNet-18
IMAGES = {"lenet": {"quick": 4, "full": 100}, "resnet": {"full": 10}}
STARTS = {"TG": "transformed-gaussian", "Unif": "uniform"}
DISTANCES: dict[str, dict[str, Any]] = {"Eucl": {"distance": "euclidean"}, "AG": {"distance": "adaptive-gaussian"}}
#: the authors' call of SSIM takes this for images of floating-point numbers
RANGE = 2.0
BASELINE = "another image"

Values = dict[tuple[str, str], Sequence[float | None]]


def inverted(folders: Mapping[str, Sequence[Path]], scale: str, data: str, network: str, curves: str = "") -> Values:
    """For each arm and image of the archive `data`: whether it failed; else its MSE and SSIM, with `curves` also along
    the search. `another image`: those of an attack that returns the next image."""
    if scale not in IMAGES[network]:
        raise BadInput("--scale quick: 5,000 steps on ResNet-18 take days without a GPU; use --scale full on one")
    images, _ = drawn(data, IMAGES[network][scale])
    found: Values = {}
    for label in folders:
        if label == BASELINE:
            other = _figures(images.roll(1, 0), images, torch.zeros(len(images), dtype=torch.bool))
            found |= {(label, metric): values for metric, values in other.items()}
        else:
            found |= _attacked(label, data, network, scale)
    return found if curves else {place: values for place, values in found.items() if " after " not in place[1]}


@functools.cache
def drawn(data: str, count: int) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] in [0, 1], drawn from an archive, and their labels [N]."""
    listing = Npz(path=f"$POLYCLINIC_DATA/{data}.npz", size=SIDE, split="").listing()
    rows = torch.randperm(len(listing.labels), generator=torch_rng(0, "inverted", data))[:count].tolist()
    pictures = [fit_image(listing.picture(row), Fit(SIDE), CHANNELS) for row in rows]
    images = torch.stack([torch.tensor(picture) for picture in pictures]) / 255
    return images, torch.tensor([int(listing.labels[row]) % OUTPUTS for row in rows])


@functools.cache
def sent(data: str, network: str, count: int) -> tuple[list[nn.Module], list[Parcel]]:
    """A network for each image, and its gradient there."""
    networks, parcels = [], []
    for number, (image, label) in enumerate(zip(*drawn(data, count), strict=True)):
        rng = torch_rng(0, "inverted", network, number)
        made = LeNet if network == "lenet" else UnstridedResNet18
        model = with_random_weights(made(CHANNELS, OUTPUTS, SIDE), rng, batch_norm=True).train()
        loss = cross_entropy(model(image[None]), F.one_hot(label[None], OUTPUTS).float())
        names, parameters = zip(*model.named_parameters(), strict=True)
        parcels.append(Parcel("gradients", dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))))
        networks.append(model)
    return networks, parcels


def settings_of(label: str, network: str) -> GradientInversion:
    """The attack that an arm's label stands for."""
    start, distance, *more = label.split(", ")
    fixed = {"distance": "gaussian", "kernel": "whole-gradient", "scaled": False}
    chosen = {"start": STARTS[start], **(DISTANCES.get(distance) or fixed | {"variance": float(distance)})}
    if network == "lenet":
        chosen |= {"optimizer": "lbfgs", "lr": 0.1, "iterations": 100}
    else:  # rounded factors: AdamW has no tolerances, and full float32 takes three times as long
        chosen |= {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.01, "iterations": 5000, "precision": "tf32"}
    if more:
        chosen["lr"] = float(more[0].removeprefix("lr "))
    along = [math.ceil(chosen["iterations"] * share) for share in (0.02, 0.05, 0.1, 0.2, 0.4, 1)]
    return GradientInversion(returns="last", trajectory=(1, *along), **chosen)


@functools.cache
def _attacked(label: str, data: str, network: str, scale: str) -> Values:
    """The figures of an arm, from the cache where it was attacked before: claims share arms, and ResNet-18 is slow."""
    images, _ = drawn(data, IMAGES[network][scale])
    told = {
        "settings": settings_of(label, network).model_dump(mode="json"),
        "network": network,
        "images": hashlib.sha256(images.numpy().tobytes()).hexdigest(),
        "code": code_digest([Path(__file__)]),
    }
    file = cache_folder() / "inversions" / f"{digest_of(told)}.json"
    if not file.exists():
        make_folder(file.parent)
        atomic_write(file, json.dumps(_attack(label, data, network, len(images))))
    return {(label, metric): values for metric, values in read_json(file).items()}


def _attack(label: str, data: str, network: str, count: int) -> dict[str, Sequence[float | None]]:
    networks, parcels = sent(data, network, count)
    known = Knowledge(networks, (CHANNELS, SIDE, SIDE), classes=OUTPUTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    back = settings_of(label, network).run(parcels, known, device=device)
    truth, kept = drawn(data, count)[0], back.trajectory
    assert kept is not None, "the settings name steps"
    after_first = mean_squared_error(kept.images[:, 0, 0], truth)
    found = back.images[:, 0]
    failed = non_converging(mean_squared_error(found, truth), after_first)
    values = {"failed": failed.double().tolist(), **_figures(found, truth, failed)}
    for place, step in enumerate(kept.steps):
        values |= _figures(kept.images[:, place, 0], truth, failed, f" after {step} steps")
    return values


def _figures(found: Tensor, truth: Tensor, failed: Tensor, when: str = "") -> dict[str, Sequence[float | None]]:
    figures = {"mse": mean_squared_error(found, truth), "ssim": ssim(found, truth, data_range=RANGE)}
    return {
        f"{name}{when}": [
            None if missed or not math.isfinite(value) else float(f"{value:.4g}")
            for value, missed in zip(values.tolist(), failed.tolist(), strict=True)
        ]
        for name, values in figures.items()
    }
