"""FedER end to end through `polyclinic run`, its sites worked at as stacks and one after the other, in turns.

    python benchmarks/feder_stacked.py [--quick] [--sites 9] [--steps 300] [--turns 2] [--json FILE]

Wall time of whole runs, generators, first models and rounds included; gate, ledger and digests are on. A short run
first warms up. Sites that work as stacks end up to rounding where they end alone, so the scores stand beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from clock import now

import polyclinic
from polyclinic.study import Study, parse_study

WAYS = {"one after the other": "never", "stacked": "always"}


def study(options: argparse.Namespace, way: str, steps: int, rounds: int) -> Study:
    """Sites with equally many images, so that their batches have one size."""
    images = options.sites * 200
    tables: dict[str, Any] = {
        "data": {"source": "fundus-phantom", "size": options.size, "samples": images, "validation": 0.0, "test": 0.2},
        "sites": {"partition": "iid", "count": options.sites},
        "model": {"backbone": "small-cnn"},
        "optimizer": {"batch_size": 32},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"workers": 1, "device": options.device, "stacked": WAYS[way]},
        "generator": {"name": "dcgan", "steps": steps},
        "tuning": {"on": False},
        "method": {"name": "feder", "rounds": rounds, "buffer": 64},
    }
    return parse_study(tables)


def timed(options: argparse.Namespace, way: str, folder: Path, steps: int, rounds: int) -> tuple[float, dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        started = now()
        result = polyclinic.run(study(options, way, steps, rounds), Path(made) / "run", cache=folder / "cache")
        seconds = now() - started
        return seconds, {"stacked": result["environment"].get("stacked", []), "test": result["metrics"]["test"]}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    told: dict[str, Any] = {}
    for way in WAYS:
        timed(options, way, folder, 5, 1)
    for _ in range(options.turns):
        for way in WAYS:
            spent, told[way] = timed(options, way, folder, options.steps, options.rounds)
            seconds[way].append(round(spent, 2))
            print(way, seconds[way][-1], told[way], flush=True)
    medians = {way: statistics.median(all_of_way) for way, all_of_way in seconds.items()}
    first, second = medians.values()
    return {
        "benchmark": "feder_stacked",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sites": options.sites,
        "size": options.size,
        "generator steps": options.steps,
        "rounds": options.rounds,
        "seconds": seconds,
        "times as fast": round(first / second, 2),
        "told": told,
    }


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sites, two steps, one turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sites", type=int, default=9)
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--steps", type=int, default=300, help="of each site's generator")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.sites, options.steps, options.rounds, options.turns = 3, 2, 1, 1
    return options


if __name__ == "__main__":
    main()
