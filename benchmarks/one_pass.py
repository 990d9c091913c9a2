"""What scoring one model at many simulated sites takes: site by site, and all sites in one pass.

    python benchmarks/one_pass.py [--quick] [--turns 2] [--rounds 5] [--json FILE]

FedAvg of the small CNN at 64 sites, each with 40 validation images of 32 px, scored in every round; all ways take
turns of whole runs, on a GPU with recorded passes and without. Only the seconds of scoring are counted. Sites train one
by one in all, and scores must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from clock import now

from polyclinic.federation.federation import Federation
from polyclinic.methods.shared.method import Method
from polyclinic.runner.run import run
from polyclinic.study import parse_study
from polyclinic.training import choices
from polyclinic.training.graphs import WARM_UP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables(archive: Path, sites: int, rounds: int) -> dict[str, Any]:
    return {
        "data": {"source": "npz", "path": str(archive), "size": 32, "validation": 0.5, "test": 0.2},
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": "small-cnn"},
        "optimizer": {"batch_size": 8, "keep_state": True},  # optimisers that are kept train site by site
        "method": {"name": "fedavg", "rounds": rounds, "local_steps": 1},
        "evaluation": {"every": 1},
        "engine": {"workers": 1, "device": DEVICE, "stacked": "always", "checkpoint_every": 0},
    }


def scored(
    archive: Path, sites: int, rounds: int, folder: Path, *, one_pass: bool, recorded: bool
) -> tuple[float, dict[str, Any]]:
    """Seconds of scoring in a round, and the result's metrics. `recorded`: on a GPU, passes are CUDA graphs."""
    spent: list[float] = []
    evaluate = Federation.evaluate

    def timed(federation: Federation, weights: Any = None) -> None:
        started = now()
        evaluate(federation, weights)
        spent.append(now() - started)

    may = Method.may_stack

    def chosen(method: Method, trainer: Any, count: int, operation: str) -> bool:
        return may(method, trainer, count, operation) and (one_pass or operation != "evaluate")

    with (
        mock.patch.object(choices, "EVALUATION_BYTES", choices.EVALUATION_BYTES if recorded else 0),
        mock.patch.object(Federation, "evaluate", timed),
        mock.patch.object(Method, "may_stack", chosen),
        tempfile.TemporaryDirectory(dir=folder) as out,
    ):
        result = run(parse_study(tables(archive, sites, rounds)), out, cache=folder / "cache")
    return statistics.median(spent[WARM_UP:]), result["metrics"]["test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four sites, one turn")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--turns", type=int, default=2, help="runs of each way")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sites, rounds, turns = (4, WARM_UP + 1, 1) if options.quick else (64, WARM_UP + options.rounds, options.turns)
    ways = [(one_pass, recorded) for one_pass in (True, False) for recorded in (True, False)]
    found: dict[tuple[bool, bool], list[float]] = {way: [] for way in ways}
    metrics: dict[tuple[bool, bool], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        archive, rng = Path(scratch) / "noise.npz", np.random.default_rng(0)
        images = rng.integers(0, 256, (80 * sites, 32, 32, 3), dtype=np.uint8)
        np.savez(archive, images=images, labels=np.arange(len(images)) % 2)
        for _ in range(turns):
            for way in ways:
                one_pass, recorded = way
                seconds, metrics[way] = scored(
                    archive, sites, rounds, Path(scratch), one_pass=one_pass, recorded=recorded
                )
                found[way].append(seconds)
                print(f"one pass {one_pass}, recorded {recorded}: {1000 * seconds:.2f} ms", file=sys.stderr, flush=True)
    losses = [one["loss"] for one in metrics.values()]
    apart = max(losses) - min(losses)
    if apart > 1e-3:
        raise SystemExit(f"the ways give losses that differ by {apart}")
    figures = {
        "benchmark": "one_pass",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "sites": sites,
        "in one pass, ms": round(1000 * statistics.median(found[True, True]), 2),
        "site by site, ms": round(1000 * statistics.median(found[False, True]), 2),
        "in one pass, not recorded, ms": round(1000 * statistics.median(found[True, False]), 2),
        "site by site, not recorded, ms": round(1000 * statistics.median(found[False, False]), 2),
        "difference of the loss": apart,
    }
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
