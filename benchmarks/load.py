"""Load: many rounds and many sites, and how memory, files and the run folder grow with them.

    python benchmarks/load.py [--quick] [--runs 10] [--rounds 1000] [--sites 2000] [--site-rounds 20] [--json FILE]

`--runs` runs of `--rounds` rounds one after the other in one process, then one run of `--sites` sites. Stated slopes:
memory grows by less than 2 kB a round from run to run, open files do not grow, files of the run folder do not grow with
rounds, and its bytes by less than 3 kB a round and site (the ledger's lines and the history).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.runner.recorder import Display
from polyclinic.runner.run import run
from polyclinic.study import Study

#: the stated slopes
MEMORY_A_ROUND = 2000.0
BYTES_A_ROUND_AND_SITE = 3000.0
#: rounds after which growth of memory tells something
LEAST_ROUNDS = 400


def tables(sites: int, rounds: int, samples: int) -> dict[str, Any]:
    return {
        "data": {"source": "fundus-phantom", "samples": samples, "size": 28, "validation": 0.1, "test": 0.1},
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": "lenet5"},
        "optimizer": {"batch_size": 8, "lr": 0.01},
        "method": {"name": "fedavg", "rounds": rounds, "local_steps": 1},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"workers": 1, "device": "cpu", "durable": False, "checkpoint_every": 10},
    }


class Gauge(Display):
    """Notes memory, open files and the folder, now and then."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.rows: list[tuple[int, int, int, int, int]] = []

    def round_done(self, line: Any, rounds: int) -> None:
        if line["round"] % self.every == 0:
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            self.rows.append((line["round"], memory(), open_files(), len(files), size))

    def slopes(self) -> dict[str, float]:
        """Growth a round, by least squares over the second half: the first fills caches."""
        rows = np.array(self.rows[len(self.rows) // 2 :], float)
        names = ("memory", "open_files", "files", "bytes")
        return {name: float(np.polyfit(rows[:, 0], rows[:, at], 1)[0]) for at, name in enumerate(names, 1)}


def memory() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def measured(place: Path, name: str, sites: int, rounds: int) -> dict[str, float]:
    gauge, started = Gauge(place / name, max(1, rounds // 20)), time.perf_counter()
    run(Study(**tables(sites, rounds, max(30, 3 * sites))), place / name, display=gauge)
    slopes = gauge.slopes()
    slopes["bytes_a_site"] = slopes.pop("bytes") / sites
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"sites": sites, "rounds": rounds, "seconds": time.perf_counter() - started, "most_memory": most, **slopes}


def judged(rows: list[dict[str, float]], after: list[int], rounds: int) -> dict[str, Any]:
    """What all runs show together, and whether the stated slopes hold.

    Memory is judged from the end of the second run on: the first two fill caches and the allocator's arenas, which are
    handed back in large pieces, so that a few rounds of one run tell nothing.
    """
    later = after[1:]
    between = (later[-1] - later[0]) / ((len(later) - 1) * rounds) if len(later) > 1 else None
    folder = all(
        row["bytes_a_site"] < BYTES_A_ROUND_AND_SITE and row["open_files"] < 0.01 and row["files"] < 0.1 for row in rows
    )
    enough = between is not None and (len(later) - 1) * rounds >= LEAST_ROUNDS
    holds = folder and (not enough or between < MEMORY_A_ROUND)
    return {"runs": rows, "memory_after_each_run": after, "memory_a_round": between, "judged": enough, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two runs of 40 rounds, then 60 sites; judges no memory")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--sites", type=int, default=2000, help="of one more run of 20 rounds; 0: none")
    parser.add_argument("--site-rounds", type=int, default=20, help="rounds of the run with many sites")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs, rounds, sites = (2, 40, 60) if chosen.quick else (chosen.runs, chosen.rounds, chosen.sites)
    plan = [(f"run-{number}", 2, rounds) for number in range(runs)] + (
        [("many-sites", sites, chosen.site_rounds)] if sites else []
    )
    rows, after, found = [], [], {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["POLYCLINIC_CACHE"] = f"{place}/cache"
        for name, count, length in plan:
            rows.append(measured(Path(place), name, count, length))
            after += [memory()] if name != "many-sites" else []
            found = judged(rows, after, rounds)
            if chosen.json:  # after each run: the whole takes long
                chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
