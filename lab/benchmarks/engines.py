"""What an engine costs: the same studies in one process, on Ray and on NVFlare (its simulator), next to a bare loop.

Rounds are taken from the runs' own histories, the first one left out (a process's first call imports and opens files);
`start` is the rest of a run: starting and ending the engine, the first round, the final test. A message is a call to
a site and its answer: SplitNN has two a mini-batch, and `message_ms` is what each costs beyond the same run in one
process. Weights must be the same on all engines, or the benchmark fails. Every run is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import finish, flags
from overhead import Case as BareCase

from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study
from polyclinic_lab.bare_loop import bare_rounds

ENGINES = ("in-process", "ray", "nvflare")
IMAGES_PER_SITE = 16
STEPS = 20


@dataclass(frozen=True)
class Case:
    """A study whose rounds are timed on every engine."""

    case: str
    method: str
    backbone: str
    sites: int
    rounds: int

    def study(self, engine: str) -> Study:
        tables = BareCase(self.case, self.backbone, 32, self.sites, IMAGES_PER_SITE, 8, self.rounds).study().as_tables()
        steps = {"local_steps": STEPS} if self.method == "splitnn" else {}
        tables["method"] = {"name": self.method, "rounds": self.rounds, **steps}
        tables["engine"] |= {"name": engine, **({"workers": "auto"} if engine == "ray" else {})}
        return parse_study(tables)

    @property
    def messages(self) -> int:
        """Calls to sites in a round."""
        return self.sites * (2 * STEPS + 2 if self.method == "splitnn" else 1)


CASES = (
    Case("a message per mini-batch", "splitnn", "lenet5", sites=2, rounds=4),
    Case("2 sites, 0.2 MB", "fedavg", "lenet5", sites=2, rounds=8),
    Case("4 sites, 0.2 MB", "fedavg", "lenet5", sites=4, rounds=8),
    Case("8 sites, 0.2 MB", "fedavg", "lenet5", sites=8, rounds=8),
    Case("2 sites, 45 MB", "fedavg", "resnet18", sites=2, rounds=4),
    Case("4 sites, 45 MB", "fedavg", "resnet18", sites=4, rounds=4),
)
QUICK = (
    Case("a message per mini-batch", "splitnn", "lenet5", sites=2, rounds=2),
    Case("2 sites, 0.2 MB", "fedavg", "lenet5", sites=2, rounds=3),
)


def measure(case: Case, engine: str, scratch: Path, cache: Path) -> dict[str, Any]:
    """Seconds of a round and of the start, and the digest of the weights."""
    study = case.study(engine)
    folder = scratch / f"{case.method}-{case.backbone}-{case.sites}-{engine}"
    started = time.perf_counter()
    result = run(study, folder, cache=cache)
    whole = time.perf_counter() - started
    seconds = [json.loads(line)["seconds"] for line in (folder / "history.jsonl").read_text().splitlines()][1:]
    return {
        "engine": engine,
        "round_seconds": round(statistics.median(seconds), 4),
        "start_seconds": round(whole - sum(seconds), 2),
        "weights": result["weights_sha256"],
    }


def measure_bare(case: Case, cache: Path) -> dict[str, Any]:
    """Seconds of a round of FedAvg in plain PyTorch; None where there is no such loop."""
    if case.method != "fedavg":
        return {"round_seconds": None}
    rounds = bare_rounds(case.study("in-process"), cache)()
    seconds = []
    for _ in range(case.rounds):
        started = time.perf_counter()
        next(rounds)
        seconds.append(time.perf_counter() - started)
    return {"round_seconds": round(statistics.median(seconds[1:]), 4)}


def elsewhere(case: Case, engine: str, scratch: Path) -> dict[str, Any]:
    """The same in a process of its own: engines change the process that they run in."""
    command = [sys.executable, __file__, "--one", json.dumps([asdict(case), engine, str(scratch)])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(order: str) -> None:
    """In that process."""
    case, engine, scratch = json.loads(order)
    cache = Path(scratch) / "cache"
    torch.set_num_threads(1)
    bare = engine == "bare"
    print(
        json.dumps(measure_bare(Case(**case), cache) if bare else measure(Case(**case), engine, Path(scratch), cache))
    )


def point(case: Case, engines: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    bare = elsewhere(case, "bare", scratch)["round_seconds"]
    rows = [elsewhere(case, engine, scratch) for engine in engines]
    here = rows[0]["round_seconds"]
    digests = {row.pop("weights") for row in rows}
    for row in rows:
        # where sites work at the same time, the difference to one process is not that of messages
        extra = 1000 * (row["round_seconds"] - here) / case.messages
        row["message_ms"] = round(extra, 2) if case.method == "splitnn" else None
        print(f"{case.case:<26} {row['engine']:<11} {row['round_seconds']:8.3f} s a round", file=sys.stderr)
    return {
        **asdict(case),
        "messages": case.messages,
        "bare_round_seconds": bare,
        "engines": rows,
        "same_weights": len(digests) == 1,
    }


def main() -> None:
    parser = flags(__doc__, "two small cases")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_here(options.one)
        return
    engines = tuple(name for name in ENGINES if name in {"in-process", *options.engines})
    with tempfile.TemporaryDirectory() as scratch:
        points = [point(case, engines, Path(scratch)) for case in (QUICK if options.quick else CASES)]
    same = all(one["same_weights"] for one in points)
    figures = {"benchmark": "engines", "quick": options.quick, "same_weights": same, "points": points}
    finish(figures, options)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
