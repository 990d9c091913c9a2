"""The Ray engine on a cluster of several node processes on this machine: same weights as in one process, and the time.

`ray.cluster_utils` starts a head and further nodes, each a process of its own with one core, its own object store and
its own workers. An actor takes one core, so that two actors lie on two nodes; the benchmark checks that they do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster

from polyclinic.runner.recorder import Display
from polyclinic.runner.run import run
from polyclinic.study import parse_study

STORE_BYTES = 256 * 2**20


def tables(sites: int, rounds: int, engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "data": {"source": "fundus-phantom", "size": 32, "samples": 12 * sites, "validation": 0.0, "test": 0.25},
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": "resnet18"},
        "optimizer": {"batch_size": 8},
        "method": {"name": "fedavg", "rounds": rounds},
        "evaluation": {"every": 0},
        "engine": {"threads": 1, "device": "cpu", "checkpoint_every": 0, **engine},
    }


class Watch(Display):
    """Notes when rounds end, and on how many nodes an actor has taken the core."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.busy_nodes = 0

    def started(self, *_: Any) -> None:
        self.stamps.append(time.perf_counter())

    def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
        self.stamps.append(time.perf_counter())
        if ray.is_initialized():
            free = available_resources_per_node()
            self.busy_nodes = max(self.busy_nodes, sum("CPU" not in of_node for of_node in free.values()))

    @property
    def seconds(self) -> float:
        """Of a round, without the first, in which actors start."""
        pairs = list(zip(self.stamps, self.stamps[1:], strict=False))
        return round(statistics.median(end - start for start, end in pairs[1:]), 3)


def measure(sites: int, rounds: int, engine: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    watch, started = Watch(), time.perf_counter()
    folder = scratch / str(engine["name"])
    result = run(parse_study(tables(sites, rounds, engine)), folder, display=watch, cache=scratch / "cache")
    return {
        "round_seconds": watch.seconds,
        "whole_seconds": round(time.perf_counter() - started, 1),
        "busy_nodes": watch.busy_nodes,
        "weights": result["weights_sha256"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 sites instead of 5 of 8")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--nodes", type=int, default=2, help="node processes, the head among them")
    options = parser.parse_args()
    sites, rounds = (2, 3) if options.quick else (8, 5)
    with tempfile.TemporaryDirectory() as scratch:
        here = measure(sites, rounds, {"name": "in-process", "workers": 1}, Path(scratch))
        cluster = Cluster()
        try:
            for _ in range(options.nodes):
                cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)
            there = measure(sites, rounds, {"name": "ray", "address": cluster.address}, Path(scratch))
        finally:
            cluster.shutdown()
    same = here.pop("weights") == there.pop("weights")
    figures = {
        "benchmark": "ray_nodes",
        "quick": options.quick,
        "nodes": options.nodes,
        "sites": sites,
        "in_process": here,
        "ray": there,
        "same_weights": same,
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    sys.exit(0 if same and there["busy_nodes"] == options.nodes else 1)


if __name__ == "__main__":
    main()
