"""What robust aggregation saves when sites send poisoned updates, and what it costs honest rare sites.

    POLYCLINIC_DATA=... python benchmarks/poisoning.py [--rounds N] [--seeds N] [--first-seed S] [--json FILE]
    python benchmarks/poisoning.py --quick          phantoms, few runs

FedAvg on chest X-rays (PneumoniaMNIST) at eight hospitals with very different shares of pneumonia, two of which attack.
`auc` is of all test images. `rare` is the accuracy at the honest hospital whose share of pneumonia is farthest from
that of all. `success` is the share of healthy test images with the attackers' white square that are called pneumonia.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.data.parts import PreparedSites, open_site, prepare
from polyclinic.federation.layers.poisoning import patched
from polyclinic.runner.result import Result
from polyclinic.runner.run import run
from polyclinic.study import Study

RULES = ("mean", "norm-bound", "median", "trimmed-mean", "multi-krum", "clusters")
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "label-flip": {"attack": "label-flip"},
    "backdoor": {"attack": "backdoor", "target": 1, "share": 0.5},
    "scale x 10": {"attack": "scale"},
    "sign-flip x 3": {"attack": "sign-flip", "factor": 3.0},
    "noise x 5": {"attack": "noise", "factor": 5.0},
}
SITES = 8
PATCH = 4


def tables(quick: bool, rounds: int, seed: int) -> dict[str, Any]:
    chest = {"source": "npz", "path": "$POLYCLINIC_DATA/pneumoniamnist.npz", "per_class": 700, "size": 28}
    phantom = {"source": "chest-phantom", "samples": 240, "size": 28}
    return {
        "seed": seed,
        "data": (phantom if quick else chest) | {"seed": seed},
        "sites": {"partition": "dirichlet", "count": SITES, "alpha": 1.0},
        "model": {"backbone": "lenet5"},
        "optimizer": {"batch_size": 16, "lr": 0.05},
        "method": {"name": "fedavg", "rounds": rounds, "liars": 0.25},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"workers": 1, "device": "cpu", "durable": False},
    }


def by_skew(sites: PreparedSites) -> list[str]:
    """The sites' names, the one whose share of the last class is farthest from that of all first."""
    counts = {site: np.array(splits["train"], float) for site, splits in sites.info["class_counts"].items()}
    share = sum(counts.values())[-1] / sum(counts.values()).sum()
    return sorted(sites.names, key=lambda site: -abs(counts[site][-1] / counts[site].sum() - share))


def attackers(names: list[str]) -> tuple[str, ...]:
    """The two sites that are most like all others: a rare attacker would be easy to tell."""
    return tuple(sorted(names[-2:]))


def measured(result: Result, sites: PreparedSites, rare: str) -> dict[str, float]:
    metrics = result["metrics"]
    images = np.concatenate([open_site(sites.folder, name).test.images for name in sites.names])
    labels = np.concatenate([open_site(sites.folder, name).test.labels for name in sites.names])
    marked = torch.from_numpy(patched(images[labels == 0], PATCH))
    with torch.no_grad():
        called = result.model()(marked).argmax(1)
    own = metrics["per_site"].get(rare, {})
    return {
        "auc": metrics["test"].get("auc", 0.5),
        "rare": own.get("accuracy", 0.0),
        "success": float(called.float().mean()),
    }


def one_run(place: Path, quick: bool, rounds: int, seed: int, attack: str, rule: str) -> dict[str, float]:
    study = tables(quick, rounds, seed)
    study["method"]["aggregation"] = rule
    plain = Study(**study)
    sites = prepare(plain.data, plain.sites, cache=place / "cache")
    order = by_skew(sites)
    if ATTACKS[attack]:
        study["poisoning"] = {"sites": attackers(order), "patch": PATCH, **ATTACKS[attack]}
    folder = place / f"{attack}-{rule}-{seed}".replace(" ", "")
    return measured(run(Study(**study), folder, cache=place / "cache"), sites, order[0])


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = ["| attack | aggregation | AUC | rare site, accuracy | back door |", "|---|---|---|---|---|"]
    for attack, rules in found.items():
        for rule, runs in rules.items():
            cells = [_mean(runs, name) for name in ("auc", "rare", "success")]
            lines.append(f"| {attack} | {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(runs: list[dict[str, float]], name: str) -> str:
    values = [one[name] for one in runs]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="phantoms, two attacks, two rules, two rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="attacks, separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    attacks = ("none", "scale x 10") if chosen.quick else tuple(chosen.attacks.split(","))
    rules = ("mean", "clusters") if chosen.quick else RULES
    rounds, seeds = (2, 1) if chosen.quick else (chosen.rounds, chosen.seeds)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["POLYCLINIC_CACHE"] = f"{place}/cache"
        for attack in attacks:
            for rule in rules:
                draws = range(chosen.first_seed, chosen.first_seed + seeds)
                runs = [one_run(Path(place), chosen.quick, rounds, seed, attack, rule) for seed in draws]
                found.setdefault(attack, {})[rule] = runs
                if chosen.json:  # as far as it is: the whole takes long
                    chosen.json.write_text(json.dumps(found, indent=1) + "\n")
                print(attack, rule, runs, flush=True)
    print(table(found))
    print(json.dumps({"rounds": rounds, "seeds": seeds, "found": found}))


if __name__ == "__main__":
    main()
