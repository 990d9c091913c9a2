"""What Polyclinic costs on top of a bare PyTorch loop that takes the very same optimiser steps.

Both train the same network from the same weights on the same images in the same order with FedAvg, in one thread,
round by round in turns. Rounds are timed and nothing else: preparing the data, the final test and the result file
are left out, evaluation and checkpoints are off; gate, ledger, encoding and byte counts are in. A difference in the
final weights fails the benchmark, for then the two did not do the same work.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import Clock, finish, flags, quartiles

from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic_lab.bare_loop import InTurns, bare_rounds, difference

TARGET = 1.05
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """One setting in which both loops are timed."""

    case: str
    backbone: str
    size: int
    sites: int
    images_per_site: int
    batch_size: int
    rounds: int

    @property
    def steps(self) -> int:
        return self.rounds * self.sites * max(1, self.images_per_site // self.batch_size)

    def study(self) -> Study:
        held_out = 2 * self.sites  # a final test there will be; it lies outside the timed rounds
        images = self.sites * self.images_per_site + held_out
        return Study(
            data={
                "source": "fundus-phantom",
                "size": self.size,
                "samples": images,
                "validation": 0.0,
                "test": held_out / images,
            },
            sites={"partition": "iid", "count": self.sites},
            model={"backbone": self.backbone},
            optimizer={"batch_size": self.batch_size},
            method={"name": "fedavg", "rounds": self.rounds},
            evaluation={"every": 0},
            engine={"workers": 1, "threads": 1, "device": "cpu", "checkpoint_every": 0},
        )


#: the first is the one with the target; the others show the price where there is next to no training to hide it
CASES = (
    Case("small CNN", "small-cnn", 32, sites=10, images_per_site=320, batch_size=32, rounds=3),
    Case("LeNet-5, batches of 8", "lenet5", 28, sites=10, images_per_site=320, batch_size=8, rounds=3),
    Case("100 sites, 1 step each", "small-cnn", 32, sites=100, images_per_site=32, batch_size=32, rounds=3),
)


def measure(case: Case, pairs: int, folder: Path) -> dict[str, Any]:
    """Both loops round by round in turns, `pairs` times; the ratio of every time."""
    study, cache = case.study(), folder / "cache"
    rounds = bare_rounds(study, cache)
    largest, spent = 0.0, []
    for number in range(pairs + 1):
        turns = InTurns(rounds(), bare_first=number % 2 == 0)
        with tempfile.TemporaryDirectory(dir=folder) as out:
            result = run(study, out, display=turns, cache=cache)
            largest = max(largest, difference(result.weights(), turns.bare_weights))
        if number:  # the first pair only warms up
            spent.append((turns.ours, turns.bare))
            print(f"pair {number}: CPU x{turns.ours.cpu / turns.bare.cpu:.4f}", file=sys.stderr, flush=True)
    return {
        **asdict(case),
        "steps": case.steps,
        "pairs": pairs,
        "wall_ratio": quartiles([ours.wall / bare.wall for ours, bare in spent]),
        "cpu_ratio": quartiles([ours.cpu / bare.cpu for ours, bare in spent]),
        "bare_cpu_seconds": round(statistics.median(bare.cpu for _, bare in spent), 4),
        "added_cpu_ms_per_site_and_round": added(case, spent),
        "largest_difference_of_weights": largest,
    }


def added(case: Case, spent: list[tuple[Clock, Clock]]) -> float:
    extra = statistics.median(ours.cpu - bare.cpu for ours, bare in spent)
    return round(1000 * extra / case.sites / case.rounds, 3)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen_cases(options):
            row = measure(case, options.pairs or (3 if options.quick else 9), Path(folder))
            rows.append(row)
            show(row)
    fair = all(row["largest_difference_of_weights"] <= TOLERANCE for row in rows)
    figures = {
        "benchmark": "overhead",
        "quick": options.quick,
        "threads": 1,
        "target": TARGET,
        "within_target": rows[0]["cpu_ratio"]["median"] <= TARGET,
        "same_weights": fair,
        "cases": rows,
    }
    finish(figures, options)
    if not fair:
        raise SystemExit("the two loops ended in different weights: they did not do the same work")


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "3 pairs of runs instead of 9, of one round each")
    parser.add_argument("--pairs", type=int, help="pairs of runs to take the median of")
    parser.add_argument("--cases", default="", help="numbers of the cases, such as 1,3; all if not given")
    parser.add_argument("--sites", type=int, help="number of sites in every case")
    parser.add_argument("--images-per-site", type=int, help="training images of a site in every case")
    return parser.parse_args()


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    changes = {"rounds": 1 if options.quick else None, "sites": options.sites}
    changes |= {"images_per_site": options.images_per_site}
    wanted = [CASES[int(number) - 1] for number in options.cases.split(",") if number] or CASES
    return [replace(case, **{name: value for name, value in changes.items() if value}) for case in wanted]


def show(row: Mapping[str, Any]) -> None:
    cpu, wall = row["cpu_ratio"], row["wall_ratio"]
    print(
        f"{row['case']:<24} {row['steps']:>5} steps  CPU x{cpu['median']:.3f} ({cpu['q1']:.3f}-{cpu['q3']:.3f})  "
        f"wall x{wall['median']:.3f} ({wall['q1']:.3f}-{wall['q3']:.3f})  "
        f"+{row['added_cpu_ms_per_site_and_round']:.1f} ms a site and round  "
        f"weights differ by {row['largest_difference_of_weights']:.0e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
