"""What a secure sum costs: bytes and seconds of real rounds with 4, 8 and 32 sites, beside open ones.

Each round is a run of FedAvg (`polyclinic run`), in which every site trains one epoch of 1,000 images of 64 px; the
same study with `federation.sum = "float"` and `"secure"`, in turn. Bytes are those that `result.json` counts.

`simulated_ratio` is the time of the secure round over that of the open one as a simulation has it: all sites, one after
another, on two cores. `deployed_ratio` is the same where sites work at the same time on machines of their own: the
seconds of the slowest site and of the coordinator, both taken from the same run. Nothing is sent over a network. CKKS
(TenSEAL) is timed for the same numbers where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.federation.host import SiteHost
from polyclinic.runner.run import run
from polyclinic.study import Study, parse_study

IMAGES, BATCH, SIDE, CORES = 1000, 32, 64, 2
NETWORKS = ("small-cnn", "resnet18")
SITES = (4, 8, 32)
SUMS = ("float", "secure")


def study_of(network: str, sites: int, how: str, images: int) -> Study:
    tables: dict[str, Any] = {
        "plugins": [str(Path(__file__).with_name("noise_images.py"))],
        "data": {
            "source": "noise-images",
            "samples": sites * math.ceil(images / 0.98),
            "size": SIDE,
            "validation": 0.0,
            "test": 0.02,
        },
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": network},
        "optimizer": {"name": "sgd", "lr": 0.01, "batch_size": BATCH},
        "method": {"name": "fedavg", "rounds": 1},
        "evaluation": {"every": 0, "final": "none", "select": "last"},
        "engine": {"device": "cpu", "threads": CORES, "workers": 1, "stacked": "never"},
        "federation": {"sum": how},
    }
    return parse_study(tables)


@contextmanager
def timed_sites() -> Iterator[dict[str, float]]:
    """The seconds of each site in what runs inside, by its name."""
    seconds: dict[str, float] = {}
    honest = SiteHost.handle_group

    def handle_group(self: SiteHost, calls: Any) -> Any:
        begin = time.perf_counter()
        answers = honest(self, calls)
        for call in calls:
            seconds[call.site] = seconds.get(call.site, 0.0) + (time.perf_counter() - begin) / len(calls)
        return answers

    SiteHost.handle_group = handle_group  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        SiteHost.handle_group = honest  # type: ignore[method-assign]


def one_round(network: str, sites: int, how: str, images: int, cache: Path) -> dict[str, float]:
    """Seconds and bytes of one round."""
    with tempfile.TemporaryDirectory() as folder, timed_sites() as of_site:
        result = run(study_of(network, sites, how, images), Path(folder) / "run", cache=cache)
        [line] = (Path(folder) / "run" / "history.jsonl").read_text().splitlines()
    seconds, counted = json.loads(line)["seconds"], result.values["communication"]
    by_sites = sum(of_site.values())
    return {
        "round": seconds,
        "slowest_site": max(of_site.values()),
        "coordinator": max(0.0, seconds - by_sites),
        "bytes": counted["total_bytes"],
    }


def measure(
    network: str, sites: int, images: int, pairs: int, cache: Path, sums: Sequence[str] = SUMS
) -> dict[str, Any]:
    """Open and secure rounds in turn, and their ratios (medians over the pairs)."""
    rounds: dict[str, list[dict[str, float]]] = {how: [] for how in sums}
    for pair in range(pairs):
        for how in sums if pair % 2 == 0 else sums[::-1]:
            rounds[how].append(one_round(network, sites, how, images, cache))
    found = {"network": network, "sites": sites, "images": images, "pairs": pairs, "rounds": rounds}
    return {**found, **(ratios(rounds) if len(sums) == len(SUMS) else {})}


def ratios(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    openly, secure = rounds["float"], rounds["secure"]

    def middle(of: Any) -> float:
        found = [of(b) / of(a) for a, b in zip(openly, secure, strict=True)]
        return round(statistics.median(found), 3)

    return {
        "bytes_ratio": middle(lambda one: one["bytes"]),
        "simulated_ratio": middle(lambda one: one["round"]),
        "deployed_ratio": middle(lambda one: one["slowest_site"] + one["coordinator"]),
    }


def ckks(numbers: int) -> dict[str, Any]:
    """Encrypting, adding and decrypting as many numbers with CKKS, timed over a few pieces of them."""
    try:
        import tenseal
    except ImportError:
        return {"ckks": "not installed (pip install tenseal, in an environment of its own)"}
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 60])
    context.global_scale = 2**40
    piece, pieces = np.random.default_rng(0).standard_normal(4096), math.ceil(numbers / 4096)
    tried = min(pieces, 50)
    begin = time.perf_counter()
    boxes = [tenseal.ckks_vector(context, piece) for _ in range(tried)]
    encrypting = time.perf_counter() - begin
    size = len(boxes[0].serialize())
    begin = time.perf_counter()
    found = [(box + box).decrypt() for box in boxes]
    opening = time.perf_counter() - begin
    error = float(np.abs(np.array(found[0]) - 2 * piece).max())
    scale = pieces / tried
    return {
        "ckks": f"measured over {tried} of {pieces} pieces of 4,096 numbers",
        "ckks_numbers": numbers,
        "ckks_encrypt_seconds": round(encrypting * scale, 3),
        "ckks_add_and_decrypt_seconds": round(opening * scale, 3),
        "ckks_bytes_up_ratio": round(size * pieces / (4 * numbers), 2),
        "ckks_largest_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small network, 4 sites of 64 images")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sites", default=",".join(map(str, SITES)))
    parser.add_argument("--pairs", type=int, default=3, help="open and secure rounds of each")
    parser.add_argument("--only", choices=SUMS, help="no pairs: rounds of one kind, to measure the other beside it")
    parser.add_argument("--json", type=Path, help="written anew after every row")
    arguments = parser.parse_args()
    networks, counts = arguments.networks.split(","), [int(one) for one in arguments.sites.split(",")]
    images, pairs, sums = IMAGES, arguments.pairs, (arguments.only,) if arguments.only else SUMS
    if arguments.quick:
        networks, counts, images, pairs = list(NETWORKS[:1]), [4], 64, 1
    torch.set_num_threads(CORES)
    figures: dict[str, Any] = {"rows": [], "images": images, "side": SIDE, "batch": BATCH, "cores": CORES}
    with tempfile.TemporaryDirectory() as cache:
        for network in networks:
            for how in SUMS:  # what only the first run pays for
                one_round(network, 3, how, 64, Path(cache))
            for count in counts:
                figures["rows"].append(measure(network, count, images, pairs, Path(cache), sums))
                print(figures["rows"][-1], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    figures |= ckks(57_000 if arguments.quick else 11_200_000)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
