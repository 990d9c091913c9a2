"""What crafted weights get back from a site that checks nothing, on chest X-rays.

The site has patients with and without tuberculosis (tb_cxr_64.npz in the folder that POLYCLINIC_DATA names) and sends
the gradient of all its images at the weights that it got. The attacker's own images are NIH's (covid_cxr_64.npz). An
image counts as identified where a reconstruction is nearest to it, of the site's images and as many that the site never
had, at 20 dB or more; fishing names images by their features instead. `by_chance` counts the others that were named.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attack_black_box import load
from torch import Tensor, nn

from polyclinic.attacks import CraftedSum, Fishing, Imprint, OverflowFilter, TrapWeights, identified
from polyclinic.attacks.coordinator.crafting import CoordinatorAttack
from polyclinic.attacks.coordinator.fishing import change
from polyclinic.models import build
from polyclinic.randomness import seeded

DENSE = ("lenet5", "cnn-32-64-128", "cnn-64-128-64-32")
POOLED = ("small-cnn", "resnet18")


class Site:
    """`images` [N, 1, S, S] with labels; `public` is the attacker's own, `others` are nobody's at the site."""

    def __init__(self, options: argparse.Namespace) -> None:
        pixels, labels = load("tb_cxr_64.npz", 2 * options.images, options.size, options.seed)
        self.images, self.others = pixels.chunk(2)
        self.labels = labels[: len(self.images)]
        self.public, _ = load("covid_cxr_64.npz", options.public, options.size, options.seed, site="NIH_ChestXray8")
        self.size, self.seed = options.size, options.seed

    def network(self, backbone: str) -> nn.Module:
        with seeded(self.seed, "network"):
            return build(backbone, channels=1, outputs=2, size=self.size)

    def gradient(self, model: nn.Module, rows: slice = slice(None)) -> dict[str, Tensor]:
        model.train().zero_grad()
        nn.functional.cross_entropy(model(self.images[rows]), self.labels[rows]).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def images_back(site: Site, backbone: str, attack: Imprint | TrapWeights) -> dict[str, Any]:
    crafted = attack.craft(site.network(backbone), site.public)
    found = attack.recover(site.gradient(crafted), crafted, site.public)
    return vars(identified(found, site.images, site.others))


def sum_of_two(site: Site, backbone: str, attack: CraftedSum) -> dict[str, Any]:
    """The site's images are spread over two; images of the other one count as chance."""
    halves = [slice(0, None, 2), slice(1, None, 2)]
    crafted = [attack.craft(site.network(backbone), site.public, place) for place in (0, 1)]
    sent = [site.gradient(model, rows) for model, rows in zip(crafted, halves, strict=True)]
    total = {name: sent[0][name] + sent[1][name] for name in sent[0]}
    found = [
        identified(
            attack.recover(total, crafted[place], site.public, place),
            site.images[halves[place]],
            site.images[halves[1 - place]],
        )
        for place in (0, 1)
    ]
    named = sum(one.images for one in found)
    decibels = sum(one.psnr * one.images for one in found if one.images) / named if named else math.nan
    chance = sum(one.by_chance for one in found)
    return {"images": named, "of": len(site.images), "psnr": decibels, "by_chance": chance}


def fished(site: Site, backbone: str, attack: Fishing, cuts: int) -> dict[str, Any]:
    """Over several rounds, each with another bound; no picture, so no PSNR."""
    model, candidates = site.network(backbone), torch.cat([site.images, site.others])
    named: set[int] = set()
    before: dict[str, Tensor] | None = None
    for cut in range(1, cuts):
        crafted = attack.craft_cut(model, site.public, cut / cuts)
        update = site.gradient(crafted)
        if before is not None and abs(attack.count(before, update, crafted, len(site.images)) - 1) < 0.1:
            named.add(attack.identify(attack.read_features(change(before, update), crafted), crafted, candidates))
        before = update
    members = sum(place < len(site.images) for place in named)
    return {"images": members, "of": len(site.images), "psnr": math.nan, "by_chance": len(named) - members}


def members(site: Site, backbone: str, attack: OverflowFilter, most: int) -> dict[str, Any]:
    """Members that are called so; by chance: others that are called so."""
    answers = [
        attack.recover(site.gradient(attack.craft(site.network(backbone), candidate, site.public)))
        for candidate in torch.cat([site.images[:most], site.others[:most]])
    ]
    half = len(answers) // 2
    return {"images": sum(answers[:half]), "of": half, "psnr": math.nan, "by_chance": sum(answers[half:])}


def attacks_on(backbone: str, images: int, options: argparse.Namespace) -> Iterator[CoordinatorAttack]:
    if backbone in POOLED:
        yield Fishing(target_class=1, strength=1000.0)
        return
    for strength in (1.0,) if options.quick else (1.0, 0.5, 0.2):
        yield Imprint(strength=strength)
        yield Imprint(strength=strength, measure="random", seed=options.seed)
        if backbone != "lenet5":
            yield TrapWeights(strength=strength, alive=1 / images)
        yield CraftedSum(strength=strength)
    yield OverflowFilter()


def measured(site: Site, backbone: str, attack: CoordinatorAttack, options: argparse.Namespace) -> dict[str, Any]:
    if isinstance(attack, Fishing):
        return fished(site, backbone, attack, 8 if options.quick else 48)
    if isinstance(attack, OverflowFilter):
        return members(site, backbone, attack, 2 if options.quick else 8)
    if isinstance(attack, CraftedSum):
        return sum_of_two(site, backbone, attack)
    assert isinstance(attack, Imprint | TrapWeights)
    return images_back(site, backbone, attack)


def rows(site: Site, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for backbone in (DENSE[-1], POOLED[0]) if options.quick else (*DENSE, *POOLED):
        for attack in attacks_on(backbone, len(site.images), options):
            if options.attack in (None, attack.name):
                yield _row(backbone, attack, measured(site, backbone, attack, options))


def _row(backbone: str, attack: Any, figures: dict[str, Any]) -> dict[str, Any]:
    figures = {**figures, "psnr": None if math.isnan(figures["psnr"]) else round(figures["psnr"], 1)}
    measure = getattr(attack, "measure", "")
    row = {"backbone": backbone, "attack": attack.name, "measure": measure, "strength": attack.strength, **figures}
    print("  ".join(f"{value}" for value in row.values()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16, help="images of the site, all behind one gradient")
    parser.add_argument("--public", type=int, default=200, help="images of the attacker's own")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one backbone of each sort at full strength")
    parser.add_argument("--attack", help="this one only: imprint, trap-weights, crafted-sum, fishing, overflow-filter")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("backbone  attack  measure  strength  identified  of  PSNR  by chance")
    result = {"benchmark": "coordinator_attacks", "rows": list(rows(Site(options), options))}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
