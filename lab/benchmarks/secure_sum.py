"""What a secure sum costs: bytes and seconds of real rounds with 4, 8 and 32 sites, beside open ones.

Each round is a run of FedAvg (`polyclinic run`), in which a site trains one epoch of 1,000 images of 64 px; the same
study with `federation.sum = "float"` and `"secure"`, in turn, in one process. Bytes are those that `result.json`
counts. All ratios are medians over the pairs of rounds, of the clock and of CPU seconds.

`deployed` is a round where sites work at the same time on machines of their own: the seconds of the slowest site and of
the coordinator, both taken from the same run. `simulated` is the round as a simulation has it: all sites, one after
another. With `--large 4` only four sites have 1,000 images and the others 32, which leaves the slowest site and the
coordinator as they are, and the simulated round is not told. Nothing is sent over a network.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import finish, flags, keep, noise_images

from polyclinic.federation.host import SiteHost
from polyclinic.methods.fedavg import FedAvg
from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study

IMAGES, BATCH, SIDE, CORES = 1000, 32, 64, 2
SMALL = 32  # images of a site that is not large
NETWORKS = ("small-cnn", "resnet18")
SITES = (4, 8, 32)
SUMS = ("float", "secure")


def study_of(network: str, sites: int, how: str, images: int, large: int, folder: Path) -> Study:
    sizes = [images if number < large else min(SMALL, images) for number in range(sites)]
    tables: dict[str, Any] = {
        "data": {**noise_images(folder, math.ceil(sum(sizes) / 0.98), SIDE), "validation": 0.0, "test": 0.02},
        "sites": {"partition": "quantity", "count": sites, "shares": sizes},
        "model": {"backbone": network},
        "optimizer": {"name": "sgd", "lr": 0.01, "batch_size": BATCH},
        "method": {"name": "fedavg", "rounds": 1},
        "evaluation": {"every": 0, "final": "none", "select": "last"},
        "engine": {"device": "cpu", "threads": CORES, "workers": 1, "stacked": "never"},
        "federation": {"sum": how},
    }
    return parse_study(tables)


def now() -> np.ndarray:
    """Seconds of the clock, and of all cores of this process."""
    return np.array([time.perf_counter(), time.process_time()])


@contextmanager
def timed(owner: Any, name: str, note: Callable[[Any, np.ndarray], None]) -> Iterator[None]:
    """Time a function of a class in what runs inside: `note` gets its first argument and the seconds."""
    honest = getattr(owner, name)

    def function(self: Any, first: Any, *others: Any) -> Any:
        begin = now()
        try:
            return honest(self, first, *others)
        finally:
            note(first, now() - begin)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, honest)


def one_round(network: str, sites: int, how: str, images: int, large: int, cache: Path) -> dict[str, Any]:
    """Bytes of one round and its seconds (of the clock, of CPUs): of all, the slowest site, and the coordinator."""
    by_site: dict[str, np.ndarray] = {}
    whole: list[np.ndarray] = []

    def note_sites(calls: Any, seconds: np.ndarray) -> None:
        for call in calls:
            by_site[call.site] = by_site.get(call.site, np.zeros(2)) + seconds / len(calls)

    with (
        tempfile.TemporaryDirectory() as folder,
        timed(SiteHost, "handle_group", note_sites),
        timed(FedAvg, "run", lambda _, seconds: whole.append(seconds)),
    ):
        result = run(study_of(network, sites, how, images, large, cache), Path(folder) / "run", cache=cache)
    [of_round] = whole
    found = {
        "round": of_round,
        "slowest_site": np.max(list(by_site.values()), axis=0),
        "coordinator": np.maximum(0.0, of_round - np.sum(list(by_site.values()), axis=0)),
    }
    seconds = {name: [round(float(one), 3) for one in both] for name, both in found.items()}
    return {**seconds, "bytes": result.values["communication"]["total_bytes"]}


def measure(network: str, sites: int, images: int, large: int, pairs: int, cache: Path) -> dict[str, Any]:
    """Open and secure rounds in turn, and their ratios (medians over the pairs)."""
    rounds: dict[str, list[dict[str, Any]]] = {how: [] for how in SUMS}
    for pair in range(pairs):
        for how in SUMS if pair % 2 == 0 else SUMS[::-1]:
            rounds[how].append(one_round(network, sites, how, images, large, cache))
            print(network, sites, how, rounds[how][-1], flush=True)
    found = {"network": network, "sites": sites, "images": images, "large": min(large, sites), "pairs": pairs}
    return {**found, **ratios(rounds, all_large=large >= sites), "rounds": rounds}


def ratios(rounds: dict[str, list[dict[str, Any]]], *, all_large: bool) -> dict[str, float]:
    def middle(parts: Sequence[str], unit: int) -> float:
        seconds = {how: [sum(one[part][unit] for part in parts) for one in rounds[how]] for how in SUMS}
        return round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 3)

    sums = {"deployed": ("slowest_site", "coordinator"), "site": ("slowest_site",)}
    sums |= {"simulated": ("round",)} if all_large else {}
    units = enumerate(("clock", "cpu"))
    told = {f"{name}_{word}_ratio": middle(parts, unit) for unit, word in units for name, parts in sums.items()}
    return {"bytes_ratio": round(rounds["secure"][0]["bytes"] / rounds["float"][0]["bytes"], 3), **told}


def main() -> None:
    parser = flags(__doc__, "the small network, 4 sites of 64 images")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sites", default=",".join(map(str, SITES)))
    parser.add_argument("--pairs", type=int, default=3, help="open and secure rounds of each")
    parser.add_argument("--large", type=int, default=max(SITES), help="sites with 1,000 images; others have 32")
    arguments = parser.parse_args()
    networks, counts = arguments.networks.split(","), [int(one) for one in arguments.sites.split(",")]
    images, pairs = IMAGES, arguments.pairs
    if arguments.quick:
        networks, counts, images, pairs = list(NETWORKS[:1]), [4], 64, 1
    torch.set_num_threads(CORES)
    figures: dict[str, Any] = {
        "benchmark": "secure_sum",
        "rows": [],
        "images": images,
        "side": SIDE,
        "batch": BATCH,
        "cores": CORES,
    }
    with tempfile.TemporaryDirectory() as cache:
        for network in networks:
            for how in SUMS:  # what only the first run pays for
                one_round(network, 3, how, 64, 3, Path(cache))
            for count in counts:
                figures["rows"].append(measure(network, count, images, arguments.large, pairs, Path(cache)))
                print(figures["rows"][-1], flush=True)
                keep(figures, arguments)
    finish(figures, arguments)


if __name__ == "__main__":
    main()
