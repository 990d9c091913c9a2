"""What `engine.wire` saves in bytes and costs in accuracy, and what `engine.durable` costs in time.

    python lab/benchmarks/wire.py [--quick] [--rounds N] [--seeds N] [--first-seed S] [--backbone NAME]
                              [--only wire|durable] [--path FILE.npz] [--json FILE]

FedAvg with four hospitals and ResNet-18, on chest X-rays (PneumoniaMNIST, `--path`) or on phantoms, once for each
encoding and seed. `bytes` are those of all parcels. Each durable run is timed next to one that is not, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import finish, flags, keep

from polyclinic.runner.run.run import run
from polyclinic.study import Study

ENCODINGS = ("exact", "fp16", "int8", "delta")


def tables(path: str, backbone: str, rounds: int, seed: int, **engine: Any) -> dict[str, Any]:
    real = {"source": "npz", "path": path, "per_class": 400, "size": 28, "seed": seed}
    phantom = {"source": "chest-phantom", "samples": 120, "size": 28, "seed": seed}
    return {
        "seed": seed,
        "data": real if path else phantom,
        "sites": {"partition": "dirichlet", "count": 4, "alpha": 1.0},
        "model": {"backbone": backbone, "norm": "group"},
        "optimizer": {"batch_size": 16, "lr": 0.02},
        "method": {"name": "fedavg", "rounds": rounds},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"workers": 1, "device": "cpu", "durable": False, **engine},
    }


def one_run(place: Path, study: dict[str, Any], name: str) -> dict[str, float]:
    started = time.perf_counter()
    result = run(Study(**study), place / name, cache=place / "cache")
    return {
        "bytes": result["communication"]["total_bytes"],
        "auc": result["metrics"]["test"].get("auc", 0.5),
        "accuracy": result["metrics"]["test"]["accuracy"],
        "weights": result["weights_sha256"],
        "seconds": time.perf_counter() - started,
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and bytes against exact."""
    exact = statistics.fmean(one["bytes"] for one in runs["exact"])
    return {
        name: {
            "bytes": statistics.fmean(one["bytes"] for one in found) / exact,
            "auc": [round(one["auc"], 4) for one in found],
            "accuracy": [round(one["accuracy"], 4) for one in found],
            "same_weights": [one["weights"] for one in found]
            == [one["weights"] for one in runs["exact"]][: len(found)],
        }
        for name, found in runs.items()
        if found
    }


def durable_cost(place: Path, chosen: argparse.Namespace, pairs: int, rounds: int) -> dict[str, Any]:
    """Seconds a round with and without fsync, one after the other, LeNet-5: what trains less has more of it."""
    seconds: dict[str, list[float]] = {"durable": [], "not": []}
    for pair in range(pairs):
        for name, durable in (("durable", True), ("not", False)):
            study = tables(chosen.path, "lenet5", rounds, 0, durable=durable)
            study["model"].pop("norm")
            seconds[name].append(one_run(place, study, f"{name}-{pair}")["seconds"] / rounds)
    ratios = [one / other for one, other in zip(seconds["durable"], seconds["not"], strict=True)]
    return {"seconds_a_round": seconds, "ratio": statistics.median(ratios[1:] or ratios)}  # the first fills caches


def main() -> None:
    parser = flags(__doc__, "phantoms, small CNN, one round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--only", choices=("wire", "durable"), help="one of the two measurements")
    parser.add_argument("--path", default="", help="an .npz file with chest X-rays")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.rounds, chosen.seeds, chosen.path, chosen.backbone = 1, 1, "", "small-cnn"
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENCODINGS}
    found: dict[str, Any] = {"benchmark": "wire"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["POLYCLINIC_CACHE"] = f"{place}/cache"
        if chosen.only != "wire":
            found["durable"] = durable_cost(place, chosen, 2 if chosen.quick else 7, 2 if chosen.quick else 20)
        for seed in range(chosen.first_seed, chosen.first_seed + (chosen.seeds if chosen.only != "durable" else 0)):
            for name in ENCODINGS:
                study = tables(chosen.path, chosen.backbone, chosen.rounds, seed, wire=name)
                runs[name].append(one_run(place, study, f"{name}-{seed}"))
                found |= {"rounds": chosen.rounds, "wire": summary(runs)}
                keep(found, chosen)
    finish(found, chosen)


if __name__ == "__main__":
    main()
