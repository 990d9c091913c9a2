"""What priors are worth to gradient inversion: public images, sent batch-norm statistics, smaller images first.

Fundus phantoms of 28 px. The attacker has 100 of them; others are behind the gradients. The search starts at the mean
of its own images. PSNR of what comes back, beside that of the nearest image that the attacker has.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.gradient_inversion.denoiser_prior import DenoiserPrior
from polyclinic.attacks.gradient_inversion.priors import BatchNormPrior, GaussianPrior, batch_statistics
from polyclinic.attacks.gradient_inversion.settings import PRESETS
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.models import BACKBONES
from polyclinic.randomness import torch_rng

OWN, SIDE = 100, 28
PLAIN: dict[str, Any] = {}
LENET: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "public images, 1e-4": {"image_prior": 1e-4},
    "public images, 1e-3": {"image_prior": 1e-3},
    "smaller images first": {"scales": (4, 2)},
    "denoiser, 1e-4": {"image_prior": 1e-4, "denoiser": True},
    "denoiser, 1e-3": {"image_prior": 1e-3, "denoiser": True},
}
NORMED: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "public images, 3e-4": {"image_prior": 3e-4},
    "statistics, 0.1": {"batch_norm_prior": 0.1},
    "both, 3e-4 and 1": {"image_prior": 3e-4, "batch_norm_prior": 1.0},
    "denoiser, 3e-4": {"image_prior": 3e-4, "denoiser": True},
}
#: network, images in the gradient, steps, seed, variants
CASES = (
    ("lenet5", 1, 1000, 1001, LENET),
    ("lenet5", 2, 200, 1002, LENET),
    ("lenet5", 4, 200, 1003, LENET),
    ("small-cnn", 1, 1000, 1001, NORMED),
)


def decibels(error: Tensor) -> float:
    return round(float(-10 * error.log10().mean()), 1)


def sent_by(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Parcel, dict[str, Tensor]]:
    """Gradients of one step, and the buffers after it."""
    network = copy.deepcopy(model).train()
    loss = nn.functional.cross_entropy(network(images), labels)
    names = [name for name, _ in network.named_parameters()]
    found = torch.autograd.grad(loss, list(network.parameters()))
    return Parcel("gradients", dict(zip(names, found, strict=True)), {}), dict(network.named_buffers())


def attack(model: nn.Module, own: Tensor, images: Tensor, labels: Tensor, steps: int, changes: dict[str, Any]) -> float:
    """PSNR of what one search brings back; `denoiser`: public images trained one, and it is the prior."""
    changes = dict(changes)
    prior = changes.pop("denoiser", None) or GaussianPrior.of(own)
    parcel, after = sent_by(model, images, labels)
    statistics = batch_statistics(model, after, torch.zeros_like(images))
    noise = torch.randn(images.shape, generator=torch_rng(0, "s"))
    knowledge = Knowledge(
        model,
        tuple(images.shape[1:]),
        batch_size=len(images),
        classes=2,
        labels=labels[None],
        start_images=(own.mean(0) + 0.05 * noise).clamp(0, 1)[None],
        image_prior=prior,
        batch_norm_prior=BatchNormPrior(model, statistics) if statistics else None,
    )
    always = {"iterations": steps, "total_variation": 1e-4, "start": "given", "lr": 0.01, "label": "known"}
    found = PRESETS["geiping"].model_copy(update={**always, **changes}).run([parcel], knowledge)
    return decibels((found.images[0] - images).square().mean())


def rows(name: str, batch: int, steps: int, seed: int, variants: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    data = FundusPhantom(samples=OWN + 40, size=SIDE, seed=seed).load()
    images, labels = torch.from_numpy(data.images).float() / 255, torch.from_numpy(data.labels)
    torch.manual_seed(seed)
    model, own = BACKBONES[name](3, 2, SIDE, "batch"), images[:OWN]
    parts = [slice(OWN + n * batch, OWN + (n + 1) * batch) for n in range(2)]
    near = [decibels((own[None] - images[part][:, None]).square().flatten(2).mean(2).amin(1)) for part in parts]
    found = []
    for variant, settings in variants.items():
        changes = {**settings, "denoiser": DenoiserPrior.of(own)} if "denoiser" in settings else settings
        psnr = [attack(model, own, images[part], labels[part], steps, changes) for part in parts]
        found.append(
            {"network": name, "images": batch, "steps": steps, "variant": variant, "psnr": psnr, "nearest": near}
        )
        print(*found[-1].values(), sep=" | ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five steps of each search")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="only variants whose name begins so")
    parser.add_argument("--networks", nargs="+", default=["lenet5", "small-cnn"], help="only these networks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if case[0] in options.networks]
    made = []
    for name, batch, steps, seed, variants in cases:
        chosen = {variant: one for variant, one in variants.items() if variant.startswith(options.only)}
        made += rows(name, batch, 5 if options.quick else steps, seed, chosen)
    figures = {"benchmark": "attack_priors", "quick": options.quick, "rows": made}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
